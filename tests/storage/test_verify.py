"""Verify: every fault that a file can have, told apart."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import CONFIG, tensors

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import NotInStoreError
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store
from multilora_store.storage.progress import Progress
from multilora_store.storage.verify import rank_faults

MODEL = "adapter_model.safetensors"


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> Store:
    store = open_store(tmp_path / "store" if request.param == "local" else memory_url)
    store.put("good", tensors(0), CONFIG)
    store.put("a", tensors(1), CONFIG)
    return store


def change(store: Store, file: str, make: Any) -> None:
    key = f"{store.resolve('a').directory}/{file}"
    store.blobs.write(key, make(store.blobs.read(key)))


def test_a_whole_store_has_no_findings(store: Store) -> None:
    for deep in (True, False):
        report = store.verify(deep=deep)
        assert report.ok
        assert (report.versions, report.snapshots, report.deep) == (2, 0, deep)
        assert report.nbytes > 0
    assert store.verify("a").versions == 1
    with pytest.raises(NotInStoreError):
        store.verify("nobody")


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize(
    ("file", "make", "kinds", "words"),
    [
        (MODEL, lambda data: data[:-1], {"size", "header"}, "truncated"),
        (MODEL, lambda data: b"", {"size", "header"}, "0 bytes"),
        (MODEL, lambda data: data[:7], {"size", "header"}, "7 bytes"),
        (MODEL, lambda data: pickle.dumps([1.0] * len(data)), {"size", "header"}, "pickle"),
        (MODEL, lambda data: b"version https://git-lfs.github.com/spec/v1\n", {"size", "header"}, "Git-LFS"),
        (MODEL, lambda data: data.replace(b"q_proj", b"k_proj"), {"header"}, "header is not the recorded one"),
        ("adapter_config.json", lambda data: data.replace(b"2", b"4", 1), {"config", "shape"}, "SHA-256"),
        ("adapter_config.json", lambda data: data[:10], {"config"}, "SHA-256"),
        ("version.json", lambda data: data[:-1], {"record"}, "SHA-256"),
    ],
)
def test_faults_are_told_apart(store: Store, deep: bool, file: str, make: Any, kinds: set[str], words: str) -> None:
    """Cases 4, 8."""
    change(store, file, make)
    report = store.verify(deep=deep)
    assert not report.ok
    assert {finding.kind for finding in report.findings} <= kinds
    assert {finding.subject for finding in report.findings} == {str(store.resolve("a"))}
    assert words in " ".join(finding.message for finding in report.findings)
    assert all(finding.path.startswith("adapters/a/") for finding in report.findings)
    assert store.verify("good", deep=deep).ok


def test_a_flipped_bit_is_found_when_every_byte_is_read(store: Store) -> None:
    change(store, MODEL, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert store.verify(deep=False).ok
    (finding,) = store.verify().findings
    assert (finding.kind, "SHA-256 of tensor" in finding.message) == ("hash", True)


@pytest.mark.parametrize("file", [MODEL, "adapter_config.json", "version.json"])
def test_missing_files_are_named(store: Store, file: str) -> None:
    """Case 37."""
    store.blobs.delete([f"{store.resolve('a').directory}/{file}"])
    for deep in (True, False):
        (finding,) = store.verify(deep=deep).findings
        assert finding.kind == "missing"
        assert file in finding.path


def test_nonfinite_tensors_are_found(store: Store) -> None:
    bad = tensors(2)
    bad[next(iter(bad))][0, 0] = float("nan")
    store.put("bad", bad, CONFIG, allow_nonfinite=True)
    (finding,) = store.verify().findings
    assert finding.kind == "nonfinite"
    assert next(iter(bad)) in finding.message


def test_ranks_that_contradict_the_config_are_found(store: Store) -> None:
    """Case 2: the stored shape is compared with the shape that the configuration gives."""
    store.put("wrong", tensors(3, rank=4), CONFIG)
    findings = store.verify(deep=False).findings
    assert {finding.kind for finding in findings} == {"shape"}
    assert "rank 4, the configuration says 2" in findings[0].message
    assert len(findings) == len(tensors(3))


def test_rank_patterns_and_other_shapes_are_understood() -> None:
    config = AdapterConfig.parse({**CONFIG, "rank_pattern": {"layers.1.self_attn.v_proj": 5}})
    shapes = {
        "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight": (2, 8),
        "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight": (5, 8),
        "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight": (8, 5),
        "base_model.model.embed.lora_embedding_A": (2, 100),
        "base_model.model.embed.lora_embedding_B": (8, 2),
        "base_model.model.conv.lora_A.weight": (2, 3, 3, 3),
        "base_model.model.conv.lora_B.weight": (8, 2, 1, 1),
        "base_model.model.lm_head.weight": (100, 8),
        "base_model.model.x.lora_magnitude_vector": (8,),
    }
    assert list(rank_faults(config, shapes)) == []
    other = AdapterConfig.parse({"peft_type": "IA3", "target_modules": ["k"]})
    assert list(rank_faults(other, {"base_model.model.k.lora_A.weight": (99, 1)})) == []


def test_snapshots_and_the_journal_are_checked(store: Store) -> None:
    record = store.stage_snapshot_file("s1", "state.json", b"12345")
    member = SnapshotMember(version=store.resolve("a").id)
    store.commit([], snapshot=SnapshotDraft(id="s1", adapters={"a": member}, files={"state.json": record}))
    assert store.verify().ok
    store.blobs.write("snapshots/s1/state.json", b"12346")
    assert [finding.kind for finding in store.verify().findings] == ["hash"]
    assert store.verify(deep=False).ok
    store.blobs.write("snapshots/s1/state.json", b"1")
    assert [finding.kind for finding in store.verify(deep=False).findings] == ["size"]
    store.blobs.delete(["snapshots/s1/state.json"])
    assert [finding.kind for finding in store.verify().findings] == ["missing"]
    store.drop_snapshot("s1")
    store.blobs.write("journal/00000009.json", store.blobs.read("journal/00000001.json"))
    (finding,) = store.verify().findings
    assert (finding.kind, finding.path) == ("journal", "journal/00000009.json")


def test_progress_counts_every_version(store: Store) -> None:
    seen: list[Progress] = []
    store.verify(progress=seen.append)
    assert sorted({one.files for one in seen}) == [0, 1, 2]
    assert seen[-1].nbytes == seen[-1].nbytes_total == sum(version.nbytes for version in store.state().live())


def test_foreign_files_without_tensors_are_refused_at_the_door(store: Store) -> None:
    from multilora_store.errors import UsageError
    from multilora_store.storage.codec import encode

    part = encode({"x": torch.ones(1)}).parts
    assert len(part) == 2
    empty = (2).to_bytes(8, "little") + b"{}"
    with pytest.raises(UsageError, match="no tensors"):
        store.put("e", {}, CONFIG, files={MODEL: empty, "adapter_config.json": AdapterConfig.parse(CONFIG).to_json()})
