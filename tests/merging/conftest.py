"""Small adapters in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from multilora_store.merging import MergeSource

MakeAdapter = Callable[..., MergeSource]


@pytest.fixture
def make_adapter() -> MakeAdapter:
    """`make_adapter(name, seed, r=4, shape=(24, 16), paths=..., **config)`: random factors, none of them zero."""
    return random_adapter


def random_adapter(
    name: str,
    seed: int,
    *,
    r: int = 4,
    shape: tuple[int, int] = (24, 16),
    paths: tuple[str, ...] = ("layers.0.q", "layers.1.q"),
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> MergeSource:
    random = torch.Generator().manual_seed(seed)
    tensors = dict(extra or {})
    fields = {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": 2 * r,
        "target_modules": sorted({path.rpartition(".")[2] for path in paths}),
        **config,
    }
    for path in paths:
        prefix = f"base_model.model.{path}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(r, shape[1], generator=random).to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(shape[0], r, generator=random).to(dtype)
    return MergeSource.in_memory(name, fields, tensors)


@pytest.fixture
def dense() -> Callable[..., Tensor]:
    """`dense(adapter, path)`: the delta of one module, as one matrix in float64."""

    def delta(adapter: Any, path: str = "layers.0.q") -> Tensor:
        source = adapter
        if not isinstance(adapter, MergeSource):  # a merge result in memory
            source = MergeSource.in_memory("merged", adapter.config, adapter.tensors)
        return source.layout.pairs[path].read(source.tensors).dense()[0]

    return delta
