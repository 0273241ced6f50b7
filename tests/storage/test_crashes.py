"""Whole or absent: writers that are killed, storages that fail at every call, and many writers at random."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import FaultyBlobs
from samples import CONFIG, same, tensors

from multilora_store.errors import MultiLoRAError, StorageError
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store
from multilora_store.storage import journal as journal_module
from multilora_store.storage.cache import VersionCache
from multilora_store.storage.memory import MemoryBlobs


def save_set(store: Store, step: int) -> None:
    """Three adapters that say the same number, and a snapshot of them, in one commit."""
    given = {"base_model.model.q_proj.lora_A.weight": torch.full((2, 64), float(step))}
    staged = [store.stage(name, given, CONFIG, step=step) for name in ("a", "b", "c")]
    members = {name: SnapshotMember() for name in ("a", "b", "c")}
    files = {"state.json": store.stage_snapshot_file(f"s{step}", "state.json", str(step).encode())}
    store.commit(staged, snapshot=SnapshotDraft(id=f"s{step}", step=step, adapters=members, files=files))


def check_set(store: Store) -> int:
    """Asserts that the newest set is whole and of one step; returns the step."""
    state = store.state()
    found = {name: float(next(iter(store.get(f"{name}@latest").tensors.values()))[0, 0]) for name in ("a", "b", "c")}
    assert len(set(found.values())) == 1, found
    snapshot = store.snapshot("latest")
    assert {snapshot.step} == set(found.values())
    for name, member in snapshot.adapters.items():
        assert store.resolve(name).id == member.version
    assert store.read_snapshot_file(snapshot, "state.json") == str(snapshot.step).encode()
    assert state == store.journal.refold()
    return int(found["a"])


def _keep_saving(root: Path, first: int, told: Any) -> None:
    store = open_store(root)
    for step in range(first, first + 100_000):
        save_set(store, step)
        told.send(step)


def _last_told(listen: Connection, before: int) -> int:
    """The last step that a killed writer told as saved; its end of the pipe is closed, so the pipe ends there."""
    told = before
    while True:
        try:
            told = listen.recv()
        except EOFError:
            listen.close()
            return told


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_a_killed_writer_loses_no_save_and_tears_none(tmp_path: Path, kills: int) -> None:
    """Case 47: kill -9 at random moments of a save; what was told as saved is there, whole, and no set is mixed."""
    context = multiprocessing.get_context("fork")
    store = open_store(tmp_path / "store")
    save_set(store, 0)
    generator, told_last, worker = random.Random(0), 0, None
    for _ in range(kills):
        listen, tell = context.Pipe(duplex=False)
        worker = context.Process(target=_keep_saving, args=(tmp_path / "store", told_last + 1, tell))
        worker.start()
        tell.close()
        time.sleep(generator.uniform(0.0, 0.05))
        if generator.random() < 0.7:
            listen.poll(5)  # let it be at work, and then some
            time.sleep(generator.uniform(0.0, 0.02))
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(20)
        told = _last_told(listen, told_last)
        found = check_set(open_store(tmp_path / "store"))
        assert found >= told, "a save that was reported is gone"
        told_last = found
    assert told_last > kills // 4
    assert open_store(tmp_path / "store").verify().ok
    save_set(open_store(tmp_path / "store"), told_last + 1)


def _copy(before: MemoryBlobs, url: str) -> MemoryBlobs:
    blobs = MemoryBlobs(url)
    for info in before.list():
        blobs.write(info.key, before.read(info.key) or b"")
    return blobs


OPERATIONS = {
    "put": lambda store: store.put("a", tensors(50), CONFIG, tags=["best"]),
    "put the same again": lambda store: store.put("a", tensors(0), CONFIG),
    "save a set": lambda store: save_set(store, 2),
    "tag": lambda store: store.tag("b", "best"),
    "untag": lambda store: store.untag("c", "keep"),
    "delete": lambda store: store.delete("d"),
    "drop a snapshot": lambda store: store.drop_snapshot("s1"),
    "get": lambda store: list(store.get("d").tensors.values()),
    "verify": lambda store: store.verify("d"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", ["fail", "truncate", "lose the answer"])
def test_every_call_of_every_operation_may_go_wrong(
    memory_url: str, operation: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every n: call n fails, is cut short or loses its answer; the state is the old or the new one, whole."""
    monkeypatch.setattr(journal_module.time, "sleep", lambda _: None)
    before = MemoryBlobs(memory_url)
    first = Store(before, cache=None)
    save_set(first, 1)
    first.put("d", tensors(4), CONFIG)
    first.tag("c", "keep")
    old = first.state().seq
    for number in range(200):
        blobs = _copy(before, f"{memory_url}-{number}")
        faulty = FaultyBlobs(blobs, number, fault)
        store = Store(faulty, cache=None)
        try:
            OPERATIONS[operation](store)
            failed = False
        except StorageError:
            failed = True
        after = Store(blobs, cache=None)
        state = after.state()
        assert state.seq in (old, old + 1)
        report = after.verify()
        assert report.ok, report.findings
        for name in state.names():
            assert list(after.get(name).tensors.values())
        if not failed and operation not in ("get", "verify"):
            assert state.seq == old + 1
        after.put("next", tensors(9), CONFIG)
        assert same(after.get("next").tensors, tensors(9))
        if number >= len(faulty.calls):
            assert not failed
            break
    else:
        pytest.fail("the operation makes more than 200 calls")


def _simulated_writer(store: Store, generator: random.Random, name: str, count: int) -> list[int]:
    """Puts through a storage that fails at random; returns the seeds that were reported as saved."""
    saved = []
    for number in range(count):
        seed = generator.randrange(10_000)
        try:
            store.put(name, tensors(seed, layers=1, width=4), CONFIG, step=number)
        except MultiLoRAError:
            continue
        saved.append(seed)
    return saved


class Unreliable(FaultyBlobs):
    """Every call may fail, be cut short or lose its answer, each with the given chance."""

    def __init__(self, inner: Any, generator: random.Random, chance: float) -> None:
        super().__init__(inner)
        self.generator = generator
        self.chance = chance

    def _goes_wrong(self, call: str) -> bool:
        self.calls.append(call)
        self.fault = self.generator.choice(["fail", "truncate", "lose the answer"])
        return self.generator.random() < self.chance


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedules", [30, pytest.param(3000, marks=pytest.mark.long)])
def test_unreliable_storage_loses_nothing_reported(
    memory_url: str, schedules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interleaved writers on a storage that fails at random: all that was reported is there and whole."""
    monkeypatch.setattr(journal_module.time, "sleep", lambda _: None)
    reported = 0
    for schedule in range(schedules):
        generator = random.Random(schedule)
        blobs = MemoryBlobs(f"{memory_url}-{schedule}")
        Store(blobs).put("start", tensors(0, layers=1, width=4), CONFIG)
        chance = generator.choice([0.0, 0.02, 0.1, 0.3])
        writers = [Store(Unreliable(blobs, generator, chance), cache=VersionCache()) for _ in range(3)]
        saved: dict[str, list[int]] = {f"w{n}": [] for n in range(3)}
        for _ in range(6):
            number = generator.randrange(3)
            saved[f"w{number}"] += _simulated_writer(writers[number], generator, f"w{number}", generator.randint(1, 2))
        store = Store(blobs)
        state = store.state()
        assert state == store.journal.refold()
        for name, seeds in saved.items():
            for seed in seeds:
                reported += 1
                wanted = tensors(seed, layers=1, width=4)
                assert any(same(store.get(version).tensors, wanted) for version in state.versions(name))
        assert store.verify().ok
    assert reported > schedules * 3
