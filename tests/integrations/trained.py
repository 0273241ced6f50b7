"""A tiny language model with a set of three adapters, its data, and a Trainer over them, the same in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import multilora_store as mls
from multilora_store.assembly.bridge import adapter_names
from multilora_store.distributed.layout import layouts
from multilora_store.distributed.sharded import reshard
from multilora_store.integrations.transformers import MultiLoRACallback, for_trainer, resume
from multilora_store.storage import open_store

FIELDS: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2}
SET: dict[str, Any] = {
    "train": {"if_missing": "init", "config": FIELDS, "trainable": True},
    "second": {"if_missing": "init", "config": {**FIELDS, "r": 2}, "trainable": True, "weight": 0.5},
    "reference": {"if_missing": "init", "config": FIELDS, "active": False},
}


def base() -> nn.Module:
    """A Llama of two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def assembled() -> Any:
    return mls.assemble(base(), SET)


def dataset(size: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 32, (size, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(model: nn.Module, folder: Path, callbacks: list[Any], *, steps: int = 4, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        **{
            "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
            "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
            "disable_tqdm": True, "seed": 11, "dataloader_pin_memory": False, "lr_scheduler_type": "cosine", **options,
        }
    )  # fmt: skip
    data = dataset()
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """`adapter: tensor` -> its whole value."""
    from torch.distributed.tensor import DTensor

    reshard(model)
    return {
        f"{name}: {key}": (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name in adapter_names(model)
        for key, t in layouts(model, (name,))[name].tensors.items()
    }


def base_pieces(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of the base."""
    from torch.distributed.tensor import DTensor

    reshard(model)
    found = {key: p for key, p in model.named_parameters() if ".lora_" not in key}
    return {k: (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for k, p in found.items()}


def different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Tensors that are not bitwise equal."""
    assert left.keys() == right.keys()
    return [key for key in left if not torch.equal(left[key], right[key])]


# What ranks run; a file of its own since each rank loads the file that its function is in.


def trained_on_ranks(root: str, wrapper: str, part: str) -> dict[str, Any]:
    """One part of a training on this rank: `whole`, or another that goes on from its first snapshot."""
    import warnings

    warnings.simplefilter("ignore")
    store = open_store(f"{root}/store")
    model = assembled()
    if wrapper == "fsdp2":
        model = for_trainer(mls.shard(model))
    base_before = base_pieces(model)
    saving = MultiLoRACallback(store if part == "whole" else open_store(f"{root}/store-{part}"))
    driver = trainer(model, Path(root, part), [saving], ddp_find_unused_parameters=False)
    if part == "whole":
        driver.train()
    else:
        resume(driver, store, snapshot=store.snapshots()[0].id)
    report = mls.audit(model, driver.optimizer.optimizer, replicas=True)
    return {
        "weights": weights(model),
        "base_kept": all(torch.equal(base_before[key], piece) for key, piece in base_pieces(model).items()),
        "report": (report.ok, report.backend),
        "wrapped": type(driver.model_wrapped).__name__,
        "steps": [snapshot.step for snapshot in saving.store.snapshots()],
        "loss": [row["loss"] for row in driver.state.log_history if "loss" in row][-1],
    }


def own_checkpoints(root: str) -> None:
    model = for_trainer(mls.shard(assembled()))
    saving = MultiLoRACallback(open_store(f"{root}/store"), checkpoints=True)
    trainer(model, Path(root, "out"), [saving]).train()


def saved_without_us(root: str) -> None:
    model = for_trainer(mls.shard(assembled()))
    trainer(model, Path(root, "out"), []).train()


def told_to_wrap_again(root: str) -> None:
    import os

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    model = for_trainer(mls.shard(assembled()))
    trainer(model, Path(root, "out"), [MultiLoRACallback(open_store(f"{root}/store"))])
