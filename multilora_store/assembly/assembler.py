"""assemble(): a base with every adapter of a set on it, before any wrap."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn

from multilora_store.assembly.bridge.record import carrier
from multilora_store.assembly.bridge.unwrap import unwrap
from multilora_store.assembly.fingerprint import BaseIdentity
from multilora_store.assembly.rollback import untouched_on_failure
from multilora_store.assembly.steps import STEPS, Assembly, Step
from multilora_store.errors import ManifestError, UsageError, choices
from multilora_store.manifest import DTYPES, Lock, Manifest
from multilora_store.plugins import Registry, default_registry
from multilora_store.storage.arguments import as_mapping

if TYPE_CHECKING:
    from multilora_store.storage import Store
    from multilora_store.storage.progress import Listener

__all__ = ["assemble", "default_assembler"]

Assembler = Callable[[Assembly, Mapping[str, Step]], PeftModel]


def assemble(
    base: nn.Module,
    adapters: Mapping[str, Any] | Manifest | Lock,
    *,
    store: Store | str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    assembler: str | Assembler = "default",
    steps: Mapping[str, str | Step] | None = None,
    rename: Mapping[str, str] | None = None,
    identity: BaseIdentity | None = None,
    allow_base_mismatch: bool = False,
    registry: Registry | None = None,
    progress: Listener | None = None,
) -> PeftModel:
    """Build the model that carries every adapter of a set, in the manifest's order, before any wrap.

    Equal to what PEFT builds by its own calls one after another, at a cost linear in the bytes of the adapters. The
    base is changed in place, as PEFT does it; when anything fails it is as it was. A base that already carries
    adapters is added to. No adapter that was there changes its values, flags, dtype or device, and neither the mode
    (train or eval) nor the global random state moves.

    Args:
        base: Any module, a Hugging Face model, or a PeftModel. A base that an earlier assembly has put adapters on
            stands for the PeftModel around it.
        adapters: Name -> source, fields or `AdapterSpec`; a manifest; a lock.
        store: The store of entries that name none, or its URL.
        dtype: One dtype for every adapter; None: as each entry says, else as stored.
        device: Where the adapters' tensors go; None: to the layer each is on. `meta`: structure without bytes.
        seed: Of fresh adapters; their weights depend on (seed, adapter, tensor) alone.
        assembler: The name of an assembler plugin, or an assembler.
        steps: Steps that differ: the name of a step, or `before:` or `after:` one, -> the name of an `assembly_step`
            plugin, or a function.
        rename: Beginning of a path in the files -> beginning on the model, for files of another layout.
        identity: The base's name and revision, where it does not tell them itself.
        allow_base_mismatch: Take adapters that were made for another base.
        registry: Where plugins are looked up; the default one if None.
        progress: Called after each adapter that is loaded.

    Returns:
        The PeftModel; `bridge.record(model)` tells what it carries.

    Raises:
        UsageError: the base is no module, or carries adapters outside a PeftModel; the device is none that torch
            knows.
        ManifestError: the declaration is wrong.
        NotInStoreError: an adapter that is found nowhere.
        UnsupportedError: a kind of adapter or a combination that is refused; nothing was touched.
        BaseMismatchError: an adapter was made for another base.
        CoverageError: tensors and places do not match in full; the base is as it was.
    """
    plugins = registry or default_registry()
    if not isinstance(base, nn.Module):
        raise UsageError(f"the base is a {type(base).__name__}, not a torch.nn.Module", remedy="build the model first")
    if not isinstance(adapters, (Manifest, Lock)) and not (isinstance(adapters, Mapping) and adapters):
        Manifest.from_mapping(adapters)  # says what is wrong with it
    if len(adapters) == 0:
        raise ManifestError("the manifest is empty", remedy="choose adapters, e.g. +adapters=[a,b]")
    work = Assembly(
        base=carrier(base),
        manifest=adapters,
        store=_store(store),
        dtype=_dtype(dtype),
        device=_device(device),
        seed=seed,
        rename=rename or {},
        identity=identity,
        allow_base_mismatch=allow_base_mismatch,
        registry=plugins,
        progress=progress,
    )
    chosen = plugins.get("assembler", assembler).load() if isinstance(assembler, str) else assembler
    if not callable(chosen):
        raise UsageError(f"the assembler is {chosen!r:.80}", remedy="give the name of a plugin, or a function")
    model = chosen(work, arrange(as_mapping(steps or {}, "steps"), plugins))
    if not isinstance(model, PeftModel):
        raise UsageError(f"assembler {assembler!r} returned a {type(model).__name__}, not a PeftModel")
    return model


def default_assembler(work: Assembly, steps: Mapping[str, Step] = STEPS) -> PeftModel:
    """Run the steps in order; when one fails, the base is as it was."""
    with untouched_on_failure(unwrap(work.base)), _no_collection():
        for step in steps.values():
            step(work)
    return work.peft


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector still: it would walk all new modules again and again, and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def arrange(changes: Mapping[str, str | Step], registry: Registry) -> dict[str, Step]:
    """The steps with `changes` worked in: replaced by name, or added `before:` or `after:` a name.

    Raises:
        UsageError: there is no such step; the steps are listed.
        PluginError: there is no such plugin.
    """
    resolved = {
        key: registry.get("assembly_step", step).load() if isinstance(step, str) else step
        for key, step in changes.items()
    }
    for key in resolved:
        where, colon, name = key.rpartition(":")
        if name not in STEPS or (colon and where not in ("before", "after")):
            raise UsageError(
                f"there is no step {key!r} of the assembly",
                remedy=f"{choices(name, STEPS, noun='step')}; or before:<step>, after:<step>",
            )
    return dict(_arranged(resolved))


def _arranged(changes: Mapping[str, Step]) -> Iterator[tuple[str, Step]]:
    for name, step in STEPS.items():
        for key, chosen in ((f"before:{name}", None), (name, step), (f"after:{name}", None)):
            found = changes.get(key, chosen)
            if found is not None:
                yield key, found


def _store(given: Store | str | os.PathLike[str] | None) -> Store | None:
    from multilora_store.storage import as_store

    return None if given is None else as_store(given)


def _device(given: str | torch.device | None) -> torch.device | None:
    try:
        return None if given is None else torch.device(given)
    except RuntimeError as error:
        raise UsageError(f"unknown device {given!r}", remedy="e.g. cpu, cuda, cuda:1, meta") from error


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    if given not in DTYPES:
        raise ManifestError(f"unknown dtype {given!r}", remedy=choices(given, DTYPES, noun="dtype"))
    found = getattr(torch, given)
    assert isinstance(found, torch.dtype)
    return found
