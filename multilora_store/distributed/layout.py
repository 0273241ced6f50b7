"""Where one tensor of an adapter lies: its global shape, and the piece of it that each rank holds.

One description for DTensors of FSDP2 (any dimension, HSDP too), for original parameters inside FSDP1's flat ones,
and for whole tensors on plain and DDP models. Save and restore know nothing else of any wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly.bridge import (
    active_adapters,
    adapter_buffers,
    adapter_config,
    adapter_names,
    adapter_parameters,
    trainable_adapters,
)
from multilora_store.distributed.internals import FlatPiece, flat_pieces
from multilora_store.errors import UnsupportedError

__all__ = ["AdapterLayout", "TensorLayout", "describe_set", "layout_of", "layouts"]


@dataclass(frozen=True)
class TensorLayout:
    """The pieces of one tensor over the ranks of its shard group.

    Args:
        name: Canonical name.
        shape: Global shape.
        dtype: Its dtype.
        dim: Dimension that is cut, or None: the tensor is cut as one flat row of elements.
        bounds: For each member of the group, (first, length) along that cut.
        members: Global ranks of the group, in the group's order; empty where every rank holds the whole.
        group: The process group that moves the pieces, None where every rank holds the whole.
        place: This rank's place in the group.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    bounds: tuple[tuple[int, int], ...]
    members: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None
    place: int = 0

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def piece_numel(self, place: int) -> int:
        """Elements that member `place` holds."""
        length = self.bounds[place][1]
        return length if self.dim is None else self.numel // max(self.shape[self.dim], 1) * length

    def piece_nbytes(self, place: int) -> int:
        """Bytes that member `place` holds."""
        return self.piece_numel(place) * self.dtype.itemsize

    def view(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """The part of the contiguous `whole` that member `place` holds, as a view."""
        first, length = self.bounds[place]
        if self.dim is None:
            return whole.view(-1)[first : first + length]
        return whole.narrow(self.dim, first, length)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the live `tensor`, without gradient history, sharing memory where it can."""
        piece = tensor.detach()
        if isinstance(piece, DTensor):
            piece = piece.to_local()
        if piece.numel() != self.piece_numel(self.place):
            raise UnsupportedError(
                f"{self.name}: this rank holds {piece.numel()} elements, its layout says "
                f"{self.piece_numel(self.place)}",
                remedy="reshard the model first; an uneven custom placement is not supported",
                name=self.name,
            )
        return piece

    def write(self, tensor: torch.Tensor, piece: torch.Tensor) -> None:
        """Copies this rank's `piece` (any shape of the right size) into the live `tensor`."""
        with torch.no_grad():
            target = self.local(tensor)
            target.copy_(piece.view(target.shape))


@dataclass(frozen=True)
class AdapterLayout:
    """One adapter on this model: its live tensors and where each lies."""

    name: str
    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]
    layouts: Mapping[str, TensorLayout]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole adapter."""
        return sum(layout.nbytes for layout in self.layouts.values())

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group over which its tensors are cut, None for one that lies whole on every rank."""
        return next((layout.group for layout in self.layouts.values() if layout.group is not None), None)


def layouts(model: nn.Module, names: tuple[str, ...] | None = None) -> dict[str, AdapterLayout]:
    """The layout of every adapter, or of those in `names`, of a model whose units are resharded."""
    flat = {id(parameter): piece for parameter, piece in flat_pieces(model)}
    found: dict[str, AdapterLayout] = {}
    for name in adapter_names(model) if names is None else names:
        tensors: dict[str, torch.Tensor] = {**adapter_parameters(model, name), **adapter_buffers(model, name)}
        found[name] = AdapterLayout(
            name,
            adapter_config(model, name),
            tensors,
            {key: layout_of(key, tensor, flat.get(id(tensor))) for key, tensor in tensors.items()},
        )
    return found


def layout_of(name: str, tensor: torch.Tensor, piece: FlatPiece | None = None) -> TensorLayout:
    """Where the pieces of one tensor lie: cut by FSDP1 (`piece`), by FSDP2 (a DTensor), or whole on every rank."""
    if piece is not None:
        members = tuple(dist.get_process_group_ranks(piece.group))
        bounds = tuple(piece.bounds(rank) for rank in range(len(members)))
        place = dist.get_rank(piece.group)
        return TensorLayout(name, piece.shape, tensor.dtype, None, bounds, members, piece.group, place)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        cut = [index for index, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
        if cut:
            return _of_dtensor(name, tensor, cut)
    return TensorLayout(name, shape, tensor.dtype, None, ((0, tensor.numel()),))


def _of_dtensor(name: str, tensor: DTensor, cut: list[int]) -> TensorLayout:
    placement = tensor.placements[cut[0]]
    if len(cut) > 1 or type(placement) is not Shard:
        raise UnsupportedError(
            f"{name} is placed as {tensor.placements}",
            why="an adapter's tensor may be cut along one mesh dimension and replicated along the others",
            remedy="keep adapters out of tensor and pipeline parallel plans",
            name=name,
        )
    mesh = tensor.device_mesh
    group = mesh.get_group(cut[0])
    members = tuple(dist.get_process_group_ranks(group))
    size = tensor.shape[placement.dim]
    chunk = -(-size // len(members))
    bounds = tuple((min(i * chunk, size), max(min(chunk, size - i * chunk), 0)) for i in range(len(members)))
    return TensorLayout(
        name,
        tuple(tensor.shape),
        tensor.dtype,
        placement.dim,
        bounds,
        members,
        group,
        mesh.get_local_rank(cut[0]),
    )


def describe_set(model: nn.Module, found: Mapping[str, AdapterLayout]) -> dict[str, object]:
    """What ranks must agree on about a set: names in order, configs, shapes, dtypes, active and trainable."""
    trainable = trainable_adapters(model)
    return {
        "names": list(found),
        "active": active_adapters(model),
        "adapters": {
            name: {
                "config": layout.config.canonical(),
                "trainable": name in trainable,
                "tensors": {key: [str(t.dtype), list(t.shape)] for key, t in layout.layouts.items()},
            }
            for name, layout in found.items()
        },
    }
