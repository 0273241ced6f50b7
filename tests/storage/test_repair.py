"""repair mends from another store, moves the rest aside, and leaves what is whole alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from samples import CONFIG, same, tensors

from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store, repair, sync
from multilora_store.storage.journal import HEAD


def flip(store: Store, directory: str, file: str = "adapter_model.safetensors") -> bytes:
    path = Path(store.url) / directory / file
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    return bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "store")
    store.put("a", tensors(1), CONFIG)
    store.put("a", tensors(2), CONFIG)
    record = store.stage_snapshot_file("s1", "state.json", b'{"step": 1}')
    draft = SnapshotDraft(id="s1", adapters={"b": SnapshotMember()}, files={"state.json": record})
    store.commit([store.stage("b", tensors(3), CONFIG)], snapshot=draft)
    return store


def test_a_whole_store_is_left_alone(store: Store) -> None:
    seq = store.state().seq
    report = repair(store)
    assert report.ok
    assert (report.findings, report.seq, report.quarantined) == ((), None, ())
    assert store.state().seq == seq


@pytest.mark.parametrize("how", ["flip", "cut", "remove", "record"])
def test_damage_is_mended_where_it_lies_and_the_bad_bytes_are_kept(how: str, store: Store, tmp_path: Path) -> None:
    sync(store, tmp_path / "other")
    old = store.versions("a")[0]
    path = tmp_path / "store" / old.directory / "adapter_model.safetensors"
    bad = path.read_bytes()[:-9]
    match how:
        case "flip":
            bad = flip(store, old.directory)
        case "cut":
            path.write_bytes(bad)
        case "remove":
            path.unlink()
        case "record":
            flip(store, old.directory, "version.json")
    latest, seq = store.resolve("a").id, store.state().seq
    assert not store.verify().ok
    assert repair(store, from_=open_store(tmp_path / "other"), dry_run=True).plan.mend
    report = repair(store, from_=open_store(tmp_path / "other"))
    assert report.ok
    assert list(report.plan.mend) == [old.directory]
    assert store.verify().ok
    assert (store.resolve("a").id, store.state().seq) == (latest, seq)  # no entry is needed
    if how in ("flip", "cut"):
        kept = f"quarantine/{old.directory}/adapter_model.safetensors"
        assert kept in report.quarantined
        assert store.blobs.read(kept) == bad


def test_equal_content_in_other_bytes_is_put_in_a_new_folder_and_the_order_stays(store: Store, tmp_path: Path) -> None:
    other = open_store(tmp_path / "other")
    files = {
        "adapter_model.safetensors": (
            tmp_path / "store" / store.versions("a")[0].directory / "adapter_model.safetensors"
        ).read_bytes(),
        "adapter_config.json": b'{"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":["v_proj","q_proj"],'
        b'"base_model_name_or_path":"tiny"}',
    }
    other.put("elsewhere", {}, CONFIG, files=files)
    old = store.versions("a")[0]
    assert other.resolve("elsewhere").id == old.id
    flip(store, old.directory)
    order = [v.id for v in store.versions("a")]
    report = repair(store, from_=other)
    assert report.ok
    assert list(report.plan.renew) == [old.directory]
    assert [v.id for v in store.versions("a")] == order
    assert store.versions("a")[0].directory != old.directory
    assert same(store.get(f"a@{old.id}").tensors, tensors(1))
    assert store.verify().ok


def test_what_nobody_holds_is_deleted_unless_it_is_named(store: Store) -> None:
    flip(store, store.resolve("a").directory)
    flip(store, store.resolve("b").directory)
    report = repair(store)
    assert not report.ok
    assert [str(version) for version in report.plan.aside] == [str(report.plan.aside[0])]
    assert same(store.get("a").tensors, tensors(1))  # latest falls back to the newest whole one
    assert any("snapshot s1" in words for words in report.plan.left)
    assert store.names() == ["a", "b"]
    assert report.to_json()["deleted"]


def test_a_snapshots_file_is_mended(store: Store, tmp_path: Path) -> None:
    sync(store, tmp_path / "other")
    flip(store, "snapshots/s1", "state.json")
    assert not repair(store, dry_run=True).ok
    assert repair(store, from_=open_store(tmp_path / "other")).ok
    assert store.read_snapshot_file(store.snapshot("s1"), "state.json") == b'{"step": 1}'


def test_hints_and_checkpoints_are_made_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    version = store.put("a", tensors(1), CONFIG)
    for n in range(70):
        store.tag(f"a@{version.id}", f"t{n}")
    checkpoint = tmp_path / "store" / "journal" / "00000064.state.json"
    good = checkpoint.read_bytes()
    checkpoint.write_bytes(good[:100])
    (tmp_path / "store" / HEAD).write_bytes(b"nonsense")
    fresh = open_store(tmp_path / "store")
    repair(fresh)
    assert checkpoint.read_bytes() == good
    assert open_store(tmp_path / "store").journal.peek() == store.log()[-1]


def spoil(root: Path, seq: int, how: str) -> Path:
    path = root / f"journal/{seq:08d}.json"
    data = path.read_bytes()
    match how:
        case "remove":
            path.unlink()
        case "cut":
            path.write_bytes(data[:40])
        case "alter":
            path.write_bytes(data.replace(b'"nbytes":', b'"nbytes":9'))
    return path


@pytest.fixture
def copied(tmp_path: Path) -> tuple[Path, Path]:
    """A store of five entries, and a copy of its files that knows one more."""
    store = open_store(tmp_path / "store")
    for seed in range(5):
        store.put("a", tensors(seed, layers=1), CONFIG)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    open_store(tmp_path / "copy").put("a", tensors(5, layers=1), CONFIG)
    return tmp_path / "store", tmp_path / "copy"


# Of the last entry only its own bytes tell that something is wrong.
LOSSES = [(seqs, how) for seqs in [(1,), (3,), (2, 4), (1, 2, 3, 4)] for how in ("remove", "cut", "alter")]


@pytest.mark.parametrize(("seqs", "how"), [*LOSSES, ((5,), "cut")])
def test_entries_come_back_from_a_copy_of_the_store(seqs: tuple[int, ...], how: str, copied: tuple[Path, Path]) -> None:
    """As far as later entries that both hold, or the hint, name their digests; the damaged bytes are kept."""
    root, copy = copied
    whole = open_store(root).state().to_bytes()
    for seq in seqs:
        spoil(root, seq, how)
    store = open_store(root)
    assert not store.verify().ok
    assert not repair(store).ok
    planned = repair(store, from_=open_store(copy), dry_run=True)
    assert (planned.plan.entries, planned.ok) == (seqs, True)
    assert not open_store(root).verify().ok
    report = repair(store, from_=open_store(copy))
    assert (report.ok, report.plan.entries) == (True, seqs)
    assert len(report.quarantined) == (0 if how == "remove" else len(seqs))
    assert open_store(root).verify().ok
    assert open_store(root).state().to_bytes() == store.state().to_bytes() == whole
    for seq in range(1, 6):
        name = f"journal/{seq:08d}.json"
        assert (root / name).read_bytes() == (copy / name).read_bytes()


def test_an_entry_that_nothing_proves_is_left(copied: tuple[Path, Path]) -> None:
    root, copy = copied
    spoil(root, 5, "cut")
    (root / HEAD).unlink()
    report = repair(open_store(root), from_=open_store(copy))
    assert report.plan.entries == ()
    assert "nothing that both hold follows entry 5" in report.plan.left[-1]
    assert not report.ok


def test_a_synced_store_has_entries_of_its_own(copied: tuple[Path, Path], tmp_path: Path) -> None:
    root, _ = copied
    sync(root, tmp_path / "synced")
    spoil(root, 2, "remove")
    report = repair(open_store(root), from_=open_store(tmp_path / "synced"))
    assert "history of its own" in report.plan.left[-1]
    assert open_store(tmp_path / "synced").verify().ok
    assert not open_store(root).verify().ok
