# ruff: noqa: RUF009 - option() is dataclasses.field() with a line of documentation
"""What commands have in common: the store, plugins, output, a set and its base, sharding, the choice of a merge."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

__all__ = [
    "AdapterEntry",
    "Common",
    "ManifestOptions",
    "MergeChoice",
    "Output",
    "SaveOptions",
    "SetOptions",
    "ShardOptions",
    "option",
]


def option(default: Any, doc: str) -> Any:
    """A field with a line of documentation; a list or mapping as default is copied for each instance."""
    if isinstance(default, (list, dict)) or (isinstance(default, type) and default is not type):
        factory = default if isinstance(default, type) else default.copy
        return field(default_factory=factory, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


class Output(Enum):
    """How results are printed."""

    table = "table"
    json = "json"


@dataclass
class StoreOptions:
    """Which store."""

    url: str | None = option("${oc.env:MULTILORA_STORE,null}", "the store's root: a folder or any fsspec URL")
    options: dict[str, Any] = option({}, "what the storage is told, e.g. {endpoint_url: ...}")
    demo: bool = option(False, "the embedded demo's own store")
    signing_key: str | None = option(None, "sign what is put: a file with an ed25519 private key, or env:NAME")
    trusted_keys: list[str] | None = option(None, "files of public keys; refuse to read what none of them signed")


@dataclass
class PluginOptions:
    """Which drop-in plugins."""

    paths: list[str] = option([], "drop-in files and folders; plugins=[...] is short for this")
    strict: bool = option(False, "a broken plugin is an error, not a warning")


@dataclass
class Common:
    """What every command takes."""

    store: StoreOptions = option(StoreOptions, "which store")
    plugins: PluginOptions = option(PluginOptions, "drop-in plugins")
    output: Output = option(Output.table, "table, or one JSON document")
    quiet: bool = option(False, "print errors only")
    verbose: bool = option(False, "print the library's log too")


@dataclass
class AdapterEntry:
    """One adapter of the manifest."""

    source: str | None = option(None, "a ref, a path that starts with / or ./, or a URL; its own name by default")
    store: str | None = option(None, "another store's URL for this entry")
    if_missing: str = option("error", "error, or init: create it from `config`")
    config: Any = option(None, "fields of a PEFT configuration, for init")
    active: bool = option(True, "takes part in the forward")
    trainable: bool = option(False, "receives gradients")
    weight: float = option(1.0, "its share when it is active")
    dtype: str | None = option(None, "float32, bfloat16, ...; null: as stored")


@dataclass
class ShardOptions:
    """How the assembled model is sharded; `shard=fsdp2` and `shard=fsdp1` choose it."""

    backend: str | None = option(None, "fsdp2, fsdp1, or null: not at all")
    granularity: str = option("adapter", "adapter: one unit per block and adapter; layer: one per block; auto")
    load: str = option(
        "all", "all: each rank reads base and adapters; first: one does, and sends the others their shards"
    )


@dataclass
class SaveOptions:
    """Whether the assembled set is saved; `save=true` is short for save.enabled=true."""

    enabled: bool = option(False, "save every adapter and a snapshot, in one commit")
    step: int | None = option(None, "the training step to record")
    profile: str | None = option(None, "also say whether a server would take each adapter: vllm")


@dataclass
class SetOptions(Common):
    """What every command takes that works on a set."""

    adapters: dict[str, AdapterEntry] = option({}, "the set, by name; +adapters=[a,b] chooses")
    snapshot: str | None = option(None, "take the set from a snapshot: latest, or an id")
    lock_from: str | None = option(None, "take the set from a lock file")
    base: Any = option(None, "the base model; base=hf, base=demo, base=python choose")


@dataclass
class ManifestOptions(SetOptions):
    """What every command takes that assembles a set."""

    assembler: Any = option(None, "another assembler than the default")
    steps: dict[str, Any] = option({}, "steps of the assembly that differ: steps.load=NAME, steps.after_load=NAME")


@dataclass
class MergeChoice:
    """The strategy and what all strategies share."""

    strategy: str = option("linear", "by name; merge=ties chooses it with its own parameters")
    into: str = option(MISSING, "the name of the merged adapter")
    rank: int | None = option(None, "rank of the result; null: the strategy's own choice")
    seed: int = option(0, "seed of strategies that draw")
    modules_to_save: Any = option("refuse", "modules trained in full: refuse, first, mean, an adapter, {module: rule}")
    dtype: str | None = option(None, "dtype of the result; null: the one they share")
    if_exists: str = option("error", "error, or version: add a version to `into`")
    params: Any = option({}, "the strategy's own parameters")
