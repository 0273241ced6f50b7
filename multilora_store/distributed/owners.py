"""Who reads or writes which adapter, and in which order: decided alike on every rank, from names and sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

__all__ = ["BUDGET", "assign_owners", "plan_rounds"]

BUDGET: Final = 256 * 1024 * 1024  # bytes that one owner holds of adapters in one round


def assign_owners(sizes: Mapping[str, int], members: Sequence[int]) -> dict[str, int]:
    """Name -> owner: the largest adapter first, each to the member with the fewest bytes so far.

    Args:
        sizes: Bytes of each adapter.
        members: Ranks that may own.
    """
    load = dict.fromkeys(members, 0)
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = min(members, key=lambda member: (load[member], member))
        load[owner] += sizes[name]
        owners[name] = owner
    return {name: owners[name] for name in sizes}


def plan_rounds(
    owners: Mapping[str, int], sizes: Mapping[str, int], budget: int = BUDGET
) -> Iterator[dict[int, list[str]]]:
    """Owner -> the adapters that move to (or from) it in one round, as many as fit in `budget`, at least one."""
    queues: dict[int, list[str]] = {}
    for name, owner in owners.items():
        queues.setdefault(owner, []).append(name)
    while any(queues.values()):
        moved: dict[int, list[str]] = {}
        for owner, queue in queues.items():
            total = 0
            while queue and (not total or total + sizes[queue[0]] <= budget):
                total += sizes[queue[0]] or 1
                moved.setdefault(owner, []).append(queue.pop(0))
        yield moved
