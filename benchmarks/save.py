"""Saving a model's N adapters: ours against PEFT's save_pretrained and against a raw write + hash of the same bytes.

    python benchmarks/save.py [--adapters 64] [--layers 24] [--width 1024] [--rank 16] [--json FILE]

One process, one model that carries all N; PEFT saves the same N, once, never extrapolated (`--no-peft` leaves it out).
The first save puts every adapter, the second finds them unchanged. Raw writes each adapter to a file of its own,
flushes it to the disk and hashes it. The best of `--rounds` counts for ours and raw, each into an empty folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import tempfile
import time
import warnings
from pathlib import Path

import peft
import torch
from assemble import Base, entries, write
from peft import PeftModel

import multilora_store as mls
from multilora_store.storage import open_store


def raw(files: list[bytes], folder: Path) -> None:
    """Write, flush and hash every file."""
    folder.mkdir()
    for number, data in enumerate(files):
        with open(folder / str(number), "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        hashlib.sha256(data).hexdigest()


def ours(model: PeftModel, folder: Path) -> tuple[float, float]:
    """Seconds of a first save, and of a second one with nothing changed."""
    store = open_store(folder)
    began = time.perf_counter()
    mls.save(model, store, step=1)
    first = time.perf_counter()
    mls.save(model, store, step=2)
    return first - began, time.perf_counter() - first


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Every number of the report; seconds."""
    store = open_store(folder / "source")
    names = write(store, options.adapters, options.layers, options.width, options.rank)
    files = [(store.path(name) / "adapter_model.safetensors").read_bytes() for name in names]
    model = mls.assemble(Base(options.layers, options.width), entries(names), store=store)
    seconds: dict[str, list[float]] = {"raw": [], "first save": [], "unchanged": []}
    for number in range(options.rounds):
        began = time.perf_counter()
        raw(files, folder / f"raw-{number}")
        seconds["raw"].append(time.perf_counter() - began)
        # A model knows what it has saved where, so each round is a store of its own.
        first, unchanged = ours(model, folder / f"ours-{number}")
        seconds["first save"].append(first)
        seconds["unchanged"].append(unchanged)
    if options.peft:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            model.save_pretrained(folder / "peft", save_embedding_layers=False)
        seconds["peft"] = [time.perf_counter() - began]
    best = {label: min(values) for label, values in seconds.items()}
    return {
        "adapters": options.adapters,
        "bytes": sum(map(len, files)),
        "seconds": best,
        "ratios": {
            "first save / raw (target: at most 2)": best["first save"] / best["raw"],
            "unchanged / raw": best["unchanged"] / best["raw"],
            **({"peft / first save (target: at least 60)": best["peft"] / best["first save"]} if options.peft else {}),
        },
        "versions": {"torch": torch.__version__, "peft": peft.__version__, "python": platform.python_version()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peft", dest="peft", action="store_false")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(options, Path(folder))
    print(f"{report['adapters']} adapters, {int(str(report['bytes'])) / 2**20:.0f} MiB; versions {report['versions']}")
    for group in ("seconds", "ratios"):
        rows = report[group]
        assert isinstance(rows, dict)
        for label, value in rows.items():
            print(f"  {label:<42} {value:8.2f}{' s' if group == 'seconds' else ''}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
