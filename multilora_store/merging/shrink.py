"""Shrinking an adapter to a rank: the nearest one of that rank, with what was lost told."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import UsageError
from multilora_store.merging.adapters import Merged, merge_adapters
from multilora_store.merging.source import MergeSource

__all__ = ["shrink_to_rank"]


def shrink_to_rank(
    config: AdapterConfig | Mapping[str, object],
    tensors: Mapping[str, Tensor],
    rank: int | None,
    *,
    name: str = "the adapter",
    threads: int | None = None,
) -> Merged:
    """The best approximation of every module's delta at `rank` (Eckart-Young), all scales put into the factors.

    Modules of that rank or less are not truncated. Tensors trained in full stay as they are.

    Args:
        config: The adapter's configuration.
        tensors: Its tensors by canonical name.
        rank: The highest rank of the result; None: only put the scales into the factors.
        name: What messages call it.
        threads: Modules at a time; None for torch's number of threads.

    Returns:
        The adapter with lora_alpha equal to r in every module, and a report: `report.error` is
        `|shrunk - adapter| / |adapter|` over all modules, `report.worst` the module that lost most.

    Raises:
        UsageError: the rank is below 1.
        MergeError: an adapter that has no plain deltas (DoRA, trained tokens), or values that are not finite.
    """
    if rank is not None and rank < 1:
        raise UsageError(f"rank {rank} is no rank", remedy="give a whole number of at least 1")
    source = MergeSource.in_memory(name, config, tensors)
    if rank is not None:  # a merge refuses to be asked for more than there is
        rank = min([rank, max((min(pair.rank, *pair.shape) for pair in source.layout.pairs.values()), default=rank)])
    return merge_adapters([source], [1.0], strategy="linear", rank=rank, modules_to_save="first", threads=threads)
