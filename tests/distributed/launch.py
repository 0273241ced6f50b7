"""Runs one function on N gloo ranks and brings back what each rank returned, raised, or left unsaid.

A server process imports torch, peft and the package once; each launch forks its ranks from it, so that a test
costs a fraction of a second instead of one import of torch for every rank, and still each rank is a process of
its own that may be killed. The server runs one launch at a time and ends with the test session.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What one rank left behind: a value, or an error, or only its exit code."""

    rank: int
    exit_code: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    output: str = ""
    seconds: float = 0.0


class Server:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of ranks ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()


@functools.cache
def server() -> Server:
    return Server()


def launch(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 170.0, **kwargs: Any
) -> list[Outcome]:
    """Calls `function(*args, **kwargs)` on each of `world` ranks; a rank past `timeout` seconds is killed."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        call = Path(folder, "call.pkl")
        call.write_bytes(pickle.dumps((args, kwargs)))
        server().ask(
            {
                "file": str(Path(function.__code__.co_filename).resolve()),
                "function": function.__qualname__,
                "world": world,
                "folder": folder,
                "timeout": timeout,
            }
        )
        return [_outcome(Path(folder), rank) for rank in range(world)]


def results(function: Callable[..., Any], world: int, *args: Any, timeout: float = 170.0, **kwargs: Any) -> list[Any]:
    """Like `launch`, for ranks that must all succeed: their return values."""
    outcomes = launch(function, world, *args, timeout=timeout, **kwargs)
    broken = [outcome for outcome in outcomes if outcome.error is not None or outcome.exit_code != 0]
    if broken:
        broken = broken[:1] if len({o.trace for o in broken}) == 1 else broken
        parts = [f"rank {o.rank} (exit code {o.exit_code}):\n{o.trace}\n{o.output[-4000:]}" for o in broken]
        raise AssertionError("\n".join(parts))
    return [outcome.value for outcome in outcomes]


def _outcome(folder: Path, rank: int) -> Outcome:
    exit_code = int((folder / f"{rank}.code").read_text())
    output = (folder / f"{rank}.out").read_text(errors="replace")
    report = folder / f"{rank}.pkl"
    if not report.exists():
        return Outcome(rank, exit_code, output=output, trace="no report: the process ended before it returned")
    value, error, trace, seconds = pickle.loads(report.read_bytes())
    return Outcome(rank, exit_code, value, error, trace, output, seconds)


# The server's side.

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends: no rank outlives a test run that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve() -> None:
    _die_with_parent()
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(Path(__file__).parent))
    import peft  # noqa: F401
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        _run(json.loads(line))
        replies.write("{}\n")
        replies.flush()


def _run(request: dict[str, Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(request["world"]):
        child = os.fork()
        if child == 0:
            _die_with_parent()
            _rank(request, rank, port)
        children[child] = rank
    deadline = time.monotonic() + request["timeout"]
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            if time.monotonic() > deadline:
                for late in children:
                    os.kill(late, signal.SIGUSR1)  # writes where it hangs
                time.sleep(0.3)
                for late in children:
                    os.kill(late, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.01)
            continue
        rank = children.pop(child)
        Path(request["folder"], f"{rank}.code").write_text(str(os.waitstatus_to_exitcode(status)))


def _rank(request: dict[str, Any], rank: int, port: int) -> None:
    folder = Path(request["folder"])
    output = os.open(folder / f"{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    code = 1
    began = time.monotonic()
    try:
        value, error, trace = _call(request), None, ""
        code = 0
    except BaseException as caught:
        value, error, trace = None, caught, traceback.format_exc()
    report = _pickled((value, error, trace, time.monotonic() - began))
    (folder / f"{rank}.part").write_bytes(report)
    (folder / f"{rank}.part").rename(folder / f"{rank}.pkl")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _call(request: dict[str, Any]) -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location("ranked", request["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranked"] = module
    spec.loader.exec_module(module)
    args, kwargs = pickle.loads(Path(request["folder"], "call.pkl").read_bytes())
    dist.init_process_group("gloo", timeout=timedelta(seconds=max(5.0, request["timeout"])))
    value = getattr(module, request["function"])(*args, **kwargs)
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a rank that a test killed cannot come
            dist.barrier()
        dist.destroy_process_group()
    return value


def _pickled(report: tuple[Any, BaseException | None, str, float]) -> bytes:
    _, error, trace, seconds = report
    try:
        data = pickle.dumps(report)
        pickle.loads(data)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace, seconds))
    return data


if __name__ == "__main__":
    _serve()
