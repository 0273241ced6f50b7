"""What a merge costs: never a dense matrix where factors do, never more of one than the budget where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
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
from multilora_store.plugins import default_registry

ROOT = Path(__file__).resolve().parents[2]
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


DIGESTS = """
import hashlib
from multilora_store.merging import MergeSource, merge_adapters
from multilora_store.plugins import default_registry
from tests.merging.conftest import random_adapter

a, b = (random_adapter(name, seed, r=8, shape=(900, 800), paths=("q",)) for seed, name in enumerate("ab"))
near = {name: tensor + a.tensors[name] for name, tensor in b.tensors.items()}  # model_stock wants no right angle
sources = [a, MergeSource.in_memory("b", b.config, near)]
for name in default_registry().names("merge_strategy"):
    known = {item.name for item in default_registry().get("merge_strategy", name).parameters}
    merged = merge_adapters(sources, [0.7, 0.3], strategy=name, **({"density": 0.4} if "density" in known else {}))
    content = b"".join(tensor.numpy().tobytes() for tensor in merged.tensors.values())
    print(name, hashlib.sha256(content).hexdigest())
"""


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_environments_threads() -> None:
    """Case 88: every strategy, in processes that were started with other numbers of threads."""
    told = [
        subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == len(default_registry().names("merge_strategy"))


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
