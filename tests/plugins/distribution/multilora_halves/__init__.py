"""Plugins of another distribution: found by their entry points, imported when they are chosen.

The entry point `merge_strategy.gone` leads nowhere on purpose: the others must work beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from multilora_store.merging import strategy
from multilora_store.merging.lowrank import LowRank

__all__ = ["halves", "named_by_ten"]


@strategy(citation="the weighted sum, scaled", default_rank="sum", neutral={"share": 1.0})
def halves(deltas: Sequence[LowRank], weights: Sequence[float], *, share: float = 0.5) -> LowRank:
    """A share of the weighted sum of the deltas, exactly."""
    return LowRank.total(deltas, [share * weight for weight in weights])


def named_by_ten(model: Any) -> Iterator[str]:
    """Finds adapters whose names are longer than ten letters."""
    from multilora_store.assembly.bridge import adapter_names

    yield from (f"adapter {name}: a long name" for name in adapter_names(model) if len(name) > 10)
