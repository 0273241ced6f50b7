"""Saving from a plain loop: at the steps that are due, at a signal to any rank, with what is kept."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import toys
from launch import results

from multilora_store.distributed import SaveSchedule
from multilora_store.errors import UsageError
from multilora_store.storage import open_store


def stopped(root: str, blocking: bool) -> dict[str, Any]:
    """SIGTERM comes to rank 1 alone, in step 4 of 9."""
    import torch
    import torch.distributed as dist

    from multilora_store.distributed import shard

    model = shard(toys.build(trainable=["a"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    store = open_store(root)
    before, steps = signal.getsignal(signal.SIGTERM), []
    with SaveSchedule(
        model, store, every=3, optimizer=optimizer, keep={"keep_last": {"count": 2}}, blocking=blocking
    ) as saves:
        for step in range(1, 10):
            toys.loss_of(model, toys.tokens(dist.get_rank())).backward()
            optimizer.step()
            if step == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if saves.after_step(step, metrics={"loss": 1.0 / step}):
                steps.append(step)
            if saves.stopping:
                break
    assert saves.snapshot is not None
    return {"steps": steps, "last": saves.snapshot.step, "restored": signal.getsignal(signal.SIGTERM) == before}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_signal_to_one_rank_saves_and_stops_all(blocking: bool, tmp_path: Path) -> None:
    """Case 2: the last step is in the store, on every rank the same, and nothing of it is lost."""
    for found in results(stopped, 2, str(tmp_path), blocking):
        assert found == {"steps": [3, 4], "last": 4, "restored": True}
    snapshots = open_store(tmp_path).snapshots()
    assert [(snapshot.step, snapshot.metadata["loss"]) for snapshot in snapshots] == [(3, 1 / 3), (4, 0.25)]


def test_what_is_kept(tmp_path: Path) -> None:
    """The newest and the best snapshot stay."""
    from multilora_store.assembly.bridge import adapter_parameters

    model, store = toys.build(), open_store(tmp_path)
    keep = {"keep_last": {"count": 1}, "keep_best": {"metric": "loss", "count": 1}}
    with SaveSchedule(model, store, every=2, signals=(), keep=keep) as saves:
        for step, loss in enumerate([9.0, 3.0, 0.1, 1.0, 0.2, 2.0, 0.3, 5.0], start=1):
            for parameter in adapter_parameters(model, "a").values():
                parameter.data.add_(1)
            assert saves.after_step(step, metrics={"loss": loss}) == (step % 2 == 0)
    assert [snapshot.step for snapshot in store.snapshots()] == [4, 8]
    assert saves.snapshot == store.snapshot()


def test_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from multilora_store.distributed import schedule

    clock = [0.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: clock[0])
    with SaveSchedule(toys.build(), open_store(tmp_path), minutes=10) as saves:
        saved = []
        for step in range(1, 8):
            clock[0] += 240
            if saves.after_step(step):
                saved.append(step)
    assert saved == [3, 6]


@pytest.mark.parametrize("options", [{"every": 0}, {"minutes": -1.0}, {"signals": ()}])
def test_a_schedule_that_never_saves_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"above 0|never saves"):
        SaveSchedule(toys.build(), open_store(tmp_path), **options)
