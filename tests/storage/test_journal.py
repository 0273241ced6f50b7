"""The journal: one linear history, whatever writers, storages and hints do."""

from __future__ import annotations

import json
import multiprocessing
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyBlobs

from multilora_store.errors import (
    ConflictError,
    DamagedError,
    OutcomeUnknownError,
    StorageDeniedError,
    StorageError,
    StoreFormatError,
    StoreNotFoundError,
)
from multilora_store.storage import journal as journal_module
from multilora_store.storage.blobs import Blobs, open_blobs
from multilora_store.storage.changes import Change, Put, Tag, Untag
from multilora_store.storage.entries import Entry, checkpoint_key, entry_key
from multilora_store.storage.fsspec_blobs import FsspecBlobs
from multilora_store.storage.journal import CHECKPOINT_EVERY, HEAD, Journal
from multilora_store.storage.local import LocalBlobs
from multilora_store.storage.marker import MARKER, Marker
from multilora_store.storage.memory import MemoryBlobs
from multilora_store.storage.records import sha256
from multilora_store.storage.state import State


def put(name: str, number: int = 0) -> Put:
    digest = sha256(f"{number}".encode())
    identity = f"v{digest[:16]}"
    return Put(
        name=name, id=identity, sha256=digest, directory=f"adapters/{name}/{identity}-aaaaaa", record=digest, nbytes=1
    )


def adding(name: str, number: int = 0) -> Any:
    return lambda state: [put(name, number)]


@pytest.fixture
def blobs(memory_url: str) -> Blobs:
    return MemoryBlobs(memory_url)


def filled(blobs: Blobs, entries: int) -> Journal:
    journal = Journal(blobs)
    for number in range(entries):
        journal.commit(adding(f"n{number % 7}", number))
    return journal


def test_a_root_without_a_marker_is_no_store(blobs: Blobs) -> None:
    blobs.write("journal/00000001.json", b"{}")
    with pytest.raises(StoreNotFoundError, match="is not a store"):
        Journal(blobs).state()
    with pytest.raises(FileNotFoundError):
        Journal(blobs).state()


def test_reading_makes_nothing(blobs: Blobs) -> None:
    with pytest.raises(StoreNotFoundError):
        Journal(blobs).state()
    assert list(blobs.list()) == []


def test_commits_are_numbered_linked_and_folded(blobs: Blobs) -> None:
    journal = Journal(blobs)
    first = journal.commit(adding("a", 1))
    second = journal.commit(lambda state: [put("b", 2), Tag(name="a", tag="best", id=put("a", 1).id)])
    assert (first.entry.seq, second.entry.seq) == (1, 2)
    assert first.entry.prev == journal.marker.genesis
    assert second.entry.prev == first.entry.digest == sha256(blobs.read(entry_key(1)))
    state = Journal(blobs).state()
    assert state == second.state
    assert state.names() == ["a", "b"]
    assert state.adapters["a"].tags == {"best": put("a", 1).id}
    assert [entry.seq for entry in journal.entries()] == [1, 2]


def test_nothing_to_change_makes_no_entry(blobs: Blobs) -> None:
    journal = filled(blobs, 1)
    assert journal.commit(lambda state: []).entry is None
    assert journal.state().seq == 1


def test_a_decision_is_taken_again_on_the_newer_state(blobs: Blobs) -> None:
    """Two writers decide from one state; the loser decides anew and sees what the winner did."""
    mine, other = filled(blobs, 1), Journal(blobs)
    seen: list[int] = []

    def decide(state: State) -> list[Change]:
        seen.append(state.seq)
        if len(seen) == 1:
            other.commit(adding("other", 99))
        return [put("mine", state.seq)]

    committed = mine.commit(decide)
    assert seen == [1, 2]
    assert committed.entry.seq == 3
    assert {"mine", "other"} <= set(Journal(blobs).state().names())


def test_a_decision_may_refuse_after_a_conflict(blobs: Blobs) -> None:
    mine, other = filled(blobs, 1), Journal(blobs)

    def decide(state: State) -> list[Change]:
        if "other" in state.adapters:
            raise ConflictError("no longer")
        other.commit(adding("other", 99))
        return [put("mine")]

    with pytest.raises(ConflictError, match="no longer"):
        mine.commit(decide)
    assert "mine" not in Journal(blobs).state().adapters


def test_a_writer_that_always_loses_gives_up_in_words(blobs: Blobs) -> None:
    mine, other = Journal(blobs, patience=0.0), filled(blobs, 1)

    def decide(state: State) -> list[Change]:
        other.commit(adding("other", state.seq))
        return [put("mine")]

    with pytest.raises(ConflictError, match="could not be made"):
        mine.commit(decide)


def test_time_never_runs_backwards(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(blobs, 1)
    before = journal.entry(1).time

    class Past(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2001, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(journal_module, "datetime", Past)
    assert journal.commit(adding("b")).entry.time == before


def test_checkpoints_are_deterministic_and_not_needed(blobs: Blobs, memory_url: str) -> None:
    journal = filled(blobs, 2 * CHECKPOINT_EVERY + 3)
    expected = journal.state()
    for seq in (CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY):
        data = blobs.read(checkpoint_key(seq))
        assert data == journal.refold().to_bytes() or seq != expected.seq
        assert data == Journal(blobs).state_at(seq).to_bytes()
        assert State.from_bytes(data, "c").to_bytes() == data
    assert Journal(blobs).state() == expected == Journal(blobs).refold()
    blobs.delete([checkpoint_key(CHECKPOINT_EVERY), checkpoint_key(2 * CHECKPOINT_EVERY), HEAD])
    assert Journal(blobs).state() == expected


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"\xff", b'{"state_format": 9}'])
def test_a_damaged_checkpoint_is_passed_over(blobs: Blobs, damage: bytes) -> None:
    expected = filled(blobs, CHECKPOINT_EVERY + 1).state()
    blobs.write(checkpoint_key(CHECKPOINT_EVERY), damage)
    assert Journal(blobs).state() == expected


def test_a_checkpoint_of_another_history_is_passed_over(blobs: Blobs, memory_url: str) -> None:
    expected = filled(blobs, CHECKPOINT_EVERY + 1).state()
    other = MemoryBlobs(memory_url + "x")
    filled(other, CHECKPOINT_EVERY)
    blobs.write(checkpoint_key(CHECKPOINT_EVERY), other.read(checkpoint_key(CHECKPOINT_EVERY)))
    assert Journal(blobs).state() == expected


def test_hints_are_never_trusted(blobs: Blobs) -> None:
    journal = filled(blobs, CHECKPOINT_EVERY + 5)
    expected, good = journal.state(), json.loads(blobs.read(HEAD))
    for hint in (
        b"",
        b"not json",
        b'{"seq": 3}',
        json.dumps({**good, "seq": 3, "digest": journal.entry(3).digest, "checkpoint": 0}).encode(),
        json.dumps({**good, "seq": 10_000}).encode(),
        json.dumps({**good, "digest": "0" * 64}).encode(),
        json.dumps({**good, "checkpoint": 640}).encode(),
        json.dumps({**good, "checkpoint": -64}).encode(),
        json.dumps({**good, "seq": 2**70}).encode(),
    ):
        blobs.write(HEAD, hint)
        assert Journal(blobs).state() == expected, hint


def test_a_stale_hint_costs_a_walk_and_a_cold_read_costs_few_requests(blobs: Blobs) -> None:
    expected = filled(blobs, CHECKPOINT_EVERY + 40).state()
    counting = FaultyBlobs(blobs)
    assert Journal(counting).state() == expected
    rounds = [call for call in counting.calls if not call.startswith("read journal/")]
    assert rounds == [f"read {MARKER}", f"read {HEAD}"] or rounds == [f"read {HEAD}", f"read {MARKER}"]
    assert len(counting.calls) <= 2 + 1 + 2 + 42
    counting.calls.clear()
    journal = Journal(counting)
    journal.state()
    counting.calls.clear()
    journal.state()
    assert counting.calls == [f"read {entry_key(CHECKPOINT_EVERY + 41)}"]


def test_history_that_does_not_follow_is_damage(blobs: Blobs, memory_url: str) -> None:
    filled(blobs, 4)
    other = MemoryBlobs(memory_url + "x")
    filled(other, 4)
    good = blobs.read(entry_key(3))
    blobs.write(entry_key(3), other.read(entry_key(3)))
    with pytest.raises(DamagedError, match="does not follow"):
        Journal(blobs).state()
    altered = json.loads(good)
    altered["writer"] = "somebody else"
    blobs.write(entry_key(3), json.dumps(altered).encode())
    with pytest.raises(DamagedError, match=r"entry 4 .* does not follow"):
        Journal(blobs).refold()


def test_an_entry_behind_a_gap_is_seen(blobs: Blobs) -> None:
    journal = filled(blobs, 5)
    blobs.delete([entry_key(3), HEAD])
    fresh = Journal(blobs)
    assert fresh.state().seq == 2
    assert fresh.stray_entries(2) == [entry_key(4), entry_key(5)]
    with pytest.raises(DamagedError, match=r"entry 3 .* is missing"):
        journal.entry(3)


def test_a_newer_format_is_refused_in_words(blobs: Blobs) -> None:
    marker = filled(blobs, 1).marker
    blobs.write(MARKER, json.dumps({"format": 2, "id": marker.id, "reads": [], "writes": []}).encode())
    with pytest.raises(StoreFormatError, match="format 2") as caught:
        Journal(blobs).state()
    assert "newer multilora_store" in caught.value.remedy
    blobs.write(MARKER, Marker(id=marker.id, reads=("compressed",)).to_bytes())
    with pytest.raises(StoreFormatError, match="compressed"):
        Journal(blobs).state()
    blobs.write(MARKER, Marker(id=marker.id, writes=("signed",)).to_bytes())
    assert Journal(blobs).state().seq == 1
    with pytest.raises(StoreFormatError, match="can be read but not written"):
        Journal(blobs).commit(adding("b"))


def test_unknown_changes_and_needs_are_refused_in_words(blobs: Blobs) -> None:
    journal = filled(blobs, 1)
    state = journal.state()
    entry = Entry(seq=2, prev=state.digest, writer="w", time=state.time, changes=(put("b"),))
    record = json.loads(entry.to_bytes())
    blobs.write(entry_key(2), json.dumps({**record, "needs": ["quantum"]}).encode())
    with pytest.raises(StoreFormatError, match="quantum"):
        Journal(blobs).state()
    blobs.write(entry_key(2), json.dumps({**record, "changes": [{"change": "teleport"}]}).encode())
    with pytest.raises(StoreFormatError, match="teleport") as caught:
        Journal(blobs).commit(adding("c"))
    assert caught.value.facts["change"] == "teleport"
    assert blobs.read(entry_key(3)) is None


class LosesAnswers(FaultyBlobs):
    """Every create of an entry goes through, and its answer is lost; `drop` of them never arrive."""

    def __init__(self, inner: Blobs, drop: int = 0) -> None:
        super().__init__(inner)
        self.drop = drop
        self.sent: list[bytes] = []

    def create(self, key: str, data: bytes) -> bool:
        if not key.startswith("journal/"):
            return super().create(key, data)
        self.sent.append(data)
        if len(self.sent) > self.drop:
            self.inner.create(key, data)
        raise StorageError("the answer was lost")


def test_a_lost_answer_is_read_back(blobs: Blobs) -> None:
    """A conditional write that a driver repeats by itself is refused although the object is ours."""
    filled(blobs, 1)
    losing = LosesAnswers(blobs)
    committed = Journal(losing).commit(adding("mine", 5))
    assert committed.entry.seq == 2
    assert len(losing.sent) == 1
    assert [entry.seq for entry in Journal(blobs).entries()] == [1, 2]


def test_a_lost_request_is_repeated_with_the_same_bytes_under_the_same_number(blobs: Blobs) -> None:
    filled(blobs, 1)
    losing = LosesAnswers(blobs, drop=2)
    assert Journal(losing).commit(adding("mine", 5)).entry.seq == 2
    assert len(losing.sent) == 3
    assert len(set(losing.sent)) == 1


def test_a_refused_create_that_is_ours_counts_as_made(blobs: Blobs) -> None:
    class SaysNo(FaultyBlobs):
        def create(self, key: str, data: bytes) -> bool:
            self.inner.create(key, data)
            return False

    filled(blobs, 1)
    assert Journal(SaysNo(blobs)).commit(adding("mine", 5)).entry.seq == 2
    assert Journal(blobs).state().seq == 2


def test_an_unknown_outcome_says_so(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module.time, "sleep", lambda _: None)
    filled(blobs, 1)
    with pytest.raises(OutcomeUnknownError, match="entry 2") as caught:
        Journal(LosesAnswers(blobs, drop=1000)).commit(adding("mine"))
    assert caught.value.facts["seq"] == 2


def test_a_denied_create_is_denied(blobs: Blobs) -> None:
    class Denies(FaultyBlobs):
        def create(self, key: str, data: bytes) -> bool:
            raise StorageDeniedError("no", remedy="ask")

    filled(blobs, 1)
    with pytest.raises(StorageDeniedError, match="no"):
        Journal(Denies(blobs)).commit(adding("mine"))
    assert Journal(blobs).state().seq == 1


def test_a_failing_hint_or_checkpoint_never_fails_a_commit(blobs: Blobs) -> None:
    class NoHints(FaultyBlobs):
        def write(self, key: str, parts: Any, sent: Any = None) -> None:
            raise StorageError("no")

        def create(self, key: str, data: bytes) -> bool:
            if key.endswith(".state.json"):
                raise StorageError("no")
            return self.inner.create(key, data)

    journal = Journal(NoHints(blobs))
    for number in range(CHECKPOINT_EVERY + 1):
        journal.commit(adding("a", number))
    assert Journal(blobs).state().seq == CHECKPOINT_EVERY + 1


@pytest.mark.parametrize("fault", ["fail", "lose the answer", "truncate"])
def test_every_call_may_go_wrong(memory_url: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every n: after the n-th call went wrong, the state is the old or the new one, and the next commit works."""
    monkeypatch.setattr(journal_module.time, "sleep", lambda _: None)
    before = MemoryBlobs(memory_url)
    filled(before, CHECKPOINT_EVERY - 1)
    number, reached = 0, True
    while reached:
        blobs = MemoryBlobs(f"{memory_url}-{number}")
        for info in before.list():
            blobs.write(info.key, before.read(info.key) or b"")
        faulty = FaultyBlobs(blobs, number, fault)
        try:
            Journal(faulty).commit(adding("mine", 1000))
            made = True
        except StorageError:
            made = False
        reached = len(faulty.calls) > number
        state = Journal(blobs).state()
        assert state.seq in ((CHECKPOINT_EVERY,) if made else (CHECKPOINT_EVERY - 1, CHECKPOINT_EVERY))
        assert ("mine" in state.adapters) == (state.seq == CHECKPOINT_EVERY)
        after = Journal(blobs).commit(adding("after", 2000)).state
        assert after == Journal(blobs).refold()
        number += 1
    assert number > 10


def _writer(url: str, number: int, commits: int, adapters: str) -> None:
    journal = Journal(open_blobs(url))
    for count in range(commits):
        journal.commit(adding("one" if adapters == "one" else f"w{number}", number * 1000 + count))


def race(url: str, adapters: str, writers: int, commits: int) -> None:
    """Processes commit to one adapter, or each to its own: every commit is there once, in one line."""
    context = multiprocessing.get_context("spawn" if "://" in url else "fork")
    workers = [context.Process(target=_writer, args=(url, n, commits, adapters)) for n in range(writers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(3000)
        assert worker.exitcode == 0
    journal = Journal(open_blobs(url))
    entries = journal.entries()
    assert [entry.seq for entry in entries] == list(range(1, writers * commits + 1))
    assert journal.refold() == journal.state()
    made = {put("a", number * 1000 + count).id for number in range(writers) for count in range(commits)}
    assert {version.id for version in journal.state().live()} == made
    keys = {info.key for info in journal.blobs.list() if not info.key.endswith(".state.json")}
    assert keys == {MARKER, HEAD, *(entry_key(n) for n in range(1, writers * commits + 1))}, "nothing else is left"


RACES = [
    pytest.param("many", 4, 25), pytest.param("one", 4, 10),
    pytest.param("many", 16, 100, marks=pytest.mark.long), pytest.param("one", 16, 100, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("adapters", "writers", "commits"), RACES)
def test_racing_processes_make_one_history(tmp_path: Path, adapters: str, writers: int, commits: int) -> None:
    """Cases 6, 69."""
    race(str(tmp_path / "s"), adapters, writers, commits)


@pytest.mark.s3
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("adapters", "writers", "commits"),
    [pytest.param("one", 3, 10, marks=pytest.mark.slow), *RACES[2:]],
)
def test_racing_processes_make_one_history_on_s3(s3_url: str, adapters: str, writers: int, commits: int) -> None:
    """Cases 6, 69, 114."""
    race(s3_url, adapters, writers, commits)


def test_threads_share_one_journal(blobs: Blobs) -> None:
    journal = Journal(blobs)
    threads = [
        threading.Thread(target=lambda n=n: [journal.commit(adding(f"t{n}", n * 100 + i)) for i in range(10)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert journal.state().seq == 80
    assert Journal(blobs).refold() == journal.state()


def test_readers_see_whole_commits_while_writers_write(blobs: Blobs) -> None:
    """Case 47: a reader sees a commit's changes together or not at all."""
    writer, stop, seen = Journal(blobs), threading.Event(), set()
    writer.commit(lambda state: [put("a", 0), put("b", 0)])

    def read() -> None:
        while not stop.is_set():
            state = Journal(blobs).state()
            seen.add((state.adapters["a"].latest.id, state.adapters["b"].latest.id))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 60):
        writer.commit(lambda state, n=number: [put("a", n), put("b", n)])
    stop.set()
    thread.join(60)
    assert seen
    assert all(left == right for left, right in seen)


def test_past_states_by_number_and_by_moment(blobs: Blobs) -> None:
    journal = filled(blobs, CHECKPOINT_EVERY + 20)
    states = [Journal(blobs).state_at(seq) for seq in range(CHECKPOINT_EVERY + 21)]
    assert [state.seq for state in states] == list(range(CHECKPOINT_EVERY + 21))
    assert states[-1] == journal.state()
    times = [entry.time for entry in journal.entries()]
    assert journal.state_at_moment(times[0] - timedelta(seconds=1)).seq == 0
    assert journal.state_at_moment(times[-1] + timedelta(days=1)) == journal.state()
    for moment in (times[5], times[40]):
        assert journal.state_at_moment(moment).seq == sum(time <= moment for time in times)


class TestSingleWriter:
    """A storage without exclusive creation: entries carry their writer's token and are found by listing."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return FsspecBlobs(f"file://{tmp_path}/s")

    def test_it_works_for_one_writer_and_says_so(self, blobs: Blobs, caplog: pytest.LogCaptureFixture) -> None:
        journal = filled(blobs, 70)
        assert journal.marker.reads == ("single-writer",)
        assert Journal(blobs).state() == journal.state()
        assert journal.state().seq == 70
        assert [entry.seq for entry in Journal(blobs).entries()] == list(range(1, 71))
        assert all("-" in info.key for info in blobs.list("journal/"))

    def test_an_accidental_second_writer_loses_nothing_and_is_seen(
        self, blobs: Blobs, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = filled(blobs, 2), Journal(blobs)

        def decide(state: State) -> list[Change]:
            if "late" not in state.adapters:
                second.commit(adding("late", 50))
            return [put("mine", 60)]

        first.commit(decide)
        second.commit(adding("next", 70))
        state = Journal(blobs).state()
        assert {"late", "mine", "next"} <= set(state.names())
        assert state.seq == 4
        assert "two writers made entry 3" in caplog.text
        assert Journal(blobs).commit(adding("more", 80)).state.seq == 5

    def test_long_histories_with_double_numbers_are_read(self, blobs: Blobs) -> None:
        """Either of two entries of one number may be the one that the next follows, wherever reading pauses."""
        filled(blobs, 15)
        for number in range(10):
            left, right = Journal(blobs), Journal(blobs)

            def decide(state: State, right: Journal = right, number: int = number) -> list[Change]:
                right.commit(adding("right", 1000 + number))
                return [put("left", 2000 + number)]

            left.commit(decide)
            before = left._state if number % 2 else right._state
            follower = Journal(blobs)
            follower.state = lambda before=before, **_: before  # type: ignore[method-assign]
            follower.commit(adding("next", 3000 + number))
        state = Journal(blobs).state()
        assert state.seq == 35
        assert len(state.versions("left")) == len(state.versions("right")) == len(state.versions("next")) == 10
        assert Journal(blobs).refold() == state


def test_the_hint_names_a_checkpoint_that_another_writer_made(blobs: Blobs) -> None:
    """A writer that walked past a checkpoint points to it all the same; where it is missing, an older one is found."""
    watcher = filled(blobs, 2)
    filled(blobs, CHECKPOINT_EVERY * 2)
    watcher.commit(adding("mine", 9))
    assert json.loads(blobs.read(HEAD))["checkpoint"] == CHECKPOINT_EVERY * 2
    expected = watcher.state()
    blobs.delete([checkpoint_key(CHECKPOINT_EVERY * 2)])
    counting = FaultyBlobs(blobs)
    assert Journal(counting).state() == expected
    assert f"read {entry_key(CHECKPOINT_EVERY + 1)}" in counting.calls
    assert f"read {entry_key(1)}" not in counting.calls


def test_a_store_made_elsewhere_is_not_written_where_creation_is_not_exclusive(tmp_path: Path) -> None:
    filled(LocalBlobs(tmp_path / "s"), 2)
    careless = Journal(FsspecBlobs(f"file://{tmp_path}/s"))
    assert careless.state().seq == 2
    with pytest.raises(StorageError, match="cannot be written here"):
        careless.commit(adding("b"))


def test_folding_changes_whose_object_is_gone_does_nothing(blobs: Blobs) -> None:
    journal = filled(blobs, 1)
    state = journal.commit(
        lambda state: [Untag(name="n0", tag="absent"), Tag(name="n0", tag="best", id="v" + "0" * 16)]
    ).state
    assert state.adapters["n0"].tags == {}
