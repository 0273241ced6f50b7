"""The ranks that torchrun has started, for a command that shards."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from multilora_store.errors import UsageError

if TYPE_CHECKING:
    from multilora_store.distributed.agreement import Ranks

__all__ = ["first_to_say", "started_ranks", "world_size"]

_HEAD_START: Final = 0.5
"""Seconds by which the first rank is ahead where all fail alike."""


def world_size() -> int:
    """How many ranks torchrun has started; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def first_to_say(words: str) -> bool:
    """Whether no other rank on this machine has said this: of ranks that fail alike one speaks, rank 0 if it is there.

    The ranks of one attempt share a folder of torchrun's, where a file stands for what has been said. Ranks that
    something else has started all speak.
    """
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if own is None:
        return True
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_HEAD_START)
    said = Path(own).parent.parent / f"multilora-{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    try:
        said.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the folder is not there or full: rather twice than never
        return True
    return True


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
