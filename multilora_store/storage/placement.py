"""Placement: which modules of an adapter a base has, and the change of names that would give the rest a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Placement", "place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The modules of an adapter against those of a base.

    Attributes:
        matched: Modules that the base has, sorted.
        unmatched: Modules that it does not have, sorted.
        rename: Beginning of a path in the file -> beginning on the base, under which every module has a place; empty
            if none does, or none is needed. `assemble(rename=...)` takes it.
    """

    matched: tuple[str, ...]
    unmatched: tuple[str, ...]
    rename: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether there is at least one module and each has its place."""
        return bool(self.matched) and not self.unmatched


def place(paths: Iterable[str], layout: Iterable[str]) -> Placement:
    """Compare module paths with the names of a base's modules, exactly: the last name alone proves nothing.

    Args:
        paths: Modules of the adapter, without PEFT's prefix.
        layout: Names of the base's modules, as `named_modules()` has them.
    """
    wanted, have = sorted(set(paths)), frozenset(layout)
    unmatched = tuple(path for path in wanted if path not in have)
    return Placement(
        matched=tuple(path for path in wanted if path in have),
        unmatched=unmatched,
        rename=_rename(wanted, have) if unmatched else {},
    )


def _rename(wanted: list[str], have: frozenset[str]) -> dict[str, str]:
    """The replacement of one beginning that places every path."""
    by_ending: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in sorted(have):
        parts = tuple(name.split("."))
        for cut in range(len(parts)):
            by_ending.setdefault(parts[cut:], []).append(parts[:cut])
    parts = tuple(wanted[0].split("."))
    for cut in range(len(parts)):
        for beginning in by_ending.get(parts[cut:], ()):
            # A beginning that is empty would match everything, so that one more segment is named on both sides.
            keep = cut or 1
            old, new = ".".join(parts[:keep]), ".".join((*beginning, *parts[cut:keep]))
            if all(_moved(path, old, new) in have for path in wanted):
                return {old: new}
    return {}


def _moved(path: str, old: str, new: str) -> str:
    if path != old and not path.startswith(f"{old}."):
        return path
    return ".".join(part for part in (new, path[len(old) + 1 :]) if part)
