"""Names of adapters and tags: what they may be, how they are spelled on storage and inside a torch model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from multilora_store.errors import NameNotAllowedError

__all__ = [
    "check_name",
    "check_new_name",
    "check_tag",
    "module_name",
    "name_from_module",
    "name_from_storage",
    "storage_name",
]

MAX_LENGTH: Final = 128
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_WINDOWS: Final = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_YAML_WORDS: Final = frozenset("y n yes no on off true false null none nan inf infinity".split())
_YAML_NUMBER: Final = re.compile(
    r"0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*(\.[0-9_]*)?([eE][+-]?[0-9_]+)?"
)
_DATE: Final = re.compile(r"\d{4}-\d{1,2}-\d{1,2}.*")
_ID: Final = re.compile(r"v[0-9a-f]{4,16}")
_REMEDY: Final = (
    "a name is letters, digits, '_', '-', '.' with '/' between segments, e.g. team/code_style; "
    "put any other title into the metadata (title=...)"
)
# Words that PEFT gives to the children of its layers: an adapter of that name would read like one of them.
_TUNER_WORDS: Final = frozenset(
    "lora_A lora_B lora_embedding_A lora_embedding_B lora_magnitude_vector lora_dropout lora_variant base_layer "
    "modules_to_save original_module token_adapter trainable_tokens_delta trainable_tokens_original weight bias".split()
)


def _refuse(noun: str, name: object, why: str) -> NameNotAllowedError:
    return NameNotAllowedError(f"{noun} {name!r} is not allowed", why=why, remedy=_REMEDY, name=name)


def _misread_by_yaml(text: str) -> bool:
    """Whether YAML or Hydra would read `text` as something other than a string."""
    return bool(text.lower() in _YAML_WORDS or _YAML_NUMBER.fullmatch(text) or _DATE.fullmatch(text))


def check_name(name: str) -> str:
    """Return `name` if it may be an adapter's name.

    Raises:
        NameNotAllowedError: saying which rule it breaks.
    """
    if not isinstance(name, str) or not name:
        raise _refuse("adapter name", name, "a name is a string that is not empty")
    if len(name) > MAX_LENGTH:
        raise _refuse("adapter name", name[:40] + "...", f"{len(name)} characters, the most is {MAX_LENGTH}")
    if name.lower() == "latest":
        raise _refuse("adapter name", name, "'latest' means an adapter's newest version")
    if _misread_by_yaml(name):
        raise _refuse("adapter name", name, "YAML and Hydra would read it as a number, a date, a boolean or null")
    for segment in name.split("/"):
        _check_segment(name, segment)
    return name


def _check_segment(name: str, segment: str) -> None:
    if not _SEGMENT.fullmatch(segment):
        found = "an empty segment" if not segment else f"the segment {segment!r}"
        raise _refuse("adapter name", name, f"{found} is not [A-Za-z0-9_][A-Za-z0-9_.-]*")
    if segment[-1] in ".-":
        raise _refuse("adapter name", name, f"the segment {segment!r} ends in {segment[-1]!r}")
    if "--" in segment:
        raise _refuse("adapter name", name, "'--' stands for '/' on storage")
    if _WINDOWS.fullmatch(segment):
        raise _refuse("adapter name", name, f"{segment!r} is a device on Windows")


def check_new_name(name: str, known: Iterable[str]) -> str:
    """Return `name` if it may join the names `known`: equal to one of them, or different under casefold.

    Raises:
        NameNotAllowedError: the name is not allowed, or differs from a known one by case only.
    """
    check_name(name)
    folded = name.casefold()
    for other in known:
        if other != name and other.casefold() == folded:
            raise _refuse("adapter name", name, f"it differs from {other!r} by case only, which some disks cannot tell")
    return name


def check_tag(tag: str) -> str:
    """Return `tag` if it may be a tag: one segment that reads neither as an id, nor as a date, nor as `latest`.

    Raises:
        NameNotAllowedError: saying which rule it breaks.
    """
    if not isinstance(tag, str) or not _SEGMENT.fullmatch(tag) or len(tag) > MAX_LENGTH:
        raise _refuse("tag", tag, "a tag is one segment of letters, digits, '_', '-', '.'")
    if tag == "latest":
        raise _refuse("tag", tag, "'latest' means an adapter's newest version")
    if _ID.fullmatch(tag):
        raise _refuse("tag", tag, "it looks like a version id")
    if _DATE.fullmatch(tag):
        raise _refuse("tag", tag, "it looks like a date")
    if _misread_by_yaml(tag):
        raise _refuse("tag", tag, "YAML and Hydra would read it as a number, a boolean or null")
    return tag


def storage_name(name: str) -> str:
    """The folder of adapter `name` under `adapters/`: one segment, `/` spelled `--`."""
    return check_name(name).replace("/", "--")


def name_from_storage(folder: str) -> str:
    """The inverse of `storage_name`."""
    return check_name(folder.replace("--", "/"))


def module_name(name: str) -> str:
    """The name of adapter `name` inside a torch module: without dots, never a word of PEFT's layers; reversible.

    Ordinary names stay as they are. `%` cannot occur in an adapter's name, so percent-encoding is unambiguous.
    """
    escaped = check_name(name).replace(".", "%2E")
    return f"%{ord(escaped[0]):02X}{escaped[1:]}" if escaped in _TUNER_WORDS else escaped


def name_from_module(name: str) -> str:
    """The inverse of `module_name`; a name that it did not make is returned as it is."""
    return re.sub(r"%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), name)
