"""The options of a command as lines of help: read off its schema, never written twice."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, get_type_hints

from omegaconf import MISSING

from multilora_store.cli.schema import Common

__all__ = ["Option", "options_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One line of `--help`.

    Attributes:
        key: As it is overridden, e.g. `store.url`.
        type: Its type in words.
        default: Its default in words, `required` where there is none.
        doc: What it says.
        text: Whether its value is a string, which the door may quote.
    """

    key: str
    type: str
    default: str
    doc: str
    text: bool


def options_of(schema: type, prefix: str = "") -> list[Option]:
    """Every option of a command, nested ones by their full key, the command's own before what all share."""
    hints = get_type_hints(schema)
    shared = {item.name for item in fields(Common)} if issubclass(schema, Common) else set()
    found: list[Option] = []
    for item in sorted(fields(schema), key=lambda item: item.name in shared):
        kind = hints[item.name]
        if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
            found += options_of(kind, f"{prefix}{item.name}.")
            continue
        default = item.default_factory() if callable(item.default_factory) else item.default
        found.append(
            Option(
                key=prefix + item.name,
                type=_type_in_words(kind),
                default=_default_in_words(default),
                doc=str(item.metadata.get("doc", "")),
                text=kind in (str, str | None),
            )
        )
    return found


def _type_in_words(kind: Any) -> str:
    if kind is Any:
        return "choice"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(member.name for member in kind)
    words = (
        str(getattr(kind, "__name__", kind)) if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    )
    words = words.replace("typing.", "").replace(" | None", "")
    return "mapping" if words.startswith("dict[") else "list" if words.startswith("list[") else words


def _default_in_words(default: Any) -> str:
    if default == MISSING:
        return "required"
    if default is None:
        return "null"
    if isinstance(default, Enum):
        return default.name
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str) and default.startswith("${oc.env:"):
        return "$" + default.removeprefix("${oc.env:").partition(",")[0]
    if isinstance(default, (list, dict)):
        return "[" + ",".join(default) + "]" if isinstance(default, list) else ("{}" if not default else str(default))
    return '""' if default == "" else str(default)
