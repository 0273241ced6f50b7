"""Assembling N adapters: ours against PEFT's sequential loading and against bare reading of the files, in one run.

    python benchmarks/assemble.py [--adapters 64] [--layers 24] [--width 1024] [--rank 16] [--json FILE]

PEFT is timed on the same N adapters, never extrapolated; `--peft 0` leaves it out, `--peft M` times it on M and
compares M with M. Every round starts from a fresh base; the best of `--rounds` counts, PEFT runs once. Pages are
warm for all: files are read once before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import peft
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly import assemble
from multilora_store.storage import Store, open_store

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Base(nn.Module):
    """The layout alone: layers of seven projections, their weights zero and never touched."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for layer in self.layers:
            for name in PROJECTIONS:
                with torch.device("meta"):
                    linear = nn.Linear(width, width, bias=False)
                linear.weight = nn.Parameter(torch.zeros(width, width))
                layer.add_module(name, linear)


def write(store: Store, count: int, layers: int, width: int, rank: int) -> list[str]:
    """Put `count` adapters into the store; their names."""
    config = AdapterConfig.parse(
        {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": list(PROJECTIONS),
            "inference_mode": True,
        }
    )
    draw = torch.Generator().manual_seed(0)
    block = torch.randn(rank * width, generator=draw)
    names = [f"adapter_{number}" for number in range(count)]
    for number, name in enumerate(names):
        tensors = {}
        for index in range(layers):
            for projection in PROJECTIONS:
                key = f"base_model.model.layers.{index}.{projection}"
                tensors[f"{key}.lora_A.weight"] = (block + number).reshape(rank, width)
                tensors[f"{key}.lora_B.weight"] = (block - number).reshape(width, rank)
        store.put(name, tensors, config)
    return names


def timed(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the best of `rounds`."""
    best = float("inf")
    for _ in range(rounds):
        gc.collect()
        start = time.perf_counter()
        made = work()
        best = min(best, time.perf_counter() - start)
        del made
    return best


def by_peft(base: nn.Module, folders: dict[str, Path]) -> PeftModel:
    """PEFT's own calls, one after another."""
    names = iter(folders)
    first = next(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base, folders[first], adapter_name=first)
        for name in names:
            model.load_adapter(folders[name], adapter_name=name)
    return model


def read_files(folders: dict[str, Path]) -> float:
    """Read every tensor of every file with the safetensors library, and touch each page."""
    total = 0.0
    for folder in folders.values():
        for tensor in load_file(folder / "adapter_model.safetensors").values():
            total += float(tensor.view(-1)[::1024].sum())
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--peft", type=int, default=None, help="adapters that PEFT loads; all by default, 0: none")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(open_store(Path(folder) / "store"), options)
    print_table(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(store: Store, options: argparse.Namespace) -> dict[str, object]:
    """Every number of the report; seconds."""
    count, wide = options.adapters, (options.layers, options.width)
    names = write(store, 2 * count, *wide, options.rank)
    folders = {name: store.path(name) for name in names}
    read_files(folders)
    half, full = names[:count], names
    seconds = {
        "read": timed(lambda: read_files({name: folders[name] for name in half}), options.rounds),
        "ours": best_fresh(lambda base: assemble(base, entries(half), store=store), wide, options.rounds),
        "ours_double": best_fresh(lambda base: assemble(base, entries(full), store=store), wide, options.rounds),
    }
    peft_count = count if options.peft is None else options.peft
    if peft_count:
        some = {name: folders[name] for name in names[:peft_count]}
        seconds["peft"] = best_fresh(lambda base: by_peft(base, some), wide, 1)
        seconds["ours_as_peft"] = (
            seconds["ours"]
            if peft_count == count
            else best_fresh(lambda base: assemble(base, entries(list(some)), store=store), wide, options.rounds)
        )
    nbytes = sum((folders[name] / "adapter_model.safetensors").stat().st_size for name in half)
    return {
        "adapters": count,
        "peft_adapters": peft_count,
        "layers": options.layers,
        "targets": len(PROJECTIONS),
        "width": options.width,
        "rank": options.rank,
        "bytes": nbytes,
        "seconds": seconds,
        "ratios": ratios(seconds),
        "versions": {"torch": torch.__version__, "peft": peft.__version__, "python": platform.python_version()},
    }


def entries(names: list[str]) -> dict[str, dict[str, bool]]:
    """A manifest of `names`, the first active as with PEFT."""
    return {name: {"active": position == 0} for position, name in enumerate(names)}


def best_fresh(work: Callable[[nn.Module], object], wide: tuple[int, int], rounds: int) -> float:
    """Seconds of the best of `rounds`, each on a base of its own."""
    return min(timed(partial(work, Base(*wide)), 1) for _ in range(rounds))


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """What the targets speak of."""
    found = {
        "ours / read (target: at most 3)": seconds["ours"] / seconds["read"],
        "double / single (target: at most 2.2)": seconds["ours_double"] / seconds["ours"],
    }
    if "peft" in seconds:
        found["peft / ours (target: at least 60)"] = seconds["peft"] / seconds["ours_as_peft"]
    return found


def print_table(report: dict[str, object]) -> None:
    """The report for people."""
    count, seconds, found = report["adapters"], report["seconds"], report["ratios"]
    assert isinstance(seconds, dict)
    assert isinstance(found, dict)
    megabytes = int(str(report["bytes"])) / 2**20
    print(
        f"{count} adapters, {report['layers']} layers x {report['targets']} targets, rank {report['rank']}, "
        f"width {report['width']}, {megabytes:.0f} MiB; versions {report['versions']}"
    )
    labels = {
        "read": f"reading the {count} files",
        "ours": f"assemble {count}",
        "ours_double": f"assemble {2 * int(str(count))}",
        "peft": f"PEFT, {report['peft_adapters']} one by one",
    }
    for key, label in labels.items():
        if key in seconds:
            print(f"  {label:<28} {seconds[key]:8.2f} s")
    for label, value in found.items():
        print(f"  {label:<40} {value:6.2f}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
