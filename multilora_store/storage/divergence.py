"""Divergence: who decides the latest version of each adapter when two stores were both written to.

Decided for whole sets, never adapter by adapter: adapters that one commit put, or one snapshot names, belong together,
and if one of them was moved on both sides, all of them follow the same side. Else a sync could mix two saved sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from multilora_store.storage.state import State, Version

__all__ = ["Common", "Diverged", "Side", "decide_latest"]

Side: TypeAlias = Literal["source", "target"]
Diverged: TypeAlias = Literal["source", "target", "refuse"]
"""Who decides `latest` and tags that both sides moved: one of them, or nobody."""
_Set: TypeAlias = tuple[Side, int | str]
"""Adapters of one side that belong together: what a commit put, by its entry, or what a snapshot names, by its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """The latest versions of one adapter on both sides, and whether each side moved since the common point.

    Attributes:
        sets: Those since then that the latest versions are parts of.
    """

    name: str
    ours: Version
    theirs: Version
    by_source: bool
    by_target: bool
    sets: Sequence[_Set]

    @property
    def both(self) -> bool:
        return self.by_source and self.by_target and self.ours.id != self.theirs.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What two stores knew of each other before a sync.

    Attributes:
        taken: The entry of the source up to which the target has taken it over; 0: never.
        seen: The entry of the source up to which the target has taken it over, or has given it what it is.
        there: The entry of the target at which that was so.
        known: States of either that the other has seen; what was latest in one of them has not moved since.
        given: The target as the source last took it over; None: it never did.
    """

    taken: int
    seen: int
    there: int
    known: Sequence[State]
    given: State | None


def decide_latest(source: State, target: State, common: Common, rule: Diverged) -> tuple[dict[str, Side], list[str]]:
    """Whose latest version each adapter gets that both stores have, and the adapters that both moved.

    Args:
        source, target: Both now.
        common: What they knew of each other before.
        rule: Who decides for a set that both moved.
    """
    sets: dict[str, list[_Set]] = defaultdict(list)
    for name, snapshot in _saved(source, common.taken, common.given):
        sets[name].append(("source", snapshot))
    for name, snapshot in _saved(target, common.there, None):
        sets[name].append(("target", snapshot))
    moves = {m.name: m for name in sorted(source.adapters) if (m := _move(name, source, target, common, sets[name]))}
    winners: dict[str, Side] = {}
    for names in _groups(list(moves.values())):
        diverged = any(moves[name].both for name in names)
        for name in names:
            if diverged:
                winners[name] = "target" if rule == "target" else "source"
            else:
                winners[name] = "source" if moves[name].by_source else "target"
    return winners, [name for name, move in moves.items() if move.both]


def _move(name: str, source: State, target: State, common: Common, saved: Sequence[_Set]) -> _Move | None:
    ours, theirs = _latest(source, name), _latest(target, name)
    if ours is None or theirs is None:
        return None
    seen_ids = {latest.id for state in common.known if (latest := _latest(state, name)) is not None}
    sets = list(saved)
    if ours.seq > common.seen:
        sets.append(("source", ours.seq))
    if theirs.seq > common.there:
        sets.append(("target", theirs.seq))
    sides = {side for side, _ in sets}
    by_source = ours.id not in seen_ids or "source" in sides
    return _Move(name=name, ours=ours, theirs=theirs, by_source=by_source, by_target="target" in sides, sets=sets)


def _saved(state: State, after: int, given: State | None) -> Iterator[tuple[str, str]]:
    """Adapters whose latest version a snapshot since entry `after` names, but one that the other store gave; and which.

    A save puts nothing where an adapter is as it was, so that half of its set may be known by its snapshot alone.
    """
    for snapshot in state.snapshots.values():
        if snapshot.seq > after and (given is None or snapshot.id not in given.snapshots):
            for name, member in snapshot.adapters.items():
                latest = _latest(state, name)
                if latest is not None and latest.id == member.version:
                    yield name, snapshot.id


def _latest(state: State, name: str) -> Version | None:
    return state.adapters[name].latest if name in state.adapters else None


def _groups(moves: Sequence[_Move]) -> list[list[str]]:
    """The adapters, grouped: two are in one group if they are in one set of either side."""
    sets: dict[_Set, list[str]] = defaultdict(list)
    for move in moves:
        for key in move.sets:
            sets[key].append(move.name)
    group = {move.name: move.name for move in moves}

    def root(name: str) -> str:
        while group[name] != name:
            group[name] = group[group[name]]
            name = group[name]
        return name

    for names in sets.values():
        for name in names[1:]:
            group[root(name)] = root(names[0])
    found: dict[str, list[str]] = defaultdict(list)
    for move in moves:
        found[root(move.name)].append(move.name)
    return list(found.values())
