"""Sharded models equal the unsharded ones, every adapter is covered, and what cannot work is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from launch import results

from multilora_store.errors import MultiLoRAError


def sharded(backend: str, model: Any, **options: Any) -> Any:
    from multilora_store.distributed import shard

    kind, _, granularity = backend.partition("-")
    return shard(model, backend=kind, granularity=granularity or "adapter", **options)


VARIANTS: dict[str, dict[str, Any]] = {
    "two active": {"active": ["a", "b"], "trainable": ["a", "b"]},
    "one of three": {"active": ["b"], "trainable": ["b"]},
    "all frozen": {"active": ["a"], "trainable": []},
    "rank below ranks": {
        "configs": {"a": {"r": 1, "target_modules": ["q_proj"]}, "b": {"r": 3, "target_modules": ["down"]}},
        "trainable": ["a", "b"],
    },
    "dora": {
        "configs": {
            "a": {"r": 4, "target_modules": ["q_proj", "up"], "use_dora": True},
            "b": {"r": 2, "target_modules": ["up"]},
        },
        "trainable": ["a", "b"],
    },
    "bias, rslora": {
        "configs": {"a": {"r": 4, "target_modules": ["q_proj"], "lora_bias": True, "use_rslora": True}},
        "trainable": ["a"],
    },
    "saved module": {
        "configs": {
            "a": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["head"]},
            "b": {"r": 2, "target_modules": ["v_proj"]},
        },
        "trainable": ["a", "b"],
    },
    "embedding": {
        "configs": {"a": {"r": 4, "target_modules": ["embed", "q_proj"]}, "b": {"r": 2, "target_modules": ["embed"]}},
        "trainable": ["a", "b"],
    },
    "some blocks": {
        "configs": {
            "a": {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}
        },
        "trainable": ["a"],
    },
}


def train_variants(backend: str) -> dict[str, Any]:
    import torch.distributed as dist

    from multilora_store.distributed import activate, audit

    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for label, options in VARIANTS.items():
        expected = toys.reference_gradients(world, **options) if options["trainable"] else {}
        plain = toys.build(**options)
        with torch.no_grad():
            logits = plain(toys.tokens(rank))
        model = sharded(backend, toys.build(**options))
        with torch.no_grad():
            forward = float((model(toys.tokens(rank)) - logits).abs().max())
        first = next(iter(options.get("configs", toys.DEFAULTS)))
        activate(model, options.get("active") or list(options.get("configs", toys.DEFAULTS)))
        if options["trainable"]:
            toys.loss_of(model, toys.tokens(rank)).backward()
        report = audit(model)
        found[label] = {
            "forward": forward,
            "gradients": toys.worst(toys.gradients(model), expected),
            "count": len(expected),
            "faults": [str(f) for f in report.findings if f.fault],
            "base": report.base_numel,
            "share": report.adapters[first].local_nbytes,
            "whole": report.adapters[first].numel * 4,
        }
    return found


@pytest.mark.parametrize(("backend", "world"), [("fsdp2", 4), ("fsdp2-layer", 2), ("fsdp1", 2)])
def test_forward_and_gradients_equal_the_unsharded_model(backend: str, world: int) -> None:
    """Cases 2, 3, 10, 33, 61, 68, 74, 84: every kind of adapter, after an evaluation forward, on every rank."""
    for found in results(train_variants, world, backend, timeout=200):
        for label, got in found.items():
            assert got["forward"] < 1e-5, (label, got)
            assert got["gradients"] < 1e-5, (label, got)
            assert got["faults"] == [], label
            assert got["base"] > 0
        assert found["two active"]["count"] == 26
        assert found["rank below ranks"]["share"] < found["rank below ranks"]["whole"]


def refusals() -> dict[str, Any]:
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch import nn
    from torch.distributed.fsdp import CPUOffloadPolicy

    from multilora_store.distributed import shard

    rank = dist.get_rank()
    found: dict[str, Any] = {}

    def note(label: str, call: Any) -> None:
        try:
            call()
        except MultiLoRAError as error:
            found[label] = (type(error).__name__, str(error))

    def attention() -> Any:
        base = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(16, 16))
        return get_peft_model(base, LoraConfig(r=2, target_modules=["0"]), adapter_name="adapter_one")

    mixed = {"dtype": torch.bfloat16, "adapter_dtypes": {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32}}
    dora = {"configs": {"a": {"r": 4, "target_modules": ["q_proj"], "use_dora": True}}}
    note("backend", lambda: shard(toys.build(), backend="no-shard"))
    note("granularity", lambda: shard(toys.build(), granularity="adapters"))
    note("blocks", lambda: shard(toys.build(), blocks=["Blok"]))
    note("mesh", lambda: shard(toys.build(), (3,)))
    note("hsdp1", lambda: shard(toys.build(), (1, dist.get_world_size()), backend="fsdp1"))
    note("attention", lambda: shard(attention()))
    note("mixed layer", lambda: shard(toys.build(**mixed), granularity="layer"))
    note(
        "mixed dora",
        lambda: shard(toys.build(dtype=torch.bfloat16, adapter_dtypes={"a": torch.float32}, **dora), backend="fsdp1"),
    )
    note("no adapters", lambda: shard(toys.Toy()))
    if not torch.accelerator.is_available():
        note("offload", lambda: shard(toys.build(), offload_policy=CPUOffloadPolicy()))
    configs = dict(toys.DEFAULTS)
    if rank == 1:
        del configs["c"]
    note("set", lambda: shard(toys.build(configs)))
    note("rank", lambda: shard(toys.build({"a": {"r": 4 + rank % 2, "target_modules": ["q_proj"]}})))
    note("dtype", lambda: shard(toys.build(adapter_dtypes={"a": torch.bfloat16 if rank == 1 else torch.float32})))
    note("flags", lambda: shard(toys.build(trainable=["a"] if rank == 1 else [])))
    note("active", lambda: shard(toys.build(active=["a"] if rank == 1 else ["b"])))
    note("option", lambda: shard(toys.build(), granularity="layer" if rank == 1 else "adapter"))
    note("base", lambda: shard(toys.build(depth=2 if rank == 1 else 3)))
    note("order", lambda: shard(toys.build(dict(reversed(toys.DEFAULTS.items())) if rank == 1 else None)))
    model = shard(toys.build())
    note("twice", lambda: shard(model))
    note("late add", lambda: model.add_adapter("late", LoraConfig(r=2, target_modules=["q_proj"])))
    note("late load", lambda: model.load_adapter("/nowhere", "late"))
    note("late delete", lambda: model.delete_adapter("a"))
    note("peft save", lambda: model.save_pretrained("/nowhere"))
    note("inner inject", lambda: model.base_model.add_weighted_adapter(["a"], [1.0], "z"))
    return found


def test_what_cannot_work_is_refused_in_words_and_disagreements_reach_every_rank() -> None:
    """Cases 12, 15, 16, 20, 79, 86: refusals before the wrap, eight disagreements, guards after it."""
    found = results(refusals, 2, timeout=200)
    usage = {
        "backend": "valid: fsdp1, fsdp2",
        "granularity": "did you mean adapter",
        "blocks": "did you mean Block",
        "mesh": "does not cover",
        "no adapters": "carries no adapters",
    }
    unsupported = {
        "hsdp1": "fsdp2",
        "attention": "MultiheadAttention",
        "mixed layer": "granularity='adapter'",
        "mixed dora": "torch.bfloat16",
        "offload": "offload_policy",
    }
    guards = {
        "twice": "attach()",
        "late add": "attach(",
        "late load": "attach(",
        "late delete": "detach(",
        "peft save": "save(model",
        "inner inject": "merge(",
    }
    differences = {
        "set": "names[2]: c on rank 0; missing on rank 1",
        "rank": "rank 1 differs",
        "dtype": "torch.bfloat16 on rank 1",
        "flags": "adapters.a.trainable: false on rank 0; true on rank 1",
        "active": "active.a",
        "option": "options.granularity: adapter on rank 0; layer on rank 1",
        "base": "base.",
        "order": "names[0]",
    }
    for each in found:
        for kind, expected in (
            ("UsageError", usage),
            ("UnsupportedError", unsupported),
            ("ShardedModelError", guards),
            ("DisagreementError", differences),
        ):
            for label, words in expected.items():
                if label == "offload" and label not in each:
                    continue
                assert each[label][0] == kind, (label, each[label])
                assert words in each[label][1], (label, each[label])


def test_shard_without_ranks_says_how_to_start() -> None:
    from multilora_store.distributed import shard

    with pytest.raises(MultiLoRAError, match="torchrun"):
        shard(toys.build())
