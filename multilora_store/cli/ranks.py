"""The ranks that torchrun has started, for a command that shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from multilora_store.errors import UsageError

if TYPE_CHECKING:
    from multilora_store.distributed.agreement import Ranks

__all__ = ["started_ranks", "world_size"]


def world_size() -> int:
    """How many ranks torchrun has started; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


@contextmanager
def started_ranks(*, sharded: bool, device: str | None) -> Iterator[tuple[Ranks, str]]:
    """The ranks of this command and the device of this one; their process group is closed in the end.

    A single process that shards becomes a group of one.

    Raises:
        UsageError: a device that torch does not know, or a CUDA device that it cannot see.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from multilora_store.distributed.agreement import world

    chosen = device or ("cuda" if sharded and torch.cuda.is_available() else "cpu")
    try:
        torch.device(chosen)
    except RuntimeError as error:
        raise UsageError(f"unknown device {chosen!r}", remedy="e.g. cpu, cuda, cuda:1, meta") from error
    on_cuda = chosen.startswith("cuda")
    if on_cuda and not torch.cuda.is_available():
        raise UsageError(f"device={chosen}: this torch sees no CUDA device", remedy="device=cpu")
    if on_cuda and world_size() > 1:
        chosen = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if on_cuda:
        torch.cuda.set_device(chosen)
    mine = not dist.is_initialized() and (world_size() > 1 or sharded)
    if mine:
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        if world_size() > 1:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield world(), chosen
    finally:
        if mine:
            dist.destroy_process_group()
