"""Dense matrices by blocks: thresholds are exact, masks and results do not depend on the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multilora_store.errors import MergeError
from multilora_store.merging import blocks
from multilora_store.merging.blocks import Block, Matrix, Workspace, block_rows
from multilora_store.merging.element_merge import ElementMerge
from multilora_store.merging.lowrank import LowRank


def small_blocks(monkeypatch: pytest.MonkeyPatch, elements: int = 64) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", elements)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0])),
        min_size=1,
        max_size=60,
    ),
    st.data(),
)
def test_the_kth_magnitude_is_that_of_sorting(values: list[float], data: st.DataObject) -> None:
    matrix = Matrix.of_tensor(torch.tensor([values]))
    count = data.draw(st.integers(1, len(values)))
    by_sorting = 0.0 if count == len(values) else sorted(map(abs, values), reverse=True)[count - 1]
    assert matrix.kth_magnitudes(count, 0) == [by_sorting, math.inf]


def test_blocks_cover_a_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    rows = [index for part in block_rows((23, 16)) for index in range(part.start, part.stop)]
    assert rows == list(range(23))
    assert len(block_rows((23, 16))) == 6
    assert block_rows((3, 1000)) == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_a_result_is_the_same_kept_or_computed_anew_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    results = []
    for budget in (10**9, 1):
        merge = element_merge(budget)
        dense = merge.dense()
        torch.testing.assert_close(merge.times(torch.eye(40)), dense)
        torch.testing.assert_close(merge.transposed_times(torch.eye(50)), dense.mT)
        results.append((dense, merge.truncate(8, exact=False, label=(0,)).delta))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1].up, results[1][1].up)


def test_the_randomised_truncation_is_near_the_best_and_its_error_is_told() -> None:
    merge = element_merge(10**9)
    dense = merge.dense().double()
    best = float(torch.linalg.svdvals(dense)[8:].square().sum().sqrt())
    exact = merge.truncate(8, exact=True, label=(0,))
    assert merge.distance(exact.delta)[0] == pytest.approx(best, rel=1e-5)
    random = merge.truncate(8, exact=False, label=(0,))
    rounded = LowRank.of(random.delta.up.bfloat16(), random.delta.down.bfloat16())
    for found, rel in ((random.delta, 1e-5), (rounded, 1e-4)):
        apart, size = merge.distance(found, random.projection)
        assert best * (1 - 1e-6) <= apart <= 1.05 * best
        assert size == pytest.approx(float(dense.norm()), rel=1e-6)
        assert apart == pytest.approx(float((dense - found.dense()[0]).norm()), rel=rel)
        assert apart == pytest.approx(merge.distance(found)[0], rel=rel)  # the same, summed block by block


def test_a_workspace_is_one_memory_in_a_thread_and_keeps_to_its_budget() -> None:
    workspace = Workspace(4 * 40 * 50)
    first = workspace.of(40, 50)
    assert first is not None
    again = workspace.of(2, 10, 50)
    assert again is not None
    assert again.shape == (2, 10, 50)
    assert again.data_ptr() == first.data_ptr()
    assert workspace.of(41, 50) is None
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(workspace.of, 40, 50).result()
    assert other is not None
    assert other.data_ptr() != first.data_ptr()


def test_a_mask_is_where_its_uniform_numbers_are_below_the_probability() -> None:
    block = Block.of(torch.ones(64, 64))
    for probability in (1e-9, 2.0**-16, 0.3, 0.5, 1.0 - 2.0**-16, 1.0):
        assert torch.equal(block.kept(probability), (block.uniform() < probability).float())
    assert float(block.kept(1.0).min()) == 1.0
    given = torch.empty(64, 64)
    assert block.uniform(given) is given
    assert torch.equal(given, block.uniform())


def test_masks_depend_on_the_place_and_the_seed() -> None:
    first = Block.of(torch.ones(20, 20), seed=1).uniform()
    assert torch.equal(first, Block.of(torch.zeros(20, 20), seed=1).uniform())
    assert not torch.equal(first, Block.of(torch.ones(20, 20), seed=2).uniform())
    assert float(first.min()) > 0.0
    assert float(first.max()) < 1.0


def test_a_function_of_another_shape_or_with_infinities_is_refused() -> None:
    matrix = Matrix.of_tensor(torch.ones(4, 4))
    wrong = ElementMerge(matrices=[matrix], weights=[1.0], function=lambda b, w: torch.ones(2, 2))
    with pytest.raises(MergeError, match=r"shape \(2, 2\)"):
        wrong.dense()
    endless = ElementMerge(matrices=[matrix], weights=[1.0], function=lambda b, w: b[0].values / 0.0)
    with pytest.raises(MergeError, match="not finite"):
        endless.dense()


def element_merge(budget: int) -> ElementMerge:
    random = torch.Generator().manual_seed(3)
    deltas = [LowRank.of(torch.randn(50, 4, generator=random), torch.randn(4, 40, generator=random)) for _ in range(2)]

    def masked_sum(parts: Sequence[Block], weights: Sequence[float]) -> Tensor:
        kept = [torch.where(part.uniform() < 0.7, part.values, 0.0) for part in parts]
        return kept[0] * weights[0] + kept[1] * weights[1]

    return ElementMerge(
        matrices=[Matrix.of_delta(delta, (0, str(index), "t")) for index, delta in enumerate(deltas)],
        weights=[0.6, 0.4],
        function=masked_sum,
        space=Workspace(budget).of(50, 40),
    )
