"""Divergence: who decides the latest version of each adapter when two stores were both written to.

Decided for whole sets, never adapter by adapter: adapters that one commit put belong together, and if one of
them was moved on both sides, all of them follow the same side. Else a sync could mix two saved sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from multilora_store.storage.state import State, Version

__all__ = ["Common", "Diverged", "Side", "decide_latest"]

Side: TypeAlias = Literal["source", "target"]
Diverged: TypeAlias = Literal["source", "target", "refuse"]
"""Who decides `latest` and tags that both sides moved: one of them, or nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """The latest versions of one adapter on both sides, and whether each side moved since the common point."""

    name: str
    ours: Version
    theirs: Version
    by_source: bool
    by_target: bool

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
    moves = {m.name: m for name in sorted(source.adapters) if (m := _move(name, source, target, common))}
    winners: dict[str, Side] = {}
    for names in _sets(moves.values(), common):
        diverged = any(moves[name].both for name in names)
        for name in names:
            if diverged:
                winners[name] = "target" if rule == "target" else "source"
            else:
                winners[name] = "source" if moves[name].by_source else "target"
    return winners, [name for name, move in moves.items() if move.both]


def _move(name: str, source: State, target: State, common: Common) -> _Move | None:
    ours, theirs = _latest(source, name), _latest(target, name)
    if ours is None or theirs is None:
        return None
    seen_ids = {latest.id for state in common.known if (latest := _latest(state, name)) is not None}
    given = None if common.given is None else _latest(common.given, name)
    # What the source put since and left the latest when it took over the target, the target has not seen either.
    kept = common.given is not None and ours.seq > common.taken and (given is None or given.id != ours.id)
    by_source = ours.id not in seen_ids or ours.seq > common.seen or kept
    return _Move(name=name, ours=ours, theirs=theirs, by_source=by_source, by_target=theirs.seq > common.there)


def _latest(state: State, name: str) -> Version | None:
    return state.adapters[name].latest if name in state.adapters else None


def _sets(moves: Iterable[_Move], common: Common) -> list[list[str]]:
    """The adapters, grouped: two are in one group if one commit since the common point put both."""
    moves = list(moves)
    commits: dict[tuple[Side, int], list[str]] = defaultdict(list)
    for move in moves:
        if move.by_source and move.ours.seq > common.taken:
            commits["source", move.ours.seq].append(move.name)
        if move.by_target:
            commits["target", move.theirs.seq].append(move.name)
    group = {move.name: move.name for move in moves}

    def root(name: str) -> str:
        while group[name] != name:
            group[name] = group[group[name]]
            name = group[name]
        return name

    for names in commits.values():
        for name in names[1:]:
            group[root(name)] = root(names[0])
    found: dict[str, list[str]] = defaultdict(list)
    for move in moves:
        found[root(move.name)].append(move.name)
    return list(found.values())
