"""The steps of an assembly, in order; each takes the work so far and moves it on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from multilora_store.adapter import canonical_tensor_name
from multilora_store.assembly.bridge.inject import Joining, add_adapters, empty_shell
from multilora_store.assembly.bridge.record import Member, inside_name, record
from multilora_store.assembly.bridge.state import active_adapters, set_active, set_flags
from multilora_store.assembly.bridge.targets import places_of
from multilora_store.assembly.bridge.tensors import Slot, slots
from multilora_store.assembly.bridge.unwrap import innermost, unwrap
from multilora_store.assembly.configs import lora_config
from multilora_store.assembly.coverage import compare, renamed
from multilora_store.assembly.fingerprint import BaseIdentity, base_mismatch, identify
from multilora_store.assembly.fresh import fill_fresh
from multilora_store.assembly.resolve import Stores, folder_digest, resolve_manifest
from multilora_store.assembly.work import Adapter, Assembly
from multilora_store.errors import CoverageError, DamagedError, UsageError
from multilora_store.manifest import Lock, LockEntry
from multilora_store.plugins import Registry
from multilora_store.storage.codec import nonfinite
from multilora_store.storage.progress import Meter

__all__ = ["STEPS", "Adapter", "Assembly", "Step"]

logger = logging.getLogger(__name__)


Step = Callable[[Assembly], None]


def resolve(work: Assembly) -> None:
    """Every reference becomes one version."""
    given = work.manifest
    work.lock = given if isinstance(given, Lock) else resolve_manifest(given, work.store, registry=work.registry)


def read(work: Assembly) -> None:
    """Open every adapter: its configuration, and its tensors to be made when they are needed."""
    assert work.lock is not None, "the step `resolve` makes the lock"
    stores = Stores(work.store)
    work.adapters = [_read(entry, stores, work.registry, given=work.manifest is work.lock) for entry in work.lock]


def _read(entry: LockEntry, stores: Stores, registry: Registry, *, given: bool) -> Adapter:
    # `given`: the lock was made at another time, so that what it names may have changed since.
    spec = entry.spec
    if entry.fresh:
        return Adapter(spec=spec, config=spec.adapter_config())
    if entry.version is None:
        folder = stores.unstored(spec, registry)
        if given and folder_digest(folder) != entry.digest:
            raise DamagedError(
                f"adapter {spec.name!r}: {spec.source} has another content than was locked",
                why="a plain folder can be written over, and the lock names what was in it",
                remedy="put the former files back, or lock the set again",
                name=spec.name,
            )
        tensors = _canonical(folder.tensors)
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        return Adapter(spec=spec, config=folder.config, tensors=tensors, shapes=shapes)
    stored = stores.stored(spec, entry.version, entry.store)
    if entry.digest is not None and stored.version.digest != entry.digest:
        raise DamagedError(
            f"adapter {spec.name!r}: version {entry.version} has another content than was locked",
            why=f"locked {entry.digest[:16]}…, found {stored.version.digest[:16]}…",
            remedy="lock the set again",
        )
    return Adapter(
        spec=spec,
        config=stored.config,
        tensors=stored.tensors,
        shapes={key: info.shape for key, info in stored.infos.items()},
        version=stored.version,
        base=BaseIdentity.from_mapping(stored.version.base),
    )


def _canonical(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a foreign directory by canonical name; refused where they are not finite, as a store refuses them."""
    named = {canonical_tensor_name(key): tensor for key, tensor in tensors.items()}
    for key in nonfinite(named.items()):
        raise DamagedError(f"tensor {key} is not finite: it holds a NaN or an infinity", tensor=key)
    return named


def check(work: Assembly) -> None:
    """Refuse what cannot be assembled, before anything is touched."""
    base = unwrap(work.base)
    present = record(base).members if isinstance(base, PeftModel) else {}
    for adapter in work.adapters:
        if adapter.name in present:
            raise UsageError(
                f"the model already carries an adapter {adapter.name!r}",
                remedy="take it off first, or give the new one another name",
                name=adapter.name,
            )
        fresh = adapter.tensors is None
        config, notes = lora_config(adapter.name, adapter.config, trainable=adapter.spec.trainable, fresh=fresh)
        work.notes.extend(notes)
        adapter.joining = Joining(name=adapter.name, inside=inside_name(adapter.name), config=config, fresh=fresh)
    if work.identity is None:
        work.identity = identify(base)
    elif not work.identity.fingerprint:
        work.identity = identify(base, name=work.identity.name, revision=work.identity.revision)
    for adapter in work.adapters:
        _check_base(work, adapter)


def _check_base(work: Assembly, adapter: Adapter) -> None:
    assert work.identity is not None
    here, made_for = work.identity, adapter.base
    error = base_mismatch(adapter.name, adapter.config, made_for, here)
    if error is not None and not work.allow_base_mismatch:
        raise error
    if error is not None:
        work.notes.append(error.what)
        return
    name = made_for.name or adapter.config.base_model
    if not made_for.fingerprint and name and here.name and _last(name) != _last(here.name):
        work.notes.append(f"adapter {adapter.name!r} was made for {name}; this base calls itself {here.name}")


def _last(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()


def inject(work: Assembly) -> None:
    """Put every adapter on the base, without bytes."""
    joining = [adapter.joining for adapter in work.adapters if adapter.joining is not None]
    base = unwrap(work.base)
    if isinstance(base, PeftModel):
        work.model = base
    else:
        work.model = empty_shell(base, joining[0])
        record(work.model)
    known = record(work.model)
    work.notes.extend(add_adapters(work.model, joining))
    for adapter in work.adapters:
        known.members[adapter.name] = Member(
            name=adapter.name,
            inside=inside_name(adapter.name),
            config=adapter.config,
            spec=adapter.spec,
            version=adapter.version,
            origin=adapter.origin,
        )
    if work.identity is not None:
        known.base = work.identity
    work.notes.extend(_ties(work))


def _ties(work: Assembly) -> list[str]:
    """A note where an adapter changes one or both ends of a tied pair: files hold two tensors, the base has one."""
    by_id: dict[int, list[str]] = {}
    for place in places_of(innermost(work.peft)):
        module: Any = place.module
        if isinstance(module, AuxiliaryTrainingWrapper):
            module = module.original_module
        elif isinstance(module, BaseTunerLayer):
            module = module.get_base_layer()
        weight = module._parameters.get("weight")
        if weight is not None:
            by_id.setdefault(id(weight), []).append(place.path)
    notes = []
    for paths in by_id.values():
        ends = sorted(paths)
        if len(ends) < 2:
            continue
        for adapter in work.adapters:
            assert adapter.joining is not None
            targets = adapter.joining.targets
            touched = [end for end in ends if targets and (end in targets.modules or end in targets.saved)]
            if touched:
                notes.append(
                    f"adapter {adapter.name!r} changes {', '.join(touched)}; in the base {' and '.join(ends)} are one "
                    f"tensor, so the two ends drift apart and a merge has to untie them"
                )
    return notes


def cover(work: Assembly) -> None:
    """Every tensor has its place and every place its tensor, in name and shape; otherwise nothing is loaded."""
    for adapter in work.adapters:
        adapter.slots = _slots(work, adapter)
        if adapter.tensors is None:
            continue
        names = _names(adapter, work.rename)
        places = {slot.key: tuple(slot.tensor.shape) for slot in adapter.slots}
        coverage = compare({new: adapter.shapes[old] for new, old in names.items()}, places)
        of_base = [key for key in coverage.unexpected if _same_as_base(work.peft, key, adapter.tensors[names[key]])]
        if of_base:
            names = {new: old for new, old in names.items() if new not in of_base}
            work.notes.append(f"adapter {adapter.name!r} also holds the base's own {', '.join(of_base)}: left out")
            coverage = compare({new: adapter.shapes[old] for new, old in names.items()}, places)
        if not coverage.ok:
            raise coverage.error(adapter.name)
        adapter.names = names


def _names(adapter: Adapter, rename: Mapping[str, str]) -> dict[str, str]:
    """Name on the model -> name in the file."""
    names = {renamed(key, rename) if rename else key: key for key in adapter.shapes}
    if len(names) < len(adapter.shapes):
        raise CoverageError(
            f"adapter {adapter.name!r}: the rename {dict(rename)!r} gives two tensors one name", name=adapter.name
        )
    return names


def _slots(work: Assembly, adapter: Adapter) -> list[Slot]:
    inside = inside_name(adapter.name)
    return [slot for site in record(work.peft).sites for slot in slots(site, inside)]


def _same_as_base(peft: PeftModel, key: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the base's own parameter with the base's own value: PEFT saves embeddings along at times."""
    path = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
    owner, _, attribute = path.rpartition(".")
    try:
        module: Any = unwrap(peft.base_model.model).get_submodule(owner)
    except AttributeError:
        return False
    module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    own = module._parameters.get(attribute)
    if own is None or own.shape != tensor.shape or own.is_meta:
        return False
    return bool(torch.equal(own.detach().cpu(), tensor.to(own.dtype)))


def load(work: Assembly) -> None:
    """Lay every tensor in its place, without copying where dtype and device allow; draw those of fresh adapters."""
    if work.device is not None and work.device.type == "meta":
        return
    sites = record(work.peft).sites
    devices: dict[str, torch.device] = {}
    sizes = {adapter.name: sum(slot.tensor.nbytes for slot in adapter.slots) for adapter in work.adapters}
    meter = Meter(work.progress, files=len(sizes), nbytes=sum(sizes.values()))
    for adapter in work.adapters:
        assert adapter.joining is not None
        nbytes = {slot.key: slot.tensor.nbytes for slot in adapter.slots}  # before another dtype is laid in
        dtype = work.dtype or _torch_dtype(adapter.spec.dtype)
        if adapter.tensors is None:
            joining = adapter.joining
            fill_fresh(adapter.name, joining.inside, joining.config, sites, seed=work.seed, dtype=dtype)
        for slot in adapter.slots:
            source = slot.tensor.detach() if adapter.tensors is None else adapter.tensors[adapter.names[slot.key]]
            path = slot.site.path
            device = work.device or devices.get(path) or devices.setdefault(path, slot.device)
            _lay(slot, source, device, _dtype_for(slot, source, dtype, work), own=adapter.spec.trainable)
            meter.add(nbytes[slot.key], files=0)
        meter.add(0)


def _lay(slot: Slot, source: torch.Tensor, device: torch.device, dtype: torch.dtype, *, own: bool) -> None:
    value = source.to(device=device, dtype=dtype)
    # What will be trained gets memory of its own; the rest may stay mapped from its file.
    slot.put(value.clone() if own and value.data_ptr() == source.data_ptr() else value)


def _dtype_for(slot: Slot, source: torch.Tensor, asked: torch.dtype | None, work: Assembly) -> torch.dtype:
    """The dtype that a tensor is held in: as asked, else as stored; a whole saved module as the one that it replaces.

    A saved module runs in the place of the base's own, with inputs of the base's dtype.
    """
    if not source.is_floating_point():
        return source.dtype
    if asked is not None:
        return asked
    held = slot.tensor.dtype
    replaces = ".lora_" not in slot.key and "token_adapter" not in slot.key
    if replaces and held != source.dtype:
        work.notes.append(f"{slot.key} is stored as {source.dtype} and held as {held}, like the module it replaces")
        return held
    return source.dtype


def _torch_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), "the manifest has checked it"
    return found


def activate(work: Assembly) -> None:
    """Put every adapter in the state that the manifest declares; adapters that were there keep theirs."""
    known = record(work.peft)
    new = {adapter.name: adapter.spec for adapter in work.adapters}
    active = {name: weight for name, weight in active_adapters(work.peft).items() if name not in new}
    active.update({name: spec.weight for name, spec in new.items() if spec.active})
    set_active(work.peft, active)
    for name, spec in new.items():
        if spec.trainable:  # they all come frozen
            set_flags(work.peft, name, True)
    known.notes.extend(dict.fromkeys(work.notes))
    for note in dict.fromkeys(work.notes):
        logger.info("%s", note)


STEPS: Final[Mapping[str, Step]] = {
    step.__name__: step for step in (resolve, read, check, inject, cover, load, activate)
}
"""Name -> step, in the order in which they run."""
