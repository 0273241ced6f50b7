"""The FSDP1 wrap: adapter factors as leaf units, blocks and the innermost model around them, original parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from multilora_store.assembly.bridge import adapter_names, adapter_parameters, innermost, peft_model
from multilora_store.distributed.places import places
from multilora_store.distributed.units import PREFIX, UnitPlan, block_of
from multilora_store.errors import UnsupportedError

__all__ = ["check", "leaves", "wrap"]

MAGNITUDE = "lora_magnitude_vector"


def leaves(model: nn.Module, plan: UnitPlan) -> list[str]:
    """Paths of the modules that become leaf units: all of the plan's but those of adapters with DoRA.

    DoRA reads its factors outside their forward, where a leaf unit has no values for it.
    """
    dora = {unit.adapter for unit in plan.units if any(f".{MAGNITUDE}." in path for path in unit.paths)}
    return [
        path for unit in plan.units for path in unit.paths if unit.adapter not in dora or ".modules_to_save." in path
    ]


def check(model: nn.Module, plan: UnitPlan, mesh: DeviceMesh, blocks: Mapping[str, str]) -> None:
    """FSDP1 flattens what shares a unit, so that must be of one dtype.

    Raises:
        UnsupportedError: naming the odd tensors, with what would do.
    """
    if mesh.ndim != 1:
        raise UnsupportedError("a (replicate, shard) mesh needs backend='fsdp2'", remedy="use shard=fsdp2")
    alone = {id(p) for path in leaves(model, plan) for p in _parameters(model, path)}
    adapters = {
        id(p): f"{name}: {key}" for name in adapter_names(model) for key, p in adapter_parameters(model, name).items()
    }
    shared: dict[str, dict[torch.dtype, list[str]]] = {}
    for key, parameter in innermost(model).named_parameters():
        if id(parameter) not in alone:
            name = adapters.get(id(parameter), key)
            of_unit = shared.setdefault(block_of(key.removeprefix(PREFIX), blocks), {})
            of_unit.setdefault(parameter.dtype, []).append(name)
    for block, dtypes in shared.items():
        if len(dtypes) > 1:
            table = "; ".join(f"{d}: {', '.join(n[:3])} ({len(n)} in all)" for d, n in dtypes.items())
            raise UnsupportedError(
                f"tensors of {len(dtypes)} dtypes would share the unit {block or 'outside the blocks'!r}",
                why=table,
                remedy="use backend='fsdp2', which takes mixed dtypes, or give all one dtype: assemble(..., dtype=...)",
                unit=block,
            )


def _parameters(model: nn.Module, path: str) -> Iterator[nn.Parameter]:
    return places(innermost(model))[path].module.parameters()


def wrap(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: UnitPlan,
    blocks: Mapping[str, str],
    policy: MixedPrecisionPolicy | None,
    *,
    keep: bool = False,
) -> None:
    """Wraps leaf units, blocks and the innermost model, in place; with `keep`, gathered values last until backward."""
    strategy = ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
    located = places(innermost(model))
    for path in leaves(model, plan):
        place = located[path]
        assert isinstance(place.parent, nn.ModuleDict)
        place.parent[place.name] = _unit(place.module, mesh, None, strategy)
    precision = (
        None
        if policy is None
        else MixedPrecision(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            cast_forward_inputs=policy.cast_forward_inputs,
        )
    )
    base = innermost(model)
    located = places(base)
    for path in blocks:
        place = located[path]
        setattr(place.parent, place.name, _unit(place.module, mesh, precision, strategy))
    peft_model(model).base_model.model = _unit(base, mesh, precision, strategy)


def _unit(
    module: nn.Module, mesh: DeviceMesh, precision: MixedPrecision | None, strategy: ShardingStrategy
) -> FullyShardedDataParallel:
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return FullyShardedDataParallel(
        module,
        process_group=mesh.get_group(),
        sharding_strategy=strategy,
        use_orig_params=True,
        mixed_precision=precision,
        device_id=device,
    )
