"""An audit check: adapters that do nothing, or far more than the others.

    multilora-store doctor '+adapters=[a,b]' base=hf base.path=/models/llama plugins=[effect_check]

An adapter whose B is zero everywhere was never trained, or was saved before its values came back from the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from torch import nn

from multilora_store.assembly.bridge import adapter_names, adapter_parameters
from multilora_store.plugins import plugin

__all__ = ["effect_check"]


@plugin("audit_check")
def effect_check(model: nn.Module, *, factor: float = 100.0) -> Iterator[str]:
    """Finds adapters without any effect, and those whose factors are `factor` times as large as the median's.

    Args:
        model: An assembled model, not sharded.
        factor: How many times the median norm is too much.
    """
    sizes: dict[str, float] = {}
    for name in adapter_names(model):
        ups = [value for key, value in adapter_parameters(model, name).items() if "lora_B" in key and not value.is_meta]
        if not ups:
            continue
        sizes[name] = sum(float(value.detach().float().norm()) ** 2 for value in ups) ** 0.5
        dead = sum(1 for value in ups if not value.detach().any())
        if dead == len(ups):
            yield f"adapter {name}: every lora_B is zero, so it has no effect"
        elif dead:
            yield f"adapter {name}: {dead} of {len(ups)} lora_B are zero: part of it was not trained, or not gathered"
    usual = median(sizes.values()) if sizes else 0.0
    for name, size in sizes.items():
        if usual and size > factor * usual:
            yield f"adapter {name}: its lora_B are {size / usual:.0f} times as large as the set's median"
