"""The optimizer's state of each adapter, keyed by the names of its tensors: taken out, and put back.

Any optimizer whose state is tensors of the parameter's own shape and scalars (AdamW, Adam, SGD with momentum, ...)
can be stored; one that packs its state otherwise (8-bit) is refused in words, not stored wrongly.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.exchange import Item
from multilora_store.distributed.layout import AdapterLayout, TensorLayout
from multilora_store.errors import DamagedError, DisagreementError, UnsupportedError, UsageError

__all__ = ["OptimizerPart", "collect", "decode", "encode", "groups_of", "read_options", "restore_part", "slots"]

logger = logging.getLogger(__name__)

METADATA_KEY: Final = "multilora_store"
# How a step is computed on this machine, not what is learned: never taken from a snapshot.
_MECHANICS: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass
class OptimizerPart:
    """One adapter's share of an optimizer.

    Args:
        kind: The optimizer's class name.
        tensors: (tensor name, state key) -> dtype, for state of the tensor's own shape.
        scalars: (tensor name, state key) -> number, with the dtype of the 0-d tensor it is, "" for a plain number.
        options: Tensor name -> options of its parameter group.
    """

    kind: str
    tensors: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    scalars: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The parameter group of each parameter, by its `id`.

    Raises:
        UsageError: it is no optimizer.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise UsageError(
            f"the optimizer is {optimizer!r:.80}, of type {type(optimizer).__name__}",
            remedy="give a torch.optim.Optimizer",
        )
    return {id(parameter): group for group in groups for parameter in group["params"]}


def collect(
    optimizer: torch.optim.Optimizer, held: Mapping[str, AdapterLayout], ranks: Ranks
) -> dict[str, OptimizerPart]:
    """What every adapter has in the optimizer, all ranks together; the same on every rank.

    Raises:
        UnsupportedError: the optimizer keeps state of another shape.
        DisagreementError: ranks have different state for one tensor.
    """
    local = ranks.together("optimizer state", lambda: {n: _local(optimizer, a) for n, a in held.items()})
    found: dict[str, OptimizerPart] = {}
    for name in held:
        merged = OptimizerPart(type(optimizer).__name__)
        found[name] = merged
    for theirs in ranks.share("optimizer state", local):
        for name, part in theirs.items():
            merged = found[name]
            for slot, scalar in part.scalars.items():
                if merged.scalars.setdefault(slot, scalar) != scalar:
                    raise DisagreementError(
                        f"ranks disagree on the optimizer's {slot[1]} of {slot[0]}: {merged.scalars[slot][0]} "
                        f"and {scalar[0]}",
                        remedy="step the optimizer equally often on every rank",
                    )
            merged.tensors.update(part.tensors)
            merged.options.update(part.options)
    return found


def _local(optimizer: torch.optim.Optimizer, adapter: AdapterLayout) -> OptimizerPart:
    part = OptimizerPart(type(optimizer).__name__)
    groups = groups_of(optimizer)
    for key, tensor in adapter.tensors.items():
        if id(tensor) not in groups:
            continue
        part.options[key] = read_options(groups[id(tensor)])
        for slot, value in optimizer.state.get(tensor, {}).items():
            _sort(part, optimizer, adapter.layouts[key], slot, value)
    return part


def _sort(part: OptimizerPart, optimizer: torch.optim.Optimizer, layout: TensorLayout, slot: str, value: Any) -> None:
    place = (layout.name, slot)
    if value is None:
        return
    if isinstance(value, (bool, int, float)):
        part.scalars[place] = (value, "")
        return
    if isinstance(value, torch.Tensor) and value.ndim == 0 and len(layout.shape) > 0:
        part.scalars[place] = (value.item(), str(value.dtype).removeprefix("torch."))
        return
    local = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(local, torch.Tensor) or local.numel() != layout.piece_numel(layout.place):
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedError(
            f"{type(optimizer).__name__} keeps {slot!r} as {shape} for {layout.name} of {layout.shape}",
            why="only state of the tensor's own shape, and single numbers, can be stored and sharded again",
            remedy="save without optimizer=, or use an optimizer with plain state (AdamW, Adam, SGD)",
        )
    part.tensors[place] = local.dtype


def read_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that are plain numbers, flags or lists of them."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
        if key not in _MECHANICS and (plain is None or isinstance(plain, (bool, int, float, str, list, tuple))):
            found[key] = list(plain) if isinstance(plain, tuple) else plain
    return found


def slots(
    part: OptimizerPart, adapter: AdapterLayout, optimizer: torch.optim.Optimizer, *, create: bool = False
) -> Iterator[Item]:
    """The state tensors as items to move; with `create`, made anew on this rank, for values that will come."""
    for (key, slot), dtype in sorted(part.tensors.items()):
        parameter = adapter.tensors[key]
        state = optimizer.state[parameter] if create else optimizer.state.get(parameter, {})
        if create:
            state[slot] = torch.zeros_like(parameter.detach(), dtype=dtype)
        layout = adapter.layouts[key]
        moved = TensorLayout(
            key, layout.shape, dtype, layout.dim, layout.bounds, layout.members, layout.group, layout.place
        )
        yield Item(f"{key}.{slot}", moved, state.get(slot))


def encode(part: OptimizerPart, whole: Mapping[str, torch.Tensor]) -> bytes:
    """The file of one adapter's optimizer state: safetensors, with one metadata key."""
    from safetensors.torch import save

    told = {
        "kind": part.kind,
        "slots": [[key, slot] for key, slot in sorted(part.tensors)],
        "scalars": [[key, slot, *value] for (key, slot), value in sorted(part.scalars.items())],
        "options": part.options,
    }
    return bytes(save(dict(whole), metadata={METADATA_KEY: json.dumps(told, sort_keys=True)}))


def decode(data: bytes, where: str) -> tuple[OptimizerPart, dict[str, torch.Tensor]]:
    """The inverse of `encode`.

    Raises:
        DamagedError: the file is not one of ours.
    """
    from safetensors.torch import load

    try:
        size = int.from_bytes(data[:8], "little")
        told = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][METADATA_KEY])
        whole = load(data)
        part = OptimizerPart(
            kind=told["kind"],
            tensors={(key, slot): whole[f"{key}.{slot}"].dtype for key, slot in told["slots"]},
            scalars={(key, slot): (value, dtype) for key, slot, value, dtype in told["scalars"]},
            options=dict(told["options"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{where} is not a file of optimizer state", why=str(error)) from error
    return part, whole


def restore_part(part: OptimizerPart, adapter: AdapterLayout, optimizer: torch.optim.Optimizer) -> None:
    """Puts scalars and options back, and empties the state of tensors that had none; tensors were scattered.

    Raises:
        UsageError: the state is another optimizer's.
    """
    trained = {key for key, _ in (*part.tensors, *part.scalars)}
    groups = groups_of(optimizer)
    for key, tensor in adapter.tensors.items():
        if key not in trained:
            optimizer.state.pop(tensor, None)
    for (key, slot), (value, dtype) in part.scalars.items():
        parameter = adapter.tensors[key]
        group = groups.get(id(parameter), {})
        if dtype:
            here = parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
            optimizer.state[parameter][slot] = torch.tensor(value, dtype=getattr(torch, dtype), device=here)
        else:
            optimizer.state[parameter][slot] = value
    _restore_options(part, adapter, groups)


def _restore_options(part: OptimizerPart, adapter: AdapterLayout, groups: Mapping[int, dict[str, Any]]) -> None:
    wanted: dict[int, list[dict[str, Any]]] = {}
    by_id: dict[int, dict[str, Any]] = {}
    for key, options in part.options.items():
        group = groups.get(id(adapter.tensors[key]))
        if group is not None:
            by_id[id(group)] = group
            wanted.setdefault(id(group), []).append(options)
    for group_id, found in wanted.items():
        if any(options != found[0] for options in found):
            logger.warning("adapter %s: its tensors had several groups; their options are kept as live", adapter.name)
            continue
        for option, value in found[0].items():
            live = by_id[group_id].get(option)
            by_id[group_id][option] = tuple(value) if isinstance(live, tuple) else value


def check_kind(part: OptimizerPart, optimizer: torch.optim.Optimizer, adapter: str) -> None:
    """The state was made by an optimizer of this class.

    Raises:
        UsageError: it was not.
    """
    if part.kind != type(optimizer).__name__:
        raise UsageError(
            f"the snapshot has {part.kind} state for adapter {adapter}, this is {type(optimizer).__name__}",
            remedy=f"give restore() a {part.kind}, or no optimizer",
        )


def in_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names among `parameters` that are in a group of the optimizer."""
    known = groups_of(optimizer)
    return [key for key, p in parameters.items() if id(p) in known]
