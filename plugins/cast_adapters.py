"""Steps of the assembly that change how adapters are held: in bfloat16, or rounded to an 8-bit grid.

    multilora-store assemble '+adapters=[a,b]' plugins=[cast_adapters] steps.after_load=cast_to_bfloat16

A step changes the adapters of this assembly alone: not the base, not adapters that were on it before, not the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from multilora_store.assembly.bridge import adapter_parameters
from multilora_store.assembly.steps import Assembly
from multilora_store.plugins import plugin

__all__ = ["cast_to_bfloat16", "round_to_int8"]

_LEVELS = 127


@plugin("assembly_step")
def cast_to_bfloat16(work: Assembly) -> None:
    """Hold every adapter of the set in bfloat16: half the bytes of fp32, to gather and to save."""
    for parameter, new in _changed(work, lambda tensor: tensor.to(torch.bfloat16)):
        parameter.data = new
    work.notes.append("cast_to_bfloat16: adapters are held in bfloat16")


@plugin("assembly_step")
def round_to_int8(work: Assembly) -> None:
    """Round the factors to 255 levels a row, as an 8-bit server will: train or judge what will be served.

    The dtype stays. The largest relative error of a tensor is told in the notes.
    """
    worst = 0.0
    for parameter, new in _changed(work, _rounded):
        size = parameter.norm().item()
        worst = max(worst, (parameter.detach() - new).norm().item() / size if size else 0.0)
        parameter.data = new
    work.notes.append(f"round_to_int8: largest relative error of a tensor {worst:.1e}")


def _changed(
    work: Assembly, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    for adapter in work.adapters:
        for parameter in adapter_parameters(work.peft, adapter.name).values():
            if parameter.is_floating_point() and not parameter.is_meta:
                yield parameter, change(parameter.detach())


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Symmetric rounding, one scale for each row (for the whole of a vector)."""
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    scale = rows.abs().amax(dim=1, keepdim=True).float() / _LEVELS
    steps = torch.where(scale > 0, rows.float() / scale, torch.zeros_like(rows, dtype=torch.float32)).round()
    return (steps * scale).to(tensor.dtype).reshape(tensor.shape)
