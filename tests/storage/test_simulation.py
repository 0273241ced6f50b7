"""Random schedules of many processes at two stores: nothing lost, nothing resurrected, no mixed set.

`MULTILORA_SCHEDULES=100000 pytest -m long tests/storage/test_simulation.py` runs the full number; a schedule
that fails names its seed, and `simulate(seed)` runs it again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from unittest import mock

import pytest
from simulator import Odds, simulate, simulated


def run(seeds: Iterable[int], **given: object) -> Counter[str]:
    counts: Counter[str] = Counter()
    with simulated():
        for seed in seeds:
            try:
                counts += Counter(simulate(seed, **given))  # type: ignore[arg-type]
            except BaseException as error:
                raise AssertionError(f"schedule {seed} of {given}: {type(error).__name__}: {error}") from error
    return counts


def test_schedules_break_no_promise() -> None:
    counts = run(range(150))
    for kind in ("entries", "kills", "lost answers", "failures", "freed", "imports"):
        assert counts[kind] > 20, counts


def test_schedules_that_once_broke_a_promise() -> None:
    """Found among a hundred thousand: what a store kept as its own latest counted as moved since."""
    run([311_416])


def test_many_writers_and_no_faults_lose_nothing() -> None:
    counts = run(range(10_000, 10_030), processes=6, deeds=4, odds=Odds(kill=0, fail=0, lost=0, stale=0.5))
    assert counts["kills"] == counts["failures"] == 0
    assert counts["entries"] > 300


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_schedules_break_no_promise() -> None:
    run(range(20_000, 22_000))


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_a_hundred_thousand_schedules_break_no_promise() -> None:
    run(range(100_000, 100_000 + int(os.environ.get("MULTILORA_SCHEDULES", "100000"))))


def _keep_as_staged(blobs: object, staged: object, state: object) -> object:
    return staged


BREAKAGES = {
    "a writer that names what was purged": (
        "multilora_store.storage.store.restage",
        _keep_as_staged,
        "live and purged",
    ),
    "a sync that forgets deletions": (
        "multilora_store.storage.sync_plan._Planner._removed_by_target",
        lambda *_: False,
        "came back",
    ),
    "a sync that names files before it sends them": (
        "multilora_store.storage.transfer.Transfer.run",
        lambda *_: None,
        "before its record was there",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_simulator_finds_what_it_is_for(breakage: str) -> None:
    """Each promise, broken on purpose, is found broken: a silent simulator would prove nothing."""
    place, broken, words = BREAKAGES[breakage]
    with mock.patch(place, broken), pytest.raises(AssertionError, match=words):
        run(range(1500))
