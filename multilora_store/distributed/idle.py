"""An adapter that is trainable but not active receives no gradient, also where FSDP2 makes zeros for it.

Blocks with experts reduce zeros for parameters that were not used, since another rank may have routed to them. The
zeros of an adapter that no rank ran would let an optimizer decay it and move it by its momentum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from peft import PeftModel
from torch import nn

from multilora_store.assembly.bridge import adapter_names, adapter_parameters, innermost, peft_model, record
from multilora_store.distributed.sharded import wrapping_of
from multilora_store.distributed.units import PREFIX, block_of, expert_blocks

__all__ = ["give_idle_no_gradient"]


def give_idle_no_gradient(model: nn.Module) -> None:
    """Watches every adapter's parameters in blocks with experts of a model that `shard` wrapped with fsdp2.

    To be called again when parameters were replaced.
    """
    wrapping = wrapping_of(model)
    if wrapping is None or wrapping.backend != "fsdp2":
        return
    blocks = expert_blocks(innermost(model), wrapping.blocks)
    peft, known = peft_model(model), record(model)
    for name in adapter_names(model) if blocks else ():
        for key, parameter in adapter_parameters(model, name).items():
            inside = block_of(key.removeprefix(PREFIX), blocks)
            if inside and parameter.is_floating_point() and not _watched(parameter):
                flag = parameter.requires_grad
                parameter.requires_grad_(True)  # torch takes hooks for nothing else, and the flag may come later
                hook = _dropping_zeros(peft, known.member(name).inside)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(flag)


def _watched(parameter: nn.Parameter) -> bool:
    return any(getattr(hook, "of_idle", False) for hook in (parameter._post_accumulate_grad_hooks or {}).values())


def _dropping_zeros(peft: PeftModel, inside: str) -> Callable[[torch.Tensor], None]:
    """A hook that drops a gradient which began while the adapter was idle; one that began before is kept."""
    begun: weakref.ref[torch.Tensor] | None = None

    def hook(parameter: torch.Tensor) -> None:
        nonlocal begun
        gradient = parameter.grad
        if gradient is None or (begun is not None and begun() is gradient):
            return
        if inside in peft.active_adapters:
            begun = weakref.ref(gradient)
        else:
            parameter.grad = None

    hook.of_idle = True  # type: ignore[attr-defined]
    return hook
