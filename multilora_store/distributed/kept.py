"""What a model was when it was last saved or restored, so that what nobody has touched since does not even travel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch import nn

from multilora_store.assembly.bridge import peft_model
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.auditing import checksum
from multilora_store.distributed.layout import AdapterLayout
from multilora_store.storage import Store, Version

__all__ = ["kept_versions", "local_digest", "unchanged"]

_kept: WeakKeyDictionary[nn.Module, dict[str, tuple[str, str, Version]]] = WeakKeyDictionary()


def local_digest(adapter: AdapterLayout) -> str:
    """A digest of this rank's pieces of one adapter."""
    total = hashlib.sha256(repr(adapter.config.canonical()).encode())
    for key, layout in adapter.layouts.items():
        total.update(f"{key} {layout.shape} {layout.dim} {layout.bounds}".encode())
        total.update(checksum(layout.local(adapter.tensors[key])).encode())
    return total.hexdigest()


def kept_versions(model: nn.Module) -> dict[str, tuple[str, str, Version]]:
    """Name -> (store URL, local digest, version) as the last save or restore left it."""
    return _kept.setdefault(peft_model(model), {})


def unchanged(
    model: nn.Module, store: Store, ranks: Ranks, fresh: Mapping[str, str], known: Mapping[str, Mapping[str, Version]]
) -> dict[str, Version]:
    """Adapters whose pieces no rank has touched since they were a version that this store still holds."""
    kept = kept_versions(model)
    mine = [
        name
        for name, digest in fresh.items()
        if name in kept and kept[name][:2] == (store.url, digest) and kept[name][2].id in known.get(name, {})
    ]
    everywhere = set(mine).intersection(*map(set, ranks.share("unchanged adapters", mine)))
    return {name: kept[name][2] for name in fresh if name in everywhere}
