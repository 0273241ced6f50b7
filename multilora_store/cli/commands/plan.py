"""`plan`: what each rank would hold and move if the set were sharded, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from multilora_store.cli.models import build_base
from multilora_store.cli.outcome import Outcome, Table, bytes_in_words
from multilora_store.cli.schema import PlanOptions
from multilora_store.cli.sets import locked
from multilora_store.cli.stores import store_for_set
from multilora_store.cli.terminal import Terminal
from multilora_store.cli.typed import plain
from multilora_store.manifest import AdapterSpec, Lock, Manifest
from multilora_store.storage.progress import Meter

if TYPE_CHECKING:
    from multilora_store.adapter import AdapterConfig
    from multilora_store.distributed import Plan
    from multilora_store.storage import Store

__all__ = ["run"]


def run(options: PlanOptions, terminal: Terminal) -> Outcome:
    """Resolve the set, put its structure on the base's, and count; no weight of either is read."""
    from multilora_store.distributed import plan

    if options.base is None:
        build_base(None)
    store = store_for_set(options, terminal)
    lock = locked(options, store)
    active = [entry.name for entry in lock if entry.spec.active and entry.spec.weight]
    trainable = [entry.name for entry in lock if entry.spec.trainable]
    with terminal.progress("reading headers", of_bytes=False) as progress:
        structure = _structure(lock, store, Meter(progress, files=len(lock)))
    with terminal.progress("planning", of_bytes=False) as progress:
        found = plan(
            build_base(plain(options.base), meta=True),
            structure,
            world_size=options.world_size,
            replicas=options.replicas,
            granularity=options.granularity,
            optimizer=options.optimizer,
            active=active,
            trainable=trainable,
            progress=progress,
        )
    return _outcome(options, found, store, set(active), set(trainable))


def _structure(lock: Lock, store: Store | None, meter: Meter) -> Manifest:
    """The set as configurations and dtypes: what its files say, without their tensors."""
    from multilora_store.assembly.resolve import Stores

    stores = Stores(store)
    specs = {}
    for entry in lock:
        config, dtype = entry.spec.adapter_config() if entry.fresh else None, entry.spec.dtype
        if config is None:
            config, stored_as = _described(entry.spec, entry.version, entry.store, stores)
            dtype = dtype or stored_as
        raw = {**config.raw, "init_lora_weights": True}  # no other start than that of its values, which are not read
        specs[entry.name] = AdapterSpec(name=entry.name, if_missing="init", config=raw, dtype=dtype)
        meter.add(0)
    return Manifest(specs)


def _described(
    spec: AdapterSpec, version: str | None, url: str | None, stores: Any
) -> tuple[AdapterConfig, str | None]:
    """An adapter's configuration, and the one dtype that all its tensors share."""
    if version is None:
        folder = stores.unstored(spec)
        return folder.config, _shared(str(tensor.dtype).removeprefix("torch.") for tensor in folder.tensors.values())
    stored = stores.stored(spec, version, url)
    return stored.config, _shared(_DTYPES.get(info.dtype, "") for info in stored.infos.values())


_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _shared(dtypes: Iterable[str]) -> str | None:
    found = set(dtypes)
    return found.pop() or None if len(found) == 1 else None


def _outcome(options: PlanOptions, found: Plan, store: Store | None, active: set[str], trainable: set[str]) -> Outcome:
    adapters = {
        name: {
            "bytes": share.nbytes,
            "local_bytes": share.local_nbytes,
            "gathered_bytes": share.gathered_nbytes,
            "resident_bytes": share.resident_nbytes,
            "units": share.units,
            "active": name in active,
            "trainable": name in trainable,
        }
        for name, share in found.adapters.items()
    }
    document = {
        "demo": options.store.demo,
        "store": store.url if store is not None else None,
        "world_size": found.world_size,
        "replicas": found.replicas,
        "granularity": found.granularity,
        "optimizer": options.optimizer,
        "base": {"bytes": found.base_nbytes, "local_bytes": found.base_local_nbytes},
        "adapters": adapters,
        "local_bytes": found.local_nbytes,
        "gradient_bytes": found.gradient_nbytes,
        "optimizer_bytes": found.optimizer_nbytes,
        "forward_bytes": found.forward_nbytes,
        "step_bytes": found.step_nbytes,
        "save_bytes": found.save_nbytes,
        "restore_bytes": found.restore_nbytes,
        "units": found.units,
        "residents": dict(found.residents),
        "warnings": list(found.warnings),
    }
    return Outcome(document=document, view=_view(options, found, adapters))


def _view(options: PlanOptions, found: Plan, adapters: dict[str, dict[str, Any]]) -> list[Table | str]:
    rows: list[tuple[str, ...]] = [
        ("base", bytes_in_words(found.base_nbytes), bytes_in_words(found.base_local_nbytes), "", "", "-", "-")
    ]
    for name, share in adapters.items():
        sizes = (share["bytes"], share["local_bytes"], share["gathered_bytes"] if share["active"] else 0)
        flags = ("yes" if share["active"] else "-", "yes" if share["trainable"] else "-")
        rows.append((name, *map(bytes_in_words, sizes), str(share["units"]), *flags))
    heads = ("part", "whole#", "on a rank#", "gathered#", "units#", "active", "train")
    copies = f", {found.replicas} replicas" if found.replicas > 1 else ""
    title = f"{found.world_size} ranks{copies}, {found.units} units, granularity {found.granularity}"
    state = f"gradients {bytes_in_words(found.gradient_nbytes)}, {options.optimizer} state "
    state += bytes_in_words(found.optimizer_nbytes)
    return [
        Table(columns=heads, rows=rows, title=title),
        f"a rank keeps {bytes_in_words(found.local_nbytes)}, of that {state}",
        f"a rank gathers {bytes_in_words(found.forward_nbytes)} in a forward, "
        f"{bytes_in_words(found.step_nbytes)} in a whole step",
        f"a save moves {bytes_in_words(found.save_nbytes)} in all, "
        f"a restore reads {bytes_in_words(found.restore_nbytes)}",
        *(f"note: {warning}" for warning in found.warnings),
    ]
