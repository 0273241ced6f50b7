"""What wraps a model, told from the model itself, and the way back to its resting state between two forwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from multilora_store.assembly.bridge import peft_model
from multilora_store.distributed.agreement import Ranks, ranks_of_mesh, shut_down, world
from multilora_store.distributed.internals import fsdp1_reshard
from multilora_store.distributed.units import Unit
from multilora_store.errors import UsageError

__all__ = ["Wrapping", "backend_of", "mesh_of", "ranks_of", "remember", "reshard", "units_of", "wrapping_of"]


@dataclass
class Wrapping:
    """How `shard` wrapped a model, for the calls that come later.

    Args:
        backend: `fsdp2` or `fsdp1`.
        granularity: `adapter` or `layer`, as chosen.
        reason: Why, where `auto` chose.
        mesh: The device mesh.
        blocks: Path from the innermost model -> class name of each repeated block.
        units: The adapter units, in the order of wrapping.
        trainable: Names that could receive gradients when the wrap was done or at the last change through us.
        options: Keyword arguments that a unit attached later is wrapped with.
    """

    backend: str
    granularity: str
    reason: str
    mesh: DeviceMesh
    blocks: dict[str, str]
    units: list[Unit]
    trainable: frozenset[str]
    options: dict[str, Any] = field(default_factory=dict)


_wrappings: WeakKeyDictionary[nn.Module, Wrapping] = WeakKeyDictionary()


def remember(model: nn.Module, wrapping: Wrapping) -> None:
    """Keeps `wrapping` for as long as the model lives."""
    _wrappings[peft_model(model)] = wrapping


def wrapping_of(model: nn.Module) -> Wrapping | None:
    """How `shard` wrapped this model, None if it did not."""
    return _wrappings.get(peft_model(model))


def units_of(model: nn.Module) -> Iterator[nn.Module]:
    """The first module of every FSDP unit in the model, of either kind, outermost first."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            unit = id(module._get_fsdp_state()) if isinstance(module, FSDPModule) else id(module)
            if unit not in seen:
                seen.add(unit)
                yield module


def backend_of(model: nn.Module) -> str:
    """`fsdp2`, `fsdp1`, `ddp` or `plain`, by what is there, whoever wrapped it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            return "fsdp2"
        if isinstance(module, FullyShardedDataParallel):
            return "fsdp1"
    return "ddp" if any(isinstance(module, DistributedDataParallel) for module in model.modules()) else "plain"


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh that the model's DTensors lie on; None where there are none."""
    wrapping = wrapping_of(model)
    if wrapping is not None:
        return wrapping.mesh
    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks that hold this model: those of its mesh, else all of the job.

    Raises:
        UsageError: it is no model, or torch.distributed was shut down since it was sharded.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {model!r:.80}, of type {type(model).__name__}", remedy="give what assemble() returned"
        )
    mesh = mesh_of(model) if dist.is_available() else None
    if mesh is None:
        return world()
    if not dist.is_initialized():
        raise shut_down()
    try:
        mesh.get_all_groups()
    except (RuntimeError, ValueError, LookupError) as error:  # torch has another word for it in each version
        raise shut_down() from error
    return ranks_of_mesh(mesh)


def reshard(model: nn.Module) -> None:
    """Puts every unit back to its shards, so that the parameters seen are the ones that last.

    After a forward without gradients the root unit, and every unit that keeps its parameters, holds temporary plain
    parameters; flags, values and optimizers that touch those are lost at the next reshard.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            fsdp1_reshard(module)
