"""Filling the shards of a model with values that one rank holds whole: read from a file, or built in its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from multilora_store.assembly.bridge import record, walk
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.exchange import (
    Item,
    broadcast_from_owners,
    broadcast_replicas,
    group_of,
    scatter_from_owners,
)
from multilora_store.distributed.layout import layout_of
from multilora_store.distributed.owners import BUDGET, plan_rounds
from multilora_store.distributed.sharded import backend_of, mesh_of
from multilora_store.errors import UnsupportedError, UsageError

__all__ = ["Holding", "fill_from_holder", "find_holding", "give_memory", "readers_of", "scatter"]


def readers_of(mesh: DeviceMesh | None, ranks: Ranks) -> list[int]:
    """Ranks that may read for others: all, under HSDP those of the first replica, from which the others copy."""
    if mesh is not None and mesh.ndim == 2:
        return [int(rank) for rank in mesh.mesh[0].tolist()]
    return list(ranks.members)


def give_memory(model: nn.Module, tensors: Iterable[torch.Tensor]) -> bool:
    """Gives those of `tensors` that are on meta memory for their shards, in place; whether there were any.

    A tensor that several modules share stays shared.
    """
    missing = {id(tensor) for tensor in tensors if tensor.is_meta}
    if not missing:
        return False
    if backend_of(model) == "fsdp1":
        raise UnsupportedError("tensors on the meta device under FSDP1", remedy="use backend='fsdp2'")
    mesh = mesh_of(model)
    device = mesh.device_type if mesh is not None else "cpu"
    made: dict[int, torch.Tensor] = {}
    for _, module in walk(model):
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is None or id(tensor) not in missing:
                    continue
                if id(tensor) not in made:
                    real = torch.zeros_like(tensor.detach(), device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
                held[key] = made[id(tensor)]  # type: ignore[assignment]
    return True


def scatter(
    model: nn.Module, ranks: Ranks, round_: Mapping[int, Sequence[Item]], whole: Mapping[str, torch.Tensor]
) -> None:
    """Writes what the owners hold whole into the shards of every rank, under HSDP of every replica.

    Args:
        round_: Owner (global rank) -> its items, the same on every rank.
        whole: The items that this rank owns, by label.
    """
    me = ranks.members[ranks.rank]
    group, members = group_of(round_, ranks)
    mesh = mesh_of(model)
    with ranks.watch("scattering values"):
        if group is not None:
            replicated = mesh is not None and mesh.ndim == 2
            if mesh is None or not replicated or me in mesh.mesh[0].tolist():
                scatter_from_owners(round_, whole, me, group, members)
            if mesh is not None and replicated:
                cut = [item for owner in sorted(round_) for item in round_[owner] if item.layout.group is not None]
                broadcast_replicas(cut, mesh)
        broadcast_from_owners(round_, whole, me, ranks.group)


@dataclass
class Holding:
    """What one rank holds and others have on meta, found before the wrap.

    Attributes:
        holder: Global rank.
        names: Paths of the tensors.
        whole: On the holder, the tensors themselves; empty elsewhere.
    """

    holder: int
    names: Sequence[str]
    whole: dict[str, torch.Tensor]


def find_holding(model: nn.Module, mesh: DeviceMesh, ranks: Ranks) -> Holding | None:
    """The rank whose model has the values that are missing (on meta) on another; None if nobody lacks what one has.

    Args:
        model: Not wrapped yet; of the same structure on every rank.
        mesh: The one that it will be wrapped on; `readers_of` it can serve the others.
        ranks: All that hold it.

    Raises:
        UsageError: one rank has some of the values, another the rest.
    """
    tensors = dict(_tensors(model))
    missing = ranks.share("tensors on meta", [name for name, tensor in tensors.items() if tensor.is_meta])
    somewhere = {name for names in missing for name in names} - set(missing[0]).intersection(*missing[1:])
    if not somewhere:
        return None
    readers = readers_of(mesh, ranks)
    lacking = {rank: somewhere.intersection(names) for rank, names in zip(ranks.members, missing, strict=True)}
    holder = next((rank for rank in readers if not lacking[rank]), None)
    if holder is None:
        rank, names = min(((rank, lacking[rank]) for rank in readers), key=lambda each: len(each[1]))
        raise UsageError(
            f"no rank has all of the values that others have on the meta device: rank {rank} lacks {min(names)}",
            why=f"{len(names)} tensors are missing there",
            remedy="build the whole model on one rank, and its structure on the others (device='meta')",
            lacking={rank: sorted(names) for rank, names in lacking.items()},
        )
    here = holder == ranks.members[ranks.rank]
    chosen = [name for name in tensors if name in somewhere]
    return Holding(holder, chosen, {name: tensors[name].detach() for name in chosen} if here else {})


def fill_from_holder(model: nn.Module, ranks: Ranks, held: Holding, budget: int = BUDGET) -> None:
    """After the wrap: gives every rank its shards of what the holder has, and the holder's word on what base it is.

    The holder's own copies are let go as they are sent; no other rank holds more than its shards and a budget.
    """
    wanted = set(held.names)
    give_memory(model, [tensor for name, tensor in _tensors(model) if name in wanted])
    tensors = dict(_tensors(model))
    items = {name: Item(name, layout_of(name, tensors[name]), tensors[name]) for name in held.names}
    sizes = {name: item.layout.nbytes for name, item in items.items()}
    for round_ in plan_rounds(dict.fromkeys(held.names, held.holder), sizes, budget):
        names = round_[held.holder]
        scatter(model, ranks, {held.holder: [items[name] for name in names]}, held.whole)
        for name in names:
            held.whole.pop(name, None)
    told: Any = ranks.share("base", record(model).base)
    record(model).base = told[ranks.members.index(held.holder)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer once, by its path as if nothing were wrapped."""
    seen: set[int] = set()
    for path, module in walk(model):
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{key}" if path else key, tensor
