"""One adapter more, or one less, on a model that is sharded and in use; the base's shards stay untouched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from multilora_store.adapter import AdapterConfig, check_new_name, source_kind
from multilora_store.assembly.bridge import (
    active_adapters,
    adapter_modules,
    adapter_names,
    adapter_parameters,
    innermost,
    record,
    set_active,
    set_trainable,
    trainable_adapters,
)
from multilora_store.assembly.fingerprint import BaseIdentity
from multilora_store.assembly.live import eject_adapter, inject_adapter
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.filling import readers_of
from multilora_store.distributed.guards import unguarded
from multilora_store.distributed.internals import collect_root_again, forget_parameters, require
from multilora_store.distributed.kept import kept_versions
from multilora_store.distributed.layout import layouts
from multilora_store.distributed.optimizer import read_options
from multilora_store.distributed.places import places
from multilora_store.distributed.restoring import check_coverage, fill
from multilora_store.distributed.sharded import backend_of, mesh_of, ranks_of, reshard, wrapping_of
from multilora_store.distributed.units import plan_units
from multilora_store.distributed.wrap import wrap_units
from multilora_store.errors import MultiLoRAError, ShardedModelError, UnsupportedError, UsageError
from multilora_store.storage import PeftFolder, Store, StoredAdapter, StoreLike, Version, as_store, read_peft_dir
from multilora_store.storage.arguments import of_type

__all__ = ["attach", "detach"]


def attach(
    model: nn.Module,
    name: str,
    *,
    source: str | None = None,
    store: StoreLike | None = None,
    config: AdapterConfig | Mapping[str, Any] | None = None,
    weight: float | None = None,
    trainable: bool = False,
    seed: int = 0,
    allow_base_mismatch: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Adds one adapter to a live model, sharded like the others; the same call on every rank.

    Args:
        model: Plain or sharded with fsdp2; it is resharded first. No unit of it is wrapped again.
        name: The adapter's name in the set.
        source: A ref of `store`, or the folder or URL of a PEFT directory; one rank reads it.
        store: Where `source` is a ref; or its URL.
        config: Instead of `source`: a fresh adapter, whose values depend on (seed, name, tensor) alone.
        weight: Also activates it with this weight, beside those that are active.
        trainable: Whether it receives gradients.
        seed: For a fresh adapter.
        allow_base_mismatch: Take it even if it was made for another base.
        optimizer: Gets a parameter group for it if it is trainable, with the options of the last group.

    Raises:
        UsageError, NotInStoreError, CoverageError: what was given cannot be attached; nothing was changed.
        UnsupportedError: it has parts that cannot be a unit of their own; assemble and shard the new set instead.
        ShardedModelError: FSDP1 and DDP cannot take parameters after the wrap.
    """
    ranks = ranks_of(model)
    known = ranks.together("attach", lambda: None if store is None else as_store(store))
    ranks.together(
        "attach",
        lambda: _check(model, name, source, known, config),
        facts=lambda _: [name, source, known.url if known else None, str(config), weight, trainable, seed],
    )
    opened = ranks.together("attach", lambda: _read(source, known) if source is not None and ranks.first else None)
    found, version = ranks.from_first("attach", lambda: _told(name, opened, config))
    before = _states(model)
    made_for = BaseIdentity.from_mapping(version.base if version is not None else None)
    ranks.together("attach", lambda: _inject(model, name, found, seed, made_for, allow_base_mismatch))
    _restore_states(model, before)
    if source is not None:
        try:
            _load(model, ranks, name, source, opened)
        except MultiLoRAError:
            _remove(model, name)
            raise
    record(model).member(name).version = version
    if weight is not None:
        set_active(model, {**active_adapters(model), name: weight})
    if trainable:
        set_trainable(model, trainable_adapters(model) | {name})
    if optimizer is not None and trainable:
        _tell(optimizer, [p for p in adapter_parameters(model, name).values() if p.requires_grad])


def detach(model: nn.Module, name: str, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Takes one adapter off a live model and frees its memory; the same call on every rank.

    Args:
        model: Plain or sharded with fsdp2; it is resharded first.
        name: The adapter.
        optimizer: Its parameter groups lose the adapter's parameters, and their state is dropped; the others keep
            theirs.

    Raises:
        UsageError: the model carries no such adapter, or no other.
        ShardedModelError: FSDP1 flattens parameters, and DDP counts on them: neither lets go of them.
    """
    ranks = ranks_of(model)
    ranks.together("detach", lambda: _check_detach(model, name), facts=lambda _: name)
    parameters = list(adapter_parameters(model, name).values())
    _remove(model, name)
    if optimizer is not None:
        _untell(optimizer, parameters)


def _load(model: nn.Module, ranks: Ranks, name: str, source: str, opened: StoredAdapter | PeftFolder | None) -> None:
    """Streams the tensors that the first rank has opened into the new shards of all."""
    held = layouts(model, (name,))

    def check() -> None:
        if opened is not None:
            shapes = {key: tuple(tensor.shape) for key, tensor in opened.tensors.items()}
            check_coverage(source, shapes, held[name])

    ranks.together("attach", check)
    owner = readers_of(mesh_of(model), ranks)[0]
    fill(model, ranks, held, {name: owner}, {} if opened is None else {name: opened})


def _remove(model: nn.Module, name: str) -> None:
    """Takes the adapter off this rank's model, and its parameters out of every unit; asks no other rank."""
    gone = [module for each in adapter_modules(model, name).values() for module in each.modules()]
    before = _states(model)
    with unguarded(model):
        eject_adapter(model, name)
    _restore_states(model, before)
    kept_versions(model).pop(name, None)
    wrapping = wrapping_of(model)
    if wrapping is not None:
        wrapping.units = [unit for unit in wrapping.units if unit.adapter != name]
        forget_parameters(innermost(model), gone)
        collect_root_again(innermost(model))


def _check(
    model: nn.Module,
    name: str,
    source: str | None,
    store: Store | None,
    config: AdapterConfig | Mapping[str, Any] | None,
) -> None:
    reshard(model)
    check_new_name(name, adapter_names(model))
    if name in adapter_names(model):
        raise UsageError(f"the model carries an adapter {name!r} already", remedy="detach() it first", name=name)
    if (source is None) == (config is None):
        raise UsageError(f"attach({name!r}) needs either source= or config=")
    text = None if source is None else of_type(source, str, "source", "a reference, a path or a URL")
    if text is not None and source_kind(text) == "ref" and store is None:
        raise UsageError(f"attach({name!r}, source={source!r}) needs store=", remedy="or give a folder: ./path")
    _check_backend(model, "attach")


def _check_backend(model: nn.Module, call: str) -> None:
    backend = backend_of(model)
    if backend in ("fsdp1", "ddp"):
        raise ShardedModelError(
            f"{call}() on a model under {backend}",
            why="it fixed its parameters when it wrapped the model",
            remedy="use backend='fsdp2', or assemble the new set and wrap it again",
        )
    if backend == "fsdp2":
        require(f"{call}()")
        if wrapping_of(model) is None:
            raise ShardedModelError(
                f"{call}() on a model that shard() did not wrap", remedy="wrap it with multilora_store.shard()"
            )


def _check_detach(model: nn.Module, name: str) -> None:
    reshard(model)
    record(model).member(name)
    _check_backend(model, "detach")
    if len(adapter_names(model)) == 1:
        raise UsageError(
            f"{name} is the only adapter of this model", remedy="attach another one first, or use disabled(model)"
        )


def _read(source: str, store: Store | None) -> StoredAdapter | PeftFolder:
    if source_kind(source) == "ref":
        assert store is not None
        return store.get(source)
    return read_peft_dir(source)


def _told(
    name: str, opened: StoredAdapter | PeftFolder | None, config: AdapterConfig | Mapping[str, Any] | None
) -> tuple[AdapterConfig, Version | None]:
    if opened is not None:
        return opened.config, opened.version if isinstance(opened, StoredAdapter) else None
    assert config is not None
    parsed = config if isinstance(config, AdapterConfig) else AdapterConfig.parse(config, where=f"config of {name}")
    return parsed, None


def _inject(
    model: nn.Module, name: str, config: AdapterConfig, seed: int, made_for: BaseIdentity, any_base: bool
) -> None:
    """Injects the adapter, and makes its parts units; undone where that is refused."""
    wrapping = wrapping_of(model)
    with unguarded(model):
        inject_adapter(model, name, config, seed=seed, base=made_for, allow_base_mismatch=any_base)
    if wrapping is None:
        return
    plan = plan_units(model, list(wrapping.blocks), [name])
    if plan.residents:
        with unguarded(model):
            eject_adapter(model, name)
        first = plan.residents[0]
        raise UnsupportedError(
            f"{first.tensor} of adapter {name} cannot join a model that is sharded already",
            why=first.reason,
            remedy="assemble the new set, then shard it",
            tensors=[resident.tensor for resident in plan.residents],
        )
    wrap_units(places(innermost(model)), wrapping, plan.units)
    wrapping.units += plan.units
    collect_root_again(innermost(model))


def _states(model: nn.Module) -> tuple[dict[str, float], dict[int, tuple[nn.Parameter, bool]]]:
    """Who is active, and every flag there is: injecting one adapter changes none of another."""
    flags = {id(p): (p, p.requires_grad) for p in model.parameters()}
    return active_adapters(model), flags


def _restore_states(model: nn.Module, before: tuple[dict[str, float], dict[int, tuple[nn.Parameter, bool]]]) -> None:
    weights, flags = before
    set_active(model, {name: weight for name, weight in weights.items() if name in adapter_names(model)})
    for parameter in model.parameters():
        known = flags.get(id(parameter))
        parameter.requires_grad_(known[1] if known is not None else False)


def _tell(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    options = read_options(optimizer.param_groups[-1]) if optimizer.param_groups else {}
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if k in optimizer.defaults}
    optimizer.add_param_group({"params": parameters, **options})


def _untell(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    gone = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in gone]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
