"""Records: JSON documents that come from storage, and are believed only as far as they are checked.

Every field of every record is asked for by name and type through a `Fields`; a value that does not fit is
a `DamagedError` that names the record and the field. Nothing in a record is ever instantiated.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, TypeVar

from multilora_store.errors import DamagedError, MultiLoRAError, UsageError

__all__ = ["Fields", "dump", "parse", "plain_json", "sha256", "time_text"]

LARGEST: Final = 256 << 20
DEEPEST: Final = 64
_T = TypeVar("_T")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_VERSION_ID = re.compile(r"v[0-9a-f]{16}", re.ASCII)
_MISSING: Final = object()


def sha256(data: bytes) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def dump(record: Mapping[str, Any]) -> bytes:
    """The one spelling of a record: sorted keys, no white space, UTF-8, a final newline."""
    return (
        json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
    ).encode()


def parse(data: bytes, where: str, *, largest: int = LARGEST) -> Fields:
    """Reads one record.

    Raises:
        DamagedError: too large, too deep, not UTF-8, not JSON, not an object, a duplicate key or a NaN in it.
    """
    if len(data) > largest:
        _damaged(where, f"{len(data)} bytes, at most {largest} are read")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        _damaged(where, f"it is not JSON: {error}", error)
    if not isinstance(value, dict):
        _damaged(where, f"a JSON object was expected, found {type(value).__name__}")
    return Fields(value, where)


def plain_json(value: Any, what: str, *, depth: int = DEEPEST) -> Any:
    """`value` as plain JSON data (tuples become lists), for what a caller wants recorded.

    Raises:
        UsageError: something in it is no JSON value, or it is nested too deeply.
    """
    if depth <= 0:
        raise UsageError(f"{what} is nested more than {DEEPEST} deep", remedy="flatten it")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UsageError(f"{what} has a key that is not a string", remedy="use string keys")
        return {key: plain_json(item, what, depth=depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, what, depth=depth - 1) for item in value]
    raise UsageError(
        f"{what} holds {value!r:.80}, of type {type(value).__name__}",
        why="only finite numbers, strings, booleans, null, lists and string-keyed mappings can be recorded",
        remedy="convert it first",
    )


def time_text(moment: datetime) -> str:
    """`moment` as it stands in records: UTC, ISO 8601, microseconds, `Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Fields:
    """One JSON object of a record, read field by field."""

    __slots__ = ("data", "where")

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def refuse(self, field: str, found: object, wanted: str) -> NoReturn:
        """Raises the error that names this record and `field`."""
        _damaged(self.where, f"field {field!r} is {found!r:.80}, {wanted} was expected")

    def text(self, field: str, *, default: Any = _MISSING, longest: int = 4096) -> str:
        return self._typed(
            field, str, f"a string of at most {longest} characters", default, lambda v: len(v) <= longest
        )

    def optional_text(self, field: str) -> str | None:
        return None if self.data.get(field) is None else self.text(field)

    def whole(self, field: str, *, default: Any = _MISSING, least: int = 0) -> int:
        fits: Callable[[int], bool] = lambda v: not isinstance(v, bool) and least <= v < 2**63  # noqa: E731
        return self._typed(field, int, f"a whole number from {least} on", default, fits)

    def optional_whole(self, field: str) -> int | None:
        return None if self.data.get(field) is None else self.whole(field)

    def number(self, field: str, *, default: Any = _MISSING) -> float:
        found = self._value(field, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            self.refuse(field, found, "a finite number")
        return float(found)

    def flag(self, field: str, *, default: Any = _MISSING) -> bool:
        return self._typed(field, bool, "true or false", default, lambda _: True)

    def digest(self, field: str, *, default: Any = _MISSING) -> str:
        return self._typed(field, str, "a SHA-256 in hex", default, lambda v: bool(_SHA256.fullmatch(v)))

    def version_id(self, field: str) -> str:
        return self._typed(field, str, "a version id", _MISSING, lambda v: bool(_VERSION_ID.fullmatch(v)))

    def checked(self, field: str, check: Callable[[str], str]) -> str:
        """A string that passes `check`, one of the name rules."""
        return self._pass(field, self.text(field), check)

    def keys(self, check: Callable[[str], str]) -> list[str]:
        """The object's keys, each of which passes `check`."""
        return [self._pass("key", key, check) for key in self.data]

    def _pass(self, field: str, found: str, check: Callable[[str], str]) -> str:
        try:
            return check(found)
        except MultiLoRAError as error:
            _damaged(self.where, f"field {field!r}: {error.what}", error)

    def moment(self, field: str) -> datetime:
        found = self.text(field, longest=64)
        try:
            moment = datetime.fromisoformat(found)
        except ValueError:
            self.refuse(field, found, "an ISO 8601 time")
        if moment.tzinfo is None:
            self.refuse(field, found, "a time with its zone")
        return moment.astimezone(UTC)

    def mapping(self, field: str, *, default: Any = _MISSING) -> dict[str, Any]:
        return self._typed(field, dict, "an object", default, lambda _: True)

    def free(self, field: str) -> dict[str, Any]:
        """An object of any content, such as a caller's metadata; only its depth is limited."""
        found = self.mapping(field, default={})
        try:
            plain_json(found, field)
        except UsageError as error:
            _damaged(self.where, error.what, error)
        return found

    def optional_free(self, field: str) -> dict[str, Any] | None:
        return None if self.data.get(field) is None else self.free(field)

    def inner(self, field: str) -> Fields:
        """The object in `field`, to be read in turn."""
        return Fields(self.mapping(field), f"{self.where} {field}")

    def inners(self, field: str) -> dict[str, Fields]:
        """The objects in the object in `field`, by key."""
        found = self.mapping(field)
        return {
            key: Fields(self._object(f"{field}.{key}", item), f"{self.where} {field}.{key}")
            for key, item in found.items()
        }

    def rows(self, field: str) -> list[Fields]:
        """The objects in the list in `field`."""
        found = self.array(field)
        return [Fields(self._object(f"{field}[{i}]", row), f"{self.where} {field}[{i}]") for i, row in enumerate(found)]

    def array(self, field: str, *, default: Any = _MISSING) -> list[Any]:
        return self._typed(field, list, "a list", default, lambda _: True)

    def texts(self, field: str, *, default: Any = _MISSING) -> tuple[str, ...]:
        found = self.array(field, default=default)
        if not all(isinstance(item, str) and len(item) <= 4096 for item in found):
            self.refuse(field, found, "a list of strings")
        return tuple(found)

    def _object(self, field: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(field, value, "an object")
        return value

    def _value(self, field: str, default: Any) -> Any:
        found = self.data.get(field, default)
        if found is _MISSING:
            _damaged(self.where, f"field {field!r} is missing")
        return found

    def _typed(self, field: str, kind: type[_T], wanted: str, default: Any, fits: Callable[[_T], bool]) -> _T:
        found = self._value(field, default)
        if not isinstance(found, kind) or not fits(found):
            self.refuse(field, found, wanted)
        return found


def _damaged(where: str, why: str, cause: BaseException | None = None) -> NoReturn:
    raise DamagedError(
        f"the record {where} is damaged",
        why=why,
        remedy="it was not written by this library, or was altered; restore it from a copy of the store",
        where=where,
    ) from cause


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
