"""Moving the pieces of whole tensors to their owners and back: exact bytes, one collective a round.

Inside each shard group, `all_to_all_single` with split sizes serves every owner of that group at once. Under HSDP
each replica's group serves the owners that are in it, so nothing travels between replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.layout import TensorLayout

__all__ = ["Item", "broadcast_from_owners", "broadcast_replicas", "gather_to_owners", "group_of", "scatter_from_owners"]


@dataclass(frozen=True)
class Item:
    """One tensor on its way: a label for the owner, where it lies, and this rank's live tensor.

    `tensor` may be None on a rank whose piece is empty.
    """

    label: str
    layout: TensorLayout
    tensor: torch.Tensor | None


def gather_to_owners(
    round_: Mapping[int, Sequence[Item]], me: int, group: dist.ProcessGroup | None, members: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The whole tensors, on the host, of the items that this rank owns.

    Args:
        round_: Owner (global rank) -> items; the same on every rank of the group, owners outside it are skipped.
        me: This rank.
        group: The shard group; None where every rank holds everything whole.
        members: Global ranks of the group, in its order.
    """
    if group is None:
        return {item.label: _host(item.layout.local(_live(item))).clone() for item in round_.get(me, ())}
    place = members.index(me)
    outgoing = [[_bytes_of(item) for item in _cut(round_, owner)] for owner in members]
    mine = list(_cut(round_, me))
    incoming = [sum(item.layout.piece_nbytes(source) for item in mine) for source in range(len(members))]
    device = _device(round_, group)
    received = _exchange([_packed(pieces, device) for pieces in outgoing], incoming, group, device).cpu()
    whole: dict[str, torch.Tensor] = {}
    for item in round_.get(me, ()):
        layout = item.layout
        if layout.group is None:
            whole[item.label] = _host(layout.local(_live(item))).clone()
        else:
            whole[item.label] = torch.empty(layout.shape, dtype=layout.dtype)
    for source, item, piece in _walk(received, mine, len(members)):
        view = item.layout.view(whole[item.label], source)
        view.copy_(piece.view(view.shape))
    assert place < len(members)
    return whole


def scatter_from_owners(
    round_: Mapping[int, Sequence[Item]],
    whole: Mapping[str, torch.Tensor],
    me: int,
    group: dist.ProcessGroup,
    members: Sequence[int],
) -> None:
    """Writes into every rank's live tensors its pieces of what the owners hold whole; the inverse of gathering.

    Args:
        whole: The items that this rank owns, by label, on the host, of the layout's shape and dtype.
    """
    device = _device(round_, group)
    mine = list(_cut(round_, me))
    outgoing = [
        _packed([_raw(item.layout.view(whole[item.label], target)) for item in mine], device)
        for target in range(len(members))
    ]
    place = members.index(me)
    theirs = {owner: list(_cut(round_, owner)) for owner in members}
    incoming = [sum(item.layout.piece_nbytes(place) for item in theirs[owner]) for owner in members]
    received = _exchange(outgoing, incoming, group, device)
    offset = 0
    for owner in members:
        for item in theirs[owner]:
            size = item.layout.piece_nbytes(place)
            if size:
                piece = received[offset : offset + size].clone().view(item.layout.dtype)
                item.layout.write(_live(item), piece)
            offset += size


def broadcast_from_owners(
    round_: Mapping[int, Sequence[Item]],
    whole: Mapping[str, torch.Tensor],
    me: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Writes on every rank what every rank holds whole, from its owner; on the host, one collective an owner.

    Args:
        group: A gloo group of all ranks, None for a single process.
    """
    for owner in sorted(round_):
        items = [item for item in round_[owner] if item.layout.group is None]
        if not items:
            continue
        size = sum(item.layout.nbytes for item in items)
        sent = torch.empty(size, dtype=torch.uint8)
        if owner == me:
            torch.cat([_raw(whole[item.label]) for item in items], out=sent)
        if group is not None:
            dist.broadcast(sent, src=owner, group=group)
        offset = 0
        for item in items:
            piece = sent[offset : offset + item.layout.nbytes].clone().view(item.layout.dtype)
            item.layout.write(_live(item), piece)
            offset += item.layout.nbytes


def broadcast_replicas(items: Sequence[Item], mesh: DeviceMesh) -> None:
    """Under HSDP: the first replica's pieces, written by all others; one collective for all of the items."""
    group = mesh.get_group(0)
    pieces = [_raw(item.layout.local(_live(item))) for item in items if item.layout.piece_numel(item.layout.place)]
    if not pieces:
        return
    sent = torch.cat(pieces)
    dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group)
    offset = 0
    for item in items:
        size = item.layout.piece_nbytes(item.layout.place)
        if size:
            item.layout.write(_live(item), sent[offset : offset + size].clone().view(item.layout.dtype))
        offset += size


def _cut(round_: Mapping[int, Sequence[Item]], owner: int) -> Iterator[Item]:
    """The owner's items that are cut between ranks; what every rank holds whole does not travel."""
    return (item for item in round_.get(owner, ()) if item.layout.group is not None)


def _walk(received: torch.Tensor, items: Sequence[Item], members: int) -> Iterator[tuple[int, Item, torch.Tensor]]:
    offset = 0
    for source in range(members):
        for item in items:
            size = item.layout.piece_nbytes(source)
            if size:
                yield source, item, received[offset : offset + size].clone().view(item.layout.dtype)
            offset += size


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    sent = torch.cat(list(outgoing))
    received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=list(incoming),
        input_split_sizes=[part.numel() for part in outgoing],
        group=group,
    )
    return received


def _packed(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not pieces:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([piece.to(device) for piece in pieces])


def _bytes_of(item: Item) -> torch.Tensor:
    if item.tensor is None:
        return torch.empty(0, dtype=torch.uint8)
    return _raw(item.layout.local(item.tensor))


def _raw(piece: torch.Tensor) -> torch.Tensor:
    return piece.detach().contiguous().view(-1).view(torch.uint8)


def _live(item: Item) -> torch.Tensor:
    assert item.tensor is not None, f"{item.label} is not on this rank"
    return item.tensor


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _device(round_: Mapping[int, Sequence[Item]], group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    tensor = next(item.tensor for items in round_.values() for item in items if item.tensor is not None)
    return tensor.device


def group_of(items: Mapping[int, Sequence[Item]], ranks: Ranks) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    """The shard group of the items and its members; without a group, all ranks."""
    for each in items.values():
        for item in each:
            if item.layout.group is not None:
                return item.layout.group, item.layout.members
    return None, ranks.members
