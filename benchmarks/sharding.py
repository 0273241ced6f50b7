"""Sharded sets side by side: ours against PEFT + FSDP2 as it is written by hand today, in one run on gloo ranks.

    python benchmarks/sharding.py [--ranks 2] [--adapters 16] [--layers 8] [--width 256] [--rank 16] [--json FILE]

By hand: one FSDP2 unit a block, `set_adapter`, a save that gathers the full state dict on rank 0 and filters it, a
restore that broadcasts it from there, and for one adapter more the model built and wrapped anew.
Traffic is counted as collectives are issued (bytes handed to rank 0), times are the best of three.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from multilora_store import activate, attach, detach, open_store, restore, save, shard
from multilora_store.distributed.agreement import world

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Block(nn.Module):
    """Four projections and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in PROJECTIONS:
            self.add_module(name, nn.Linear(width, width, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o_proj(torch.tanh(self.q_proj(x) + self.k_proj(x) + self.v_proj(x)))


class Base(nn.Module):
    """Blocks alone."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.clone()


class Traffic(TorchDispatchMode):
    """Bytes that collectives hand to this rank, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        home, operation = str(func).split(".")[:2]
        if home == "c10d":
            self.count(operation, args[0])
        elif home == "_c10d_functional" and operation != "wait_tensor":
            self.count(operation, given)
        return given

    def count(self, operation: str, received: Any) -> None:
        """Adds the bytes of what one collective hands out."""
        for tensor in received if isinstance(received, (list, tuple)) else [received]:
            if isinstance(tensor, torch.Tensor):
                self.bytes[operation] = self.bytes.get(operation, 0) + tensor.numel() * tensor.element_size()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def build(options: argparse.Namespace, count: int) -> nn.Module:
    """A PeftModel with `count` adapters, the same on every rank."""
    torch.manual_seed(0)
    config = {"r": options.rank, "target_modules": list(PROJECTIONS)}
    model = get_peft_model(Base(options.layers, options.width), LoraConfig(**config), adapter_name="m0")
    for index in range(1, count):
        model.add_adapter(f"m{index}", LoraConfig(**config))
    return model


def timed(work: Callable[[], Any], rounds: int = 3) -> float:
    """Seconds of the best of `rounds`, all ranks together."""
    best = float("inf")
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        best = min(best, time.perf_counter() - began)
    return best


def wrapped(options: argparse.Namespace, count: int) -> Any:
    """A model with one FSDP2 unit a block."""
    model: Any = build(options, count)
    for layer in model.base_model.model.layers:
        fully_shard(layer)
    fully_shard(model.base_model.model)
    return model


def by_hand(options: argparse.Namespace, root: str) -> dict[str, float]:
    """PEFT and FSDP2 without this library."""
    model = wrapped(options, options.adapters)
    model.set_adapter("m0")
    x = torch.randn(4, options.width)
    model(x).sum().backward()
    with Traffic() as step:
        model(x).sum().backward()
    model.base_model.model.reshard()

    def whole() -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save({k: v for k, v in state.items() if "lora_" in k}, f"{root}/adapters.pt")

    def back() -> None:
        state = torch.load(f"{root}/adapters.pt") if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, state, options=options)

    with Traffic() as saving:
        whole()
    return {
        "step bytes": step.total,
        "save bytes": saving.total,
        "switch ms": timed(lambda: model.set_adapter("m1")) * 1000,
        "save s": timed(whole),
        "restore s": timed(back),
        "attach s": timed(lambda: wrapped(options, options.adapters + 1), rounds=1),
    }


def ours(options: argparse.Namespace, root: str) -> dict[str, float]:
    """The same with this library, and what has no counterpart there."""
    model = shard(build(options, options.adapters))
    activate(model, {"m0": 1.0}, trainable=["m0"])
    x = torch.randn(4, options.width)
    model(x).sum().backward()
    with Traffic() as step:
        model(x).sum().backward()
    store = open_store(root)
    with Traffic() as saving:
        save(model, store, step=0)

    def touch_and_save() -> None:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    parameter.add_(1e-3)
        save(model, store, step=1)

    late = {"peft_type": "LORA", "r": options.rank, "target_modules": list(PROJECTIONS)}
    found = {
        "step bytes": step.total,
        "save bytes": saving.total,
        "switch ms": timed(lambda: activate(model, {"m1": 1.0}, trainable=["m1"])) * 1000,
        "save s": timed(touch_and_save),
        "save unchanged s": timed(lambda: save(model, store, step=2)),
        "restore s": timed(lambda: restore(model, store)),
    }
    ranks = world()
    found["agree ms"] = timed(lambda: [ranks.agree("step", {"m0": 1.0}) for _ in range(100)]) * 10
    began = time.perf_counter()
    attach(model, "late", config=late)
    found["attach s"] = time.perf_counter() - began
    began = time.perf_counter()
    detach(model, "late")
    found["detach s"] = time.perf_counter() - began
    found["adapter bytes"] = sum(p.numel() * p.element_size() for key, p in model.named_parameters() if "lora_" in key)
    return found


def run(rank: int, options: argparse.Namespace, root: str) -> None:
    """One rank of the run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=options.ranks)
    theirs, mine = by_hand(options, root), ours(options, f"{root}/store")
    if rank == 0:
        report(options, theirs, mine)
    dist.barrier()
    dist.destroy_process_group()


def report(options: argparse.Namespace, theirs: dict[str, float], mine: dict[str, float]) -> None:
    """A table, and JSON where asked for."""
    print(f"torch {torch.__version__}, {options.ranks} gloo ranks, {options.adapters} adapters, one of them active")
    print(f"{'':18}{'by hand':>14}{'ours':>14}{'by hand / ours':>16}")
    for key, value in mine.items():
        other = theirs.get(key)
        left, ratio = ("", "") if other is None else (f"{other:,.4g}", f"{other / value:,.2f}")
        print(f"{key:18}{left:>14}{value:>14,.4g}{ratio:>16}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "by hand": theirs, "ours": mine}, file, indent=2)


def main(arguments: list[str]) -> None:
    """Parse, start the ranks, wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("adapters", 16), ("layers", 8), ("width", 256), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as root:
        mp.spawn(run, args=(options, root), nprocs=options.ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
