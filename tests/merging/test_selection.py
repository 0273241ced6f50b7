"""The k-th magnitude by a sample and one pass is that of sorting, whatever the sample, the ties and the blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from multilora_store.merging import selection
from multilora_store.merging.selection import kth_largest

Values = NDArray[np.float32]


def by_sorting(values: Values, count: int) -> float:
    return float(np.sort(values)[::-1][count - 1])


def selected(monkeypatch: pytest.MonkeyPatch, values: Values, count: int, sample: Values) -> tuple[float, int]:
    """What is found in a matrix that counts as large, and how many passes it took."""
    monkeypatch.setattr(selection, "SAMPLE", 4)
    passes = 0

    def blocks() -> Iterator[Values]:
        nonlocal passes
        passes += 1
        yield from np.array_split(values, 3)

    (found,) = kth_largest([count], values.size, lambda: sample, blocks)
    return found, passes


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.9, 0.9999])
def test_one_pass_finds_it_where_the_sample_is_a_fair_one(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    values = np.abs(random.standard_normal(40_000, dtype=np.float32))
    count = max(1, int(share * values.size))
    found, passes = selected(monkeypatch, values, count, random.choice(values, 4_000))
    assert (found, passes) == (by_sorting(values, count), 1)


@pytest.mark.parametrize(
    ("values", "sample"),
    [
        (np.arange(1000), np.arange(900, 1000)),  # a sample of large ones only
        (np.arange(1000), np.arange(100)),  # of small ones
        (np.repeat([0.0, 1.0, 2.0], [600, 300, 100]), np.repeat([0.0, 1.0, 2.0], [60, 30, 10])),  # ties fill it
        (np.zeros(1000), np.zeros(100)),
        (np.full(1000, 3.0), np.zeros(100)),
    ],
    ids=["too-large", "too-small", "ties", "zeros", "equal"],
)
@pytest.mark.parametrize("count", [1, 99, 100, 101, 400, 500, 999])
def test_it_is_exact_where_the_sample_misleads_and_where_many_tie(
    values: Values, sample: Values, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffled = np.random.default_rng(2).permutation(values).astype(np.float32)
    found, _ = selected(monkeypatch, shuffled, count, sample.astype(np.float32))
    assert found == by_sorting(shuffled, count)


def test_several_are_found_in_one_pass_and_those_that_are_missed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SAMPLE", 4)
    values = np.random.default_rng(3).permutation(10_000).astype(np.float32)
    sample = values[values < 9_000][::7]  # nothing of the largest tenth
    counts = [1, 10, 2_500, 9_000, 2_500]
    found = kth_largest(counts, values.size, lambda: sample, lambda: iter(np.array_split(values, 3)))
    assert found == [by_sorting(values, count) for count in counts]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=5, max_size=60), st.data())
def test_the_radix_selection_is_that_of_sorting(values: list[float], data: st.DataObject) -> None:
    some = np.array(values, dtype=np.float32)
    count = data.draw(st.integers(1, len(values)))
    assert selection._by_radix(count, lambda: iter(np.array_split(some, 3))) == by_sorting(some, count)
