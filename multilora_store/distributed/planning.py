"""What a sharded set would hold and move, for any number of ranks, computed from shapes alone: no rank, no weights.

One adapter of each distinct configuration is put on the base (which may be on the meta device), its units are those
that `shard` would wrap, and the figures are multiplied. Padding of uneven shards is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly import assemble
from multilora_store.assembly.bridge import adapter_modules, adapter_names, adapter_parameters, innermost
from multilora_store.distributed.options import GRANULARITIES
from multilora_store.distributed.units import UnitPlan, block_of, choose_granularity, find_blocks, plan_units
from multilora_store.errors import UsageError, choices
from multilora_store.manifest import AdapterSpec, Manifest
from multilora_store.storage import Store
from multilora_store.storage.arguments import of_type
from multilora_store.storage.progress import Listener, Meter

__all__ = ["AdapterPlan", "Plan", "plan", "shard_nbytes"]

# Copies of a parameter that an optimizer keeps, each in the parameter's dtype.
OPTIMIZERS: Final[Mapping[str, int]] = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
SMALL_UNIT: Final = 64 * 1024


@dataclass(frozen=True)
class AdapterPlan:
    """One adapter's share.

    Attributes:
        nbytes: Bytes of the whole adapter: what a save, and a restore, move once.
        local_nbytes: Bytes on the fullest rank, padding included.
        gathered_nbytes: Bytes that its units gather in one forward while it is active.
        resident_nbytes: Bytes of it that are gathered with the base in every forward, active or not.
        units: Its units.
    """

    nbytes: int
    local_nbytes: int
    gathered_nbytes: int
    resident_nbytes: int
    units: int


@dataclass(frozen=True)
class Plan:
    """Figures for one rank unless said otherwise, in bytes.

    Attributes:
        world_size: Ranks; `replicas` of them hold the same shard.
        granularity: `adapter` or `layer`.
        base_nbytes: The base, once, all ranks of a replica together.
        base_local_nbytes: Its shards on the fullest rank.
        adapters: By name.
        gradient_nbytes: Sharded gradients of the trainable adapters.
        optimizer_nbytes: Optimizer state of the trainable adapters.
        forward_nbytes: Gathered by one rank in one forward, for the active set given.
        step_nbytes: The same in a forward and a backward that reaches every unit.
        save_nbytes: Adapter bytes that move to owners in a save, all ranks together.
        restore_nbytes: Bytes read from storage in a restore, all ranks together.
        units: FSDP units in all.
        residents: Why tensors stay in the base's units: reason -> how many.
        warnings: What is worth knowing before the run.
    """

    world_size: int
    replicas: int
    granularity: str
    base_nbytes: int
    base_local_nbytes: int
    adapters: Mapping[str, AdapterPlan]
    gradient_nbytes: int
    optimizer_nbytes: int
    forward_nbytes: int
    step_nbytes: int
    save_nbytes: int
    restore_nbytes: int
    units: int
    residents: Mapping[str, int] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def local_nbytes(self) -> int:
        """Everything that one rank keeps between steps."""
        adapters = sum(adapter.local_nbytes for adapter in self.adapters.values())
        return self.base_local_nbytes + adapters + self.gradient_nbytes + self.optimizer_nbytes


def plan(
    base: nn.Module,
    adapters: Mapping[str, Any] | Manifest | None = None,
    *,
    world_size: int,
    store: Store | None = None,
    replicas: int = 1,
    granularity: str = "adapter",
    blocks: Iterable[str] | None = None,
    active: Iterable[str] | None = None,
    trainable: Iterable[str] = (),
    optimizer: str = "adamw",
    progress: Listener | None = None,
) -> Plan:
    """What each rank would hold and move if this set were sharded over `world_size` ranks with fsdp2.

    Args:
        base: The base, best on the meta device; or a model that carries its adapters already.
        adapters: As for `assemble`: a manifest, or name -> config, spec or ref of `store`.
        world_size: Ranks in all.
        store: Where refs are looked up; only configs are read.
        replicas: Replicas of the shards (HSDP): world_size / replicas ranks share one copy.
        granularity: `adapter`, `layer`, or `auto`, as for `shard`.
        blocks: Class names of the repeated blocks where they are not found by themselves.
        active: Adapters that take part, for the traffic; None: all.
        trainable: Adapters that receive gradients.
        optimizer: `adamw`, `momentum`, `sgd` or `none`.
        progress: Called after each adapter of another configuration than those before it.

    Raises:
        UsageError: an unknown option, or sizes that do not divide.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r} is not known", remedy=choices(optimizer, OPTIMIZERS))
    if granularity not in GRANULARITIES:
        raise UsageError(f"granularity {granularity!r} is not known", remedy=choices(granularity, GRANULARITIES))
    for name, value in (("world_size", world_size), ("replicas", replicas)):
        of_type(value, int, name, "a whole number")
    if world_size < 1 or replicas < 1 or world_size % replicas:
        raise UsageError(f"{world_size} ranks cannot form {replicas} replicas", remedy="replicas divides world_size")
    model, alike = _model(base, adapters, store)
    ranks = world_size // replicas
    known = find_blocks(innermost(model), None if blocks is None else tuple(blocks))
    granularity, _ = choose_granularity(granularity, innermost(model), known)
    units = plan_units(model, list(known))
    shares, meter = {}, Meter(progress, files=len(adapter_names(model)))
    for name in adapter_names(model):
        shares[name] = _share(model, name, units, ranks, granularity)
        meter.add(0)
    every = {name: shares[alike[name]] for name in alike}
    chosen = list(every if active is None else active)
    for name in [*chosen, *trainable]:
        if name not in every:
            raise UsageError(f"the set has no adapter {name!r}", remedy=choices(name, every, noun="adapter"))
    base_sizes = _base_sizes(model, ranks, list(known))
    return _figures(
        every, base_sizes, chosen, list(trainable), (world_size, replicas), granularity, optimizer, units, alike
    )


def shard_nbytes(parameter: torch.Tensor, ranks: int) -> int:
    """Bytes of the fullest shard of a parameter, cut as `shard` cuts it, padding included."""
    shape = tuple(parameter.shape)
    if len(shape) == 2 and shape[0] < ranks and shape[1] % ranks == 0:
        return parameter.numel() // ranks * parameter.element_size()
    rows = -(-shape[0] // ranks)
    return rows * (parameter.numel() // max(shape[0], 1)) * parameter.element_size()


def _model(
    base: nn.Module, adapters: Mapping[str, Any] | Manifest | None, store: Store | None
) -> tuple[nn.Module, dict[str, str]]:
    """A model that carries one adapter of each configuration, and for each adapter the one that stands for it."""
    if adapters is None:
        return base, {name: name for name in adapter_names(base)}
    manifest = adapters if isinstance(adapters, Manifest) else Manifest.from_mapping(_entries(adapters))
    first: dict[str, str] = {}
    alike: dict[str, str] = {}
    specs: dict[str, AdapterSpec] = {}
    for name, spec in manifest.adapters.items():
        config = _config(spec, store)
        key = f"{config.canonical()!r} {spec.dtype}"
        alike[name] = first.setdefault(key, name)
        if alike[name] == name:
            specs[name] = AdapterSpec(name=name, if_missing="init", config=config.raw, dtype=spec.dtype, source=name)
    model = assemble(base, dict(specs), device="meta")
    for name, spec in specs.items():
        if spec.dtype is not None:  # on meta nothing is laid in place, and so nothing takes its dtype
            for parameter in adapter_parameters(model, name).values():
                parameter.data = parameter.data.to(getattr(torch, spec.dtype))
    return model, alike


def _entries(adapters: Mapping[str, Any]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in adapters.items():
        if isinstance(value, AdapterConfig):
            entries[name] = {"if_missing": "init", "config": dict(value.raw)}
        elif isinstance(value, Mapping) and "target_modules" in value:
            entries[name] = {"if_missing": "init", "config": dict(value)}
        else:
            entries[name] = value
    return entries


def _config(spec: AdapterSpec, store: Store | None) -> AdapterConfig:
    if spec.if_missing == "init" and spec.config is not None:
        return AdapterConfig.parse({"peft_type": "LORA", **spec.config}, where=f"config of {spec.name}")
    if store is None:
        raise UsageError(f"adapter {spec.name!r} comes from {spec.source!r}", remedy="give plan() its store=")
    return store.get(spec.source).config


def _share(model: nn.Module, name: str, units: UnitPlan, ranks: int, granularity: str) -> AdapterPlan:
    parameters = adapter_parameters(model, name)
    modules = adapter_modules(model, name)
    mine = [unit for unit in units.units if unit.adapter == name]
    own = {id(p) for unit in mine for path in unit.paths for p in modules[path].parameters()}
    if granularity == "layer":
        own = set()
    local = {key: shard_nbytes(p, ranks) for key, p in parameters.items()}
    return AdapterPlan(
        nbytes=sum(p.numel() * p.element_size() for p in parameters.values()),
        local_nbytes=sum(local.values()),
        gathered_nbytes=ranks * sum(local[k] for k, p in parameters.items() if id(p) in own),
        resident_nbytes=ranks * sum(local[k] for k, p in parameters.items() if id(p) not in own),
        units=len(mine) if granularity == "adapter" else 0,
    )


def _base_sizes(model: nn.Module, ranks: int, blocks: list[str]) -> dict[str, int]:
    """`whole`, `local`, `blocks` and `root` (gathered in a forward), and `units`, of the base alone."""
    of_adapters = {id(p) for name in adapter_names(model) for p in adapter_parameters(model, name).values()}
    sizes = {"whole": 0, "local": 0, "blocks": 0, "root": 0, "units": len(blocks) + 1}
    for key, parameter in innermost(model).named_parameters():
        if id(parameter) in of_adapters:
            continue
        local = shard_nbytes(parameter, ranks)
        sizes["whole"] += parameter.numel() * parameter.element_size()
        sizes["local"] += local
        sizes["blocks" if block_of(key, blocks) else "root"] += ranks * local
    return sizes


def _figures(
    every: Mapping[str, AdapterPlan],
    base: Mapping[str, int],
    active: list[str],
    trainable: list[str],
    ranks: tuple[int, int],
    granularity: str,
    optimizer: str,
    units: UnitPlan,
    alike: Mapping[str, str],
) -> Plan:
    world_size, replicas = ranks
    resident = sum(share.resident_nbytes for share in every.values())
    moving = sum(every[name].gathered_nbytes for name in active)
    forward = base["blocks"] + base["root"] + resident + moving
    gradients = sum(every[name].local_nbytes for name in trainable)
    whole = sum(share.nbytes for share in every.values())
    reasons: dict[str, int] = {}
    for each in units.residents:
        times = sum(stand == each.adapter for stand in alike.values())
        reasons[each.reason] = reasons.get(each.reason, 0) + times
    return Plan(
        world_size=world_size,
        replicas=replicas,
        granularity=granularity,
        base_nbytes=base["whole"],
        base_local_nbytes=base["local"],
        adapters=dict(every),
        gradient_nbytes=gradients,
        optimizer_nbytes=OPTIMIZERS[optimizer] * gradients,
        forward_nbytes=forward,
        step_nbytes=2 * forward - base["root"],
        save_nbytes=whole,
        restore_nbytes=whole,
        units=base["units"] + sum(share.units for share in every.values()),
        residents=reasons,
        warnings=tuple(_warnings(every, base, reasons, granularity)),
    )


def _warnings(
    every: Mapping[str, AdapterPlan], base: Mapping[str, int], reasons: Mapping[str, int], granularity: str
) -> list[str]:
    found: list[str] = []
    small = [n for n, s in every.items() if s.units and s.gathered_nbytes // s.units < SMALL_UNIT]
    if small:
        found.append(
            f"units of {len(small)} adapters gather under {SMALL_UNIT // 1024} KiB each ({small[0]} ...): "
            "latency counts more than bytes there; granularity='layer' gathers once a block"
        )
    if granularity == "layer" and len(every) > 1:
        found.append("with granularity='layer' every adapter is gathered in every forward, active or not")
    for reason, count in reasons.items():
        found.append(f"{count} tensors stay in the base's units: {reason}")
    total = sum(share.local_nbytes for share in every.values())
    if total > base["local"]:
        found.append(f"adapters take {total / max(base['local'], 1):.1f} x the base's memory on a rank")
    return found
