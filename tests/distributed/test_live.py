"""attach and detach on a live sharded model: the reference's gradients, freed memory, the optimizer told."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from launch import results

from multilora_store.errors import BaseMismatchError, MultiLoRAError

LATE = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down", "head"], "peft_type": "LORA"}


def unsharded(world: int, active: dict[str, float], trainable: list[str], late: Any) -> dict[str, torch.Tensor]:
    """Gradients of the reference with the late adapter injected on one process."""
    from multilora_store.assembly.bridge import set_active, set_trainable
    from multilora_store.assembly.live import inject_adapter

    model = toys.build()
    inject_adapter(model, "late", LATE, late)
    set_active(model, active)
    set_trainable(model, trainable)
    for rank in range(world):
        (toys.loss_of(model, toys.tokens(rank)) / world).backward()
    return toys.gradients(model)


def cycle(model: Any, times: int = 6) -> list[tuple[int, int]]:
    """(tensors alive, characters in unit names) after the second and after the last cycle."""
    import torch.distributed as dist

    from multilora_store.distributed import attach, detach
    from multilora_store.distributed.internals import unit_names

    sizes = []
    for turn in range(times):
        attach(model, "late", config=LATE, weight=1.0)
        with torch.no_grad():
            model(toys.tokens(dist.get_rank()))
        detach(model, "late")
        gc.collect()
        if turn in (1, times - 1):
            sizes.append((sum(1 for one in gc.get_objects() if isinstance(one, torch.Tensor)), unit_names(model)))
    return sizes


def refusals(model: Any, store: Any) -> dict[str, tuple[str, str]]:
    import torch.distributed as dist

    from multilora_store.distributed import attach, detach

    rank = dist.get_rank()
    found = {}
    for label, call in {
        "taken": lambda: attach(model, "a", config=LATE),
        "both": lambda: attach(model, "z"),
        "no store": lambda: attach(model, "z", source="late"),
        "not there": lambda: attach(model, "z", source="zz", store=store),
        "misfit": lambda: attach(model, "z", source="misfit", store=store),
        "embedding": lambda: attach(model, "z", config={**LATE, "target_modules": ["embed"]}),
        "differs": lambda: attach(model, f"z{rank}", config=LATE),
        "unknown": lambda: detach(model, "z"),
    }.items():
        try:
            call()
        except MultiLoRAError as error:
            found[label] = (type(error).__name__, str(error))
    return found


def attach_and_detach(granularity: str, root: str) -> dict[str, Any]:
    import torch.distributed as dist

    from multilora_store.assembly.bridge import adapter_parameters, trainable_adapters
    from multilora_store.distributed import activate, attach, audit, detach, save, shard
    from multilora_store.storage import open_store

    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    template = toys.build({"late": LATE})
    late = {k: torch.randn(p.shape, generator=generator) for k, p in adapter_parameters(template, "late").items()}
    store = open_store(root)
    if rank == 0:
        store.put("late", late, LATE)
        store.put("misfit", late, {**LATE, "r": 3})
    dist.barrier()
    model = shard(toys.build(active=["a"], trainable=["a"]), granularity=granularity)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with torch.no_grad():
        model(toys.tokens(rank))
    found: dict[str, Any] = {}
    attach(model, "late", source="late", store=store, trainable=True, weight=0.5, optimizer=optimizer)
    found["groups"] = len(optimizer.param_groups)
    found["faults"] = [str(f) for f in audit(model, optimizer).findings if f.fault]
    found["trainable"] = trainable_adapters(model)
    toys.loss_of(model, toys.tokens(rank)).backward()
    expected = unsharded(world, {"a": 1.0, "late": 0.5}, ["a", "late"], late)
    found["gradients"] = toys.worst(toys.gradients(model), expected)
    optimizer.step()
    optimizer.zero_grad()
    found["saved"] = sorted(save(model, store, step=1, optimizer=optimizer).adapters)
    watched = [weakref.ref(p) for p in adapter_parameters(model, "late").values()]
    detach(model, "late", optimizer=optimizer)
    found["groups after"] = len(optimizer.param_groups)
    found["states after"] = len(optimizer.state)
    activate(model, {"b": 1.0}, trainable=["b"])
    toys.loss_of(model, toys.tokens(rank)).backward()
    found["b"] = toys.worst(toys.gradients(model), toys.reference_gradients(world, active=["b"], trainable=["b"]))
    gc.collect()
    found["alive"] = sum(ref() is not None for ref in watched)
    model.zero_grad()
    found["flat"] = cycle(model)
    found |= refusals(model, store)
    found["still"] = [str(f) for f in audit(model).findings if f.fault]
    return found


@pytest.mark.parametrize("granularity", ["adapter", pytest.param("layer", marks=pytest.mark.slow)])
def test_attach_and_detach_on_a_live_sharded_model(granularity: str, tmp_path: Path) -> None:
    """Cases 12, 23, 52: no re-wrap, nothing leaks, nothing of another adapter changes."""
    for each in results(attach_and_detach, 2, granularity, str(tmp_path)):
        assert each["groups"] == 2
        assert each["faults"] == []
        assert each["trainable"] == {"a", "late"}
        assert each["gradients"] < 1e-5
        assert each["saved"] == ["a", "b", "c", "late"]
        assert (each["groups after"], each["states after"]) == (1, 12)
        assert each["b"] < 1e-5
        assert each["alive"] == 0
        assert each["flat"][0] == each["flat"][1]
        assert each["taken"][0] == each["both"][0] == each["no store"][0] == each["unknown"][0] == "UsageError"
        assert each["not there"][0] in ("NotInStoreError", "RankFailedError")
        assert each["misfit"][0] in ("CoverageError", "RankFailedError")
        assert "tensors differ" in each["misfit"][1]
        assert each["embedding"][0] == "UnsupportedError"
        assert each["differs"][0] == "DisagreementError"
        assert each["still"] == []


def train_two_hundred() -> dict[str, list[float]]:
    """One more adapter in each cycle, trained for a step beside another, and taken off again."""
    import torch.distributed as dist

    from multilora_store.distributed import attach, detach, shard

    model = shard(toys.build(active=["a"], trainable=["a"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen: dict[str, list[float]] = {"tensors": [], "MB": [], "states": []}
    for turn in range(1, 201):
        attach(model, f"late-{turn % 3}", config=LATE, weight=1.0, trainable=True, optimizer=optimizer)
        toys.loss_of(model, toys.tokens(dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        detach(model, f"late-{turn % 3}", optimizer=optimizer)
        if turn in (40, 200):
            gc.collect()
            seen["tensors"].append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
            seen["states"].append(len(optimizer.state))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen["MB"].append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return seen


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_two_hundred_cycles_leave_memory_flat() -> None:
    """Case 52: attached, trained, detached: tensors, optimizer state and the process's memory stay."""
    for each in results(train_two_hundred, 2, timeout=1000):
        assert each["tensors"][0] == each["tensors"][1]
        assert each["states"][0] == each["states"][1]
        assert each["MB"][1] - each["MB"][0] < 8, each


def refused() -> list[str]:
    from multilora_store.distributed import attach, detach, shard

    model = shard(toys.build(), backend="fsdp1")
    found = []
    for call in (lambda: attach(model, "z", config=LATE), lambda: detach(model, "a")):
        with pytest.raises(MultiLoRAError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_fsdp1_refuses_in_words() -> None:
    for each in results(refused, 2):
        assert all("fsdp2" in message for message in each)


def test_attach_and_detach_on_a_plain_model() -> None:
    from multilora_store.assembly.bridge import active_adapters, adapter_names
    from multilora_store.distributed import attach, detach

    model = toys.build(trainable=["a"])
    attach(model, "late", config=LATE, weight=2.0)
    assert adapter_names(model) == ("a", "b", "c", "late")
    assert active_adapters(model)["late"] == 2.0
    detach(model, "late")
    assert adapter_names(model) == ("a", "b", "c")


def test_another_base_is_refused_by_restore_and_attach(tmp_path: Path) -> None:
    """Case 106: what is checked at assembly is checked whenever adapters are loaded."""
    from multilora_store.assembly.bridge import adapter_names, adapter_parameters, innermost
    from multilora_store.distributed import attach, restore, save
    from multilora_store.storage import open_store

    store = open_store(tmp_path)
    save(toys.build(), store, step=1)
    other = toys.build()
    with torch.no_grad():
        innermost(other).layers[1].norm.weight.add_(1)
        for parameter in adapter_parameters(other, "a").values():
            parameter.zero_()
    for call in (lambda: restore(other, store), lambda: attach(other, "late", source="a", store=store)):
        with pytest.raises(BaseMismatchError, match="another base"):
            call()
    assert adapter_names(other) == ("a", "b", "c")
    assert not any(bool(parameter.any()) for parameter in adapter_parameters(other, "a").values())
    restore(other, store, allow_base_mismatch=True)
    attach(other, "late", source="a", store=store, allow_base_mismatch=True)
    assert all(bool(parameter.any()) for parameter in adapter_parameters(other, "a").values())
