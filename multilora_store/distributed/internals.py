"""The private parts of torch's FSDP that no public call replaces, each in one function, each probed by name.

Tried with torch 2.13. `require` says in words what is missing on another version, before anything is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from multilora_store.errors import UnsupportedError

__all__ = [
    "FlatPiece",
    "collect_root_again",
    "fixed_policies",
    "flat_pieces",
    "forget_parameters",
    "fsdp1_reshard",
    "require",
    "reset_iteration",
    "unit_names",
    "units_holding",
]

TRIED: Final = "2.13"


def require(purpose: str) -> None:
    """Partly run groups are completed by the root, as adapter units need.

    Raises:
        UnsupportedError: this torch does not have it.
    """
    needed = ("reset_iter_state", "set_reduce_scatter_unused_params", "reshard", "unshard")
    missing = [name for name in needed if not hasattr(FSDPModule, name)]
    if missing:
        raise UnsupportedError(
            f"{purpose} needs torch {TRIED} or newer: this is torch {torch.__version__}",
            why=f"FSDPModule lacks {', '.join(missing)}",
            remedy=f"install torch>={TRIED}",
        )


def _state(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    state = module._get_fsdp_state()
    for owner, names in (
        (state, ("_is_root", "_state_ctx", "_fsdp_param_groups")),
        (state._state_ctx, ("all_states",)),
    ):
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise UnsupportedError(
                f"attach and detach on a sharded model do not know torch {torch.__version__}",
                why=f"{type(owner).__name__} lacks {', '.join(missing)}; tried with torch {TRIED}",
                remedy="assemble the new set and shard it again",
            )
    return state


def collect_root_again(root: nn.Module) -> None:
    """Lets the root unit of `root` find its units anew in the next forward, after some came or went."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = _state(module)
            state._is_root = None
            state._state_ctx.all_states.clear()
            for group in state._fsdp_param_groups:
                group._module_fqn = None  # torch appends to it at each collection


def forget_parameters(root: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Takes the parameters of `modules` out of every unit that still holds them, so that their memory is freed."""
    gone = set(modules)
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _state(module)._fsdp_param_groups:
            if not any(each._module_info.module in gone for each in group.fsdp_params):
                continue
            group.fsdp_params = [each for each in group.fsdp_params if each._module_info.module not in gone]
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for dead in [key for key in handles if key in gone]:
                    handles.pop(dead).remove()


def units_holding(root: nn.Module, parameters: Iterable[nn.Parameter]) -> list[FSDPModule]:
    """The FSDP2 units, each once, that hold one of these sharded parameters."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[int, FSDPModule] = {}
    for module in root.modules() if wanted else ():
        if isinstance(module, FSDPModule):
            groups = module._get_fsdp_state()._fsdp_param_groups
            if any(id(each.sharded_param) in wanted for group in groups for each in group.fsdp_params):
                found.setdefault(id(module._get_fsdp_state()), module)
    return list(found.values())


def unit_names(root: nn.Module) -> int:
    """Characters in torch's own names of all FSDP2 units: what grew with every attach before it was reset."""
    units = {id(m._get_fsdp_state()): m._get_fsdp_state() for m in root.modules() if isinstance(m, FSDPModule)}
    return sum(len(group._module_fqn or "") for state in units.values() for group in state._fsdp_param_groups)


def fixed_policies(unit: FSDPModule) -> bool:
    """Whether the unit computes or reduces in a dtype of its own, which it fixed in its first forward."""
    policies = [group.mp_policy for group in unit._get_fsdp_state()._fsdp_param_groups]
    return any(policy.param_dtype is not None or policy.reduce_dtype is not None for policy in policies)


def reset_iteration(root: nn.Module) -> None:
    """Brings FSDP2 units back to rest after a forward or backward that raised; gradients under way are lost."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()
            return


def fsdp1_reshard(module: FullyShardedDataParallel) -> None:
    """Registers the sharded original parameters of one FSDP1 unit again, wherever a forward left it."""
    handle: Any = getattr(module, "_handle", None)
    resting = getattr(handle.flat_param, "_local_shard", None) if handle is not None else None
    if resting is not None and handle.flat_param.data_ptr() != resting.data_ptr():  # None before the first forward
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


@dataclass(frozen=True)
class FlatPiece:
    """One original parameter inside the flat parameter of an FSDP1 unit.

    Args:
        shape: Its global shape.
        start: Where it begins in the unsharded flat parameter, in elements.
        shard: Elements of the flat parameter on each rank.
        group: The unit's process group.
    """

    shape: tuple[int, ...]
    start: int
    shard: int
    group: dist.ProcessGroup

    def bounds(self, rank: int) -> tuple[int, int]:
        """The part of this parameter that `rank` of the group holds: (first element, number of elements)."""
        size = torch.Size(self.shape).numel()
        first = min(max(rank * self.shard - self.start, 0), size)
        last = min(max((rank + 1) * self.shard - self.start, 0), size)
        return first, last - first


def flat_pieces(root: nn.Module) -> Iterator[tuple[nn.Parameter, FlatPiece]]:
    """Every original parameter under FSDP1 below `root`, with where it lies."""
    for module in root.modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = handle.flat_param
        if not handle.uses_sharded_strategy or flat._params is None:
            raise UnsupportedError(
                "this FSDP1 unit keeps no sharded original parameters",
                remedy="wrap with use_orig_params=True and ShardingStrategy.FULL_SHARD, as shard() does",
            )
        offset = 0
        shapes = iter(zip(flat._params, flat._shapes, strict=True))
        for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not padding:
                parameter, shape = next(shapes)
                yield parameter, FlatPiece(tuple(shape), offset, flat._sharded_size.numel(), handle.process_group)
            offset += numel
