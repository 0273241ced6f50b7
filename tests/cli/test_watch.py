"""`sync watch=`: a process that follows a run, and ends when it is told to."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch

from multilora_store.cli import main
from multilora_store.storage import open_store

CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}


def put(root: Path, value: float) -> str:
    pair = {"lora_A": torch.full((1, 4), value), "lora_B": torch.ones(4, 1)}
    tensors = {f"base_model.model.q.{key}.weight": tensor for key, tensor in pair.items()}
    return str(open_store(root).put("a", tensors, CONFIG))


class Lines:
    """The lines of a pipe as they come, each waited for."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe, self._lines = pipe, queue.Queue[str]()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self._lines.put(line.rstrip())

    def until(self, words: str) -> str:
        deadline = time.monotonic() + 60
        while words not in (line := self._lines.get(timeout=60)):
            assert time.monotonic() < deadline, f"no line with {words!r}"
        return line


@contextmanager
def watching(here: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Lines, Lines]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "multilora_store", "sync", "source=run", "target=copy", "watch=0.2", *words],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell's background job, as CI may be, hands down that interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = Lines(process.stdout), Lines(process.stderr)
    try:
        yield process, out, err
    finally:
        process.kill()
        process.wait(20)
        for lines in (out, err):
            lines.reader.join(20)


def test_a_run_is_followed_until_it_is_interrupted(here: Path) -> None:
    """From before its first save on, one line a change, and exit code 0."""
    with watching(here) as (process, out, err):
        err.until("neither a store nor")
        first = put(here / "run", 1.0)
        assert out.until("+ a@") == f"+ {first}"
        out.until("copied")
        second = put(here / "run", 2.0)
        assert out.until("+ a@") == f"+ {second}"
        out.until("copied")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0
    assert [str(version) for version in open_store(here / "copy").versions("a")] == [first, second]
    assert open_store(here / "copy").verify().ok


def test_json_is_a_line_a_round(here: Path) -> None:
    with watching(here, "output=json") as (process, out, _):
        failed = json.loads(out.until("{"))
        assert (failed["exit"], failed["error"]["type"]) == (1, "StoreNotFoundError")
        assert failed["again_in"] > 0
        name = put(here / "run", 1.0)
        document = json.loads(out.until("versions"))
        assert (document["versions"], document["unchanged"], document["exit"]) == ([name], False, 0)
        assert json.loads(out.until("{"))["unchanged"] is True
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0


def test_a_watch_that_would_do_nothing_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(here / "run", 1.0)
    assert main(["sync", "source=run", "target=copy", "watch=1", "dry_run=true"]) == 2
    assert main(["sync", "source=run", "target=copy", "watch=0"]) == 2
    assert "more than 0" in capsys.readouterr().err
