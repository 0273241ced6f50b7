"""Following a store: through silence, failures that pass, and the start of the run itself."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from counting import CountingBlobs
from samples import CONFIG, tensors

from multilora_store.errors import StorageDeniedError, StorageUnreachableError, UsageError
from multilora_store.storage import Store, follow, open_store


class Waits:
    """Stands for sleeping: notes how long, lets the run go on meanwhile, and ends after the last of its steps."""

    def __init__(self, *steps: Any) -> None:
        self.steps, self.seconds = list(steps), list[float]()

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        if not self.steps:
            return True
        step = self.steps.pop(0)
        if step is not None:
            step()
        return False


def test_each_round_brings_what_is_new(tmp_path: Path) -> None:
    source = open_store(tmp_path / "run")
    waits = Waits(
        lambda: source.put("a", tensors(1), CONFIG), None, lambda: source.put("a", tensors(2), CONFIG, tags=["best"])
    )
    rounds = list(follow(tmp_path / "run", tmp_path / "copy", every=5, sleep=waits))
    assert [type(done.error).__name__ for done in rounds] == ["StoreNotFoundError", *["NoneType"] * 3]
    assert [len(done.report.plan.puts) for done in rounds if done.report] == [1, 0, 1]
    assert waits.seconds[1:] == [5, 5, 5]
    assert open_store(tmp_path / "copy").tags("a") == source.tags("a")


def test_a_quiet_round_costs_two_requests_a_side(tmp_path: Path) -> None:
    open_store(tmp_path / "run").put("a", tensors(1), CONFIG)
    left, right = (CountingBlobs(open_store(tmp_path / name).blobs) for name in ("run", "copy"))
    seen: list[tuple[int, int]] = []
    for _ in follow(Store(left), Store(right), every=1, sleep=Waits(None, None, None)):
        seen.append((left.total, right.total))
    quiet = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(seen[1:])]
    assert quiet == [(3, 3), (3, 3)], "the hint, the newest entry, and the one that is not there"


def test_failures_that_pass_are_waited_out_longer_and_longer(tmp_path: Path) -> None:
    source = open_store(tmp_path / "run")
    source.put("a", tensors(1), CONFIG)
    failing = [True] * 9

    def before(call: str, key: str) -> None:
        if failing and failing.pop():
            raise StorageUnreachableError("no answer")

    target = Store(CountingBlobs(open_store(tmp_path / "copy").blobs, before))
    waits = Waits(*[None] * 9, lambda: source.put("a", tensors(2), CONFIG))
    rounds = list(follow(source, target, every=60, sleep=waits))
    assert [done.error is None for done in rounds] == [False] * 9 + [True, True]
    assert 45 <= waits.seconds[0] <= 60
    assert 90 <= waits.seconds[1] <= 120
    assert all(225 <= seconds <= 300 for seconds in waits.seconds[3:9])
    assert waits.seconds[9:] == [60, 60]
    assert target.resolve("a").id == source.resolve("a").id


def test_what_time_does_not_mend_ends_it(tmp_path: Path) -> None:
    source = open_store(tmp_path / "run")
    source.put("a", tensors(1), CONFIG)

    def before(call: str, key: str) -> None:
        raise StorageDeniedError("no right")

    target = Store(CountingBlobs(open_store(tmp_path / "copy").blobs, before))
    with pytest.raises(StorageDeniedError):
        list(follow(source, target, every=1, sleep=Waits(None)))


@pytest.mark.parametrize("every", [0, -1, float("nan"), float("inf"), "x", None, True])
def test_every_is_a_time(every: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every"):
        follow(tmp_path / "run", tmp_path / "copy", every=every)
