"""save and restore are inverse on any world size and wrapper, whole or absent, and move adapter bytes only."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from launch import launch, results
from safetensors.torch import load_file

from multilora_store.errors import MultiLoRAError

RICH: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["head"]},
    "b": {"r": 1, "lora_alpha": 4, "target_modules": ["q_proj", "up"], "lora_bias": True},
    "team/c": {"r": 3, "lora_alpha": 3, "target_modules": ["embed", "down"]},
}


def prepared(backend: str, **options: Any) -> Any:
    """A toy under one of the wrappers; `plain` and `ddp` too."""
    from torch.nn.parallel import DistributedDataParallel

    from multilora_store.distributed import shard

    model = toys.build(**options)
    kind, _, rest = backend.partition("-")
    if kind == "plain":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = (2, 2) if rest == "hsdp" else None
    return shard(model, mesh, backend=kind, granularity="layer" if rest == "layer" else "adapter")


def digests(model: Any) -> dict[str, str]:
    """A digest of the whole value of every adapter tensor."""
    import torch.distributed as dist

    from multilora_store.distributed.auditing import checksum
    from multilora_store.distributed.exchange import Item, gather_to_owners, group_of
    from multilora_store.distributed.layout import layouts
    from multilora_store.distributed.sharded import ranks_of, reshard

    reshard(model)
    ranks = ranks_of(model)
    me = dist.get_rank()
    items = [Item(f"{n}: {k}", a.layouts[k], t) for n, a in layouts(model).items() for k, t in a.tensors.items()]
    group, members = group_of({0: items}, ranks)
    whole = gather_to_owners(dict.fromkeys(range(dist.get_world_size()), items), me, group, members)
    return {label: checksum(tensor) for label, tensor in sorted(whole.items())}


def train_and_save(backend: str, root: str, steps: int = 2) -> dict[str, Any]:
    import torch.distributed as dist

    from multilora_store.assembly.bridge import active_adapters, trainable_adapters
    from multilora_store.distributed import activate, save
    from multilora_store.storage import open_store

    rank = dist.get_rank()
    model = prepared(backend, configs=RICH, active=["a", "b"], trainable=["a", "b"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(steps):
        toys.loss_of(model, toys.tokens(rank + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(toys.tokens(rank))
    activate(model, {"b": 0.25, "team/c": 0.5}, trainable=["a"])
    store = open_store(root)
    first = save(model, store, step=steps, optimizer=optimizer)
    again = save(model, store, step=steps + 1)
    log = store.log()
    return {
        "digests": digests(model),
        "active": active_adapters(model),
        "trainable": trainable_adapters(model),
        "entries": len(log),
        "versions": [{n: m.version for n, m in s.adapters.items()} for s in (first, again)],
    }


def restore_and_look(backend: str, root: str, *, reverse: bool = False) -> dict[str, Any]:
    import torch.distributed as dist

    from multilora_store.assembly.bridge import active_adapters, trainable_adapters
    from multilora_store.distributed import audit, restore
    from multilora_store.storage import open_store

    configs = dict(reversed(RICH.items())) if reverse else RICH
    model = prepared(backend, configs=configs, trainable=list(configs) if backend == "ddp" else [])
    with torch.no_grad():
        model(toys.tokens(dist.get_rank()))
    snapshot = restore(model, open_store(root))
    report = audit(model, replicas=True)
    return {
        "digests": digests(model),
        "active": active_adapters(model),
        "trainable": trainable_adapters(model),
        "faults": [str(f) for f in report.findings if f.fault],
        "step": snapshot.step,
    }


SAVED = [("fsdp2", 2), ("fsdp1", 2), ("ddp", 2), ("fsdp2-hsdp", 4), ("plain", 1)]
RESTORED = [("fsdp2", 4), ("fsdp1", 2), ("plain", 1), ("fsdp2-hsdp", 4), ("ddp", 2)]  # all of them from the first


@pytest.mark.parametrize(("backend", "world"), SAVED)
def test_restore_is_the_inverse_of_save_on_any_world_and_wrapper(backend: str, world: int, tmp_path: Path) -> None:
    """Cases 1, 2, 3, 5, 7, 33, 68, 69, 98: every adapter whole, by name, whoever is active, on any world size."""
    saved = results(train_and_save, world, backend, str(tmp_path))
    for each in saved:
        assert each["digests"] == saved[0]["digests"]
        assert each["versions"][0] == each["versions"][1], "unchanged adapters keep their versions"
        assert each["entries"] == 2, "one journal entry a save, by one writer"
    chosen = RESTORED if (backend, world) == ("fsdp2", 2) else RESTORED[SAVED.index((backend, world)) % 5 :][:1]
    for other, ranks in chosen:
        for each in results(restore_and_look, ranks, other, str(tmp_path), reverse=True):
            assert each["digests"] == saved[0]["digests"], (other, ranks)
            assert each["active"] == {"b": 0.25, "team/c": 0.5}
            assert each["trainable"] == {"a"}
            assert each["faults"] == []
            assert each["step"] == 3


def test_files_hold_adapters_whole_and_no_base(tmp_path: Path) -> None:
    """Cases 2, 9, 72: files that PEFT's names and the configs' shapes describe, and not one tensor of the base."""
    results(train_and_save, 2, "fsdp2", str(tmp_path))
    found = tmp_path.glob("adapters/*/*/adapter_model.safetensors")
    files = {path.parent.parent.name: load_file(path) for path in found}
    assert set(files) == {"a", "b", "team--c"}
    assert all(tensor.numel() for tensors in files.values() for tensor in tensors.values())
    prefix = "base_model.model."
    assert files["a"][f"{prefix}layers.0.q_proj.lora_A.weight"].shape == (4, 16)
    assert files["a"][f"{prefix}head.weight"].shape == (24, 16)
    assert files["team--c"][f"{prefix}embed.lora_embedding_A"].shape == (3, 24)
    assert not any("q_proj.weight" in key or "base_layer" in key for tensors in files.values() for key in tensors)


def resume(backend: str, root: str, steps: list[int], *, fresh: bool, configs: Any = None) -> dict[str, float]:
    """Steps with dropout; from a snapshot unless `fresh`; saves at the end."""
    import torch.distributed as dist

    from multilora_store.distributed import restore, save
    from multilora_store.storage import open_store

    rank = dist.get_rank()
    world = dist.get_world_size()
    model = prepared(backend, configs=configs, trainable=["a", "c"], active=["a", "c"])
    torch.manual_seed(7 + rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)
    store = open_store(root)
    if not fresh:
        restore(model, store, optimizer=optimizer)
    for step in steps:
        batches = [toys.tokens(10 * step + i, size=2) for i in range(4)]
        mine = [batches[i] for i in range(4) if i * world // 4 == rank]
        (sum(toys.loss_of(model, batch) for batch in mine) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, store, step=steps[-1], optimizer=optimizer)
    return digests(model)


def tensors_of(root: Path) -> dict[str, torch.Tensor]:
    from multilora_store.storage import open_store

    store = open_store(root)
    snapshot = store.snapshot()
    return {
        f"{name}: {key}": tensor.clone()
        for name, member in snapshot.adapters.items()
        for key, tensor in store.get(f"{name}@{member.version}").tensors.items()
    }


DROPOUT = {name: {**fields, "lora_dropout": 0.1} for name, fields in toys.DEFAULTS.items()}


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_resume_on_the_same_world_is_bitwise_with_dropout(backend: str, tmp_path: Path) -> None:
    """Cases 57, 128: step n+1 after save and restore equals the uninterrupted run."""
    straight = results(resume, 2, backend, str(tmp_path / "x"), [1, 2, 3, 4], fresh=True, configs=DROPOUT)
    results(resume, 2, backend, str(tmp_path / "y"), [1, 2], fresh=True, configs=DROPOUT)
    resumed = results(resume, 2, backend, str(tmp_path / "y"), [3, 4], fresh=False, configs=DROPOUT)
    assert resumed == straight


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("fsdp2", 4), ("plain", 1), marks=pytest.mark.slow),
        pytest.param(("plain", 1), ("fsdp1", 4), marks=pytest.mark.slow),
        (("fsdp1", 2), ("fsdp2", 4)),
    ],
)
def test_resume_on_another_world_equals_to_rounding(first: Any, second: Any, tmp_path: Path) -> None:
    """Case 7: saved on W ranks, resumed on V."""
    results(resume, 1, "plain", str(tmp_path / "x"), [1, 2, 3], fresh=True)
    results(resume, first[1], first[0], str(tmp_path / "y"), [1, 2], fresh=True)
    results(resume, second[1], second[0], str(tmp_path / "y"), [3], fresh=False)
    assert toys.worst(tensors_of(tmp_path / "y"), tensors_of(tmp_path / "x")) < 2e-5


def faults(root: str) -> dict[str, Any]:
    """Every way to stop a save, on rank 1 only; then a save that works."""
    import torch.distributed as dist

    from multilora_store.assembly.bridge import adapter_parameters
    from multilora_store.distributed import activate, restore, save
    from multilora_store.storage import open_store

    rank = dist.get_rank()
    model = prepared("fsdp2", trainable=["a"])
    store = open_store(root)
    good = save(model, store, step=0)
    found: dict[str, Any] = {}

    def note(label: str, call: Any) -> None:
        try:
            call()
        except (MultiLoRAError, OSError) as error:
            found[label] = (type(error).__name__, str(error))
        found[f"{label}: latest"] = store.snapshot().id == good.id

    class Broken:
        def __init__(self, method: str) -> None:
            self.method = method

        def __getattr__(self, name: str) -> Any:
            if name == self.method and rank == 1:
                raise OSError("the disk of rank 1 is gone")
            return getattr(store, name)

    parameter = next(iter(adapter_parameters(model, "b").values()))
    kept = parameter.detach().to_local().clone()
    with torch.no_grad():
        if rank == 1:
            parameter.to_local().view(-1)[0] = float("nan")
    note("nan", lambda: save(model, store, step=1))
    with torch.no_grad():
        parameter.to_local().copy_(kept + 1)
        for name in ("a", "c"):
            next(iter(adapter_parameters(model, name).values())).to_local().add_(1)
    note("stage", lambda: save(model, Broken("stage"), step=1))
    note("step", lambda: save(model, store, step=1 + rank))
    odd = torch.optim.AdamW(model.parameters()) if rank else None
    note("optimizer", lambda: save(model, store, step=1, optimizer=odd))
    note("unknown snapshot", lambda: restore(model, store, snapshot="s19990101T000000-00000000"))
    note("background", lambda: save(model, Broken("stage"), step=1, blocking=False).result())
    note("activate", lambda: activate(model, {"a": 1.0 if rank else 0.5}))
    note("unknown adapter", lambda: activate(model, {"aa": 1.0}))
    handle = save(model, store, step=2, blocking=False)
    with torch.no_grad():
        parameter.to_local().zero_()
    after = handle.result(30)
    found["background saved"] = after.step
    stored = store.get(f"b@{after.adapters['b'].version}").tensors
    name = next(iter(adapter_parameters(model, "b")))
    found["value before"] = bool((stored[name] != 0).any())
    return found


def test_a_failure_on_one_rank_fails_all_and_keeps_the_former_snapshot(tmp_path: Path) -> None:
    """Cases 6, 98: NaN, a broken disk, disagreement: every rank raises, the store stays, the next save works."""
    found = results(faults, 2, str(tmp_path))
    for rank, each in enumerate(found):
        assert each["nan"][0] == ("UsageError" if rank == 1 else "RankFailedError")
        assert "NaN or infinity" in each["nan"][1]
        assert each["stage"][0] == ("OSError" if rank == 1 else "RankFailedError")
        assert "the disk of rank 1 is gone" in each["stage"][1]
        assert each["step"][0] == "DisagreementError"
        assert "step: 1 on rank 0; 2 on rank 1" in each["step"][1]
        assert each["optimizer"][0] == "DisagreementError"
        assert each["unknown snapshot"][0] in ("NotInStoreError", "RankFailedError")
        assert "the disk of rank 1 is gone" in each["background"][1]
        assert each["activate"][0] == "DisagreementError"
        assert each["unknown adapter"][0] == "UsageError"
        assert all(value for label, value in each.items() if label.endswith(": latest"))
        assert each["background saved"] == 2
        assert each["value before"], "the background save wrote what was there when it was asked for"


def die_in(root: str, phase: str, victim: int) -> Any:
    import torch.distributed as dist

    from multilora_store.distributed import restore, save
    from multilora_store.errors import RankFailedError
    from multilora_store.storage import open_store

    rank = dist.get_rank()
    model = prepared("fsdp2", trainable=["a"])
    store = open_store(root)
    save(model, store, step=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(0.5)

    class Deadly:
        def __getattr__(self, name: str) -> Any:
            if name == phase and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return getattr(store, name)

    try:
        if phase in ("get", "snapshot"):
            restore(model, Deadly())
        else:
            save(model, Deadly(), step=1)
    except RankFailedError as error:
        return str(error), error.facts.get("absent"), store.snapshot().step
    return "nothing raised", None, store.snapshot().step


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("url", 1),
        ("stage", 1),
        ("get", 1),
        pytest.param("commit", 0, marks=pytest.mark.slow),
        pytest.param("stage_snapshot_file", 0, marks=pytest.mark.long),
        pytest.param("snapshot", 0, marks=pytest.mark.long),
    ],
)
def test_a_rank_killed_in_any_phase_leaves_the_store_whole(phase: str, victim: int, tmp_path: Path) -> None:
    """Case 47: kill -9 of one rank: the other ends within seconds with its name, the next save works."""
    outcomes = launch(die_in, 2, str(tmp_path), phase, victim, timeout=90)
    survivor = 1 - victim
    assert outcomes[victim].exit_code == -signal.SIGKILL
    message, absent, step = outcomes[survivor].value
    assert f"rank {victim} stopped answering" in message, outcomes[survivor]
    assert absent == [victim]
    assert step == 0
    assert outcomes[survivor].seconds < 60
    assert results(train_and_save, 2, "fsdp2", str(tmp_path / "next"))[0]["entries"] == 2
