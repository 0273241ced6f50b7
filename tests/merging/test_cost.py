"""What a merge costs: never a dense matrix where factors do, never more of one than the budget where they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multilora_store.merging import MergeSource, adapters, merge_adapters
from multilora_store.merging.blocks import BLOCK_ELEMENTS
from multilora_store.merging.element_merge import CHUNK_BLOCKS
from multilora_store.merging.module_merge import ModuleResult, Settings, merge_module
from multilora_store.merging.plan import ModulePlan

Make = Callable[..., MergeSource]
SIDE, RANK = 2048, 4


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


def largest_of(monkeypatch: pytest.MonkeyPatch, sources: list[MergeSource], **fields: Any) -> int:
    largest = Largest()

    def here(plans: Sequence[ModulePlan], settings: Settings, workers: int, progress: object) -> list[ModuleResult]:
        with largest:  # modes belong to a thread
            return [merge_module(plan, settings) for plan in plans]

    monkeypatch.setattr(adapters, "_run", here)
    merge_adapters(sources, [0.5] * len(sources), **fields)
    assert largest.elements > 0
    return largest.elements


@pytest.mark.parametrize(
    "strategy", ["linear", "cat", "svd", "task_arithmetic", "slerp", "knots", "core_space", "tsv", "iso", "peft_linear"]
)
def test_factors_stay_factors(strategy: str, make_adapter: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 97 and case 124: the work is that of the small factors, not of the layer's matrix."""
    sources = [make_adapter(name, seed, r=RANK, shape=(SIDE, SIDE), paths=("q",)) for seed, name in enumerate("ab")]
    # Both adapters' factors side by side for each of two right parts; and the counts of a radix selection.
    assert largest_of(monkeypatch, sources, strategy=strategy) <= max(2 * SIDE * 2 * RANK, 2**16) < SIDE * SIDE / 50


@pytest.mark.parametrize("strategy", ["ties", "dare_linear"])
def test_dense_results_keep_to_the_budget(strategy: str, make_adapter: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [make_adapter(name, seed, r=RANK, shape=(SIDE, SIDE), paths=("q",)) for seed, name in enumerate("ab")]
    chunk = BLOCK_ELEMENTS * CHUNK_BLOCKS
    assert largest_of(monkeypatch, sources, strategy=strategy, memory_budget=1, rank=2) <= chunk < SIDE * SIDE
    assert largest_of(monkeypatch, sources, strategy=strategy, memory_budget=2**30, rank=2) == SIDE * SIDE


@pytest.mark.parametrize("strategy", ["linear", "svd", "knots", "core_space", "ties"])
def test_bytes_do_not_depend_on_torchs_threads(strategy: str, make_adapter: Make) -> None:
    """Case 88: the same recipe gives the same bytes for any number of threads."""
    sources = [make_adapter(name, seed, r=8, shape=(900, 800), paths=("q",)) for seed, name in enumerate("ab")]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(merge_adapters(sources, [0.7, 0.3], strategy=strategy, rank=8).tensors)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


def test_tensors_are_looked_up_once_for_each_module(make_adapter: Make) -> None:
    """Case 115: a lazy mapping is asked for each tensor as often as it is needed, not more."""
    asked: list[str] = []

    class Counting(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    source = make_adapter("a", 1)
    counted = MergeSource(
        name="a", digest=source.digest, config=source.config, tensors=Counting(source.tensors), infos=source.infos
    )
    merge_adapters([counted, make_adapter("b", 2)], [0.5, 0.5], strategy="ties")
    assert sorted(asked) == sorted(source.tensors)
