"""Overrides before Hydra sees them: sugar spelled out, what would be misread refused with the remedy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Sweep
from hydra.errors import HydraException

from multilora_store.adapter import source_kind
from multilora_store.cli.choices import GROUPS
from multilora_store.cli.failures import first_line
from multilora_store.cli.settings import AdapterEntry
from multilora_store.cli.sources import adapter_of
from multilora_store.errors import ManifestError, NameNotAllowedError, UsageError, choices

__all__ = ["chosen", "prepare", "quoted"]

_FIELDS: Final = tuple(AdapterEntry.__dataclass_fields__)
_SPECIAL: Final = "~ # ; ! < > ( ) & | ^ ` = and letters beyond ASCII"
_LIST_FORM: Final = "+adapters=[a,b]"


def quoted(value: str) -> str:
    """`value` as one quoted string of Hydra's grammar."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def prepare(
    words: Sequence[str],
    *,
    text_keys: Collection[str],
    open_keys: Collection[str] = (),
    multirun: bool,
    own_set: bool = False,
) -> list[str]:
    """What Hydra shall be given for the overrides that were typed.

    Args:
        words: The overrides as typed.
        text_keys: Keys whose value is a string: quoted where Hydra's grammar would stumble.
        open_keys: Keys of mappings whose own keys are the user's: `store.options.K=V` adds K.
        multirun: Whether `-m` was given.
        own_set: Whether the user's own configs may choose adapters too.

    Raises:
        UsageError: an override that Hydra cannot parse, or would silently misread.
    """
    parser = OverridesParser.create()
    prepared = [_opened(_spelled_out(word), open_keys) for word in words]
    prepared = [_quote_if_needed(word, parser, text_keys) for word in prepared]
    parsed = [_parse(word, parser) for word in prepared]
    if not multirun:
        for override in parsed:
            _refuse_sweep(override)
    for override in parsed:
        _refuse_odd_choice(override)
    adapters = [override for override in parsed if override.key_or_group == "adapters"]
    _check_choices(adapters)
    if not own_set:
        _check_touched(words, parsed)
    return _beside_sweeps(prepared, parsed) if multirun else prepared


def chosen(prepared: Iterable[str], key: str) -> list[str]:
    """The values that overrides give to a key, or to the group that fills it, sweeps and lists unrolled."""
    parser = OverridesParser.create()
    found: list[str] = []
    for word in prepared:
        override = parser.parse_override(word)
        if key == (override.package or override.key_or_group) and not override.is_delete():
            found += [str(item) for option in _alternatives(override) for item in _as_list(option)]
    return found


def _spelled_out(word: str) -> str:
    """The short forms: a store's path, `save=true`, `plugins=[..]`, adapters whose names hold `/` or `.`."""
    mark, key, value = _split(word)
    if key == "store" and value and source_kind(value.strip("'\"")) != "ref":
        return f"{mark}store.url={value}"
    if key == "save" and value in {"true", "false"}:
        return f"{mark}save.enabled={value}"
    if key == "plugins" and not value.startswith("{"):
        listed = value if value.startswith("[") else f"[{value}]"
        return f"{mark}plugins.paths={listed}"
    if key.startswith("adapters.") and "=" in word:
        return _adapter_key(mark, key, value, word)
    if re.fullmatch(r"steps\.\w+", key) and value:  # a place of its own for each choice of the group
        return f"+steps@{key}={value}"
    return word


def _beside_sweeps(prepared: list[str], parsed: Sequence[Override]) -> list[str]:
    """Fields of a group that is swept, as sweeps of one: Hydra composes once without the swept groups first."""
    swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
    found = []
    for word, override in zip(prepared, parsed, strict=True):
        mark, key, value = _split(word)
        below = any(key.startswith(f"{group}.") for group in swept)
        alone = below and "=" in word and not override.is_sweep_override()
        found.append(f"{mark}{key}=choice({value})" if alone else word)
    return found


def _opened(word: str, open_keys: Collection[str]) -> str:
    """Hydra adds a key to a mapping only when told to."""
    mark, key, value = _split(word)
    inside = any(key.startswith(f"{name}.") or (key == name and value.startswith("{")) for name in open_keys)
    return f"++{word}" if inside and not mark and "=" in word else word


def _split(word: str) -> tuple[str, str, str]:
    match = re.match(r"(\+\+|\+|~)?([^=]*)(?:=(.*))?$", word, re.DOTALL)
    assert match is not None, "every word matches"
    return match[1] or "", match[2], match[3] or ""


def _adapter_key(mark: str, key: str, value: str, word: str) -> str:
    """`adapters.team/a.weight=0.3` in the form that Hydra takes: the name is a key of a mapping, not a path."""
    parts = key.split(".")[1:]
    split = next((at for at, part in enumerate(parts) if at > 0 and part in _FIELDS), None)
    if split is None:
        name = ".".join(parts)
        if value.startswith("{"):
            return f"++adapters={{{name}: {value}}}"
        if "/" in name or len(parts) > 1:
            raise UsageError(
                f"override {word!r}: {parts[-1]!r} is not a field of an adapter",
                remedy=choices(parts[-1], _FIELDS, noun="field"),
            )
        return word
    name, path = ".".join(parts[:split]), parts[split:]
    if mark == "+" or "/" in name or "." in name or path[0] == "config":
        return _inline(name, path, value)
    return word


def _inline(name: str, path: Sequence[str], value: str) -> str:
    options = [value]
    if path[-1] in {"source", "store"} and value[:1] not in {"'", '"'} and re.search(r"[^\w./:@,*+-]", value, re.ASCII):
        options = [quoted(value)]
    elif "," in value:
        try:
            override = OverridesParser.create().parse_override(f"x={value}")
        except HydraException:
            override = None
        if override is not None and override.is_choice_sweep():
            options = list(override.sweep_string_iterator())
    opening = "".join(f"{{{part}: " for part in (name, *path))
    return "++adapters=" + ",".join(opening + option + "}" * (len(path) + 1) for option in options)


def _quote_if_needed(word: str, parser: OverridesParser, text_keys: Collection[str]) -> str:
    mark, key, value = _split(word)
    if "=" not in word or not _is_text(key, text_keys):
        return word
    try:
        override = parser.parse_override(word)
    except HydraException:
        if value[:1] in {"'", '"', "["}:
            return word
        return f"{mark}{key}={quoted(value)}"
    misread = override.value_type is not None and not isinstance(override.value(), (str, Sweep, type(None)))
    return f"{mark}{key}={quoted(value)}" if misread and value[:1] not in {"[", "{"} else word


def _is_text(key: str, text_keys: Collection[str]) -> bool:
    parts = key.split(".")
    entry = parts[0] == "adapters" and len(parts) == 3 and parts[2] in {"source", "store"}
    return entry or key in text_keys


def _parse(word: str, parser: OverridesParser) -> Override:
    try:
        return parser.parse_override(word)
    except HydraException as error:
        raise UsageError(
            f"override {word!r} cannot be read: {first_line(error)}", remedy=_remedy(word), override=word
        ) from error


def _remedy(word: str) -> str:
    if re.search(r"@\{[^}]*\}?", word):
        return "a date in a ref stands without braces: a@2026-11-30 or a@2026-11-30T12:00:00Z"
    key, _, value = word.partition("=")
    if not key.strip("+~"):
        return "write key=value"
    if value.startswith(("[", "{")):
        return f"quote strings that hold {_SPECIAL} inside: \"{key}=['...']\""
    return f"quote values that hold {_SPECIAL}, for the shell and for Hydra: \"{key}='{value}'\""


def _refuse_sweep(override: Override) -> None:
    if not override.is_sweep_override():
        return
    word = str(override.input_line)
    mark, key, value = _split(word)
    if key == "adapters" and isinstance(override.value(), ChoiceSweep):
        raise UsageError(
            f"override {word!r} is a sweep over adapters, not a set",
            remedy=f"the set: '{mark}adapters=[{value}]'; one run for each: -m",
        )
    raise UsageError(
        f"override {word!r} is a sweep", remedy=f"a list: '{mark}{key}=[{value}]'; one run for each value: -m"
    )


def _refuse_odd_choice(override: Override) -> None:
    """What stands where the name of a plugin belongs: a number, a boolean; a step without its place."""
    group = override.key_or_group
    if group not in GROUPS or override.is_delete():
        return
    items = [item for option in _alternatives(override) for item in _as_list(option)]
    if group == "steps" and override.package is None and not any(isinstance(item, dict) for item in items):
        raise UsageError(f"override {str(override.input_line)!r} names no place", remedy="e.g. steps.after_load=NAME")
    for item in items:
        if not isinstance(item, (str, dict, type(None))):
            raise UsageError(f"{group}={item} is no choice", remedy=f"by name: {GROUPS[group].choose}")


def _alternatives(override: Override) -> list[Any]:
    value = override.value()
    return list(value.list) if isinstance(value, ChoiceSweep) else [value]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _check_choices(overrides: Sequence[Override]) -> None:
    """Each choice is a name, and no adapter is chosen twice in one run."""
    runs: list[list[Any]] = [[]]
    for override in overrides:
        if override.is_delete():
            continue
        options = [_as_list(option) for option in _alternatives(override) if not isinstance(option, dict)]
        runs = [run + option for run in runs for option in options] if options else runs
    for run in runs:
        names = [_choice_name(item) for item in run]
        for name, count in Counter(names).items():
            if count > 1:
                given = [str(item) for item in run if adapter_of(str(item)) == name]
                two = f"'+adapters={{{name}1: {{source: {given[0]}}}, {name}2: {{source: {given[-1]}}}}}'"
                raise ManifestError(
                    f"adapter {name!r} is chosen {count} times: {', '.join(given)}",
                    remedy=f"two versions need two names: {two}" if len(set(given)) > 1 else "name it once",
                    name=name,
                )


def _check_touched(words: Sequence[str], parsed: Sequence[Override]) -> None:
    """An override of an adapter's field that was rewritten into a mapping must not bring the adapter in."""
    known: set[str] = set()
    for word, override in zip(words, parsed, strict=True):
        if override.key_or_group == "adapters" and not override.is_delete():
            options = [option for option in _alternatives(override) if not isinstance(option, dict)]
            known |= {adapter_of(str(item)) for option in options for item in _as_list(option)}
            known |= set(_entries(override)) if word.startswith("+") else set()
    for word, override in zip(words, parsed, strict=True):
        for name in () if word.startswith("+") else _entries(override):
            if name not in known:
                raise ManifestError(
                    f"override {word!r}: adapter {name!r} is not in the set",
                    why=f"chosen: {', '.join(sorted(known)) or 'none'}",
                    remedy=f"choose it too: '+adapters=[{','.join([*sorted(known), name])}]'",
                    name=name,
                )


def _entries(override: Override) -> list[str]:
    """The adapters' names in an override that is a mapping of entries."""
    if override.key_or_group != "adapters" or override.is_delete():
        return []
    return [str(name) for option in _alternatives(override) if isinstance(option, dict) for name in option]


def _choice_name(item: Any) -> str:
    if not isinstance(item, str):
        shown = "null" if item is None else str(item).lower() if isinstance(item, bool) else str(item)
        raise NameNotAllowedError(
            f"adapter name {shown} is not allowed",
            why="Hydra reads it as a number, a boolean, null or a list",
            remedy=f"rename it; names start like {_LIST_FORM}",
        )
    try:
        return adapter_of(item)
    except NameNotAllowedError as error:
        if " " in item.strip():
            raise NameNotAllowedError(
                f"adapter name {item!r} is not allowed",
                why="names are separated by commas, not by spaces",
                remedy=f"write '+adapters=[{','.join(item.split())}]'",
            ) from error
        if item.startswith(("/", "./", "../")) or "://" in item:
            raise NameNotAllowedError(
                f"adapter name {item!r} is not allowed",
                why="a path or URL is a source, not a name",
                remedy=f"give it a name: '+adapters={{a: {{source: \"{item}\"}}}}'",
            ) from error
        raise
