"""A simulator: several processes at two stores, stepped call by call in an order that one seed decides.

Every call to a storage is a step. Before it, any other process may run any number of steps; at it, the process
may be killed, the call may fail, or its answer may be lost; hints may be stale or not written. The world looks
at every entry as it is made and at every file as it is removed, so a fault is found where it happens.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from samples import CONFIG, tensors

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import MultiLoRAError, StorageUnreachableError
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, restore_state, sync
from multilora_store.storage.blobs import BlobInfo, Buffer, Sent, parts_of
from multilora_store.storage.changes import Delete, Import, Put
from multilora_store.storage.contents import Contents, VersionRecord
from multilora_store.storage.entries import Entry
from multilora_store.storage.marker import Marker
from multilora_store.storage.puts import Source, build_contents
from multilora_store.storage.records import sha256
from multilora_store.storage.retention import apply_retention
from multilora_store.storage.state import Fold, State

START = datetime(2026, 1, 1, tzinfo=UTC)
SEEDS = 5
SET_SEEDS = 40


class Killed(BaseException):
    """The process is gone, with everything it had in memory."""


class BrokenPromise(AssertionError):
    """What must never happen has happened."""


@dataclass(frozen=True, slots=True)
class Odds:
    """How likely each call goes wrong, each hint is stale."""

    kill: float = 0.004
    fail: float = 0.004
    lost: float = 0.006
    stale: float = 0.3


@dataclass
class Shelf:
    """The files of one store, and what the world knows of it: its true state after every entry."""

    name: str
    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    hints: list[bytes] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def state(self) -> State:
        return self.states[-1]


class World:
    """Two shelves, a clock that counts calls, and whose turn it is."""

    def __init__(self, seed: int, odds: Odds) -> None:
        self.random = random.Random(seed)
        self.odds = odds
        self.step = 0
        self.shelves = {name: Shelf(name) for name in ("left", "right")}
        self.counts = {"entries": 0, "kills": 0, "lost answers": 0, "failures": 0, "freed": 0, "imports": 0}
        self.sets: set[tuple[str, ...]] = set()
        self.quiet = False

    def created(self, shelf: Shelf, key: str, data: bytes) -> None:
        """Looks at an entry that was just made."""
        if key == "multilora-store.json":
            marker = Marker.from_bytes(data, key)
            shelf.states.append(State(store_id=marker.id, digest=marker.genesis))
        elif key.startswith("journal/") and ".state" not in key:
            before = shelf.state
            entry = Entry.from_bytes(data, key, before.seq + 1)
            if entry.prev != before.digest:
                raise BrokenPromise(f"{key} of {shelf.name} forks the history")
            fold = Fold(before)
            for change in entry.changes:
                fold.apply(change, entry.seq, entry.time)
            shelf.entries.append(entry)
            shelf.states.append(fold.finish(entry.seq, entry.digest, entry.time))
            self.counts["entries"] += 1
            self.counts["imports"] += any(isinstance(change, Import) for change in entry.changes)
            check_whole(shelf)
            self.sets |= saved_sets(entry)
            self.check_sets(shelf)

    def check_sets(self, shelf: Shelf) -> None:
        """The latest versions of `m1` and `m2` were saved together, by one commit somewhere."""
        found = tuple(versions[-1].id for name in ("m1", "m2") if (versions := shelf.state.versions(name)))
        if found and found not in self.sets:
            raise BrokenPromise(f"the latest of a set in {shelf.name} is mixed: {found}")

    def removed(self, shelf: Shelf, keys: Iterable[str]) -> None:
        """Looks at files that are about to be removed."""
        live = shelf.state.directories() if shelf.states else set()
        for key in keys:
            directory = key.rpartition("/")[0]
            if any(directory == path or directory.startswith(f"{path}/") for path in live):
                raise BrokenPromise(f"{key} of {shelf.name} was removed, and the state names it")
            self.counts["freed"] += key.startswith(("adapters/", "snapshots/"))


def check_whole(shelf: Shelf) -> None:
    """Every file that the state names lies there whole."""
    for version in shelf.state.live():
        if version.directory in shelf.state.purged:
            raise BrokenPromise(f"{version} of {shelf.name} is live and purged")
        record = shelf.files.get(f"{version.directory}/version.json")
        if record is None or sha256(record[0]) != version.record:
            raise BrokenPromise(f"{version} of {shelf.name} was named before its record was there")
        size = sum(len(shelf.files.get(f"{version.directory}/{f}", (b"",))[0]) for f in CONTENT_FILES)
        if size != version.nbytes:
            raise BrokenPromise(f"{version} of {shelf.name} lacks files: {size} of {version.nbytes} bytes")
    for snapshot in shelf.state.snapshots.values():
        for path in snapshot.files:
            if f"{snapshot.directory}/{path}" not in shelf.files:
                raise BrokenPromise(f"snapshot {snapshot.id} of {shelf.name} lacks {path}")
        for name, member in snapshot.adapters.items():
            if member.version not in {version.id for version in shelf.state.versions(name)}:
                raise BrokenPromise(f"snapshot {snapshot.id} of {shelf.name} names {name}@{member.version}, not live")


def saved_sets(entry: Entry) -> set[tuple[str, ...]]:
    """The set of `m1` and `m2` that the entry saves, if it does."""
    put = {change.name: change.id for change in entry.changes if isinstance(change, Put)}
    return {(put["m1"], put["m2"])} if "m1" in put else set()


def check_not_resurrected(target: Shelf, source: Shelf) -> None:
    """No import puts what an earlier import had brought, which the target then deleted, and nobody put anew."""
    deleted: dict[tuple[str, str], int] = {}
    reached = 0
    for entry in target.entries:
        for change in entry.changes:
            if isinstance(change, Import) and change.origin.store == source.state.store_id:
                _check_import(change, target, source, deleted, reached)
                reached = max(reached, change.origin.seq) if not change.origin.scope else reached
            for inner in change.changes if isinstance(change, Import) else (change,):
                if isinstance(inner, Delete):
                    deleted[inner.name, inner.id] = reached
                elif isinstance(inner, Put):
                    deleted.pop((inner.name, inner.id), None)


def _check_import(
    change: Import, target: Shelf, source: Shelf, deleted: Mapping[tuple[str, str], int], reached: int
) -> None:
    needed = {(c.name, c.id) for c in change.changes if c.verb == "tag"}
    for taken in (c for c in change.changes if c.verb == "snapshot"):
        needed |= {(name, member.version) for name, member in taken.adapters.items()}
    for put in (c for c in change.changes if isinstance(c, Put) and (c.name, c.id) in deleted):
        made = source.states[change.origin.seq].adapters[put.name].versions[put.id].seq
        if made <= deleted[put.name, put.id] and (put.name, put.id) not in needed:
            raise BrokenPromise(f"{put.name}@{put.id} came back to {target.name}: put {made}, known up to {reached}")


CONTENT_FILES = ("adapter_config.json", "adapter_model.safetensors", "version.json")


class Process:
    """One process: its thread runs only while it has the turn."""

    def __init__(self, world: World, script: Callable[[Process], None], seed: int) -> None:
        self.world, self.script = world, script
        self.random = random.Random(seed)
        self.dead = False
        self.failure: BaseException | None = None
        self.go = threading.Lock()
        self.go.acquire()
        self.turns: Turns | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.go.acquire()
        try:
            self.script(self)
        except BaseException as error:
            self.failure = error
        assert self.turns is not None
        self.turns.ended(self)

    def turn(self) -> None:
        """Lets whoever is chosen run, until it is this one's turn again."""
        assert self.turns is not None
        self.turns.next(self)

    def store(self, name: str) -> Store:
        return Store(SimulatedBlobs(self, self.world.shelves[name]))

    def restart(self) -> None:
        """A new process in the place of a killed one."""
        self.dead = False


class Turns:
    """Whose turn it is, in random order; a pause is a process that is not chosen for long.

    The one that runs chooses, and hands the turn over itself: most steps go on in the same thread.
    """

    def __init__(self, processes: Sequence[Process], chooser: random.Random) -> None:
        self.waiting, self.chooser = list(processes), chooser
        self.over = threading.Lock()
        self.over.acquire()
        self.failure: BaseException | None = None
        for process in processes:
            process.turns = self
            process.thread.start()

    def run(self) -> None:
        """Steps the processes until all are done; raises what the first of them raised."""
        self.chooser.choice(self.waiting).go.release()
        self.over.acquire()
        if self.failure is not None:
            raise self.failure

    def next(self, process: Process) -> None:
        if self.chooser.random() >= 0.25:
            return
        chosen = self.chooser.choice(self.waiting)
        if chosen is not process:
            chosen.go.release()
            process.go.acquire()

    def ended(self, process: Process) -> None:
        self.waiting.remove(process)
        self.failure = process.failure
        if self.waiting and self.failure is None:
            self.chooser.choice(self.waiting).go.release()
        else:
            self.over.release()


class SimulatedBlobs:
    """What one process sees of one shelf."""

    exclusive = "holds"
    endpoint = "simulated"

    def __init__(self, process: Process, shelf: Shelf) -> None:
        self.process, self.shelf = process, shelf
        self.url = f"simulated://{shelf.name}"

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One call: perhaps it fails before it does anything, or its answer is lost, or the process ends."""
        process, world = self.process, self.process.world
        if process.dead:
            raise Killed
        process.turn()
        world.step += 1
        if world.quiet:
            yield
            return
        luck = world.random.random()
        odds = world.odds
        if luck < odds.kill / 2:
            self._die()
        if luck > 1 - odds.fail:
            world.counts["failures"] += 1
            raise StorageUnreachableError("simulated: the call failed")
        yield
        if odds.kill / 2 <= luck < odds.kill:
            self._die()
        if odds.kill <= luck < odds.kill + odds.lost:
            world.counts["lost answers"] += 1
            raise StorageUnreachableError("simulated: the answer was lost")

    def _die(self) -> None:
        self.process.dead = True
        self.process.world.counts["kills"] += 1
        raise Killed

    def read(self, key: str) -> bytes | None:
        with self._call():
            if key == "head.json" and self.shelf.hints and self.process.world.random.random() < self._staleness():
                return self.process.world.random.choice(self.shelf.hints)
            found = self.shelf.files.get(key)
            return None if found is None else found[0]

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        data = self.read(key)
        return None if data is None else data[start : start + length]

    def write(self, key: str, parts: Buffer | Sequence[Buffer], sent: Sent | None = None) -> None:
        with self._call():
            data = b"".join(parts_of(parts))
            if key == "head.json":
                self.shelf.hints.append(data)
                if self.process.world.random.random() < self._staleness():
                    return
            self.shelf.files[key] = (data, self.process.world.step)

    def create(self, key: str, data: bytes) -> bool:
        with self._call():
            if key in self.shelf.files:
                return False
            self.shelf.files[key] = (data, self.process.world.step)
            self.process.world.created(self.shelf, key, data)
            return True

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        with self._call():
            found = [self._info(key) for key in self.shelf.files if key.startswith(prefix)]
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):  # each on its own, so that a kill leaves some
            with self._call():
                self.process.world.removed(self.shelf, [key] if key in self.shelf.files else [])
                self.shelf.files.pop(key, None)

    def stat(self, key: str) -> BlobInfo | None:
        with self._call():
            return self._info(key) if key in self.shelf.files else None

    def local_path(self, key: str) -> Path | None:
        return None

    def _info(self, key: str) -> BlobInfo:
        data, step = self.shelf.files[key]
        return BlobInfo(key, len(data), START + timedelta(seconds=step))

    def _staleness(self) -> float:
        return 0.0 if self.process.world.quiet else self.process.world.odds.stale


class SeedTensors(dict[str, Any]):
    """Stands for the tensors of a seed, whose files are made once and not by every put."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed


class _Inline:
    """An executor whose work is done when it is submitted: a process has one thread here."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*given))
        except BaseException as error:
            future.set_exception(error)
        return future

    def map(self, work: Callable[..., Any], *given: Iterable[Any]) -> Iterator[Any]:
        return iter([work(*row) for row in zip(*given, strict=True)])

    def shutdown(self, **_: object) -> None:
        pass


def _remembered(parse: Callable[..., Any]) -> Callable[..., Any]:
    """`parse(data, where, ...)`, done once for equal bytes wherever they lie."""
    known = lru_cache(4096)(lambda data, *given: parse(data, "simulated", *given))
    return lambda data, where, *given: known(data, *given)


@contextmanager
def simulated() -> Iterator[None]:
    """Our own code, but for sleeping, for threads inside a process, and for what was hashed or parsed before."""
    config = AdapterConfig.parse(CONFIG, where="")
    made = {
        seed: build_contents(Source(tensors=tensors(seed, layers=1, width=2), config=config, files=None), "")
        for seed in range(SEEDS + SET_SEEDS)
    }

    def contents(source: Source, name: str, *, allow_nonfinite: bool = False) -> Contents:
        assert isinstance(source.tensors, SeedTensors)
        return made[source.tensors.seed]

    home = "multilora_store.storage"
    with ExitStack() as stack:
        for place in ("store", "puts"):
            stack.enter_context(mock.patch(f"{home}.{place}.build_contents", contents))
        for place in ("history", "puts", "sync", "transfer"):
            stack.enter_context(mock.patch(f"{home}.{place}.ThreadPoolExecutor", _Inline))
        for record in (Entry, VersionRecord):  # frozen, and functions of the bytes alone
            stack.enter_context(mock.patch.object(record, "from_bytes", _remembered(record.from_bytes)))
        stack.enter_context(mock.patch(f"{home}.journal.time.sleep"))
        yield


# What processes do.


def put(process: Process, store: Store) -> None:
    store.put(process.random.choice(["a", "b"]), SeedTensors(process.random.randrange(SEEDS)), CONFIG)


def save_set(process: Process, store: Store) -> None:
    """A set of two and a snapshot with a file, in one entry."""
    number = process.random.randrange(10**9)
    staged = [
        store.stage(name, SeedTensors(SEEDS + process.random.randrange(SET_SEEDS)), CONFIG, metadata={"set": number})
        for name in ("m1", "m2")
    ]
    identity = f"s{number}"
    record = store.stage_snapshot_file(identity, "state.json", b"{}")
    members = {name: SnapshotMember() for name in ("m1", "m2")}
    store.commit(staged, snapshot=SnapshotDraft(id=identity, adapters=members, files={"state.json": record}))


def delete(process: Process, store: Store) -> None:
    store.delete(str(process.random.choice(store.versions(process.random.choice(["a", "b"])))))


def tag(process: Process, store: Store) -> None:
    store.tag(str(process.random.choice(store.versions(process.random.choice(["a", "b"])))), "best")


def untag(process: Process, store: Store) -> None:
    store.untag(process.random.choice(["a", "b"]), "best")


def drop(process: Process, store: Store) -> None:
    store.drop_snapshot(process.random.choice(store.snapshots() or ["none"]).id)  # type: ignore[union-attr]


def collect(process: Process, store: Store) -> None:
    store.gc(grace=timedelta(seconds=process.random.choice([0, 0, 40])))


def retain(process: Process, store: Store) -> None:
    apply_retention(store, {"keep_last": {"count": 2}}, adapters=("a", "b"))


def bring_back(process: Process, store: Store) -> None:
    restore_state(store, process.random.randint(0, store.state().seq), adapters=("a", "b"))


def read(process: Process, store: Store) -> None:
    store.files.read_all(store.resolve(process.random.choice(["a", "b", "m1"])))


def move(process: Process, store: Store) -> None:
    """A sync in either direction."""
    other = process.store("right" if store.blobs.shelf.name == "left" else "left")  # type: ignore[attr-defined]
    rule = process.random.choice(["source", "target"])
    sync(store, other, delete=process.random.random() < 0.3, diverged=rule, jobs=1)  # type: ignore[arg-type]


DEEDS: tuple[tuple[Callable[[Process, Store], None], int], ...] = (
    (put, 6), (save_set, 4), (delete, 4), (tag, 2), (untag, 1), (drop, 2), (collect, 4), (retain, 1),
    (bring_back, 1), (read, 2), (move, 5),
)  # fmt: skip


def script(deeds: int) -> Callable[[Process], None]:
    """A process that does `deeds` random things, at one store or the other, and starts again when killed."""

    def run(process: Process) -> None:
        stores = {name: process.store(name) for name in process.world.shelves}
        for _ in range(deeds):
            [deed] = process.random.choices([d for d, _ in DEEDS], [weight for _, weight in DEEDS])
            name = process.random.choice(["left", "left", "right"])
            try:
                deed(process, stores[name])
            except (MultiLoRAError, IndexError, AttributeError):
                continue
            except Killed:
                process.restart()
                stores = {name: process.store(name) for name in process.world.shelves}

    return run


def settle(process: Process) -> None:
    """Afterwards, undisturbed: everything still works, both stores come to hold all, and gc leaves no garbage."""
    left, right = process.store("left"), process.store("right")
    for store in (left, right):
        put(process, store)
    sync(left, right, jobs=1)
    sync(right, left, jobs=1)
    for store in (left, right):
        store.gc(grace=timedelta(0))
        for version in store.state().live():
            store.files.read_all(version)
        if store.journal.refold().to_bytes() != store.journal.state().to_bytes():
            raise BrokenPromise("the folded state is not what the journal says")


def simulate(seed: int, *, processes: int = 3, deeds: int = 4, odds: Odds = Odds()) -> dict[str, int]:
    """Runs one schedule and checks it; what happened in it, by kind."""
    world = World(seed, odds)
    Turns([Process(world, script(deeds), seed * 31 + n) for n in range(processes)], random.Random(seed)).run()
    world.quiet = True
    Turns([Process(world, settle, seed)], random.Random(seed)).run()
    left, right = world.shelves["left"], world.shelves["right"]
    check_not_resurrected(left, right)
    check_not_resurrected(right, left)
    for shelf in (left, right):
        check_whole(shelf)
        live = shelf.state.directories()
        strays = [k for k in shelf.files if k.startswith("adapters/") and k.rpartition("/")[0] not in live]
        if strays:
            raise BrokenPromise(f"gc left {strays[:3]} in {shelf.name}")
    return world.counts
