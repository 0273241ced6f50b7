"""The algebra in the factors equals the algebra on dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_store.merging.lowrank import LowRank, relative_distance

sizes = st.integers(1, 9)


def shares(most: int) -> st.SearchStrategy[float]:
    """Weights in hundredths: of any size but those whose square no float holds."""
    return st.integers(-100 * most, 100 * most).map(lambda number: number / 100)


@st.composite
def deltas(draw: st.DrawFn, count: int = 2) -> list[LowRank]:
    groups, rows, columns = draw(st.integers(1, 3)), draw(sizes), draw(sizes)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    found = []
    for _ in range(count):
        rank = draw(st.integers(1, 12))  # above the smaller side too
        up = torch.randn(groups, rows, rank, generator=random, dtype=torch.float64)
        down = torch.randn(groups, rank, columns, generator=random, dtype=torch.float64)
        found.append(LowRank.of(up, down, draw(shares(3))))
    return found


@settings(max_examples=80, deadline=None)
@given(deltas(), shares(2), shares(2))
def test_sums_norms_and_products_are_those_of_the_dense_deltas(pair: list[LowRank], v: float, w: float) -> None:
    a, b = pair
    total = LowRank.total(pair, [v, w])
    torch.testing.assert_close(total.dense(), v * a.dense() + w * b.dense())
    expected = float((v * a.dense() + w * b.dense()).norm())
    assert total.precise_norm() == pytest.approx(expected, abs=1e-12)
    parts = abs(v) * a.norm() + abs(w) * b.norm()
    assert total.norm() == pytest.approx(expected, abs=1e-7 * parts)
    assert a.distance(b) == pytest.approx(float((a.dense() - b.dense()).norm()), abs=1e-7 * (a.norm() + b.norm()))
    assert a.inner(b) == pytest.approx(float((a.dense() * b.dense()).sum()), abs=1e-9)
    assert -1.0 <= a.cosine(b) <= 1.0
    torch.testing.assert_close(a.transposed.dense(), a.dense().mT)


@settings(max_examples=80, deadline=None)
@given(deltas(1), st.integers(1, 14))
def test_a_truncation_is_the_best_approximation_of_every_group(one: list[LowRank], rank: int) -> None:
    (delta,) = one
    truncated = delta.truncate(rank)
    assert truncated.rank <= rank
    values = torch.linalg.svdvals(delta.dense())
    lost = float(values[:, rank:].square().sum().sqrt())
    assert float((delta.dense() - truncated.dense()).norm()) == pytest.approx(lost, abs=1e-9)
    torch.testing.assert_close(delta.padded(delta.rank + 3).dense(), delta.dense())


@pytest.mark.parametrize("apart", [1.0, 1e-1, 1e-2, 3e-3, 1e-3, 1e-4, 1e-6, 1e-9, 0.0])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_a_truncation_is_exact_for_factors_that_nearly_depend_on_each_other(apart: float, size: float) -> None:
    random = torch.Generator().manual_seed(0)
    up, down, near_up, near_down = (
        torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((2, 60, 4), (2, 4, 50)) * 2
    )
    one, other = LowRank.of(up, down), LowRank.of(up + apart * near_up, (down + apart * near_down) * size, 1 / size)
    difference = LowRank.total([one, other], [1.0, -1.0])  # of the size of `apart`, its factors of size 1
    exact = difference.dense()
    values = torch.linalg.svdvals(exact)
    for rank in (8, 3):
        found, norm = difference.truncate_and_norm(rank)
        lost = float(values[:, rank:].norm())
        assert float((found.dense() - exact).norm()) == pytest.approx(lost, rel=1e-8, abs=1e-8 * apart + 1e-13)
        assert norm == pytest.approx(float(values.norm()), rel=1e-8, abs=1e-13)


def test_the_difference_of_equal_deltas_has_no_norm_left() -> None:
    random = torch.Generator().manual_seed(0)
    delta = LowRank.of(torch.randn(40, 4, generator=random), torch.randn(4, 30, generator=random), 2.0)
    rotated = delta.truncate(4)
    assert relative_distance(rotated, delta) < 1e-14
    zero = LowRank.zero_like(delta)
    assert zero.norm() == 0.0
    assert delta.cosine(zero) == 0.0
    assert relative_distance(zero, zero) == 0.0
    assert relative_distance(delta, zero) == math.inf


def test_factors_that_do_not_belong_together_are_no_delta() -> None:
    with pytest.raises(AssertionError, match="share the rank"):
        LowRank(torch.ones(1, 4, 2), torch.ones(1, 3, 4))
