"""What the wrap is done with: every value checked before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from multilora_store.errors import UnsupportedError, UsageError, choices

__all__ = ["BACKENDS", "GRANULARITIES", "Options"]

BACKENDS: Final = ("fsdp2", "fsdp1")
GRANULARITIES: Final = ("adapter", "layer", "auto")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the wrap is done with, beside the mesh.

    Args:
        backend: `fsdp2` or `fsdp1`.
        granularity: `adapter`, `layer`, or `auto`.
        blocks: Class names of the repeated blocks, None to find them.
        mp_policy: Mixed precision of the base; adapters keep their own dtype.
        reshard_after_forward: As in `fully_shard`; None is True for all but the root.
        offload_policy: As in `fully_shard`.
    """

    backend: str = "fsdp2"
    granularity: str = "adapter"
    blocks: tuple[str, ...] | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    offload_policy: OffloadPolicy | None = None

    def __post_init__(self) -> None:
        for noun, given, valid in (
            ("backend", self.backend, BACKENDS),
            ("granularity", self.granularity, GRANULARITIES),
        ):
            if given not in valid:
                raise UsageError(f"{noun} {given!r} is not known", remedy=choices(str(given), valid, noun=noun))
        whole = self.reshard_after_forward is None or isinstance(self.reshard_after_forward, bool)
        if self.backend == "fsdp1" and (not whole or self.offload_policy is not None):
            raise UnsupportedError(
                "offload_policy and a group size for reshard_after_forward need backend='fsdp2'",
                remedy="use backend='fsdp2', or leave them out",
            )
        if isinstance(self.offload_policy, CPUOffloadPolicy) and not torch.accelerator.is_available():
            raise UnsupportedError(
                "CPU offload needs an accelerator, this torch sees none",
                remedy="leave offload_policy out: the shards are in host memory anyway",
            )
