"""Ranks agree or all raise, name the rank and the difference, and nothing hangs (Cases 20, 86)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch import launch, results

from multilora_store.distributed.agreement import Patience, patience, world
from multilora_store.distributed.disagreement import differences
from multilora_store.errors import DisagreementError, RankFailedError, UsageError


def test_a_single_process_agrees_with_itself() -> None:
    alone = world()
    assert (alone.size, alone.first) == (1, True)
    alone.agree("anything", {"a": 1})
    assert alone.together("work", lambda: 7) == 7
    assert alone.share("value", "x") == ["x"]
    assert alone.from_first("value", lambda: 3) == 3
    with pytest.raises(KeyError):
        alone.together("work", lambda: {}["missing"])


def test_patience_refuses_limits_that_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="late"):
        Patience(late=10, fail=1)
    with patience(fail=2.0) as limits:
        assert limits == Patience(late=2.0, fail=2.0)


def test_differences_name_paths() -> None:
    given = [{"a": {"r": 8}, "b": [1, 2]}, {"a": {"r": 4}, "b": [1]}]
    assert differences(given) == {"a.r": [8, 4], "b[1]": [2, "missing"]}


def agree_many() -> dict[str, Any]:
    ranks = world()
    first = ranks.rank == 0
    found: dict[str, Any] = {}
    ranks.agree("same", {"a": 1, "b": [1.5, None]})
    cases = {
        "missing adapter": ({"adapters": {"a": 1, "b": 1}}, {"adapters": {"a": 1}}),
        "rank": ({"a": {"r": 8}}, {"a": {"r": 4}}),
        "order": ({"names": ["a", "b"]}, {"names": ["b", "a"]}),
        "weight": ({"a": 0.5}, {"a": 0.25}),
        "type": ({"a": 1}, {"a": "1"}),
        "empty": ({"a": {}}, {"a": {"x": 1}}),
        "bool": ({"trainable": True}, {"trainable": False}),
        "nothing": ({}, None),
    }
    for label, (mine, other) in cases.items():
        try:
            ranks.agree(label, mine if ranks.rank != 1 else other)
        except DisagreementError as error:
            found[label] = (error.facts["ranks"], str(error))
    try:
        ranks.agree("activate" if first else "save", {})
    except DisagreementError as error:
        found["call"] = str(error)
    try:
        ranks.together("reading", lambda: 1 / 0 if ranks.rank == 1 else 0)
    except (RankFailedError, ZeroDivisionError) as error:
        found["failure"] = (type(error).__name__, str(error))
    found["objects"] = ranks.share("names", f"rank {ranks.rank}")
    found["first"] = ranks.from_first("draw", lambda: "drawn by the first")
    began = time.perf_counter()
    for _ in range(200):
        ranks.agree("each step", {"a": 0.7, "b": 0.3})
    found["ms"] = (time.perf_counter() - began) / 200 * 1000
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_of_difference_names_the_rank_on_every_rank(size: int) -> None:
    """Case 20: ranks that were given different adapters exit with a diff instead of hanging."""
    found = results(agree_many, size)
    labels = {"missing adapter", "rank", "order", "weight", "type", "empty", "bool", "nothing"}
    for each in found:
        for label in labels:
            odd, message = each[label]
            assert odd == [1], (label, message)
            assert "rank 1 differs" in message
        assert each["missing adapter"] == found[0]["missing adapter"]
        assert "adapters.b: 1 on rank" in each["missing adapter"][1]
        assert "activate" in each["call"]
        assert "save" in each["call"]
        assert each["objects"] == [f"rank {rank}" for rank in range(size)]
        assert each["first"] == "drawn by the first"
    assert found[1]["failure"][0] == "ZeroDivisionError"
    assert found[0]["failure"][0] == "RankFailedError"
    assert "rank 1 failed during reading: ZeroDivisionError" in found[0]["failure"][1]


def die_or_wait() -> tuple[str, list[int], float]:
    ranks = world()
    ranks.barrier("start")
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        ranks.agree("the next step", {})
    except RankFailedError as error:
        return str(error), error.facts["absent"], time.monotonic() - began
    raise AssertionError("a dead rank went unnoticed")


def test_a_killed_rank_is_named_within_seconds() -> None:
    outcomes = launch(die_or_wait, 3, timeout=30)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        error = outcomes[rank].error
        assert outcomes[rank].value is not None or error is not None
    told = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert told or all("Connection" in str(outcomes[rank].error) for rank in (0, 2))


def come_late(seconds: float, fail: float) -> tuple[str, str]:
    import logging

    with patience(late=0.3, fail=fail):
        ranks = world()
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("multilora_store.distributed.agreement").addHandler(handler)
        ranks.barrier("start")
        if ranks.rank == 1:
            time.sleep(seconds)
        try:
            ranks.agree("a slow step", {})
        except RankFailedError as error:
            os._exit(3) if ranks.rank == 1 else None
            return str(error), " ".join(heard)
        return "", " ".join(heard)


def test_a_slow_rank_is_named_but_not_failed_before_its_time() -> None:
    found = results(come_late, 2, 1.5, 30.0)
    assert [error for error, _ in found] == ["", ""]
    assert "waited 0 s for rank 1" in found[0][1]


def switch_on_one_rank_alone() -> list[tuple[str, dict[str, float], list[str]]]:
    from toys import build

    from multilora_store.assembly.bridge import active_adapters, trainable_adapters
    from multilora_store.distributed import activate, shard

    rank = world().rank
    model = shard(build(active=["a"], trainable=["a"]))
    calls = {
        "text": ({"b": "1" if rank else 1.0}, None),
        "infinite": ({"b": float("inf") if rank else 1.0}, None),
        "unknown": ({"zz" if rank else "b": 1.0}, None),
        "unknown trainable": ({"b": 1.0}, ["zz" if rank else "b"]),
    }
    found = []
    for weights, trainable in calls.values():
        try:
            activate(model, weights, trainable=trainable)
        except (UsageError, RankFailedError) as error:
            told = type(error).__name__
        else:
            told = "nothing was raised"
        found.append((told, active_adapters(model), sorted(trainable_adapters(model))))
    return found


def test_a_switch_that_one_rank_refuses_changes_no_rank() -> None:
    first, second = results(switch_on_one_rank_alone, 2)
    assert first == [("RankFailedError", {"a": 1.0}, ["a"])] * 4
    assert second == [("UsageError", {"a": 1.0}, ["a"])] * 4


def shard_other_values() -> list[tuple[str, str]]:
    import torch
    from toys import build

    from multilora_store.assembly.bridge import adapter_parameters, inject_adapter
    from multilora_store.distributed import shard
    from multilora_store.distributed.sharded import backend_of

    found = []
    for odd in ("base", "trained", "seed"):
        model = build()
        with torch.no_grad():
            if odd == "base":
                model.base_model.model.embed.weight.add_(world().rank)
            elif odd == "trained":
                next(iter(adapter_parameters(model, "b").values())).mul_(1 + world().rank)
            else:
                config = {"peft_type": "LORA", "r": 2, "target_modules": ["down"]}
                inject_adapter(model, "fresh", config, seed=world().rank)
        try:
            shard(model)
        except DisagreementError as error:
            found.append((str(error), backend_of(model)))
    return found


def test_ranks_that_hold_other_values_do_not_shard_them_into_one() -> None:
    """A base of its own on each rank, an adapter trained on one of them, a fresh one of another seed."""
    for base, trained, seed in results(shard_other_values, 2):
        assert "samples of the base" in base[0]
        assert "samples of adapter b" in trained[0]
        assert "samples of adapter fresh" in seed[0]
        assert {base[1], trained[1], seed[1]} == {"plain"}


def shut_down_and_begin_again(file: str) -> tuple[bool, str, list[int], bool]:
    import torch.distributed as dist

    ranks = world()
    ranks.agree("a fact", 1)
    assert ranks.held is not None
    assert world() is ranks
    dist.destroy_process_group()
    gone = ranks.held() is None
    with pytest.raises(UsageError) as caught:
        ranks.agree("another fact", 1)
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=ranks.rank, world_size=2)
    return gone, str(caught.value), world().share("place", ranks.rank), world() is ranks


def test_groups_end_with_torch_distributed_and_begin_with_it_again(tmp_path: Path) -> None:
    """A group kept alive past the shutdown keeps threads that abort the interpreter when it ends."""
    for gone, said, places, same in results(shut_down_and_begin_again, 2, str(tmp_path / "store")):
        assert gone
        assert "destroy_process_group was called" in said
        assert (places, same) == ([0, 1], False)


def use_after_shutdown() -> list[str]:
    import torch.distributed as dist
    from toys import build

    import multilora_store as mls

    model = mls.shard(build())
    dist.destroy_process_group()
    said = []
    for use in (
        lambda: mls.save(model, "memory://after", step=1),
        lambda: mls.activate(model, {"a": 1.0}),
        lambda: mls.detach(model, "a"),
        lambda: mls.audit(model),
    ):
        with pytest.raises(UsageError) as caught:
            use()
        said.append(str(caught.value))
    return said


def test_a_sharded_model_is_of_no_use_once_its_group_is_gone() -> None:
    for said in results(use_after_shutdown, 2):
        assert len(said) == 4
        assert all("destroy_process_group was called" in one for one in said)


LEFT_OPEN = """
import atexit
import torch.distributed as dist
from multilora_store.distributed.agreement import world

dist.init_process_group("gloo")
world().agree("a fact", 1)
ranks = world()
atexit._run_exitfuncs()
assert ranks.held() is None, "still open"
print("ended")
"""


def test_groups_that_a_script_leaves_open_end_before_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEFT_OPEN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["ended", "ended"]
