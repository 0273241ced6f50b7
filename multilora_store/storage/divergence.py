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

__all__ = ["Diverged", "Side", "decide_latest"]

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


def decide_latest(
    source: State, target: State, known: Sequence[State], *, seen: int, there: int, rule: Diverged
) -> tuple[dict[str, Side], list[str]]:
    """Whose latest version each adapter gets that both stores have, and the adapters that both moved.

    Args:
        source, target: Both now.
        known: States of either that the other has seen; what was latest in one of them has not moved since.
        seen: The entry of the source up to which the target knows it.
        there: The entry of the target at which that was so.
        rule: Who decides for a set that both moved.
    """
    moves = {m.name: m for name in sorted(source.adapters) if (m := _move(name, source, target, known, seen, there))}
    winners: dict[str, Side] = {}
    for names in _sets(moves.values(), seen, there):
        diverged = any(moves[name].both for name in names)
        for name in names:
            if diverged:
                winners[name] = "target" if rule == "target" else "source"
            else:
                winners[name] = "source" if moves[name].by_source else "target"
    return winners, [name for name, move in moves.items() if move.both]


def _move(name: str, source: State, target: State, known: Sequence[State], seen: int, there: int) -> _Move | None:
    ours, theirs = _latest(source, name), _latest(target, name)
    if ours is None or theirs is None:
        return None
    seen_ids = {latest.id for state in known if (latest := _latest(state, name)) is not None}
    by_source = ours.id not in seen_ids or ours.seq > seen
    return _Move(name=name, ours=ours, theirs=theirs, by_source=by_source, by_target=theirs.seq > there)


def _latest(state: State, name: str) -> Version | None:
    return state.adapters[name].latest if name in state.adapters else None


def _sets(moves: Iterable[_Move], seen: int, there: int) -> list[list[str]]:
    """The adapters, grouped: two are in one group if one commit since the common point put both."""
    moves = list(moves)
    commits: dict[tuple[Side, int], list[str]] = defaultdict(list)
    for move in moves:
        if move.ours.seq > seen:
            commits["source", move.ours.seq].append(move.name)
        if move.theirs.seq > there:
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
