"""Coverage: every tensor of a file has its place on the model and every place its tensor, or nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from multilora_store.errors import CoverageError

__all__ = ["Coverage", "compare", "propose_rename", "renamed"]

PREFIX: Final = "base_model.model."
_SHOWN: Final = 5

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What fits and what does not between the tensors of an adapter and the places on a model.

    Attributes:
        missing: Places without a tensor.
        unexpected: Tensors without a place.
        misshapen: Name -> (shape in the file, shape on the model).
        places: Every place on the model.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: Mapping[str, tuple[Shape, Shape]]
    places: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether it is 100 percent in both directions."""
        return not (self.missing or self.unexpected or self.misshapen)

    def error(self, name: str) -> CoverageError:
        """The error that tells of all of it, with the nearest candidates and a rename that would do."""
        counts = [
            f"{len(found)} {words}"
            for found, words in (
                (self.missing, "missing"),
                (self.unexpected, "without a place on the model"),
                (self.misshapen, "of another shape"),
            )
            if found
        ]
        rename = propose_rename(self.unexpected, self.missing)
        remedy = (
            f"the paths differ by their beginning only: pass rename={rename!r}"
            if rename
            else "check that the adapter was made for this base and that its configuration is its own"
        )
        return CoverageError(
            f"adapter {name!r} does not fit the model: tensors {', '.join(counts)}",
            why="; ".join(self._lines()),
            remedy=remedy,
            name=name,
            missing=self.missing,
            unexpected=self.unexpected,
            misshapen=dict(self.misshapen),
            rename=rename,
        )

    def _lines(self) -> list[str]:
        lines = [f"missing {key}" for key in self.missing[:_SHOWN]]
        for key in self.unexpected[:_SHOWN]:
            near = get_close_matches(key, self.missing or self.places, n=1, cutoff=0.5)
            lines.append(f"unexpected {key}" + (f" (nearest: {near[0]})" if near else ""))
        for key, (found, wanted) in list(self.misshapen.items())[:_SHOWN]:
            lines.append(f"{key} is {list(found)} in the file, {list(wanted)} on the model")
        left = sum(max(0, len(items) - _SHOWN) for items in (self.missing, self.unexpected, self.misshapen))
        return [*lines, f"and {left} more"] if left else lines


def compare(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Coverage:
    """Compare the shapes of a file's tensors with those of the places on a model, both by canonical name."""
    return Coverage(
        missing=tuple(sorted(key for key in wanted if key not in found)),
        unexpected=tuple(sorted(key for key in found if key not in wanted)),
        misshapen={
            key: (found[key], wanted[key]) for key in sorted(found) if key in wanted and found[key] != wanted[key]
        },
        places=tuple(wanted),
    )


def renamed(key: str, rename: Mapping[str, str]) -> str:
    """`key` with the beginning of its path replaced: the longest entry of `rename` that ends at a dot wins."""
    path = key.removeprefix(PREFIX)
    for old in sorted(rename, key=len, reverse=True):
        if not old or path == old or path.startswith(f"{old}."):
            rest = path[len(old) :].lstrip(".")
            return PREFIX + ".".join(part for part in (rename[old], rest) if part)
    return key


def propose_rename(unexpected: Iterable[str], missing: Iterable[str]) -> dict[str, str]:
    """The replacement of a path's beginning that turns every unexpected name into a missing one; {} if none does."""
    have, want = sorted(unexpected), set(missing)
    if not have or len(have) != len(want):
        return {}
    first = have[0].removeprefix(PREFIX).split(".")
    for target in sorted(want):
        other = target.removeprefix(PREFIX).split(".")
        common = 0
        while common < min(len(first), len(other)) and first[-1 - common] == other[-1 - common]:
            common += 1
        old, new = ".".join(first[: len(first) - common]), ".".join(other[: len(other) - common])
        # Where one beginning contains the other, name at least one segment: an empty one would match everything.
        for keep in range(common + 1):
            old_path = ".".join(first[: len(first) - common + keep])
            new_path = ".".join(other[: len(other) - common + keep])
            if (old_path or (not old and new)) and {renamed(key, {old_path: new_path}) for key in have} == want:
                return {old_path: new_path}
    return {}
