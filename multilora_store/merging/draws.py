"""Random numbers that are a function of the recipe: the seed, the adapter's content, the tensor, the place in it."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["generator", "normal", "uniform"]


def generator(*labels: object) -> torch.Generator:
    """A CPU generator seeded with SHA-256 over the labels, the merge's seed among them: the same on every thread."""
    text = "\x1f".join(map(str, ("multilora_store.merge", *labels)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def uniform(shape: tuple[int, ...], *labels: object) -> Tensor:
    """Numbers of [0, 1), float32."""
    return torch.rand(shape, generator=generator(*labels), dtype=torch.float32)


def normal(shape: tuple[int, ...], *labels: object) -> Tensor:
    """Numbers of the standard normal distribution, float32."""
    return torch.randn(shape, generator=generator(*labels), dtype=torch.float32)
