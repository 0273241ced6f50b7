"""Random numbers that are a function of the recipe: the seed, the adapter's content, the tensor, the place in it."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["integers", "kept", "normal", "uniform"]


def uniform(out: Tensor, *labels: object) -> Tensor:
    """Fill a float32 tensor with numbers of (0, 1), odd multiples of 2**-17: four from each draw of 64 bits."""
    return out.copy_(_sixteen_bits(out.shape, labels)).add_(32768.5).mul_(2.0**-16)


def kept(out: Tensor, probability: float, *labels: object) -> Tensor:
    """Fill a float32 tensor with 1 where `uniform` of the same labels is below the probability, else 0."""
    return torch.lt(out.copy_(_sixteen_bits(out.shape, labels)), probability * 2.0**16 - 32768.5, out=out)


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
    """Whole numbers of [-32768, 32767], int16, from the raw stream of SFC64, which NumPy never changes."""
    count = math.prod(shape)
    words = np.random.SFC64(_seed(labels)).random_raw(-(-count // 4))
    return torch.from_numpy(words.view(np.int16)[:count]).reshape(shape)
