"""Random numbers that are a function of the recipe: the seed, the adapter's content, the tensor, the place in it."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["integers", "kept", "normal", "uniform"]


def uniform(shape: tuple[int, ...], *labels: object) -> Tensor:
    """Numbers of (0, 1), float32, odd multiples of 2**-17: four from each draw of 64 bits, which draws cost."""
    return _sixteen_bits(shape, labels).add_(32768.5).mul_(2.0**-16)


def kept(probability: float, shape: tuple[int, ...], *labels: object) -> Tensor:
    """1 where `uniform` of the same labels is below the probability, else 0, float32."""
    drawn = _sixteen_bits(shape, labels)
    return torch.lt(drawn, probability * 2.0**16 - 32768.5, out=drawn)


def normal(shape: tuple[int, ...], *labels: object) -> Tensor:
    """Numbers of the standard normal distribution, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(_seed(labels) >> 1), dtype=torch.float32)


def integers(below: int, count: int, *labels: object) -> Tensor:
    """`count` whole numbers of [0, below)."""
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(_seed(labels) >> 1))


def _seed(labels: tuple[object, ...]) -> int:
    """64 bits of SHA-256 over the labels, the merge's seed among them: the same on every thread."""
    text = "\x1f".join(map(str, ("multilora_store.merge", *labels)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _sixteen_bits(shape: tuple[int, ...], labels: tuple[object, ...]) -> Tensor:
    """Whole numbers of [-32768, 32767] as float32, from the raw stream of SFC64, which NumPy never changes."""
    count = math.prod(shape)
    words = np.random.SFC64(_seed(labels)).random_raw(-(-count // 4))
    return torch.from_numpy(words.view(np.int16)[:count]).to(torch.float32).reshape(shape)
