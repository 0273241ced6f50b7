"""Ranks agree, or all of them raise: the check that comes before every collective.

Two phases. A hash of what each rank was given, and whether it failed, goes through one small `all_reduce`;
only when that shows a difference do the ranks exchange the facts themselves, and each of them raises the same
error with the rank and the difference in it. All of it runs on a gloo group of its own, so that it neither
waits behind nor disturbs the traffic of the model.

A rank that is late is named in the log after `Patience.late` seconds and is given up after `Patience.fail`
seconds; a rank that died is noticed at once, since its connections close.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from multilora_store.distributed.disagreement import canonical, disagreement, joined
from multilora_store.errors import MultiLoRAError, RankFailedError, UsageError

__all__ = ["Patience", "Ranks", "patience", "ranks_of_mesh", "shut_down", "world"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a rank waits for the others, in seconds.

    Args:
        late: After this long the ranks that have not come are named in the log.
        fail: After this long they are given up and every waiting rank raises.
    """

    late: float = 30.0
    fail: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 < self.late <= self.fail:
            raise UsageError(
                f"patience must satisfy 0 < late <= fail, got late={self.late}, fail={self.fail}",
                remedy="for instance Patience(late=30, fail=1800), in seconds",
            )


_patience = Patience()


@contextlib.contextmanager
def patience(*, late: float | None = None, fail: float | None = None) -> Iterator[Patience]:
    """Waits shorter or longer within the block; groups keep the limits they were made with beyond `fail`."""
    global _patience
    before = _patience
    _patience = Patience(
        late=min(before.late, fail) if late is None and fail is not None else late or before.late,
        fail=before.fail if fail is None else fail,
    )
    try:
        yield _patience
    finally:
        _patience = before


@dataclass(frozen=True)
class Ranks:
    """The ranks that act together on one model, with the group on which they agree.

    A single process (no process group, or a group of one) agrees with itself: every method is then a plain call.

    Args:
        members: Global ranks, ascending.
        held: The gloo group of exactly these members, None for a single process. Not kept alive: torch alone ends it,
            since a thread of a group that outlives the interpreter aborts the process.
        rank: This process's place among the members.
    """

    members: tuple[int, ...] = (0,)
    held: weakref.ref[dist.ProcessGroup] | None = field(default=None, compare=False, repr=False)
    rank: int = 0
    _turns: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo group of exactly these members, None for a single process.

        Raises:
            UsageError: torch.distributed was shut down.
        """
        group = None if self.held is None else self.held()
        if self.held is not None and group is None:
            raise shut_down()
        return group

    @property
    def first(self) -> bool:
        """Whether this is the one rank that commits, prints and speaks for all."""
        return self.rank == 0

    def agree(self, subject: str, facts: Any) -> None:
        """Every rank was given the same `facts` (JSON-like), or every rank raises DisagreementError."""
        self.together(subject, lambda: None, facts=lambda _: facts)

    def together(self, subject: str, work: Callable[[], T], *, facts: Callable[[T], Any] | None = None) -> T:
        """Runs `work` here and on every other rank; all succeed and agree on `facts(result)`, or all raise.

        Raises:
            Exception: What `work` raised on this rank.
            RankFailedError: Another rank's work raised, or a rank died or stayed away.
            DisagreementError: The facts differ; the error names ranks and differences.
        """
        error: Exception | None = None
        result: T | None = None
        given: Any = None
        try:
            result = work()
            given = facts(result) if facts is not None else None
        except Exception as caught:
            error = caught
        self._settle(subject, error, given)
        return result  # type: ignore[return-value]  # `work` returned it: _settle raises otherwise

    def share(self, subject: str, value: T) -> list[T]:
        """The `value` of every member, in order of rank (small Python objects)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.watch(subject):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, subject: str, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, on every rank; if it raises there, all raise."""
        made = self.together(subject, make) if self.first else self.together(subject, lambda: None)
        if self.size == 1:
            return made  # type: ignore[return-value]
        box: list[Any] = [made]
        with self.watch(subject):
            dist.broadcast_object_list(box, src=self.members[0], group=self.group)
        return box[0]  # type: ignore[no-any-return]

    def aside(self, purpose: str) -> Ranks:
        """The same ranks on one more group, for a thread that must not mix its traffic with this one's."""
        return self if self.size == 1 else _ranks(self.members, purpose)

    def barrier(self, subject: str) -> None:
        """Returns once every rank has come here."""
        self._settle(subject, None, None)

    def _settle(self, subject: str, error: Exception | None, given: Any) -> None:
        if self.size == 1:
            if error is not None:
                raise error
            return
        vote = _hash_word([subject, given] if error is None else [subject, "failed", self.rank])
        ballot = torch.tensor([vote, -vote], dtype=torch.int64)  # the largest and the smallest vote, in one collective
        self._reduce(subject, ballot)
        if int(ballot[0]) == -int(ballot[1]):
            return
        failure = None if error is None else (type(error).__name__, str(error))
        reports = self.share(subject, (subject, given, failure))
        if error is not None:
            raise error
        self._raise_failure(subject, reports)
        raise disagreement(subject, reports, self.members)

    def _raise_failure(self, subject: str, reports: Sequence[tuple[str, Any, tuple[str, str] | None]]) -> None:
        failed = {rank: report[2] for rank, report in zip(self.members, reports, strict=True) if report[2] is not None}
        if not failed:
            return
        rank, (kind, message) = next(iter(failed.items()))
        others = "" if len(failed) == 1 else f" (and ranks {joined(list(failed)[1:])})"
        raise RankFailedError(
            f"rank {rank}{others} failed during {subject}: {kind}: {message.splitlines()[0] if message else ''}",
            why="\n".join(message.splitlines()[1:]),
            remedy="this rank stopped with it, nothing was committed; see the error of the failed rank",
            subject=subject,
            failed={r: f"{k}: {m}" for r, (k, m) in failed.items()},
        )

    def _reduce(self, subject: str, ballot: torch.Tensor) -> None:
        with self.watch(subject) as turn:
            work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            limits = _patience
            if not _wait(work, limits.late):
                absent = self._absent(turn, settle=min(1.0, limits.late))
                logger.warning(
                    "%s: waited %.0f s for rank %s; giving up after %.0f s",
                    subject,
                    limits.late,
                    joined(absent),
                    limits.fail,
                )
                if not _wait(work, max(limits.fail - limits.late, 0.001)):
                    raise TimeoutError(f"no answer within {limits.fail:.0f} s")

    @contextlib.contextmanager
    def watch(self, subject: str) -> Iterator[int]:
        """Turns a broken or silent connection into an error that names who is gone; yields the turn's number."""
        turn = next(self._turns)
        try:
            yield turn
        except MultiLoRAError:
            raise
        except (RuntimeError, TimeoutError) as error:
            absent = self._absent(turn)
            raise RankFailedError(
                f"{'rank ' + joined(absent) if absent else 'a rank'} stopped answering during {subject}",
                why=str(error).splitlines()[0],
                remedy="look at that rank's log; start all ranks again, the last committed snapshot is whole",
                subject=subject,
                absent=absent,
            ) from error

    def _absent(self, turn: int, *, settle: float = 2.0) -> list[int]:
        """Members that do not report within `settle` seconds, by the store that the job started with."""
        group = None if self.held is None else self.held()
        name = "" if group is None else group.group_name
        key = f"multilora_store/present/{name}/{turn}"
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{key}/{self.members[self.rank]}", "here")
            missing = list(self.members)
            deadline = time.monotonic() + settle
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not store.check([f"{key}/{rank}"])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            return [0]  # the store lives in rank 0, and does not answer
        return missing


def shut_down() -> UsageError:
    """The error for ranks that would act together on what belongs to a process group that is no more."""
    return UsageError(
        "the process group that this model was sharded with is gone",
        why="destroy_process_group was called",
        remedy="call it after the last save, restore or switch",
    )


def world() -> Ranks:
    """All ranks of the job; a single process where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
        return Ranks()
    return _ranks(tuple(range(dist.get_world_size())))


def ranks_of_mesh(mesh: Any) -> Ranks:
    """The ranks of a device mesh; every rank of that mesh must ask at the same time, the first time."""
    if dist.get_backend() == "fake":
        return Ranks()
    return _ranks(tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist())))


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str], Ranks]] = (
    weakref.WeakKeyDictionary()
)
"""Of a default process group, by members and purpose."""


@atexit.register
def _end_groups() -> None:
    """Joins the threads of groups that a script leaves open, while the interpreter is there for them."""
    for made in list(_made.values()):
        for ranks in made.values():
            group = None if ranks.held is None else ranks.held()
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def _ranks(members: tuple[int, ...], purpose: str = "agreement") -> Ranks:
    """The control group of these members, made once per default process group and purpose."""
    if len(members) == 1:
        return Ranks(members=members)
    default = dist.distributed_c10d._get_default_group()
    made = _made.setdefault(default, {})
    if (members, purpose) in made:
        return made[members, purpose]
    everyone = members == tuple(range(dist.get_world_size()))
    group = dist.new_group(
        None if everyone else list(members),
        backend="gloo",
        timeout=timedelta(seconds=_patience.fail),
        use_local_synchronization=not everyone,
        group_desc=f"multilora_store {purpose}",
    )
    ranks = Ranks(members=members, held=weakref.ref(group), rank=members.index(dist.get_rank()))
    made[members, purpose] = ranks
    return ranks


def _wait(work: Any, seconds: float) -> bool:
    """Whether the work finished in time; its own failure is raised."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def _hash_word(value: Any) -> int:
    """63 bits of a SHA-256, which gloo reduces faster than more of them."""
    return int.from_bytes(hashlib.sha256(canonical(value).encode()).digest()[:8], "big") >> 1
