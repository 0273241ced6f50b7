"""Arguments: what a caller gave is of the documented type, or an error says which type is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from multilora_store.adapter import Ref
from multilora_store.errors import UsageError
from multilora_store.storage.state import Version

__all__ = ["as_mapping", "as_ref", "as_several", "of_type"]

T = TypeVar("T")


def of_type(value: Any, kind: type[T] | tuple[type[T], ...], what: str, wanted: str) -> T:
    """Returns `value` if it is of that kind.

    Raises:
        UsageError: it is not; the error names what it is for (`what`) and what would do (`wanted`).
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UsageError(f"{what} is {value!r:.80}, of type {type(value).__name__}", remedy=f"give {wanted}")
    return value


def as_several(values: Iterable[T], what: str) -> tuple[T, ...]:
    """The values of a list; a string, which is a sequence of letters, is refused."""
    if isinstance(values, str):
        raise UsageError(f"{what} is the string {values!r}", remedy=f"give a list: [{values!r}]")
    return tuple(of_type(values, Iterable, what, "a list"))


def as_mapping(value: Mapping[str, T], what: str) -> Mapping[str, T]:
    """A mapping whose keys are strings."""
    of_type(value, Mapping, what, "a mapping with string keys")
    for key in value:
        of_type(key, str, f"a key of {what}", "a mapping with string keys")
    return value


def as_ref(ref: str | Ref | Version) -> Ref:
    """The reference, whether it was given as text, parsed, or as a version that was found before."""
    if isinstance(ref, Version):
        return Ref(ref.name, ref.id)
    if isinstance(ref, Ref):
        return ref
    return Ref.parse(ref)
