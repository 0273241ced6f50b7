"""Saving and reading a set of adapters: this store beside plain safetensors, in one run.

    python benchmarks/storage.py [--adapters 64] [--layers 24] [--width 1024] [--rank 16] [--json FILE]

Rows: `raw` writes the same bytes to plain files, with one flush to the disk each, and hashes them once; `safetensors`
is `save_file` and a hash, as scripts do; `store` is one commit of the whole set, every tensor hashed, every file
flushed. Ratios are against `raw`. Every measurement is the median of `--repeat` runs, taken in turn, on a quiet cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from multilora_store.storage import Store, open_store

CONFIG = {"peft_type": "LORA", "lora_alpha": 32, "target_modules": ["q", "k", "v", "o", "gate", "up", "down"]}
Tensors = dict[str, torch.Tensor]


def make_set(adapters: int, layers: int, width: int, rank: int) -> dict[str, Tensors]:
    """`adapters` adapters of `layers` x 7 targets, random, float32."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensors] = {}
    for number in range(adapters):
        tensors: Tensors = {}
        for layer in range(layers):
            for target in CONFIG["target_modules"]:
                stem = f"base_model.model.model.layers.{layer}.{target}_proj"
                tensors[f"{stem}.lora_A.weight"] = torch.rand(rank, width, generator=generator)
                tensors[f"{stem}.lora_B.weight"] = torch.rand(width, rank, generator=generator)
        found[f"adapter{number:03d}"] = tensors
    return found


def save_raw(folder: Path, adapters: dict[str, Tensors]) -> None:
    """The bytes as plain files: one hash, one write, one flush."""
    for name, tensors in adapters.items():
        digest = hashlib.sha256()
        descriptor = os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o666)
        with open(descriptor, "wb", buffering=1 << 20) as file:
            for tensor in tensors.values():
                data = memoryview(tensor.numpy()).cast("B")
                digest.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


def save_safetensors(folder: Path, adapters: dict[str, Tensors]) -> None:
    """`save_file`, then a hash of the file."""
    for name, tensors in adapters.items():
        path = folder / f"{name}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")


def save_store(folder: Path, adapters: dict[str, Tensors]) -> None:
    """One commit of the whole set."""
    store = open_store(folder)
    requests = [
        {"name": name, "tensors": tensors, "config": {**CONFIG, "r": rank_of(tensors)}}
        for name, tensors in adapters.items()
    ]
    store.commit(store.stage_many(requests))


def rank_of(tensors: Tensors) -> int:
    """The rank, read off the first factor."""
    return int(next(iter(tensors.values())).shape[0])


def read_plain(folder: Path, adapters: dict[str, Tensors]) -> None:
    """Every tensor of every plain file, touched."""
    for name in adapters:
        for tensor in load_file(folder / f"{name}.safetensors").values():
            tensor.sum()


def read_store(folder: Path, adapters: dict[str, Tensors]) -> None:
    """Every tensor of every adapter of the store, touched; hashed on the first use, as the cache decides."""
    store = open_store(folder)
    for name in adapters:
        for tensor in store.get(name).tensors.values():
            tensor.sum()


def measure(work: dict[str, Callable[[], None]], repeat: int) -> dict[str, float]:
    """Median seconds of each piece of work; the pieces take turns, so that a slow moment hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeat):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def commits_per_second(folder: Path, count: int) -> float:
    """Commits of a tag, one after another, by one writer on this disk."""
    store = open_store(folder)
    store.put("a", {"base_model.model.x.lora_A.weight": torch.ones(1, 1)}, {**CONFIG, "r": 1})
    start = time.perf_counter()
    for number in range(count):
        store.tag("a", f"t.{number}")
    return count / (time.perf_counter() - start)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All measurements, below `folder`."""
    adapters = make_set(options.adapters, options.layers, options.width, options.rank)
    nbytes = sum(tensor.nbytes for tensors in adapters.values() for tensor in tensors.values())

    def fresh(save: Callable[[Path, dict[str, Tensors]], None], name: str) -> Callable[[], None]:
        def work() -> None:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
            save(folder / name, adapters)

        return work

    saves = measure(
        {
            "raw": fresh(save_raw, "raw"),
            "safetensors": fresh(save_safetensors, "safetensors"),
            "store": fresh(save_store, "store"),
        },
        options.repeat,
    )
    again = measure({"store, unchanged": lambda: save_store(folder / "store", adapters)}, options.repeat)
    os.environ["MULTILORA_CACHE"] = str(folder / "cache")
    first = measure({"store, first use": lambda: read_store(folder / "store", adapters)}, 1)
    store = open_store(folder / "store")
    for name in adapters:
        store.path(name)
    reads = measure(
        {
            "safetensors": lambda: read_plain(folder / "safetensors", adapters),
            "store": lambda: read_store(folder / "store", adapters),
        },
        options.repeat,
    )
    check_equal(store, adapters)
    return {
        "adapters": options.adapters, "bytes": nbytes, "save": {**saves, **again}, "read": {**reads, **first},
        "commits_per_second": commits_per_second(folder / "small", 200),
        "ratios": {
            "save: store / raw": saves["store"] / saves["raw"],
            "save: store / safetensors": saves["store"] / saves["safetensors"],
            "save unchanged: store / raw": again["store, unchanged"] / saves["raw"],
            "read: store / safetensors": reads["store"] / reads["safetensors"],
        },
    }  # fmt: skip


def check_equal(store: Store, adapters: dict[str, Tensors]) -> None:
    """What was measured is right: every tensor of the store is the one that was given."""
    for name, tensors in adapters.items():
        stored = store.get(name).tensors
        assert set(stored) == set(tensors)
        assert all(torch.equal(stored[key], tensor) for key, tensor in tensors.items())


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    size = report["bytes"]
    print(f"{report['adapters']} adapters, {size / 1e6:.0f} MB")
    for what in ("save", "read"):
        for name, seconds in report[what].items():
            print(f"  {what:5} {name:18} {seconds:8.3f} s {size / seconds / 1e6:8.0f} MB/s")
    for name, ratio in report["ratios"].items():
        print(f"  {name:32} {ratio:6.2f} x")
    print(f"  commits of one writer            {report['commits_per_second']:6.0f} /s")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; by default the temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="write the report here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = run(options, Path(folder))
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
