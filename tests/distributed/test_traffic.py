"""Bytes that travel, counted as collectives are issued, and the plan that foretells them (Cases 4, 9, 74, 121)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from launch import results
from torch.utils._python_dispatch import TorchDispatchMode

from multilora_store.errors import UsageError


class Traffic(TorchDispatchMode):
    """Counts the bytes that collectives hand to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            operation = name.split(".")[1]
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            if isinstance(first, torch.Tensor):
                self.bytes[operation] = self.bytes.get(operation, 0) + first.numel() * first.element_size()
        return func(*args, **(kwargs or {}))


def many(count: int) -> dict[str, dict[str, Any]]:
    return {f"m{i}": {"r": 4, "target_modules": ["q_proj", "v_proj"]} for i in range(count)}


def traffic(root: str) -> dict[str, dict[str, Any]]:
    kinds = {"one": ("adapter", 1), "many": ("adapter", 12), "most": ("adapter", 32), "layer": ("layer", 12)}
    return {label: count_bytes(*kind, f"{root}/{label}") for label, kind in kinds.items()}


def count_bytes(granularity: str, count: int, root: str) -> dict[str, Any]:
    import torch.distributed as dist

    from multilora_store.distributed import audit, save, shard
    from multilora_store.storage import open_store

    rank = dist.get_rank()
    model = shard(toys.build(many(count), active=["m0"], trainable=["m0"]), granularity=granularity)
    toys.loss_of(model, toys.tokens(rank)).backward()
    model.zero_grad()
    with Traffic() as step:
        loss = toys.loss_of(model, toys.tokens(rank))
        forward = dict(step.bytes)
        loss.backward()
    report = audit(model)
    with Traffic() as saving:
        save(model, open_store(root), step=1)
    gathered = sum(b for name, b in forward.items() if "allgather" in name)
    whole = sum(b for name, b in step.bytes.items() if "allgather" in name)
    return {
        "forward": gathered,
        "step": whole,
        "alltoall": saving.bytes.get("alltoall_base_", 0),
        "gathered by save": sum(b for name, b in saving.bytes.items() if "allgather_base" in name),
        "adapters": sum(a.numel for a in report.adapters.values()) * 4,
        "local": report.adapters["m0"].local_nbytes,
        "base local": report.base_local_nbytes,
        "units": report.units,
    }


def unsharded_nbytes() -> dict[str, dict[str, int]]:
    """Granularity -> adapter -> bytes that lie whole on this rank once a forward has kept what it gathered."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from multilora_store.assembly.bridge import adapter_parameters
    from multilora_store.distributed import shard

    found: dict[str, dict[str, int]] = {}
    for granularity in ("adapter", "layer"):
        model = shard(toys.build(many(4), active=["m0"]), granularity=granularity, reshard_after_forward=False)
        with torch.no_grad():
            model(toys.tokens(dist.get_rank()))
        found[granularity] = {
            name: sum(p.nbytes for p in adapter_parameters(model, name).values() if not isinstance(p, DTensor))
            for name in many(4)
        }
    return found


def test_an_inactive_adapter_takes_no_memory_unsharded() -> None:
    for each in results(unsharded_nbytes, 2):
        assert each["adapter"]["m0"] == each["layer"]["m0"] > 0
        assert [each["adapter"][f"m{i}"] for i in (1, 2, 3)] == [0, 0, 0]
        assert [each["layer"][f"m{i}"] for i in (1, 2, 3)] == [each["layer"]["m0"]] * 3, "what a unit a block costs"


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 4])
def test_an_inactive_adapter_does_not_travel_and_the_plan_says_the_bytes(world: int, tmp_path: Path) -> None:
    from multilora_store.distributed import plan

    every = results(traffic, world, str(tmp_path))
    one, twelve, most, layer = (every[0][label] for label in ("one", "many", "most", "layer"))
    assert one["step"] == twelve["step"] == most["step"]
    assert one["forward"] == twelve["forward"] == most["forward"]
    assert layer["step"] > twelve["step"]
    assert sum(each["many"]["alltoall"] for each in every) == twelve["adapters"], "adapter bytes, once"
    for granularity, found in (("adapter", twelve), ("layer", layer)):
        foretold = plan(
            toys.Toy(), many(12), world_size=world, granularity=granularity, active=["m0"], trainable=["m0"]
        )
        assert foretold.forward_nbytes == found["forward"], granularity
        assert foretold.step_nbytes == found["step"], granularity
        assert foretold.adapters["m0"].local_nbytes == found["local"]
        assert foretold.base_local_nbytes == found["base local"]
        assert foretold.units == found["units"]
        assert foretold.save_nbytes == found["adapters"]
    assert plan(toys.Toy(), many(2), world_size=world, granularity="auto").granularity == "adapter"


def test_plan_refuses_what_it_does_not_know() -> None:
    from multilora_store.distributed import plan

    base = toys.Toy()
    for options in ({"optimizer": "adam8"}, {"granularity": "auto?"}, {"replicas": 3}, {"active": ["zz"]}):
        with pytest.raises(UsageError):
            plan(base, many(1), world_size=4, **options)


class Llama(torch.nn.Module):
    """The layout of a 70B Llama: 80 blocks, grouped-query attention, on the meta device."""

    def __init__(self, depth: int = 80, width: int = 8192, inner: int = 28672, narrow: int = 1024) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.embed_tokens = torch.nn.Embedding(128256, width)
        self.layers = torch.nn.ModuleList()
        for _ in range(depth):
            block = torch.nn.Module()
            for name, size in (("q", width), ("k", narrow), ("v", narrow), ("o", width)):
                setattr(block, f"{name}_proj", linear(width, size, bias=False))
            block.gate_proj, block.up_proj = linear(width, inner, bias=False), linear(width, inner, bias=False)
            block.down_proj = linear(inner, width, bias=False)
            self.layers.append(block)
        self.lm_head = linear(width, 128256, bias=False)


def test_a_plan_of_a_70b_base_with_a_hundred_adapters_takes_seconds() -> None:
    from multilora_store.distributed import plan

    with torch.device("meta"):
        base = Llama().to(torch.bfloat16)
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    adapters = {f"a{i}": {"r": 16 if i % 2 else 8, "target_modules": targets} for i in range(100)}
    began = time.process_time()
    foretold = plan(base, adapters, world_size=64, active=["a0"], trainable=["a0"])
    assert time.process_time() - began < 60
    assert 130e9 < foretold.base_nbytes < 150e9
    assert len(foretold.adapters) == 100
    assert foretold.adapters["a0"].local_nbytes * 64 < 1.05 * foretold.adapters["a0"].nbytes
