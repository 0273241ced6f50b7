"""Retention: which snapshots and versions to keep, by policies that are plugins; the rest goes in one entry.

A policy sees candidates, oldest first, and says which it keeps; what any policy keeps stays. Snapshots are
decided first, then versions: what a remaining snapshot or a tag names, and the latest version of every
adapter, is never removed. Files are freed by a later gc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from multilora_store.errors import PluginError, UsageError
from multilora_store.plugins import Registry, default_registry
from multilora_store.storage.arguments import as_mapping
from multilora_store.storage.changes import Change, Delete, DropSnapshot
from multilora_store.storage.state import State

if TYPE_CHECKING:
    from multilora_store.storage.store import Store

__all__ = [
    "Candidate",
    "Policy",
    "RetentionPlan",
    "RetentionReport",
    "apply_retention",
    "keep_best",
    "keep_every",
    "keep_last",
    "keep_tagged",
    "plan_retention",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One snapshot, or one version of an adapter, as a policy sees it.

    Attributes:
        kind: `snapshot` or `version`.
        id: Its id.
        name: The adapter; empty for a snapshot.
        seq: The entry that made it.
        time: When that was.
        tags: Tags that name it, sorted.
    """

    kind: Literal["snapshot", "version"]
    id: str
    name: str = ""
    seq: int
    time: datetime
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"snapshot {self.id}" if self.kind == "snapshot" else f"{self.name}@{self.id}"


Policy: TypeAlias = Callable[..., Iterable[Candidate]]
"""`policy(candidates, **parameters)`: the candidates, oldest first, that it keeps. Called once for all
snapshots and once for the versions of each adapter."""


def keep_last(candidates: Sequence[Candidate], *, count: int = 3) -> Sequence[Candidate]:
    """Keeps the newest `count`."""
    return candidates[-_at_least(count, 1, "count") :]


def keep_tagged(candidates: Sequence[Candidate], *, tags: Sequence[str] = ("*",)) -> list[Candidate]:
    """Keeps what a tag of one of these patterns names."""
    return [c for c in candidates if any(fnmatchcase(tag, pattern) for tag in c.tags for pattern in tags)]


def keep_best(
    candidates: Sequence[Candidate], *, metric: str, count: int = 1, mode: Literal["min", "max"] = "min"
) -> list[Candidate]:
    """Keeps the `count` best by a number in the metadata; what has no such number is not judged, and not kept."""
    if mode not in ("min", "max"):
        raise UsageError(f"keep_best has no mode {mode!r}", remedy="valid: min, max")
    scored = [(_score(c, metric), c) for c in candidates]
    known = [(score if mode == "min" else -score, -c.seq, c) for score, c in scored if score is not None]
    known.sort(key=lambda row: row[:2])  # of equals, the newer one
    return [c for _, _, c in known[: _at_least(count, 1, "count")]]


def keep_every(
    candidates: Sequence[Candidate], *, steps: int | None = None, hours: float | None = None
) -> list[Candidate]:
    """Keeps the first in every `steps` training steps, or in every `hours` hours."""
    if (steps is None) == (hours is None):
        raise UsageError("keep_every takes either steps or hours", remedy="give exactly one of them")
    kept: dict[int, Candidate] = {}
    for candidate in candidates:
        if steps is not None and candidate.step is not None:
            kept.setdefault(candidate.step // _at_least(steps, 1, "steps"), candidate)
        elif hours is not None:
            if not hours > 0:
                raise UsageError(f"keep_every got hours={hours}", remedy="give more than zero")
            kept.setdefault(int(candidate.time.timestamp() // (hours * 3600)), candidate)
    return list(kept.values())


def _at_least(value: int, least: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is {value!r}", remedy=f"give a whole number from {least} on")
    return value


def _score(candidate: Candidate, metric: str) -> float | None:
    value = candidate.metadata.get(metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What policies come to.

    Attributes:
        drop: Snapshots to drop, oldest first.
        delete: Versions to delete, by adapter, oldest first.
        keep: Everything else, with what keeps it.
    """

    drop: tuple[Candidate, ...]
    delete: tuple[Candidate, ...]
    keep: tuple[tuple[Candidate, str], ...]

    def changes(self) -> list[Change]:
        """The changes of one entry."""
        drops = [DropSnapshot(id=candidate.id) for candidate in self.drop]
        return [*drops, *(Delete(name=candidate.name, id=candidate.id) for candidate in self.delete)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """What was removed and kept: the plan, and its entry (None: nothing was removed, or a dry run)."""

    plan: RetentionPlan
    seq: int | None
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "dropped": [c.id for c in self.plan.drop], "deleted": [str(c) for c in self.plan.delete],
            "kept": {str(c): why for c, why in self.plan.keep}, "seq": self.seq, "dry_run": self.dry_run,
        }  # fmt: skip


def apply_retention(
    store: Store,
    policies: Mapping[str, Mapping[str, Any]],
    *,
    adapters: Sequence[str] = ("*",),
    snapshots: bool = True,
    dry_run: bool = False,
    registry: Registry | None = None,
) -> RetentionReport:
    """Removes what no policy keeps, in one entry that is decided again if another writer is faster.

    Args:
        store: The store.
        policies: Parameters by name of a retention policy, as in `{"keep_last": {"count": 5}, "keep_tagged": {}}`.
        adapters: Patterns of the adapters whose versions are judged; all others keep everything.
        snapshots: Whether snapshots are judged; those with an adapter that is not, are kept.
        dry_run: Only plans.
        registry: Where policies are looked up; by default built-ins and installed plugins.

    Raises:
        UsageError: no policies, or wrong parameters.
        PluginError: an unknown policy, or one that fails.
    """
    for name, parameters in as_mapping(policies, "the policies").items():
        as_mapping(parameters, f"the parameters of {name}")
    chosen = _load(policies, registry or default_registry())
    if dry_run:
        plan = plan_retention(store.state(), chosen, adapters=adapters, snapshots=snapshots)
        return RetentionReport(plan=plan, seq=None, dry_run=True)
    store.journal.marker  # noqa: B018  (a root that is no store is an error)
    made: list[RetentionPlan] = []

    def decide(state: State) -> list[Change]:
        made.append(plan_retention(state, chosen, adapters=adapters, snapshots=snapshots))
        return made[-1].changes()

    done = store.journal.commit(decide)
    return RetentionReport(plan=made[-1], seq=done.entry.seq if done.entry else None, dry_run=False)


def plan_retention(
    state: State,
    policies: Mapping[str, Callable[[Sequence[Candidate]], Iterable[Candidate]]],
    *,
    adapters: Sequence[str] = ("*",),
    snapshots: bool = True,
) -> RetentionPlan:
    """What `policies`, with their parameters bound, keep of `state`."""
    if not policies:
        raise UsageError("no retention policy is given, and nothing would be kept", remedy="give at least one")
    keep: list[tuple[Candidate, str]] = []

    def judge(candidates: Sequence[Candidate], held: Mapping[str, str]) -> list[Candidate]:
        kept: dict[str, str] = dict(held)
        for name, policy in policies.items():
            for candidate in policy(candidates):
                kept.setdefault(candidate.id, name)
        keep.extend((c, kept[c.id]) for c in candidates if c.id in kept)
        return [c for c in candidates if c.id not in kept]

    judged = {name for name in state.names() if any(fnmatchcase(name, pattern) for pattern in adapters)}
    everything = sorted(state.snapshots.values(), key=lambda s: s.seq)
    outside = {s.id: "not judged" for s in everything if not snapshots or not judged.issuperset(s.adapters)}
    drop = judge([_of_snapshot(state, s.id) for s in everything], outside)
    dropped = {c.id for c in drop}
    delete: list[Candidate] = []
    for name in sorted(judged):
        delete += judge(_of_adapter(state, name), _held(state, name, dropped))
    return RetentionPlan(drop=tuple(drop), delete=tuple(delete), keep=tuple(keep))


def _held(state: State, name: str, dropped: set[str]) -> dict[str, str]:
    """Versions that must stay, and why."""
    adapter = state.adapters[name]
    held = {identity: f"tag {tag}" for tag, identity in adapter.tags.items()}
    for snapshot in state.snapshots.values():
        member = snapshot.adapters.get(name)
        if snapshot.id not in dropped and member is not None and member.version is not None:
            held.setdefault(member.version, f"snapshot {snapshot.id}")
    if adapter.latest is not None:
        held.setdefault(adapter.latest.id, "latest")
    return held


def _of_snapshot(state: State, identity: str) -> Candidate:
    found = state.snapshots[identity]
    tags = {
        tag
        for name, member in found.adapters.items()
        if name in state.adapters
        for tag, version in state.adapters[name].tags.items()
        if version == member.version
    }
    return Candidate(
        kind="snapshot", id=identity, seq=found.seq, time=found.time, step=found.step, metadata=found.metadata,
        tags=tuple(sorted(tags)),
    )  # fmt: skip


def _of_adapter(state: State, name: str) -> list[Candidate]:
    tags = state.adapters[name].tags
    return [
        Candidate(
            kind="version", id=v.id, name=name, seq=v.seq, time=v.time, step=v.step, metadata=v.metadata,
            tags=tuple(sorted(tag for tag, identity in tags.items() if identity == v.id)),
        )
        for v in state.versions(name)
    ]  # fmt: skip


def _load(
    policies: Mapping[str, Mapping[str, Any]], registry: Registry
) -> dict[str, Callable[[Sequence[Candidate]], Iterable[Candidate]]]:
    """Every policy with its parameters checked against its signature and bound."""
    bound = {}
    for name, given in policies.items():
        plugin = registry.get("retention_policy", name)
        valid = {parameter.name for parameter in plugin.parameters}
        missing = {p.name for p in plugin.parameters if p.default is p.REQUIRED} - set(given)
        if set(given) - valid or missing:
            wrong = ", ".join(sorted((set(given) - valid) or missing))
            raise UsageError(
                f"{name} {'lacks' if missing and not set(given) - valid else 'does not take'} {wrong}",
                remedy=f"its parameters: {', '.join(sorted(valid)) or 'none'}",
            )
        bound[name] = _bind(name, plugin.load(), given)
    return bound


def _bind(name: str, policy: Policy, given: Mapping[str, Any]) -> Callable[[Sequence[Candidate]], Iterable[Candidate]]:
    def call(candidates: Sequence[Candidate]) -> list[Candidate]:
        kept = list(policy(candidates, **given))
        asked = {c.id for c in candidates}
        strangers = [c for c in kept if c.id not in asked]
        if strangers:
            raise PluginError(f"retention policy {name!r} keeps {strangers[0]!s}, which it was not asked about")
        return kept

    return call
