"""gc frees what nothing names, nothing else, whatever runs beside it and wherever it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from faulty import Fault, FaultyBlobs
from samples import CONFIG, same, tensors

from multilora_store.errors import ConflictError, PurgedError, StorageError, UsageError
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store
from multilora_store.storage.gc import Directory, plan_gc
from multilora_store.storage.local import LocalBlobs
from multilora_store.storage.marker import Marker
from multilora_store.storage.state import State

NOW = timedelta(0)
HOUR = timedelta(hours=1)


def age(store: Store, path: str, by: timedelta) -> None:
    """Makes every file below `path` older."""
    root = Path(store.url) / path
    for file in [root] if root.is_file() else root.rglob("*"):
        if file.is_file():
            moment = file.stat().st_mtime - by.total_seconds()
            os.utime(file, (moment, moment))


def keys(store: Store) -> set[str]:
    return {info.key for info in store.blobs.list("adapters/")} | {info.key for info in store.blobs.list("snapshots/")}


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> Store:
    return open_store(tmp_path / "store" if request.param == "local" else memory_url)


def test_what_is_live_stays_and_what_is_deleted_goes(store: Store) -> None:
    first = store.put("a", tensors(1), CONFIG)
    second = store.put("a", tensors(2), CONFIG)
    store.put("b", tensors(3), CONFIG)
    store.delete(f"a@{first.id}")
    report = store.gc(grace=NOW)
    assert [d.path for d in report.purged] == [d.path for d in report.freed] == [first.directory]
    assert report.nbytes == first.nbytes
    assert report.seq == store.state().seq
    assert not any(key.startswith(first.directory) for key in keys(store))
    assert same(store.get("a").tensors, tensors(2))
    assert second.directory in {d.path for d in report.kept}
    with pytest.raises(PurgedError, match=f"entry {report.seq}"):
        store.resolve(f"a@{first.id}")
    assert store.verify().ok


def test_a_second_gc_has_nothing_to_do_and_makes_no_entry(store: Store) -> None:
    store.delete(str(store.put("a", tensors(1), CONFIG)))
    store.put("a", tensors(2), CONFIG)
    store.gc(grace=NOW)
    before = store.state().seq
    report = store.gc(grace=NOW)
    assert (report.purged, report.freed, report.seq) == ((), (), None)
    assert store.state().seq == before


def test_shared_content_stays_until_its_last_user_is_gone(store: Store) -> None:
    store.put("a", tensors(1), CONFIG)
    store.put("b", tensors(1), CONFIG)
    store.delete("a")
    assert store.gc(grace=NOW).freed == ()
    assert same(store.get("b").tensors, tensors(1))
    store.delete("b")
    assert len(store.gc(grace=NOW).freed) == 1
    assert keys(store) == set()


def test_content_that_was_purged_can_be_stored_again(store: Store) -> None:
    first = store.put("a", tensors(1), CONFIG)
    store.delete("a")
    store.gc(grace=NOW)
    again = store.put("a", tensors(1), CONFIG)
    assert again.id == first.id
    assert again.directory != first.directory
    store.gc(grace=NOW)
    assert same(store.get("a").tensors, tensors(1))


def test_dry_run_says_what_and_why_and_changes_nothing(store: Store) -> None:
    gone = store.put("a", tensors(1), CONFIG)
    kept = store.put("a", tensors(2), CONFIG, tags=("best",))
    store.commit([], snapshot=SnapshotDraft(id="s1", adapters={"a": SnapshotMember(version=kept.id)}))
    store.delete(f"a@{gone.id}")
    before, seq = keys(store), store.state().seq
    report = store.gc(grace=NOW, dry_run=True)
    assert (keys(store), store.state().seq) == (before, seq)
    assert [(d.path, d.why) for d in report.purged] == [(gone.directory, f"a@{gone.id} was deleted by entry {seq}")]
    assert report.freed == report.purged
    why = {d.path: d.why for d in report.kept}[kept.directory]
    assert why == f"a@{kept.id}, tag best, snapshot s1"
    assert report.to_json()["purged"][0]["files"] == 3
    assert store.gc(grace=HOUR, dry_run=True).freed == ()


def test_grace_is_counted_from_the_purge_by_the_storages_clock(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = store.put("a", tensors(1), CONFIG)
    store.delete("a")
    first = store.gc(grace=HOUR)
    assert [d.path for d in first.purged] == [version.directory]
    assert first.freed == ()
    assert store.gc(grace=HOUR).freed == ()
    age(store, "adapters", timedelta(days=3))  # the age of the files says nothing
    assert store.gc(grace=HOUR).freed == ()
    age(store, f"journal/{first.seq:08d}.json", 2 * HOUR)
    assert [d.path for d in store.gc(grace=HOUR).freed] == [version.directory]


def test_an_upload_that_no_entry_names_is_kept_for_the_grace_period(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("b", tensors(2), CONFIG)
    staged = store.stage("a", tensors(1), CONFIG)
    report = store.gc(grace=HOUR)
    assert report.purged == ()
    assert "perhaps a save at work" in {d.path: d.why for d in report.kept}[staged.put.directory]
    store.commit([staged])
    assert same(store.get("a").tensors, tensors(1))


def test_a_writer_whose_upload_was_purged_uploads_again(store: Store) -> None:
    """The clock-free rule: a purge between upload and commit loses nothing."""
    store.put("b", tensors(2), CONFIG)
    staged = store.stage("a", tensors(1), CONFIG)
    assert [d.path for d in store.gc(grace=NOW).freed] == [staged.put.directory]
    store.commit([staged])
    assert store.get("a").version.directory != staged.put.directory
    assert same(store.get("a").tensors, tensors(1))


def test_a_snapshot_whose_files_were_purged_is_refused(store: Store) -> None:
    version = store.put("a", tensors(1), CONFIG)
    record = store.stage_snapshot_file("s1", "state.json", b"{}")
    assert [d.path for d in store.gc(grace=NOW).freed] == ["snapshots/s1"]
    draft = SnapshotDraft(id="s1", adapters={"a": SnapshotMember(version=version.id)}, files={"state.json": record})
    with pytest.raises(ConflictError, match="were purged before the commit"):
        store.commit([], snapshot=draft)
    assert store.snapshots() == []


def test_a_dropped_snapshots_files_go_and_foreign_files_stay(store: Store) -> None:
    version = store.put("a", tensors(1), CONFIG)
    record = store.stage_snapshot_file("s1", "state.json", b"{}")
    draft = SnapshotDraft(id="s1", adapters={"a": SnapshotMember(version=version.id)}, files={"state.json": record})
    store.commit([], snapshot=draft)
    store.blobs.write("adapters/notes/readme.txt/x", b"mine")
    assert store.gc(grace=NOW).freed == ()
    store.drop_snapshot("s1")
    assert [d.path for d in store.gc(grace=NOW).freed] == ["snapshots/s1"]
    assert store.blobs.read("adapters/notes/readme.txt/x") == b"mine"


def test_a_negative_grace_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="grace"):
        store.gc(grace=timedelta(seconds=-1))


def test_temporary_files_of_killed_writers_are_swept_when_they_are_old(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", tensors(1), CONFIG)
    folder = tmp_path / "adapters" / "b" / "v0123456789abcdef-abcdef"
    folder.mkdir(parents=True)
    old, young = folder / ".tmp~x~1", tmp_path / "journal" / ".tmp~y~2"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    age(store, "adapters/b", timedelta(days=2))
    store.gc()
    assert not folder.parent.exists()
    assert young.exists()


def test_the_plan_keeps_a_named_folder_whatever_a_purge_says() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    path = "snapshots/s1"
    directory = Directory(path=path, keys=(f"{path}/x",), nbytes=1, newest=moment)
    state = State(store_id="i", purged={path: 3})
    old = plan_gc(state, [directory], purged_at={3: moment}, now=moment + HOUR, grace=HOUR)
    assert [d.path for d in old.free] == [path]
    unknown = plan_gc(state, [directory], purged_at={}, now=moment + HOUR, grace=NOW)
    assert unknown.free == ()


@pytest.mark.parametrize("fault", ["fail", "truncate", "lose the answer"])
def test_a_storage_that_fails_at_any_call_loses_nothing(fault: Fault, tmp_path: Path) -> None:
    at = 0
    while True:
        root = tmp_path / f"{fault}-{at}"
        store = open_store(root)
        store.put("a", tensors(1), CONFIG)
        store.put("a", tensors(2), CONFIG)
        store.delete(str(store.versions("a")[0]))
        store.stage("b", tensors(3), CONFIG)
        faulty = FaultyBlobs(LocalBlobs(root), at, fault)
        with contextlib.suppress(StorageError):
            Store(faulty).gc(grace=NOW)
        fresh = open_store(root)
        assert same(fresh.get("a").tensors, tensors(2)), (fault, at)
        assert fresh.verify().ok
        fresh.gc(grace=NOW)
        named = {version.directory for version in fresh.state().live()}
        assert {key.rpartition("/")[0] for key in keys(fresh)} == named, (fault, at)
        if len(faulty.calls) <= at:
            break
        at += 1
    assert at > 8


def test_in_single_writer_mode_a_gc_waits_for_the_save_and_takes_two_calls(tmp_path: Path) -> None:
    (tmp_path / "multilora-store.json").write_bytes(Marker(id="one", reads=("single-writer",)).to_bytes())
    store = open_store(tmp_path)
    version = store.put("a", tensors(1), CONFIG)
    store.put("a", tensors(2), CONFIG)
    store.delete(f"a@{version.id}")
    staged = store.stage("b", tensors(3), CONFIG)
    with pytest.raises(ConflictError, match="looks like a save at work"):
        store.gc(grace=HOUR)
    store.commit([staged])
    first = store.gc(grace=NOW)
    assert [d.path for d in first.purged] == [version.directory]
    assert first.freed == ()
    assert [d.path for d in store.gc(grace=NOW).freed] == [version.directory]
    assert same(store.get("a").tensors, tensors(2))
    assert same(store.get("b").tensors, tensors(3))


_COLLECTOR = """
import sys, time
from datetime import timedelta
from multilora_store.storage import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    store.gc(grace=timedelta(0))
"""


def start_collector(root: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _COLLECTOR, str(root), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_writers_beside_a_gc_without_grace_lose_nothing(tmp_path: Path) -> None:
    """A gc must not take what a save beside it is about to name."""
    store = open_store(tmp_path)
    store.put("keep", tensors(0), CONFIG)
    collector = start_collector(tmp_path, 4.0)
    try:
        end, number = time.monotonic() + 3.0, 0
        while time.monotonic() < end:
            number += 1
            store.put("a", tensors(number % 3), CONFIG)
            assert same(store.get("a").tensors, tensors(number % 3))
            if number % 2:
                store.delete(str(store.versions("a")[0]))
    finally:
        assert collector.wait(60) == 0
        assert collector.stdout is not None
        collector.stdout.close()
    assert number > 3
    assert store.verify().ok
    assert same(store.get("keep").tensors, tensors(0))


def kill_collectors(root: Path, rounds: int) -> None:
    """Kills a gc at `rounds` moments; after each the store is whole and a later gc finishes the work."""
    store = open_store(root)
    store.put("keep", tensors(0), CONFIG)
    collector = start_collector(root, 600.0)
    try:
        for number in range(rounds):
            version = store.put("a", tensors(number + 1), CONFIG)
            store.put("a", tensors(1000 + number), CONFIG)
            store.delete(str(version))
            time.sleep(0.002 * (number % 20))
            collector.send_signal(signal.SIGKILL)
            collector.wait(30)
            assert collector.stdout is not None
            collector.stdout.close()
            assert store.verify().ok
            assert same(store.get("a").tensors, tensors(1000 + number))
            collector = start_collector(root, 600.0)
    finally:
        collector.kill()
        collector.wait(30)
        if collector.stdout is not None:
            collector.stdout.close()
    store.gc(grace=NOW)
    assert {key.rpartition("/")[0] for key in keys(store)} == {v.directory for v in store.state().live()}


def test_a_killed_gc_leaves_a_whole_store(tmp_path: Path) -> None:
    kill_collectors(tmp_path, 3)


@pytest.mark.long
def test_many_killed_gcs_leave_a_whole_store(tmp_path: Path) -> None:
    kill_collectors(tmp_path, 40)
