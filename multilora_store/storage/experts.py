"""The flat factors in which PEFT stores an adapter of fused expert parameters, and one pair of factors per expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilora_store.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["flatten", "unflatten"]


def unflatten(down: torch.Tensor, up: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of each expert: (experts, rank, in) and (experts, out, rank), views where they can be.

    Args:
        down: `lora_A`, (experts * rank, in), the expert outermost.
        up: `lora_B`, (out, rank * experts), the expert innermost, as PEFT's ParamWrapper reads it.
        rank: Rank of one expert, as the configuration has it.

    Raises:
        UsageError: the shapes are not those of such a pair.
    """
    experts, rest = divmod(down.shape[0], rank) if rank > 0 and down.ndim == 2 else (0, 1)
    if rest or not experts or up.ndim != 2 or up.shape[1] != down.shape[0]:
        raise UsageError(
            f"factors of shapes {tuple(down.shape)} and {tuple(up.shape)} are not those of experts of rank {rank}",
            why="PEFT stores (experts * rank, in) and (out, rank * experts)",
            remedy="take the rank from the configuration that lies beside the tensors",
        )
    return down.reshape(experts, rank, -1), up.reshape(up.shape[0], rank, experts).permute(2, 0, 1)


def flatten(down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `unflatten`: (experts, rank, in) and (experts, out, rank) as PEFT stores them."""
    experts, rank, columns = down.shape
    rows = up.shape[1]
    return down.reshape(experts * rank, columns), up.permute(1, 2, 0).reshape(rows, rank * experts)
