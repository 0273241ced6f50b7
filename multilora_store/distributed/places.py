"""Where each module of a base hangs, seen through wrappers: what a wrap replaces or takes as a unit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from multilora_store.assembly.bridge import unwrap

__all__ = ["Place", "places"]


@dataclass(frozen=True)
class Place:
    """One module.

    Args:
        parent: The module it hangs on.
        name: Under which name.
        module: The module as it hangs there, with its wrappers.
    """

    parent: nn.Module
    name: str
    module: nn.Module

    @property
    def compiled(self) -> bool:
        """Whether torch.compile wraps the module, or replaces its call."""
        module: nn.Module | None = self.module
        while module is not None:
            if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
                return True
            module = next((m for n, m in module._modules.items() if n == "_checkpoint_wrapped_module"), None)
        return False


def places(base: nn.Module) -> dict[str, Place]:
    """Path from `base`, free of wrappers -> where that module hangs; the base itself is left out."""
    found: dict[str, Place] = {}

    def descend(path: str, parent: nn.Module) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            below = f"{path}.{name}" if path else name
            found[below] = Place(parent, name, child)
            descend(below, unwrap(child))

    descend("", unwrap(base))
    return found
