"""The example of a plain loop, run as it is under torchrun: short, two adapters in turn, stopped and resumed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multilora_store.storage import open_store

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train.py"


def torchrun(*arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
    done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_example_is_under_forty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = torchrun(str(tmp_path / "whole"), "4")
    assert re.findall(r"step (\d): (\w+)", whole) == [("1", "tone"), ("2", "code"), ("3", "tone"), ("4", "code")]
    stopped = open_store(shutil.copytree(tmp_path / "whole", tmp_path / "store"))
    for snapshot in stopped.snapshots():  # as it was after the second step
        if (snapshot.step or 0) > 2:
            stopped.drop_snapshot(snapshot.id)
    assert whole.endswith(torchrun(str(tmp_path / "store"), "4", "resume"))
    saved = [
        {snapshot.step: {name: member.version for name, member in snapshot.adapters.items()} for snapshot in snapshots}
        for snapshots in (open_store(tmp_path / name).snapshots() for name in ("whole", "store"))
    ]
    assert list(saved[1]) == [1, 2, 3, 4]
    assert saved[0] == saved[1], "versions are named by their content"
