"""accelerate drives a set that is sharded by us or by its own FSDP2 plugin: activate, save, restore, audit hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerated
import pytest
import torch
import toys
from launch import launch, results

from multilora_store.errors import ShardedModelError, UnsupportedError, UsageError
from multilora_store.integrations.accelerate import adopt, plain_optimizer, prepare_model
from multilora_store.storage import open_store

ROOT = Path(__file__).resolve().parents[2]


def reference() -> dict[str, torch.Tensor]:
    """The same four steps on one process over both ranks' batches, gradients averaged."""
    import multilora_store as mls

    model = toys.build(trainable=["a", "b"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for name in ["a", "b"] * 2:
        mls.activate(model, [name], trainable=[name])
        for rank in range(2):
            (toys.loss_of(model, toys.tokens(rank)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return accelerated.weights(model)


@pytest.mark.parametrize("way", ["ours", pytest.param("ours+plugin", marks=pytest.mark.slow), "plugin"])
def test_two_adapters_train_in_turn_as_unsharded_and_resume_bit_for_bit(tmp_path: Path, way: str) -> None:
    """Case 128: wrapped by accelerate's plugin or by us, saved whole, restored after the wrap."""
    whole = results(accelerated.train, 2, str(tmp_path), way, "whole", timeout=120)
    resumed = results(accelerated.train, 2, str(tmp_path), way, "resumed", timeout=120)
    wanted = reference()
    for before, after in zip(whole, resumed, strict=True):
        assert before["ok"]
        assert before["backend"] == "fsdp2"
        assert before["granularity"] == ("" if way == "plugin" else "adapter")
        assert before["type"] == ("MULTI_CPU" if way == "ours" else "FSDP")
        assert all(torch.equal(before["weights"][key], after["weights"][key]) for key in wanted)
        for key, value in wanted.items():
            torch.testing.assert_close(before["weights"][key], value, rtol=1e-4, atol=1e-5, msg=key)
    assert list(open_store(tmp_path / "store").snapshot().adapters) == ["a", "b", "c"]


@pytest.mark.parametrize(("way", "error"), [("fsdp1", UnsupportedError), ("twice", ShardedModelError)])
def test_what_would_wrap_a_second_time_is_refused(way: str, error: type[Exception]) -> None:
    outcomes = launch(accelerated.refused, 2, way)
    assert all(isinstance(outcome.error, error) for outcome in outcomes), outcomes[0].trace


def test_set_ups_that_own_the_parameters_are_refused() -> None:
    driver: Any = SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED"), num_processes=2)
    with pytest.raises(UnsupportedError, match="DEEPSPEED"):
        prepare_model(driver, toys.build())
    with pytest.raises(UsageError, match="carries no adapters"):
        prepare_model(driver, toys.Toy())
    with pytest.raises(UsageError, match="this one is plain"):
        adopt(driver, toys.build())


def test_the_torch_optimizer_is_found_inside_accelerates() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert plain_optimizer(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))) is optimizer
    assert plain_optimizer(None) is None
    with pytest.raises(UsageError, match="is no optimizer"):
        plain_optimizer(SimpleNamespace(optimizer=3))


@pytest.mark.slow
def test_under_accelerate_launch(tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "integrations" / "accelerated.py")
    paths = [ROOT, ROOT / "tests" / "distributed"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2"]
    line += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    line += ["--main_process_port=0", program, str(tmp_path)]
    for part in ("whole", "resumed"):
        done = subprocess.run([*line, part], env=env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    whole, resumed = (torch.load(tmp_path / f"{part}-1.pt") for part in ("whole", "resumed"))
    assert whole["ranks"] == 2
    assert all(torch.equal(value, resumed["weights"][key]) for key, value in whole["weights"].items())
