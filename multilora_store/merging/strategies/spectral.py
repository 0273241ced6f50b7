"""Strategies on singular vectors: they align the adapters' subspaces before they merge. All run in the factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from multilora_store.merging.blocks import Block
from multilora_store.merging.lowrank import Decomposition, LowRank
from multilora_store.merging.strategies.elements import Election, elected_mean, trimmed
from multilora_store.merging.strategy import BETWEEN_0_AND_1, Interval, strategy

__all__ = ["core_space", "iso", "knots", "tsv"]

_TINY = 1e-10  # relative to the largest singular value: below it a direction is rounding, not content


@strategy(
    citation="Stoica et al., Model merging with SVD to tie the Knots (arXiv 2410.19735), section 4",
    neutral={"method": "linear", "scale": 1.0},
    limits={"density": BETWEEN_0_AND_1},
)
def knots(
    deltas: Sequence[LowRank],
    weights: Sequence[float],
    *,
    method: Literal["ties", "linear"] = "ties",
    density: float = 0.2,
    scale: float = 1.0,
    election: Election = "total",
) -> LowRank:
    """Express all deltas in one shared left basis by the SVD of `[D1 ... Dk]`, merge the right parts, multiply back.

    With `method: ties` the right parts (singular values times right vectors) go through trim, elect and mean.
    """
    basis, triangular = torch.linalg.qr(torch.cat([delta.up for delta in deltas], dim=2))
    columns = torch.split(triangular, [delta.rank for delta in deltas], dim=2)
    rights = torch.cat([left @ delta.down for left, delta in zip(columns, deltas, strict=True)], dim=2)
    # The left vectors and values of `rights` are those of its small triangular factor; u.T rights is s times vh.
    u, s, _ = torch.linalg.svd(torch.linalg.qr(rights.mT, mode="r").R.mT, full_matrices=False)
    content = (s > _TINY * s[:, :1])[:, :, None]
    aligned = torch.split((u.mT @ rights) * content, deltas[0].shape[1], dim=2)
    merged = _merge_elements(aligned, weights, method, density, election)
    return LowRank(basis @ u, merged * scale)


@strategy(
    citation="Panariello et al., Accurate and Efficient Low-Rank Model Merging in Core Space (arXiv 2509.17786)",
    neutral={"method": "linear", "scale": 1.0},
    limits={"density": BETWEEN_0_AND_1},
)
def core_space(
    deltas: Sequence[LowRank],
    weights: Sequence[float],
    *,
    method: Literal["linear", "ties", "tsv", "iso"] = "tsv",
    density: float = 0.2,
    scale: float = 1.0,
    election: Election = "total",
) -> LowRank:
    """Write every delta as `U M V` in bases common to all, merge the small cores `M`, multiply back.

    The bases are the left singular vectors of the stacked B and the right ones of the stacked A: nothing is lost.
    """
    left, ups = _common_basis([delta.up for delta in deltas])
    right, downs = _common_basis([delta.down.mT for delta in deltas])
    cores = [up @ down.mT for up, down in zip(ups, downs, strict=True)]
    if method in ("linear", "ties"):
        merged = _merge_elements(cores, weights, "ties" if method == "ties" else "linear", density, election)
    else:
        spectral = tsv if method == "tsv" else iso
        merged = spectral([_as_low_rank(core) for core in cores], weights).dense()
    return LowRank(left @ merged, right.mT * scale)


@strategy(
    citation="Gargiulo et al., Task Singular Vectors: Reducing Task Interference (arXiv 2412.00081), TSV-M",
    neutral={"keep": 1.0, "scale": 1.0},
    limits={"keep": BETWEEN_0_AND_1},
)
def tsv(deltas: Sequence[LowRank], weights: Sequence[float], *, keep: float = 1.0, scale: float = 1.0) -> LowRank:
    """Make the singular vectors of different adapters orthogonal to each other, then sum.

    `keep` is the fraction of each adapter's singular directions that takes part; the paper, whose deltas have full
    rank, keeps one in as many as there are tasks.
    """
    lefts, rights, sizes = [], [], []
    for delta, weight in zip(deltas, weights, strict=True):
        part = delta.svd()
        count = max(1, math.ceil(keep * part.s.shape[1]))
        content = (part.s > _TINY * part.s[:, :1])[:, :count]
        lefts.append(part.u[:, :, :count] * content[:, None, :])
        rights.append(part.vh[:, :count] * content[:, :, None])
        sizes.append(part.s[:, :count] * (weight * scale))
    return LowRank(
        _orthogonal(torch.cat(lefts, dim=2)) * torch.cat(sizes, dim=1)[:, None, :],
        _orthogonal(torch.cat(rights, dim=1)),
    )


@strategy(
    citation="Marczak et al., No Task Left Behind: Isotropic Model Merging (arXiv 2502.04959), Iso-C and Iso-CTS",
    neutral={"isotropy": 0.0, "common": 1.0, "scale": 1.0},
    limits={"isotropy": Interval(low=0.0, high=1.0), "common": BETWEEN_0_AND_1},
)
def iso(
    deltas: Sequence[LowRank],
    weights: Sequence[float],
    *,
    isotropy: float = 1.0,
    common: float = 1.0,
    scale: float = 1.0,
) -> LowRank:
    """The weighted sum with its singular values drawn to their mean: no task's direction outweighs another's.

    `common` is the fraction of the sum's directions that stay, the strongest ones; the others give way to the strongest
    directions of each adapter beside them. 1 is the paper's Iso-C, 0.8 its Iso-CTS. `isotropy` 1 is the paper's, 0
    keeps the singular values. The mean is over the directions that the adapters span.
    """
    whole = LowRank.total(deltas, weights).svd()
    size = whole.s.shape[1]
    own = min(size // len(deltas), round((size - int(size * common)) / len(deltas)))
    shared = size - own * len(deltas)
    left = whole.u[:, :, :shared]
    parts = [Decomposition(left, whole.s[:, :shared], whole.vh[:, :shared])]
    for delta, weight in zip(deltas, weights, strict=True) if own else ():
        beside = LowRank(delta.up - left @ (left.mT @ delta.up), delta.down * weight).svd()
        parts.append(Decomposition(beside.u[:, :, :own], beside.s[:, :own], beside.vh[:, :own]))
    sizes = torch.cat([part.s for part in parts], dim=1)
    content = sizes > _TINY * whole.s[:, :1]
    u = torch.cat([part.u for part in parts], dim=2) * content[:, None, :]
    vh = torch.cat([part.vh for part in parts], dim=1) * content[:, :, None]
    if own:
        u, vh = _orthogonal(u), _orthogonal(vh)
    mean = (sizes * content).sum(dim=1, keepdim=True) / content.sum(dim=1, keepdim=True).clamp(min=1)
    return LowRank(u * ((sizes + isotropy * (mean - sizes)) * scale)[:, None, :], vh)


def _common_basis(factors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Left singular vectors of the factors side by side, and each factor's coordinates in them."""
    basis, triangular = torch.linalg.qr(torch.cat(list(factors), dim=2))
    u = torch.linalg.svd(triangular, full_matrices=False).U
    return basis @ u, torch.split(u.mT @ triangular, [factor.shape[2] for factor in factors], dim=2)


def _as_low_rank(core: Tensor) -> LowRank:
    identity = torch.eye(core.shape[2], dtype=core.dtype).expand(core.shape[0], -1, -1)
    return LowRank(core, identity)


def _orthogonal(stacked: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns or rows (Procrustes: the polar factor).

    Where the stacked vectors depend on each other the factor is not unique: the part without content is left out.
    """
    u, s, vh = torch.linalg.svd(stacked, full_matrices=False)
    content = (s > _TINY * s[:, :1])[:, None, :]
    nearest: Tensor = (u * content) @ vh
    return nearest


def _merge_elements(
    parts: Sequence[Tensor],
    weights: Sequence[float],
    method: Literal["ties", "linear"],
    density: float,
    election: Election,
) -> Tensor:
    """The parts (groups, rows, columns) merged element by element, each group for itself."""
    if method == "linear":
        return torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum(dim=0)
    merged = []
    for group in range(parts[0].shape[0]):
        blocks = [Block.of(part[group]) for part in parts]
        merged.append(elected_mean(trimmed(blocks, density), weights, election))
    return torch.stack(merged).to(parts[0].dtype)
