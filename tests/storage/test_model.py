"""A state machine of Hypothesis drives a store against a model in plain dictionaries."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from samples import CONFIG, same, tensors

from multilora_store.errors import NotInStoreError, ProtectedError
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, open_store, restore_state, sync

NAMES = st.sampled_from(["a", "b/c", "d.e"])
SEEDS = st.integers(0, 4)
TAGS = st.sampled_from(["best", "last.good"])
WRITERS = st.integers(0, 2)
IDS: dict[int, str] = {}


def given(seed: int) -> dict[str, object]:
    return tensors(seed, layers=1, width=2)  # type: ignore[return-value]


class StoreMachine(RuleBasedStateMachine):
    """Three writers, each with its own stale view, and what the store must say.

    `puts` holds the live seeds of each adapter, newest put last; `tags` and `snapshots` name seeds.
    """

    new_root: Callable[[], str]

    def __init__(self) -> None:
        super().__init__()
        self.root = type(self).new_root()
        self.writers = [self.opened() for _ in range(3)]
        self.puts: dict[str, list[int]] = {}
        self.tags: dict[str, dict[str, int]] = {}
        self.snapshots: dict[str, dict[str, int]] = {}

    def opened(self) -> Store:
        return open_store(self.root)

    @initialize()
    def begin(self) -> None:
        for seed in range(5):
            IDS[seed] = self.writers[0].put("a", given(seed), CONFIG).id
        self.puts["a"] = list(range(5))

    @rule(writer=WRITERS, name=NAMES, seed=SEEDS)
    def put(self, writer: int, name: str, seed: int) -> None:
        before = self.writers[writer].state().seq
        version = self.writers[writer].put(name, given(seed), CONFIG)
        live = self.puts.setdefault(name, [])
        assert self.writers[writer].state().seq == before + (live[-1:] != [seed]), "the same again makes no entry"
        assert version.id == IDS[seed]
        if seed in live:
            live.remove(seed)
        live.append(seed)

    @rule(writer=WRITERS, name=NAMES, tag=TAGS, seed=SEEDS)
    def tag(self, writer: int, name: str, tag: str, seed: int) -> None:
        if seed not in self.puts.get(name, []):
            with pytest.raises(NotInStoreError):
                self.writers[writer].tag(f"{name}@{IDS[seed]}", tag)
            return
        self.writers[writer].tag(f"{name}@{IDS[seed]}", tag)
        self.tags.setdefault(name, {})[tag] = seed

    @rule(writer=WRITERS, name=NAMES, tag=TAGS)
    def untag(self, writer: int, name: str, tag: str) -> None:
        if tag not in self.tags.get(name, {}):
            with pytest.raises(NotInStoreError):
                self.writers[writer].untag(name, tag)
            return
        self.writers[writer].untag(name, tag)
        del self.tags[name][tag]

    @rule(writer=WRITERS, name=NAMES, seed=SEEDS)
    def delete(self, writer: int, name: str, seed: int) -> None:
        ref = f"{name}@{IDS[seed]}"
        if seed not in self.puts.get(name, []):
            with pytest.raises(NotInStoreError):
                self.writers[writer].delete(ref)
        elif self.held(name, seed):
            with pytest.raises(ProtectedError):
                self.writers[writer].delete(ref)
        else:
            self.writers[writer].delete(ref)
            self.puts[name].remove(seed)

    @precondition(lambda self: any(self.puts.values()))
    @rule(writer=WRITERS)
    def take_snapshot(self, writer: int) -> None:
        members = {name: seeds[-1] for name, seeds in self.puts.items() if seeds}
        identity = self.writers[writer].new_snapshot_id()
        drafted = {name: SnapshotMember(version=IDS[seed]) for name, seed in members.items()}
        self.writers[writer].commit([], snapshot=SnapshotDraft(id=identity, adapters=drafted))
        self.snapshots[identity] = members

    @precondition(lambda self: self.snapshots)
    @rule(writer=WRITERS, which=st.randoms(use_true_random=False))
    def drop_snapshot(self, writer: int, which: object) -> None:
        identity = which.choice(sorted(self.snapshots))  # type: ignore[attr-defined]
        self.writers[writer].drop_snapshot(identity)
        del self.snapshots[identity]

    @rule(writer=WRITERS)
    def collect(self, writer: int) -> None:
        self.writers[writer].gc(grace=timedelta(0))

    @rule(writer=WRITERS)
    def start_anew(self, writer: int) -> None:
        self.writers[writer] = self.opened()

    @rule(writer=WRITERS)
    def restore_the_present(self, writer: int) -> None:
        assert restore_state(self.writers[writer], self.writers[writer].state().seq, exact=True).seq is None

    def held(self, name: str, seed: int) -> bool:
        tagged = seed in self.tags.get(name, {}).values()
        return tagged or any(members.get(name) == seed for members in self.snapshots.values())

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        for store in (self.writers[0], self.writers[2]):
            assert store.state() == self.writers[1].state()
        self.compare(self.writers[1])

    def compare(self, store: Store) -> None:
        if not store.state().seq:
            return
        assert store.names() == sorted(name for name, seeds in self.puts.items() if seeds)
        for name, seeds in self.puts.items():
            if seeds:
                assert [version.id for version in store.versions(name)] == [IDS[seed] for seed in seeds]
            assert store.tags(name) == {tag: IDS[seed] for tag, seed in self.tags.get(name, {}).items()}
        found = {s.id: {n: member.version for n, member in s.adapters.items()} for s in store.snapshots()}
        assert found == {i: {n: IDS[seed] for n, seed in m.items()} for i, m in self.snapshots.items()}

    def teardown(self) -> None:
        """Everything can be read, the history folds to the state, and a copy says the same."""
        store = self.opened()
        self.compare(store)
        for name, seeds in self.puts.items():
            for seed in seeds:
                assert same(store.get(f"{name}@{IDS[seed]}").tensors, given(seed))
        assert store.verify().ok
        assert store.state() == store.journal.refold()
        copy = open_store(f"memory://{uuid.uuid4().hex}")
        sync(store, copy)
        self.compare(copy)


def drive(
    new_root: Callable[[], str], *, examples: int, steps: int = 25, phases: tuple[Phase, ...] = tuple(Phase)
) -> None:
    machine = type("Machine", (StoreMachine,), {"new_root": staticmethod(new_root)})
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, phases=phases,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)


def memory_root() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("examples", [12, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_a_store_in_memory_equals_its_model(examples: int) -> None:
    drive(memory_root, examples=examples)


@pytest.mark.parametrize("examples", [5, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_a_store_on_disk_equals_its_model(examples: int) -> None:
    parent = tempfile.mkdtemp()
    try:
        drive(lambda: tempfile.mkdtemp(dir=parent) + "/store", examples=examples)
    finally:
        shutil.rmtree(parent)


@pytest.mark.s3
@pytest.mark.parametrize(
    "examples", [pytest.param(4, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.long)]
)
@pytest.mark.timeout(3600)
def test_a_store_on_s3_equals_its_model(examples: int, s3_url: str) -> None:
    drive(lambda: f"{s3_url}/{uuid.uuid4().hex}", examples=examples, steps=15)


def test_the_machine_finds_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that forgets what protects from a deletion is found out."""
    monkeypatch.setattr("multilora_store.storage.changing._holders", lambda *_: [])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        drive(memory_root, examples=200, phases=(Phase.generate,))
