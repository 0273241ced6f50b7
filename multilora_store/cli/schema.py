# ruff: noqa: RUF009 - option() is dataclasses.field() with a line of documentation
"""The configuration of every command, typed once: names, types, defaults and one line on each.

Hydra composes into these; `--help` and the documentation are written from them. `Any` stands where a plugin decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from multilora_store.cli.settings import (
    AdapterEntry,
    Common,
    ManifestOptions,
    MergeChoice,
    Output,
    SaveOptions,
    SetOptions,
    ShardOptions,
    option,
)

__all__ = ["SCHEMAS", "AdapterEntry", "Common", "MergeChoice", "Output"]


@dataclass
class AssembleOptions(ManifestOptions):
    """Options of `assemble`."""

    merge: Any = option(None, "merge the set before the wrap: merge=ties merge.into=ab; the model carries `ab` alone")
    shard: ShardOptions = option(ShardOptions, "how to shard; shard=fsdp2")
    dtype: str | None = option(None, "one dtype for every adapter; null: as stored")
    device: str | None = option(None, "cpu, cuda, cuda:1; meta: structure without bytes; null: cuda under torchrun")
    seed: int = option(0, "seed of adapters that are created")
    allow_base_mismatch: bool = option(False, "accept adapters that were made for another base")
    lock: str | None = option(None, "write the resolved set to this file")
    export: str | None = option(None, "write every adapter as a PEFT folder under this folder")
    save: SaveOptions = option(SaveOptions, "save the set to the store; save=true, save.step=100")
    dry_run: bool = option(False, "print what would be assembled, touch nothing")


@dataclass
class ImportOptions(Common):
    """Options of `import`."""

    source: str = option(MISSING, "a PEFT folder, one of several, a checkpoint-N; a path, a URL, kohya://FILE, ...")
    name: str | None = option(None, "the adapter's name; null: the folder's or file's")
    reader: Any = option(None, "another layout: reader=kohya reader.params.component=unet; null: PEFT's")
    prefix: str = option("", "put before every name, e.g. team/")
    configs: dict[str, Any] = option({}, "out of a checkpoint of a whole model: configs.NAME=its adapter_config.json")
    allow_pickle: bool = option(False, "read pickles too, by restricted loading: .bin, .pt, distributed checkpoints")
    allow_rank_mismatch: bool = option(False, "take tensors whose rank is not the one that the configuration says")
    tags: list[str] = option([], "tags to set on what was imported")


@dataclass
class ExportOptions(Common):
    """Options of `export`."""

    ref: str | None = option(None, "an adapter, name@version, name@tag, or a pattern such as 'team/*'")
    target: str = option(MISSING, "the folder or URL to write; a pattern makes one folder for each name")
    kind: str = option("adapter", "adapter; or merged: base and adapters as one plain Hugging Face folder")
    adapters: dict[str, AdapterEntry] = option({}, "with kind=merged, several adapters instead of `ref`")
    base: Any = option(None, "with kind=merged, the base's folder: base=hf base.path=/models/llama")
    exporter: Any = option(None, "another layout: exporter=vllm exporter.params.max_rank=16; null: PEFT's")
    params: dict[str, Any] = option({}, "with kind=merged: params.modules_to_save=first, params.tied=refuse")


@dataclass
class PlanOptions(SetOptions):
    """Options of `plan`."""

    world_size: int = option(MISSING, "how many ranks")
    replicas: int = option(1, "replicas of the shards (HSDP); divides world_size")
    granularity: str = option("adapter", "adapter: one unit per block and adapter; layer: one per block; auto")
    optimizer: str = option("adamw", "whose state trainable adapters have: adamw, momentum, sgd, none")


@dataclass
class ReportOptions(Common):
    """Options of `report`."""

    pattern: str = option("*", "which adapters, e.g. 'team/*'")
    needs: bool = option(True, "read the newest version's header of each, for what a server needs")


@dataclass
class PathOptions(Common):
    """Options of `path`."""

    ref: str = option(MISSING, "an adapter, name@version or name@tag")


@dataclass
class ListOptions(Common):
    """Options of `list`."""

    pattern: str = option("*", "which names, e.g. 'team/*'")


@dataclass
class ShowOptions(Common):
    """Options of `show`."""

    ref: str = option(MISSING, "an adapter, name@version, name@tag; or the word plugins")
    tensors: bool = option(False, "list every tensor")


@dataclass
class LogOptions(Common):
    """Options of `log`."""

    name: str | None = option(None, "only entries that touch this adapter")
    limit: int = option(20, "how many entries, newest first; 0: all")


@dataclass
class SnapshotsOptions(Common):
    """Options of `snapshots`."""

    snapshot: str | None = option(None, "show this one in full: latest, or an id")


@dataclass
class TagOptions(Common):
    """Options of `tag`."""

    ref: str = option(MISSING, "the version to tag, e.g. a@latest")
    tag: str = option(MISSING, "the tag, e.g. best")
    remove: bool = option(False, "take the tag away instead")


@dataclass
class DeleteOptions(Common):
    """Options of `delete`."""

    ref: str | None = option(None, "one version: name@version, name@tag, or the newest of a bare name")
    all: bool = option(False, "every version of the adapter that a bare name names")
    snapshot: str | None = option(None, "a snapshot instead")


@dataclass
class RestoreOptions(Common):
    """Options of `restore`."""

    target: str | None = option(None, "a folder to write: a PEFT folder per adapter, the lock, the snapshot's files")
    snapshot: str = option("latest", "which snapshot: latest, or an id")
    to: str | None = option(None, "instead, a past state to bring back: the number of an entry, a date, a moment")
    adapters: list[str] = option(["*"], "with to: which adapters, by pattern")
    exact: bool = option(False, "with to: also remove what came later")
    dry_run: bool = option(False, "with to: print what would be done")


@dataclass
class VerifyOptions(Common):
    """Options of `verify`."""

    ref: str | None = option(None, "one adapter or version; null: the whole store")
    deep: bool = option(True, "read and hash every byte, not sizes alone")
    profile: str | None = option(None, "also ask whether a server would take each adapter: vllm")
    max_rank: int | None = option(None, "the server's rank setting, for the profile")


@dataclass
class DoctorOptions(ManifestOptions):
    """Options of `doctor`."""

    checkpoint: str | None = option(None, "another tool's checkpoint on this machine, instead of a store and a set")
    checks: dict[str, Any] = option({}, "which audit checks of plugins; none chosen: every one that is declared")
    allow_pickle: bool = option(False, "look into pickles of that checkpoint too, by restricted loading")


@dataclass
class MergeOptions(Common):
    """Options of `merge`."""

    adapters: dict[str, AdapterEntry] = option({}, "what to merge; adapters.a.weight=0.7 are the weights")
    merge: Any = option(None, "the strategy; merge=linear, merge.into=ab, merge.params.density=0.3")
    dry_run: bool = option(False, "compute and report, write nothing")


@dataclass
class DiffOptions(Common):
    """Options of `diff`."""

    left: str = option(MISSING, "an adapter or version")
    right: str = option(MISSING, "what to compare it with")


@dataclass
class SyncOptions(Common):
    """Options of `sync`."""

    source: str = option(MISSING, "the store to read, by URL")
    target: str = option(MISSING, "the store to bring up to date, by URL")
    include: list[str] = option(["*"], "which adapters, by pattern")
    exclude: list[str] = option([], "which not")
    snapshot: str | None = option(None, "just the set of one snapshot, with its files: latest, or an id")
    delete: bool = option(False, "delete in the target what the source has deleted")
    max_delete: int = option(100, "refuse to delete more than this")
    diverged: str = option("source", "whose `latest` wins where both moved: source, target, or refuse")
    tags: list[str] = option([], "just the versions with a tag like one of these")
    jobs: int = option(32, "how many files are under way at a time")
    bandwidth: float | None = option(None, "at most so many bytes a second")
    trusted_keys: list[str] | None = option(None, "short for store.trusted_keys: bring only what one of them signed")
    source_options: dict[str, Any] = option({}, "what the source's storage is told; before store.options")
    target_options: dict[str, Any] = option({}, "what the target's storage is told; before store.options")
    watch: float | None = option(None, "sync again every so many seconds, until Ctrl-C (exit code 0)")
    dry_run: bool = option(False, "print the plan, copy nothing")


@dataclass
class RepairOptions(Common):
    """Options of `repair`."""

    source: str | None = option(None, "another store to take whole copies from, by URL")
    source_options: dict[str, Any] = option({}, "what the source's storage is told; before store.options")
    deep: bool = option(True, "read and hash every byte first")
    dry_run: bool = option(False, "print what would be done, write nothing")


@dataclass
class GcOptions(Common):
    """Options of `gc`."""

    grace_hours: float = option(24.0, "keep what was purged less than this many hours ago")
    policies: dict[str, Any] = option({}, "first delete what none of them keeps: policies=[keep_last]")
    dry_run: bool = option(False, "print what would go, delete nothing")


SCHEMAS: Final[Mapping[str, type[Common]]] = MappingProxyType(
    {
        "assemble": AssembleOptions,
        "plan": PlanOptions,
        "import": ImportOptions,
        "export": ExportOptions,
        "path": PathOptions,
        "list": ListOptions,
        "report": ReportOptions,
        "show": ShowOptions,
        "log": LogOptions,
        "snapshots": SnapshotsOptions,
        "tag": TagOptions,
        "delete": DeleteOptions,
        "restore": RestoreOptions,
        "verify": VerifyOptions,
        "doctor": DoctorOptions,
        "merge": MergeOptions,
        "diff": DiffOptions,
        "sync": SyncOptions,
        "gc": GcOptions,
        "repair": RepairOptions,
    }
)
"""Command -> its options."""

for _verb, _schema in SCHEMAS.items():
    ConfigStore.instance().store(
        group="options", name=_verb, node=_schema, package="_global_", provider="multilora_store"
    )
