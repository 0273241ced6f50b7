"""Retention keeps what a policy, a tag or a snapshot keeps, and past states can be compared and restored."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from samples import CONFIG, same, tensors

from multilora_store.errors import NotInStoreError, PluginError, PurgedError, UsageError
from multilora_store.plugins import Plugin, Registry, default_registry
from multilora_store.storage import SnapshotDraft, SnapshotMember, Store, diff_states, open_store, restore_state
from multilora_store.storage.retention import Candidate, apply_retention, keep_best, keep_every, keep_last, keep_tagged

START = datetime(2026, 1, 1, tzinfo=UTC)


def candidates(count: int) -> list[Candidate]:
    return [
        Candidate(
            kind="version", id=f"v{n}", name="a", seq=n + 1, time=START + timedelta(hours=n), step=100 * n,
            metadata={"loss": abs(n - 3)} if n != 2 else {"loss": "nan"}, tags=("best",) if n == 1 else (),
        )
        for n in range(count)
    ]  # fmt: skip


def ids(kept: Sequence[Candidate]) -> list[str]:
    return [candidate.id for candidate in kept]


def test_the_policies_keep_what_their_names_say() -> None:
    rows = candidates(6)
    assert ids(keep_last(rows, count=2)) == ["v4", "v5"]
    assert ids(keep_tagged(rows)) == ["v1"]
    assert ids(keep_tagged(rows, tags=("x*",))) == []
    assert ids(keep_best(rows, metric="loss", count=2)) == ["v3", "v4"]
    assert ids(keep_best(rows, metric="loss", mode="max")) == ["v0"]
    assert ids(keep_every(rows, steps=200)) == ["v0", "v2", "v4"]
    assert ids(keep_every(rows, hours=3)) == ["v0", "v3"]


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        (keep_last, {"count": 0}),
        (keep_best, {"metric": "loss", "mode": "lowest"}),
        (keep_every, {}),
        (keep_every, {"steps": 1, "hours": 1}),
        (keep_every, {"hours": -1}),
    ],
)
def test_wrong_parameters_are_refused(policy: object, given: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        policy(candidates(2), **given)  # type: ignore[operator]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Five versions of `a`, of which snapshots s1 and s2 name two; one version of `b`."""
    store = open_store(tmp_path / "store")
    for n in range(5):
        staged = store.stage("a", tensors(n), CONFIG, step=n, metadata={"loss": n})
        draft = SnapshotDraft(id=f"s{n}", step=n, adapters={"a": SnapshotMember()}) if n in (1, 2) else None
        store.commit([staged], snapshot=draft)
    store.put("b", tensors(9), CONFIG)
    return store


def seeds(store: Store, name: str = "a") -> list[int | None]:
    return [version.step for version in store.versions(name)]


def test_snapshots_go_first_and_then_the_versions_that_only_they_held(store: Store) -> None:
    report = apply_retention(store, {"keep_last": {"count": 1}})
    assert [s.id for s in store.snapshots()] == ["s2"]
    assert seeds(store) == [2, 4]
    assert report.seq == store.state().seq
    assert report.to_json()["kept"][str(store.versions("a")[0])] == "snapshot s2"
    assert apply_retention(store, {"keep_last": {"count": 1}}).seq is None


def test_what_a_tag_or_snapshot_names_and_the_latest_never_go(store: Store) -> None:
    store.tag(str(store.versions("a")[0]), "mine")
    apply_retention(store, {"keep_best": {"metric": "accuracy"}}, snapshots=False)
    assert seeds(store) == [0, 1, 2, 4]
    assert [s.id for s in store.snapshots()] == ["s1", "s2"]
    assert store.names() == ["a", "b"]


def test_policies_add_up_and_dry_run_changes_nothing(store: Store) -> None:
    policies = {"keep_last": {"count": 1}, "keep_best": {"metric": "loss"}}
    seq = store.state().seq
    report = apply_retention(store, policies, dry_run=True)
    assert store.state().seq == seq
    assert [c.step for c in report.plan.delete] == [1, 3]
    apply_retention(store, policies)
    assert seeds(store) == [0, 2, 4]


def test_only_the_chosen_adapters_are_judged(store: Store) -> None:
    apply_retention(store, {"keep_last": {"count": 1}}, adapters=("b",))
    assert seeds(store) == [0, 1, 2, 3, 4]
    assert len(store.snapshots()) == 2


def test_no_policy_and_unknown_ones_are_refused(store: Store) -> None:
    for policies in ({}, {"keep_last": {"n": 3}}, {"keep_best": {}}):
        with pytest.raises(UsageError):
            apply_retention(store, policies)
    with pytest.raises(PluginError, match="keep_last"):
        apply_retention(store, {"keep_lst": {}})
    assert {"keep_best", "keep_every", "keep_last", "keep_tagged"} <= set(default_registry().names("retention_policy"))


def test_a_plugin_that_keeps_a_stranger_is_named(store: Store) -> None:
    def odd(candidates: Sequence[Candidate]) -> list[Candidate]:
        """Keeps what it was not asked about."""
        return [Candidate(kind="version", id="v9", seq=1, time=START)]

    registry = Registry([Plugin(kind="retention_policy", name="odd", target=odd, origin="test")])
    with pytest.raises(PluginError, match="odd"):
        apply_retention(store, {"odd": {}}, registry=registry)
    assert len(seeds(store)) == 5


# Past states.


def test_a_past_state_is_compared_and_restored_by_a_new_entry(store: Store) -> None:
    then = store.state()
    store.tag("a", "best")
    store.put("a", tensors(50), CONFIG, step=50)
    store.drop_snapshot("s1")
    store.put("c", tensors(60), CONFIG)
    difference = diff_states(then, store.state())
    assert difference.added == ("c",)
    assert difference.dropped == ("s1",)
    assert difference.adapters["a"].tags == {"best": (None, then.versions("a")[-1].id)}
    assert difference.to_json()["adapters"]["a"]["put"] == [store.resolve("a").id]
    entries = len(store.log())
    report = restore_state(store, then.seq)
    assert report.seq == entries + 1
    assert same(store.get("a").tensors, tensors(4))
    assert store.tags("a") == {"best": then.versions("a")[-1].id}, "what came later stays"
    assert {s.id for s in store.snapshots()} == {"s1", "s2"}
    assert store.names() == ["a", "b", "c"]  # what came later stays
    restore_state(store, then.seq, exact=True)
    assert diff_states(then, store.state()).empty
    assert restore_state(store, then.seq, exact=True).seq is None
    assert store.verify().ok


def test_a_deleted_adapter_comes_back_until_it_is_purged(store: Store) -> None:
    then = store.state()
    store.delete("b")
    assert restore_state(store, then, adapters=("b",), dry_run=True).diff.added == ("b",)
    assert store.names() == ["a"]
    restore_state(store, then.time, adapters=("b",))
    assert same(store.get("b").tensors, tensors(9))
    store.delete("b")
    store.gc(grace=timedelta(0))
    with pytest.raises(PurgedError, match="purged it"):
        restore_state(store, then, adapters=("b",))
    restore_state(store, then, adapters=("a",))


def test_a_state_that_never_was_is_refused(store: Store) -> None:
    with pytest.raises(NotInStoreError, match="no entry 99"):
        restore_state(store, 99)
    with pytest.raises(NotInStoreError, match="no adapter like"):
        restore_state(store, 1, adapters=("zz",))
