"""From a manifest to a lock: refs, patterns, snapshots, other stores, and what is found nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly.resolve import lock_snapshot, resolve_manifest
from multilora_store.errors import ManifestError, NotInStoreError, StoreNotFoundError, UsageError
from multilora_store.manifest import AdapterSpec, Manifest
from multilora_store.plugins import Plugin, Registry
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, new_snapshot_id, open_store, read_peft_dir

CONFIG = AdapterConfig.parse({"peft_type": "LORA", "r": 1, "target_modules": ["q"]})


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"base_model.model.q.lora_{factor}.weight": torch.full((1, 1), value) for factor in "AB"}


@pytest.fixture
def filled(store: Store) -> Store:
    """`a` in two versions, the first tagged best; `team/a`, `team/b`."""
    store.put("a", tensors(1.0), CONFIG, tags=("best",))
    store.put("a", tensors(2.0), CONFIG)
    store.put("team/a", tensors(3.0), CONFIG)
    store.put("team/b", tensors(4.0), CONFIG)
    return store


def test_refs_become_versions(filled: Store) -> None:
    lock = resolve_manifest({"a": None, "x": "a@best", "z": {"source": "team/a", "weight": 0.5}}, filled)
    assert [entry.version for entry in lock] == [
        filled.resolve("a").id,
        filled.resolve("a@best").id,
        filled.resolve("team/a").id,
    ]
    assert all(entry.store == filled.url and entry.digest for entry in lock)
    assert lock.entries["z"].spec.weight == 0.5


@pytest.mark.parametrize("manifest", [{"team/*": None}, {"all": {"source": "team/*"}}, {"team/*": {"active": False}}])
def test_patterns_take_many(manifest: dict[str, Any], filled: Store) -> None:
    lock = resolve_manifest(manifest, filled)
    assert list(lock.entries) == ["team/a", "team/b"]
    as_values = Manifest({"all": AdapterSpec(name="all", source="team/*")})
    assert list(resolve_manifest(as_values, filled).entries) == ["team/a", "team/b"]


def test_patterns_that_take_none_or_twice(filled: Store) -> None:
    with pytest.raises(NotInStoreError, match=r"no adapter of .* matches 'tam/\*'"):
        resolve_manifest({"tam/*": None}, filled)
    with pytest.raises(ManifestError, match="'team/a' is named twice"):
        resolve_manifest({"team/a": None, "team/*": None}, filled)
    with pytest.raises(ManifestError, match="no store to look for them"):
        resolve_manifest({"team/*": None})


def test_found_nowhere_shows_both_lists(filled: Store) -> None:
    with pytest.raises(NotInStoreError, match="in neither the configuration nor the store") as caught:
        resolve_manifest({"aa": None}, filled, known=["b", "c"])
    assert "configuration: b, c; store: a, team/a, team/b" in caught.value.why
    assert caught.value.facts["stored"] == ["a", "team/a", "team/b"]
    with pytest.raises(NotInStoreError, match="worst"):
        resolve_manifest({"a": "a@worst"}, filled)


def test_what_is_declared_and_not_stored_is_no_misspelling(filled: Store) -> None:
    """The entry exists: the remedy is to bring the adapter, not to look for another name."""
    with pytest.raises(NotInStoreError, match=r"is declared, but the store .* does not hold 'aa'") as caught:
        resolve_manifest({"aa": None}, filled, known=["aa"])
    assert "if_missing=init" in caught.value.remedy


def test_sources_in_a_circle(filled: Store) -> None:
    with pytest.raises(ManifestError, match="in a circle: x -> z -> x"):
        resolve_manifest({"x": "z", "z": "x"}, filled)


def test_init_where_nothing_is_stored(filled: Store) -> None:
    fields = {"if_missing": "init", "config": {"r": 2, "target_modules": ["q"]}}
    lock = resolve_manifest({"new": fields, "a": fields}, filled)
    assert lock.entries["new"].fresh
    assert lock.entries["a"].version == filled.resolve("a").id
    assert resolve_manifest({"new": fields}).entries["new"].fresh


def test_no_store_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no store"):
        resolve_manifest({"a": None})
    with pytest.raises(StoreNotFoundError):
        resolve_manifest({"a": None}, open_store(tmp_path / "empty"))


def test_another_store_and_a_folder(filled: Store, tmp_path: Path) -> None:
    other = open_store(tmp_path / "other")
    version = other.put("a", tensors(9.0), CONFIG)
    folder = str(other.path("a"))
    lock = resolve_manifest({"a": {"store": other.url}, "f": folder}, filled)
    assert lock.entries["a"].version == version.id
    assert lock.entries["a"].store == other.url
    assert lock.entries["f"].version is None
    assert lock.entries["f"].digest == version.digest


def test_a_source_plugin_reads_its_scheme(filled: Store) -> None:
    folder = filled.path("a")
    reader = Plugin(kind="source", name="vault", target=lambda url: read_peft_dir(folder), origin="test")
    lock = resolve_manifest({"x": "vault://secret/a"}, registry=Registry([reader]))
    assert lock.entries["x"].digest == filled.resolve("a").digest


def test_a_snapshot_is_a_set_with_its_states(filled: Store) -> None:
    members = {
        "a": SnapshotMember(active=True, trainable=True, weight=0.25, version=filled.resolve("a@best").id),
        "team/a": SnapshotMember(active=False, trainable=False, weight=1.0, version=filled.resolve("team/a").id),
    }
    draft = SnapshotDraft(id=new_snapshot_id(), step=3, adapters=members, metadata={})
    filled.commit([], snapshot=draft)
    lock = lock_snapshot(filled)
    assert lock.snapshot == draft.id
    assert [(entry.name, entry.version) for entry in lock] == [(name, m.version) for name, m in members.items()]
    spec = lock.entries["a"].spec
    assert (spec.active, spec.trainable, spec.weight) == (True, True, 0.25)
