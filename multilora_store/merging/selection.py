"""The k-th largest of many magnitudes that are formed block by block: exact, in one pass as a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["SAMPLE", "kth_largest"]

Values = NDArray[np.float32]
SAMPLE: Final = 2**16
"""Elements few enough to select from at once, and enough to tell where to look in a larger matrix."""
_DEVIATIONS: Final = 5.0  # how far the sample's fraction may be from the whole's, in standard deviations


def kth_largest(count: int, size: int, sample: Callable[[], Values], blocks: Callable[[], Iterator[Values]]) -> float:
    """The `count`-th largest of `size` magnitudes.

    A random sample tells an interval that holds it; one pass counts what lies above and gathers what lies inside.
    Where the interval is missed, or ties fill it, two passes of a radix selection find it. The result is that of
    sorting, whatever the sample was.

    Args:
        count: At least 1, at most `size`.
        size: How many magnitudes there are.
        sample: Gives some of them, drawn at random; asked for large sizes only.
        blocks: Gives all of them, in flat blocks of float32, none negative.
    """
    if size <= SAMPLE:
        return _largest(np.concatenate(list(blocks())), count)
    low, high = _interval(sample(), count / size)
    found = _inside(count, low, high, size // 8, blocks)
    return _by_radix(count, blocks) if found is None else found


def _largest(values: Values, count: int) -> float:
    place = values.size - count
    return float(np.partition(values, place)[place])


def _interval(sample: Values, share: float) -> tuple[float, float]:
    """The sample's magnitudes between which the one lies that a `share` of all reach."""
    centre, margin = share * sample.size, _DEVIATIONS * math.sqrt(sample.size * share * (1.0 - share)) + 3.0
    first, last = math.floor(centre - margin), math.ceil(centre + margin)
    high = math.inf if first < 1 else _largest(sample, first)
    return (0.0 if last > sample.size else _largest(sample, last)), high


def _inside(count: int, low: float, high: float, most: int, blocks: Callable[[], Iterator[Values]]) -> float | None:
    """The magnitude, if it lies within the interval and no more than `most` others do."""
    reached, gathered, inside = 0, [], 0
    for values in blocks():
        chosen = values >= low
        reached += int(np.count_nonzero(chosen))
        chosen &= values <= high
        gathered.append(values[np.flatnonzero(chosen)])  # by places: faster than by booleans where few are true
        inside += gathered[-1].size
        if inside > most:
            return None
    place = count - (reached - inside)
    return _largest(np.concatenate(gathered), place) if 1 <= place <= inside else None


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
