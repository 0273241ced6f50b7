"""sync moves what changed, once, and nothing else; both sides keep what they have."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
from counting import counted
from faulty import Fault, FaultyBlobs
from samples import CONFIG, same, tensors

from multilora_store.errors import (
    ConflictError,
    DamagedError,
    ProtectedError,
    StorageError,
    StoreError,
    StoreNotFoundError,
    UsageError,
)
from multilora_store.storage import SnapshotDraft, SnapshotMember, State, Store, import_peft, open_store, sync
from multilora_store.storage.memory import MemoryBlobs
from multilora_store.storage.progress import Progress

NOW = timedelta(0)


@pytest.fixture(params=["local", "memory"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> tuple[Store, Store]:
    if request.param == "local":
        return open_store(tmp_path / "a"), open_store(tmp_path / "b")
    return open_store(tmp_path / "a"), open_store(memory_url)


def fill(store: Store, count: int, *, start: int = 0) -> None:
    """`count` adapters in one entry."""
    store.commit([store.stage(f"a{n:03d}", tensors(n), CONFIG) for n in range(start, start + count)])


def snap(store: Store, identity: str, **members: int) -> None:
    """A snapshot with an optimizer's file; members by name and seed."""
    puts = [store.stage(name, tensors(seed), CONFIG) for name, seed in members.items()]
    store.stage_snapshot_file(identity, "optimizer/x.safetensors", f"moments of {identity}".encode())
    store.stage_snapshot_file(identity, "state.json", b"{}")
    adapters = {name: SnapshotMember() for name in members}
    store.commit(puts, snapshot=SnapshotDraft(id=identity, step=3, adapters=adapters))


def facts(state: State) -> dict[str, object]:
    """What a reader sees: ids in order, tags, snapshots."""
    return {
        "versions": {name: [v.id for v in state.versions(name)] for name in state.names()},
        "tags": {name: dict(adapter.tags) for name, adapter in state.adapters.items() if adapter.tags},
        "snapshots": {i: {n: m.version for n, m in s.adapters.items()} for i, s in state.snapshots.items()},
    }


def test_everything_moves_and_the_target_says_the_same(pair: tuple[Store, Store]) -> None:
    source, target = pair
    for seed in (1, 2):
        source.put("team/a", tensors(seed), CONFIG, metadata={"loss": seed}, step=seed)
    source.put("b", tensors(3), CONFIG, tags=("best",))
    snap(source, "s1", a=4, b=5)
    report = sync(source, target)
    assert facts(target.state()) == facts(source.state())
    assert target.versions("team/a")[0].metadata == {"loss": 1}
    assert same(target.get("team/a").tensors, tensors(2))
    assert target.read_snapshot_file(target.snapshot("s1"), "optimizer/x.safetensors") == b"moments of s1"
    assert target.verify().ok
    assert (report.contents, report.files, report.seq) == (5, 17, 1)
    assert not report.unchanged
    assert report.to_json()["snapshots"] == ["s1"]
    [entry] = target.log()
    [change] = entry.changes
    assert change.to_json()["origin"]["seq"] == source.state().seq


def test_nothing_changed_costs_two_requests_a_side_beyond_opening(tmp_path: Path) -> None:
    """Case 50: nothing is compared by size or time."""
    costs = []
    for count in (10, 500):
        source, target = open_store(f"memory://src{tmp_path.name}{count}"), open_store(f"memory://dst{count}x")
        fill(source, count)
        sync(source, target)
        (ours, our_calls), (theirs, their_calls) = counted(source), counted(target)
        report = sync(ours, theirs)
        assert report.unchanged
        assert report.seq is None
        opening = {"read multilora-store.json", "read head.json"}
        for calls in (our_calls, their_calls):
            assert opening < set(calls.keys)
            assert calls.total - len(opening) == 2, calls.keys
        costs.append((our_calls.total, their_calls.total))
    assert costs[0] == costs[1]


def test_a_folded_no_op_costs_the_same_for_any_number_of_adapters(tmp_path: Path) -> None:
    costs = []
    for count in (10, 500):
        source, target = open_store(f"memory://s2{tmp_path.name}{count}"), open_store(f"memory://d2{count}x")
        fill(source, count)
        sync(source, target)
        target.tag("a000", "mine")  # so that the import is not the newest entry
        (ours, our_calls), (theirs, their_calls) = counted(source), counted(target)
        assert sync(ours, theirs).unchanged
        costs.append((our_calls.total, their_calls.total))
    assert costs[0] == costs[1]


def test_a_changed_adapter_moves_once_and_unchanged_content_never(pair: tuple[Store, Store]) -> None:
    source, target = pair
    fill(source, 6)
    sync(source, target)
    source.put("a003", tensors(99), CONFIG)
    source.put("copy", tensors(1), CONFIG)  # content that the target has under another name
    theirs, calls = counted(target)
    report = sync(source, theirs)
    assert [str(v) for v in report.plan.puts] == [str(source.resolve("a003")), str(source.resolve("copy"))]
    assert report.contents == 1
    assert sum(key.startswith("write adapters/") for key in calls.keys) == 3
    assert facts(target.state()) == facts(source.state())


def test_same_size_changes_are_never_missed(tmp_path: Path) -> None:
    """Case 50: equal sizes and an older mtime say nothing."""
    import os

    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    source.put("a", tensors(1), CONFIG)
    sync(source, target)
    changed = source.put("a", tensors(2), CONFIG)
    for file in (tmp_path / "a" / changed.directory).iterdir():
        os.utime(file, (1, 1))
    sync(source, target)
    assert same(target.get("a").tensors, tensors(2))


def test_selections_move_only_their_part(pair: tuple[Store, Store]) -> None:
    source, target = pair
    source.put("team/a", tensors(1), CONFIG)
    source.put("team/b", tensors(2), CONFIG)
    source.put("other", tensors(3), CONFIG)
    sync(source, target, include=("team/*",), exclude=("*/b",))
    assert target.names() == ["team/a"]
    assert sync(source, target, include=("team/*",), exclude=("*/b",)).unchanged
    sync(source, target)  # the narrower origin must not hide what it left out
    assert target.names() == ["other", "team/a", "team/b"]
    assert sync(source, target, include=("team/*",)).unchanged  # everything covers its parts


def test_one_snapshot_moves_just_its_set(pair: tuple[Store, Store]) -> None:
    source, target = pair
    snap(source, "s1", a=1, b=2)
    source.put("a", tensors(3), CONFIG)
    source.put("c", tensors(4), CONFIG)
    sync(source, target, snapshot="latest")
    assert target.names() == ["a", "b"]
    assert same(target.get("a").tensors, tensors(1))
    assert [s.id for s in target.snapshots()] == ["s1"]
    assert target.verify().ok


def test_tags_select_versions(pair: tuple[Store, Store]) -> None:
    source, target = pair
    source.put("a", tensors(1), CONFIG, tags=("best",))
    source.put("a", tensors(2), CONFIG)
    source.put("b", tensors(3), CONFIG)
    sync(source, target, tags=["best"])
    assert facts(target.state())["versions"] == {"a": [source.resolve("a@best").id]}
    assert target.tags("a") == source.tags("a")


def test_deletion_only_when_asked_and_never_above_its_limit(pair: tuple[Store, Store]) -> None:
    source, target = pair
    fill(source, 4)
    sync(source, target)
    own = target.put("own", tensors(50), CONFIG)
    for name in ("a000", "a001", "a002"):
        source.delete(name)
    sync(source, target)
    assert "a000" in target.names()
    before = target.state()
    with pytest.raises(ProtectedError, match="would remove 3"):
        sync(source, target, delete=True, max_delete=2)
    assert target.state().seq == before.seq
    target.tag("a001", "precious")
    report = sync(source, target, delete=True)
    assert target.names() == ["a001", "a003", "own"]
    assert len(report.plan.deletes) == 2
    assert any("tag precious" in words for words in report.plan.kept)
    assert target.resolve("own").id == own.id


def test_a_dropped_snapshot_and_an_untag_follow_with_delete(pair: tuple[Store, Store]) -> None:
    source, target = pair
    snap(source, "s1", a=1)
    source.tag("a", "best")
    sync(source, target)
    source.drop_snapshot("s1")
    source.untag("a", "best")
    sync(source, target)
    assert [s.id for s in target.snapshots()] == ["s1"]
    sync(source, target, delete=True)
    assert target.snapshots() == []
    assert target.tags("a") in ({}, {"best": target.resolve("a").id})


def test_what_the_target_deleted_does_not_come_back(pair: tuple[Store, Store]) -> None:
    source, target = pair
    fill(source, 2)
    snap(source, "s1", z=9)
    sync(source, target)
    target.delete("a000")
    target.drop_snapshot("s1")
    source.put("a001", tensors(77), CONFIG)
    report = sync(source, target)
    assert target.names() == ["a001", "z"]
    assert target.snapshots() == []
    assert len(report.plan.kept) == 2
    source.put("a000", tensors(0), CONFIG)  # the same again says nothing new
    sync(source, target)
    assert "a000" not in target.names()
    source.put("a000", tensors(0), CONFIG, metadata={"again": True})  # put anew: the source wants it again
    sync(source, target)
    assert "a000" in target.names()


def test_there_and_back_is_the_identity(pair: tuple[Store, Store]) -> None:
    left, right = pair
    left.put("a", tensors(1), CONFIG)
    sync(left, right)
    right.put("a", tensors(2), CONFIG, tags=("best",))
    sync(right, left)
    assert facts(left.state()) == facts(right.state())
    left.tag("a", "best")
    left.delete(str(left.versions("a")[0]))
    sync(left, right, delete=True)
    assert facts(left.state()) == facts(right.state())
    seqs = left.state().seq, right.state().seq
    for _ in range(3):
        sync(right, left)
        sync(left, right)
    assert left.state().seq + right.state().seq <= sum(seqs) + 2  # it settles
    assert facts(left.state()) == facts(right.state())


@pytest.mark.parametrize("rule", ["source", "target"])
def test_diverged_stores_keep_both_sets_and_latest_follows_the_rule(rule: str, pair: tuple[Store, Store]) -> None:
    source, target = pair
    source.put("a", tensors(1), CONFIG, tags=("best",))
    sync(source, target)
    ours = source.put("a", tensors(2), CONFIG, tags=("best",))
    theirs = target.put("a", tensors(3), CONFIG, tags=("best",))
    with pytest.raises(ConflictError, match="latest of a"):
        sync(source, target, diverged="refuse")
    report = sync(source, target, diverged=rule)
    winner = ours if rule == "source" else theirs
    assert report.plan.diverged == ("latest of a", "tag best of a")
    assert {v.id for v in target.versions("a")} == {ours.id, theirs.id, source.versions("a")[0].id}
    assert target.resolve("a").id == target.resolve("a@best").id == winner.id
    assert sync(source, target, diverged="refuse").unchanged


def save(store: Store, **seeds: int) -> tuple[str, ...]:
    """One commit of a set; the ids of its versions."""
    versions = store.commit([store.stage(name, tensors(seed), CONFIG) for name, seed in seeds.items()]).versions
    return tuple(versions[name].id for name in seeds)


@pytest.mark.parametrize("rule", ["source", "target"])
def test_diverged_sets_are_never_mixed(rule: str, pair: tuple[Store, Store]) -> None:
    """One member of the set is the same on both sides, and looks as if only one side had moved it."""
    left, right = pair
    save(left, m1=1, m2=2)
    theirs = save(right, m1=1, m2=3)
    sync(left, right, diverged="target")
    ours = save(left, m1=4, m2=5)
    sync(right, left, diverged=rule)
    assert (left.resolve("m1").id, left.resolve("m2").id) == (theirs if rule == "source" else ours)


def test_stores_without_a_common_point_unite(pair: tuple[Store, Store]) -> None:
    source, target = pair
    source.put("a", tensors(1), CONFIG)
    target.put("b", tensors(2), CONFIG)
    sync(source, target)
    assert target.names() == ["a", "b"]


def test_a_copied_store_finds_its_common_point(tmp_path: Path) -> None:
    import shutil

    source = open_store(tmp_path / "a")
    fill(source, 2)
    source.put("a000", tensors(10), CONFIG)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    target = open_store(tmp_path / "b")
    assert sync(source, target).unchanged
    target.delete("a001")
    source.put("a000", tensors(11), CONFIG)
    sync(source, target)
    assert target.names() == ["a000"]
    assert same(target.get("a000").tensors, tensors(11))


def test_a_source_that_was_restored_to_an_older_state_is_refused(tmp_path: Path) -> None:
    import shutil

    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    source.put("x", tensors(5), CONFIG)
    sync(source, target)
    shutil.rmtree(tmp_path / "a")
    shutil.move(tmp_path / "backup", tmp_path / "a")
    again = open_store(tmp_path / "a")
    with pytest.raises(ConflictError, match="is not what it was"):
        sync(again, target)
    again.put("w", tensors(6), CONFIG)
    with pytest.raises(ConflictError, match="is not what it was"):
        sync(again, target)
    assert "x" in target.names()


def test_dry_run_plans_and_writes_nothing(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 3)
    report = sync(source, target, dry_run=True)
    assert report.dry_run
    assert len(report.plan.puts) == report.contents == 3
    assert report.nbytes == sum(v.nbytes for v in source.state().live())
    assert not (tmp_path / "b").exists()


def test_damage_in_the_source_stops_the_sync_and_the_target_stays(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 3)
    sync(source, target)
    bad = source.put("a001", tensors(8), CONFIG)
    path = tmp_path / "a" / bad.directory / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = facts(target.state())
    with pytest.raises(DamagedError, match="SHA-256"):
        sync(source, target)
    assert facts(target.state()) == before


def test_progress_tells_how_far(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 3)
    seen: list[Progress] = []
    sync(source, target, progress=seen.append)
    assert [p.files for p in seen] == list(range(1, 10))
    assert seen[-1].files == seen[-1].files_total
    assert seen[-1].nbytes == seen[-1].nbytes_total == sum(v.nbytes for v in source.state().live())
    assert seen[-1].remaining == 0


def test_bandwidth_is_kept(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 3)
    size = sum(v.nbytes for v in source.state().live())
    started = time.monotonic()
    sync(source, target, bandwidth=size / 0.8)
    assert 0.6 < time.monotonic() - started < 20


@pytest.mark.parametrize("given", [{"include": "a*"}, {"diverged": "mine"}, {"delete": True, "tags": ["x"]}])
def test_wrong_usage_is_refused(given: dict[str, object], tmp_path: Path) -> None:
    source = open_store(tmp_path / "a")
    fill(source, 1)
    with pytest.raises(UsageError):
        sync(source, tmp_path / "b", **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="both source and target"):
        sync(source, tmp_path / "a")


def test_a_source_that_is_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        sync(tmp_path / "typo", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("rule", ["source", "target"])
@pytest.mark.parametrize("between", [False, True])
def test_a_set_saved_over_half_of_the_last_one_stays_whole(
    between: bool, rule: Literal["source", "target"], tmp_path: Path
) -> None:
    """The half that did not change is a part of the new set, though the other store has seen its content before."""

    def save(store: Store, one: int, two: int) -> None:
        members = {"m1": SnapshotMember(), "m2": SnapshotMember()}
        staged = [store.stage("m1", tensors(one), CONFIG), store.stage("m2", tensors(two), CONFIG)]
        store.commit(staged, snapshot=SnapshotDraft(id=store.new_snapshot_id(), adapters=members))

    def latest(store: Store) -> list[str]:
        return [store.resolve(name).id for name in ("m1", "m2")]

    left, right = open_store(tmp_path / "left"), open_store(tmp_path / "right")
    save(left, 1, 2)
    save(right, 3, 4)
    sync(right, left, diverged="target")
    save(right, 5, 4)
    saved = latest(right)
    if between:
        sync(left, right, diverged="target")
        assert latest(right) == saved
    left.put("b", tensors(9), CONFIG)
    sync(right, left, diverged="target")
    assert latest(left) == saved
    sync(left, right)
    assert latest(right) == saved
    save(left, 6, 4)
    save(right, 5, 7)
    mine, theirs = latest(left), latest(right)
    sync(left, right, diverged=rule)
    assert latest(right) == (mine if rule == "source" else theirs)


def test_a_store_in_the_making_is_no_folder_of_adapters(tmp_path: Path) -> None:
    """Whoever looked for the marker just before it came, and sees files of versions, does not take them for plain."""
    first, other = open_store(tmp_path / "first"), open_store(tmp_path / "other")
    first.put("a", tensors(1), CONFIG)
    other.put("b", tensors(2), CONFIG)
    shutil.copytree(tmp_path / "first/adapters", tmp_path / "making/adapters")
    making = open_store(tmp_path / "making")
    with pytest.raises(StoreNotFoundError, match="without an entry"):
        sync(making, other)
    with pytest.raises(UsageError, match="is a store"):
        import_peft(other, tmp_path / "making")
    assert other.names() == ["b"]
    sync(other, making)
    assert making.names() == ["b"]
    assert not (tmp_path / "making/b").exists(), "it is no target for plain folders either"


def test_a_plain_folder_goes_in_and_comes_out_with_its_bytes(tmp_path: Path) -> None:
    first = open_store(tmp_path / "first")
    first.put("x", tensors(1), CONFIG)
    first.put("w", tensors(2), CONFIG)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "x").mkdir()
    (plain / "x" / "adapter_config.json").write_text("{}")  # so that the target is a folder of adapters
    assert len(sync(first, plain).plan.puts) == 2
    assert sync(first, plain).unchanged
    second = open_store(tmp_path / "second")
    assert len(sync(plain, second, dry_run=True).plan.puts) == 2
    sync(plain, second)
    assert sync(plain, second).unchanged
    assert [second.resolve(n).id for n in ("x", "w")] == [first.resolve(n).id for n in ("x", "w")]
    model = (plain / "x" / "adapter_model.safetensors").read_bytes()
    assert second.blobs.read(f"{second.resolve('x').directory}/adapter_model.safetensors") == model


# Everything that can go wrong on the way.


@pytest.mark.parametrize(
    ("side", "fault"),
    [("source", "fail"), ("target", "fail"), ("target", "truncate"), ("target", "lose the answer")],
)
def test_a_storage_that_fails_at_any_call_leaves_old_or_new(side: str, fault: Fault, tmp_path: Path) -> None:
    at = 0
    while True:
        urls = [f"memory://{tmp_path.name}-{fault}-{side}-{at}-{end}".replace(" ", "_") for end in "ab"]
        source, target = open_store(urls[0]), open_store(urls[1])
        source.put("a", tensors(1), CONFIG)
        sync(source, target)
        old = facts(target.state())
        snap(source, "s1", a=2, b=3)
        new = facts(source.state())
        faulty = FaultyBlobs(MemoryBlobs(urls[side == "target"]), at, fault)
        ends = (Store(faulty), target) if side == "source" else (source, Store(faulty))
        with contextlib.suppress(StorageError):
            sync(*ends, jobs=1)
        fresh = open_store(urls[1])
        assert facts(fresh.state()) in (old, new), (fault, at)
        assert fresh.verify(threads=1).ok
        sync(source, open_store(urls[1]), jobs=1)
        assert facts(fresh.state()) == new
        assert fresh.verify(threads=1).ok, (fault, at)
        if len(faulty.calls) <= at:
            break
        at += 1
    assert at > 10


def test_a_killed_sync_does_not_send_again_what_it_has_sent(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 8)
    sent = 0

    def stop(progress: Progress) -> None:
        nonlocal sent
        sent = progress.files
        if sent == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync(source, target, jobs=1, progress=stop)
    report = sync(source, target)
    assert report.resumed >= 13
    assert facts(target.state()) == facts(source.state())
    assert target.verify().ok
    assert target.blobs.read(f"sync/{source.state().store_id}.json") is None
    assert target.gc(grace=NOW).freed == ()


def test_what_a_killed_sync_left_can_be_purged_under_the_next(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 4)

    def collect(call: str, key: str) -> None:
        if call == "create" and key.startswith("journal/") and not purged:
            purged.append(key)
            open_store(tmp_path / "b").gc(grace=NOW)

    purged: list[str] = []
    open_store(tmp_path / "b").put("z", tensors(70), CONFIG)
    theirs, _ = counted(target, collect)
    sync(source, theirs)
    assert purged
    assert set(source.names()) < set(target.names())
    assert target.verify().ok


def test_a_purge_in_the_source_on_the_way_is_read_again_once(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 3)

    def collect(call: str, key: str) -> None:
        if call == "read" and key.startswith("adapters/") and not purged:
            purged.append(key)
            source.delete("a001")
            source.gc(grace=NOW)

    purged: list[str] = []
    ours, _ = counted(source, collect)
    sync(ours, target, jobs=1)
    assert target.names() == ["a000", "a002"]
    assert target.verify().ok


def test_a_replica_without_its_files_is_an_error(tmp_path: Path) -> None:
    source = open_store(tmp_path / "a")
    fill(source, 2)
    next((tmp_path / "a" / source.resolve("a001").directory).glob("*.safetensors")).unlink()
    with pytest.raises(StoreError, match="is missing"):
        sync(source, tmp_path / "b")


def test_two_syncs_at_once_are_safe(pair: tuple[Store, Store]) -> None:
    source, target = pair
    fill(source, 6)
    reports, failures = [], []

    def run() -> None:
        try:
            reports.append(sync(source, Store(target.blobs)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(reports) == 3
    assert facts(target.state()) == facts(source.state())
    assert target.verify().ok
    assert sum(report.seq is not None for report in reports) >= 1
    assert target.state().seq == 1  # whoever was slower found nothing left to do


def test_a_sync_beside_a_writer_of_the_target_keeps_both(tmp_path: Path) -> None:
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 2)
    done: list[str] = []

    def write(call: str, key: str) -> None:
        if call == "create" and key.startswith("journal/") and not done:
            done.append(key)
            open_store(tmp_path / "b").put("mine", tensors(60), CONFIG)

    theirs, _ = counted(target, write)
    sync(source, theirs)
    assert target.names() == ["a000", "a001", "mine"]


_SYNC = """
import sys
from multilora_store.storage import sync
print("ready", flush=True)
while True:
    sync(sys.argv[1], sys.argv[2], jobs=2)
"""


@contextlib.contextmanager
def syncing(source: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SYNC, str(source), str(target)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()


def kill_syncs(tmp_path: Path, rounds: int) -> None:
    """Kills real syncs at many moments; the target never shows anything but a state that the source was in."""
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    fill(source, 3)
    states = [facts(source.state())]
    sync(source, target)
    for number in range(rounds):
        with syncing(tmp_path / "a", tmp_path / "b"):
            snap(source, f"s{number}", a000=100 + number, b=200 + number)
            states.append(facts(source.state()))
            time.sleep(0.003 * (number % 15))
        assert facts(target.state()) in states, number
        assert target.verify().ok
    sync(source, target)
    assert facts(target.state()) == states[-1]


def test_killed_syncs_leave_old_or_new(tmp_path: Path) -> None:
    kill_syncs(tmp_path, 3)


@pytest.mark.long
def test_many_killed_syncs_leave_old_or_new(tmp_path: Path) -> None:
    kill_syncs(tmp_path, 40)


@pytest.mark.s3
@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_a_store_goes_to_s3_and_back(driver: str, s3_url: str, tmp_path: Path) -> None:
    """Case 50: an upload and a change of equal size, on a real S3 server."""
    source, bucket = open_store(tmp_path / "a"), open_store(s3_url, driver=driver)
    fill(source, 5)
    snap(source, "s1", m=20)
    sync(source, bucket)
    source.put("a003", tensors(99), CONFIG)
    assert sync(source, bucket).contents == 1
    (ours, _), (theirs, calls) = counted(source), counted(bucket)
    assert sync(ours, theirs).unchanged
    assert calls.total == 4
    back = open_store(tmp_path / "b")
    sync(bucket, back)
    assert facts(back.state()) == facts(bucket.state()) == facts(source.state())
    assert back.verify().ok
    source.delete("a001")
    sync(source, bucket, delete=True)
    assert "a001" not in bucket.names()
    assert bucket.gc(grace=NOW).freed
    assert bucket.verify().ok
