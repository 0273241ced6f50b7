"""Seeing through whatever wraps a model: DDP, FSDP1, FSDP2, torch.compile, activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftModel
from torch import nn

from multilora_store.errors import UsageError

__all__ = ["innermost", "peft_model", "unwrap", "walk"]

# The child under which each kind of wrapper keeps the module that it wraps; no other module uses these names.
_WRAPPED_CHILDREN = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def unwrap(module: nn.Module) -> nn.Module:
    """The module under any number of wrappers; `module` itself where there is none."""
    while True:
        children = module._modules
        inside = next((children[name] for name in _WRAPPED_CHILDREN if name in children), None)
        if inside is None and isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inside = module.module
        if inside is None:
            return module
        module = inside


def walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every unwrapped module below and including `module`, once, with its path as if nothing were wrapped.

    A segment is left out because the module above it is a wrapper, never because of how it is spelled: a base with a
    child called `module` keeps it.
    """
    seen: set[int] = set()

    def descend(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = unwrap(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from descend(f"{path}.{name}" if path else name, child)

    yield from descend("", module)


def peft_model(model: nn.Module) -> PeftModel:
    """The PeftModel that `model` is or wraps.

    Raises:
        UsageError: there is none.
    """
    found = unwrap(model)
    if isinstance(found, PeftModel):
        return found
    for _, child in walk(found):
        if isinstance(child, PeftModel):
            return child
    raise UsageError(
        f"this {type(found).__name__} carries no adapters: it neither is nor wraps a PeftModel",
        remedy="pass what assemble() returned, or a wrapper around it, not the base inside",
    )


def innermost(model: nn.Module) -> nn.Module:
    """The base inside the PeftModel, with adapters in place and without wrappers: `peft.base_model.model`."""
    return unwrap(peft_model(model).base_model.model)
