"""Random numbers that are a function of the recipe: the seed, the adapter's content, the tensor, the place in it."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

__all__ = ["generator", "normal", "uniform"]


def generator(*labels: object) -> torch.Generator:
    """A CPU generator seeded with SHA-256 over the labels, the merge's seed among them: the same on every thread."""
    text = "\x1f".join(map(str, ("multilora_store.merge", *labels)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def uniform(shape: tuple[int, ...], *labels: object) -> Tensor:
    """Numbers of (0, 1), float32, odd multiples of 2**-17: four from each draw of 64 bits, which draws cost."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator(*labels))
    return words.view(torch.int16)[:count].to(torch.float32).add_(32768.5).mul_(2.0**-16).reshape(shape)


def normal(shape: tuple[int, ...], *labels: object) -> Tensor:
    """Numbers of the standard normal distribution, float32."""
    return torch.randn(shape, generator=generator(*labels), dtype=torch.float32)
