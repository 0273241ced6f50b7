"""The k-th largest of many magnitudes that are formed block by block: exact, in one pass as a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["SAMPLE", "kth_largest"]

Values = NDArray[np.float32]
SAMPLE: Final = 2**16
"""Elements few enough to select from at once, and enough to tell where to look in a larger matrix."""
_DEVIATIONS: Final = 3.5  # of the sample's fraction from the whole's: more are rarer than what they cost is large


def kth_largest(
    counts: Sequence[int], size: int, sample: Callable[[], Values], blocks: Callable[[], Iterator[Values]]
) -> list[float]:
    """The `count`-th largest of `size` magnitudes, for each count.

    A random sample tells intervals that hold them; one pass counts what lies above each and gathers what lies inside.
    Where an interval is missed, or ties fill it, two passes of a radix selection find it. The result is that of
    sorting, whatever the sample was.

    Args:
        counts: Each at least 1, at most `size`.
        size: How many magnitudes there are.
        sample: Gives some of them, drawn at random; asked for large sizes only.
        blocks: Gives all of them, in flat blocks of float32, none negative.
    """
    if size <= SAMPLE:
        values = np.concatenate(list(blocks()))
        return [_largest(values, count) for count in counts]
    drawn = sample()
    searches = [_Search(count, *_interval(drawn, count / size), size // 8) for count in counts]
    for values in blocks():
        for search in searches:
            search.look_at(values)
    found = [(search.count, search.found()) for search in searches]
    return [_by_radix(count, blocks) if magnitude is None else magnitude for count, magnitude in found]


def _largest(values: Values, count: int) -> float:
    place = values.size - count
    return float(np.partition(values, place)[place])


def _interval(sample: Values, share: float) -> tuple[float, float]:
    """The sample's magnitudes between which the one lies that a `share` of all reach."""
    centre, margin = share * sample.size, _DEVIATIONS * math.sqrt(sample.size * share * (1.0 - share)) + 3.0
    first, last = math.floor(centre - margin), math.ceil(centre + margin)
    high = math.inf if first < 1 else _largest(sample, first)
    return (0.0 if last > sample.size else _largest(sample, last)), high


@dataclass(slots=True)
class _Search:
    """A pass for one magnitude: found if it lies within the interval and no more than `most` others do."""

    count: int
    low: float
    high: float
    most: int
    _reached: int = 0
    _inside: int = 0
    _gathered: list[Values] = field(default_factory=list)

    def look_at(self, values: Values) -> None:
        if self._inside > self.most:
            return
        chosen = values >= self.low
        self._reached += int(np.count_nonzero(chosen))
        chosen &= values <= self.high
        self._gathered.append(values[np.flatnonzero(chosen)])  # by places: faster than by booleans where few are true
        self._inside += self._gathered[-1].size

    def found(self) -> float | None:
        place = self.count - (self._reached - self._inside)
        within = self._inside <= self.most and 1 <= place <= self._inside
        return _largest(np.concatenate(self._gathered), place) if within else None


def _by_radix(count: int, blocks: Callable[[], Iterator[Values]]) -> float:
    """By the bits of the float32 magnitudes, whose order is that of the numbers: the upper sixteen, then the lower."""
    upper, above = _bucket((values.view(np.int32) >> 16 for values in blocks()), count)
    bits = (values.view(np.int32) for values in blocks())
    lower, _ = _bucket((some[(some >> 16) == upper] & 0xFFFF for some in bits), count - above)
    return float(np.array((upper << 16) | lower, dtype=np.int32).view(np.float32))


def _bucket(keys: Iterator[NDArray[Any]], count: int) -> tuple[int, int]:
    """The key of the `count`-th largest, and how many keys are larger."""
    counts = np.zeros(2**16, dtype=np.int64)
    for some in keys:
        counts += np.bincount(some, minlength=2**16)
    from_top = counts[::-1].cumsum()
    index = int(np.searchsorted(from_top, count))
    return counts.size - 1 - index, int(from_top[index - 1]) if index else 0
