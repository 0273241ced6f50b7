"""The FSDP wrap of an assembled model: agree, refuse what cannot work, wrap from the inside out, audit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from multilora_store.assembly.bridge import adapter_parameters, innermost, peft_model, record, trainable_adapters
from multilora_store.assembly.fingerprint import sampled_values
from multilora_store.distributed import fsdp1
from multilora_store.distributed.agreement import Ranks, ranks_of_mesh, world
from multilora_store.distributed.auditing import audit
from multilora_store.distributed.filling import fill_from_holder, find_holding
from multilora_store.distributed.guards import guard
from multilora_store.distributed.idle import give_idle_no_gradient
from multilora_store.distributed.internals import require
from multilora_store.distributed.layout import describe_set, layouts
from multilora_store.distributed.options import Options
from multilora_store.distributed.places import Place, places
from multilora_store.distributed.sharded import Wrapping, backend_of, remember
from multilora_store.distributed.units import (
    Unit,
    UnitPlan,
    block_of,
    choose_granularity,
    expert_blocks,
    find_blocks,
    plan_units,
    refuse_attention,
)
from multilora_store.errors import ShardedModelError, UnsupportedError, UsageError

__all__ = ["make_mesh", "shard", "wrap_units"]

logger = logging.getLogger(__name__)


def shard(
    model: nn.Module,
    mesh: DeviceMesh | tuple[int, ...] | None = None,
    *,
    backend: str = "fsdp2",
    granularity: str = "adapter",
    blocks: Iterable[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_policy: OffloadPolicy | None = None,
    empty: bool = False,
) -> nn.Module:
    """Shards an assembled model in place, every adapter of it, and returns it; the same call on every rank.

    One rank may hold the values alone, of the base, of adapters or of both, and the others their structure on the
    meta device: it sends each rank its shards, so that a host never holds more than one copy (fsdp2).

    Args:
        model: What `assemble` returned; blocks may be compiled or wrapped for activation checkpointing already.
        mesh: One dimension to shard over, or two named ones (replicate, shard); sizes are enough; None: all ranks.
        backend: `fsdp2` (fully_shard) or `fsdp1` (FullyShardedDataParallel with original parameters).
        granularity: `adapter`: each adapter's part of a block is its own unit, so an inactive one never travels;
            `layer`: one unit a block; `auto`: `layer` where blocks are compiled, else `adapter`.
        blocks: Class names of the repeated blocks where they are not found by themselves.
        mp_policy: Mixed precision of the base. Adapters are computed and reduced in their own dtype.
        reshard_after_forward: As in `fully_shard`.
        offload_policy: As in `fully_shard`.
        empty: Adapters may be on the meta device, since `restore` fills them afterwards (fsdp2).

    Raises:
        UsageError: an unknown option value, or no process group.
        UnsupportedError: targets, dtypes or devices that the wrap cannot take; nothing was wrapped.
        DisagreementError: ranks were given different models or options; nothing was wrapped.
        ShardedModelError: the model is sharded already.
        AuditError: the wrap left a parameter uncovered.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "shard() needs ranks: torch.distributed is not initialised",
            remedy="start with torchrun and call torch.distributed.init_process_group() first",
        )
    given = {
        "backend": backend,
        "granularity": granularity,
        "blocks": None if blocks is None else tuple(blocks),
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload_policy,
    }
    options = world().together(
        "shard", lambda: _check(model, given), facts=lambda checked: _facts(model, mesh, checked)
    )
    made = make_mesh(model, mesh)
    ranks = ranks_of_mesh(made)
    plan, reason, found = ranks.together("shard", lambda: _decide(model, options, made))
    _compare_values(model, ranks)
    held = find_holding(model, made, ranks)
    if held is not None and backend == "fsdp1":
        raise UnsupportedError(f"{held.names[0]} is on the meta device on some ranks", remedy="use backend='fsdp2'")
    expected = _flags(model)
    _wrap(model, made, options, plan, found, reason)
    if held is not None:
        fill_from_holder(model, ranks, held)
    give_idle_no_gradient(model)
    guard(model)
    report = audit(model, ranks=ranks, expected_flags=expected)
    allowed = {"meta"} if empty else set()
    replace(report, findings=tuple(f for f in report.findings if f.kind not in allowed)).raise_if_failed()
    return model


def make_mesh(model: nn.Module, mesh: DeviceMesh | tuple[int, ...] | None) -> DeviceMesh:
    """The mesh itself, or one of the given sizes on the model's kind of device."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
            raise UsageError(
                f"the mesh has {mesh.ndim} dimensions named {mesh.mesh_dim_names}",
                remedy="one dimension, or two named ones: (replicate, shard)",
            )
        return mesh
    sizes = (dist.get_world_size(),) if mesh is None else tuple(mesh)
    total = torch.Size(sizes).numel()
    if len(sizes) not in (1, 2) or total != dist.get_world_size():
        raise UsageError(
            f"a mesh of {' x '.join(map(str, sizes))} does not cover {dist.get_world_size()} ranks",
            remedy="give (shard,) or (replicate, shard) whose product is the number of ranks",
        )
    names = ("fsdp",) if len(sizes) == 1 else ("replicate", "fsdp")
    return init_device_mesh(_device_type(model), sizes, mesh_dim_names=names)


def _device_type(model: nn.Module) -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or dist.get_backend() in ("gloo", "fake", "mpi"):
        kinds = {p.device.type for p in model.parameters()} - {"meta"}
        return kinds.pop() if len(kinds) == 1 else "cpu"
    return accelerator.type


def _check(model: nn.Module, given: Mapping[str, Any]) -> Options:
    options = Options(**given)
    peft_model(model)
    if backend_of(model) != "plain":
        raise ShardedModelError(
            f"the model is wrapped by {backend_of(model)} already",
            why="a second wrap would shard shards",
            remedy="assemble the whole set first and shard once; attach() adds an adapter to a sharded model",
        )
    refuse_attention(model)
    if options.backend == "fsdp2":
        require("shard(backend='fsdp2')")
    return options


def _facts(model: nn.Module, mesh: DeviceMesh | tuple[int, ...] | None, options: Options) -> dict[str, Any]:
    of_adapters = {id(p) for name in layouts(model) for p in adapter_parameters(model, name).values()}
    base = {n: [str(p.dtype), list(p.shape)] for n, p in model.named_parameters() if id(p) not in of_adapters}
    return {
        "options": {name: str(getattr(options, name)) for name in Options.__dataclass_fields__},
        "mesh": str(mesh.mesh.tolist()) if isinstance(mesh, DeviceMesh) else mesh,
        "base": base,
        **describe_set(model, layouts(model)),
    }


def _decide(model: nn.Module, options: Options, mesh: DeviceMesh) -> tuple[UnitPlan, tuple[str, str], dict[str, str]]:
    base = innermost(model)
    record(model).base  # noqa: B018  # identified now: once sharded its values can no longer be sampled
    blocks = find_blocks(base, options.blocks)
    granularity, reason = choose_granularity(options.granularity, base, blocks)
    plan = plan_units(model, list(blocks))
    if options.backend == "fsdp1":
        fsdp1.check(model, plan, mesh, blocks)
    else:
        _check_dtypes(model, plan, granularity)
    return plan, (granularity, reason), blocks


def _compare_values(model: nn.Module, ranks: Ranks) -> None:
    """Each rank keeps its own shard of what it holds: other values elsewhere would become a model that nobody had.

    Raises:
        DisagreementError: samples of the values of the base or of an adapter differ, as those of fresh adapters do
            that were made with other seeds; what has no values (on meta) agrees with any.
    """
    _, _, of_base = record(model).base.fingerprint.partition("-")
    own = {"samples of the base": of_base}
    for name, adapter in layouts(model).items():
        own[f"samples of adapter {name}"] = sampled_values(adapter.tensors.values())
    told = ranks.share("shard", own)
    for subject in own:
        if len({each[subject] for each in told} - {""}) > 1:
            ranks.agree("shard", {subject: own[subject]})


def _check_dtypes(model: nn.Module, plan: UnitPlan, granularity: str) -> None:
    """One unit reduces gradients in one dtype, whichever of its adapters is trained.

    Raises:
        UnsupportedError: naming the odd tensors.
    """
    where = place_of_tensors(model, plan, granularity)
    for unit, tensors in where.items():
        dtypes = sorted({str(p.dtype) for p in tensors.values()})
        if len(dtypes) > 1:
            counts = {d: [n for n, p in tensors.items() if str(p.dtype) == d] for d in dtypes}
            few = min(counts, key=lambda d: len(counts[d]))
            raise UnsupportedError(
                f"adapter tensors of {' and '.join(dtypes)} would share the unit {unit!r}",
                why=f"{few}: {', '.join(counts[few][:3])}{' ...' if len(counts[few]) > 3 else ''}",
                remedy="granularity='adapter' keeps adapters apart; or give them one dtype: assemble(..., dtype=...)",
                unit=unit,
                dtypes=dtypes,
            )


def place_of_tensors(model: nn.Module, plan: UnitPlan, granularity: str) -> dict[str, dict[str, nn.Parameter]]:
    """Unit -> the adapter tensors that would be in it, by `adapter: canonical name`."""
    resident = {(r.adapter, r.tensor): r.block for r in plan.residents}
    found: dict[str, dict[str, nn.Parameter]] = {}
    names = dict.fromkeys([u.adapter for u in plan.units] + [r.adapter for r in plan.residents])
    blocks = {u.block for u in plan.units} - {""}
    for name in names:
        for tensor, p in adapter_parameters(model, name).items():
            if not (p.is_floating_point() or p.is_complex()):
                continue
            inner = block_of(tensor.removeprefix("base_model.model."), blocks)
            block = resident.get((name, tensor), inner)
            own = granularity == "adapter" and (name, tensor) not in resident
            key = f"{block or 'outside the blocks'}{f' of {name}' if own else ''}"
            found.setdefault(key, {})[f"{name}: {tensor}"] = p
    return found


def _flags(model: nn.Module) -> dict[str, bool]:
    return {
        f"{name}: {key}": p.requires_grad
        for name in layouts(model)
        for key, p in adapter_parameters(model, name).items()
    }


def _wrap(
    model: nn.Module,
    mesh: DeviceMesh,
    options: Options,
    plan: UnitPlan,
    blocks: Mapping[str, str],
    chosen: tuple[str, str],
) -> None:
    granularity, reason = chosen
    units = list(plan.units) if granularity == "adapter" or options.backend == "fsdp1" else []
    arguments: dict[str, Any] = {"reshard_after_forward": options.reshard_after_forward}
    if options.offload_policy is not None:
        arguments["offload_policy"] = options.offload_policy
    wrapping = Wrapping(
        backend=options.backend,
        granularity=granularity,
        reason=reason,
        mesh=mesh,
        blocks=dict(blocks),
        units=units,
        trainable=frozenset(trainable_adapters(model)),
        options=arguments,
    )
    if options.backend == "fsdp1":
        fsdp1.wrap(model, mesh, plan, blocks, options.mp_policy, keep=options.reshard_after_forward is False)
    else:
        _wrap_fsdp2(model, wrapping, options.mp_policy or MixedPrecisionPolicy())
    remember(model, wrapping)
    logger.info(
        "sharded over %d ranks: %d blocks, %d adapter units, granularity %s (%s)",
        mesh.size(),
        len(blocks),
        len(units),
        granularity,
        reason,
    )


def _wrap_fsdp2(model: nn.Module, wrapping: Wrapping, policy: MixedPrecisionPolicy) -> None:
    base = innermost(model)
    located = places(base)
    wrap_units(located, wrapping)
    place = placement(wrapping.mesh)
    arguments = {**wrapping.options, "mesh": wrapping.mesh, "mp_policy": policy, "shard_placement_fn": place}
    with_experts = expert_blocks(base, wrapping.blocks)
    for path in wrapping.blocks:
        unit = located[path].module
        fully_shard(unit, **arguments)
        if path in with_experts:
            assert isinstance(unit, FSDPModule)
            unit.set_reduce_scatter_unused_params(True, recurse=False)
    fully_shard(base, **arguments)
    if wrapping.granularity == "layer" and any(located[path].compiled for path in wrapping.blocks):
        _allow_recompiles(model)


def wrap_units(located: Mapping[str, Place], wrapping: Wrapping, units: Iterable[Unit] | None = None) -> None:
    """Makes each unit an FSDP2 unit with a policy of its own: the adapter's dtype for values and gradients."""
    place = placement(wrapping.mesh)
    for unit in wrapping.units if units is None else units:
        modules = [located[path].module for path in unit.paths]
        dtypes = {p.dtype for m in modules for p in m.parameters() if p.is_floating_point()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        fully_shard(
            modules,
            mesh=wrapping.mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False),
            shard_placement_fn=place,
            **wrapping.options,
        )


def placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """For `fully_shard`: cut along dimension 1 what is shorter than the ranks along 0, where 1 divides evenly."""
    ranks = mesh.size(mesh.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard | None:
        shape = parameter.shape
        return Shard(1) if len(shape) == 2 and shape[0] < ranks and shape[1] % ranks == 0 else None

    return place


def _allow_recompiles(model: nn.Module) -> None:
    """A compiled block is compiled once for each adapter that is switched on: let that many be kept."""
    config: Any = torch._dynamo.config
    wanted = 8 + 2 * len(layouts(model))
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        if getattr(config, limit, wanted) < wanted:
            logger.info("raised torch._dynamo.config.%s to %d", limit, wanted)
            setattr(config, limit, wanted)
