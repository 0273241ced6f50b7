"""A set of adapters under an Accelerator: what ranks run, and a program for `accelerate launch`."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import toys
from torch import nn

import multilora_store as mls
from multilora_store.assembly.bridge import adapter_names
from multilora_store.distributed.layout import layouts
from multilora_store.distributed.sharded import reshard
from multilora_store.integrations.accelerate import check_prepared, plain_optimizer, prepare_model
from multilora_store.storage import open_store


def accelerator(fsdp: int | None = None, **options: Any) -> Any:
    """An Accelerator on the host, with accelerate's FSDP plugin switched on where a version is given."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    made = Accelerator(cpu=True)
    if fsdp is not None:  # accelerate offers its plugin on accelerators only; all that it calls works on gloo as well
        PartialState().distributed_type = made.state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=fsdp, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False, reshard_after_forward=True if fsdp == 2 else "FULL_SHARD", **options,
        )  # fmt: skip
    return made


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    reshard(model)
    return {
        f"{name}: {key}": toys.whole(tensor).detach().clone()
        for name in adapter_names(model)
        for key, tensor in layouts(model, (name,))[name].tensors.items()
    }


def steps(driver: Any, model: nn.Module, optimizer: Any, names: list[str]) -> None:
    """One step for each name, of that adapter alone."""
    for name in names:
        mls.activate(model, [name], trainable=[name])
        driver.backward(toys.loss_of(model, toys.tokens(driver.process_index)))
        driver.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train(root: str, way: str, part: str) -> dict[str, Any]:
    """`whole`: four steps, a snapshot after two. `resumed`: restore that one and do the other two."""
    warnings.simplefilter("ignore")
    driver = accelerator(2 if way in ("plugin", "ours+plugin") else None)
    model = toys.build(trainable=["a", "b"])
    if way == "plugin":
        unprepared = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = driver.prepare(model, unprepared)
    else:
        model = prepare_model(driver, model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if way == "ours":
            model, optimizer = driver.prepare(model, optimizer)
        else:
            optimizer = driver.prepare_optimizer(optimizer)
    report = check_prepared(model, optimizer)
    store = open_store(f"{root}/store")
    if part == "whole":
        steps(driver, model, optimizer, ["a", "b"])
        with torch.no_grad():
            toys.loss_of(model, toys.tokens(0))  # leaves the root unsharded, which saving must not mind
        mls.save(model, store, step=2, optimizer=plain_optimizer(optimizer))
    else:
        mls.restore(model, store, optimizer=plain_optimizer(optimizer))
    steps(driver, model, optimizer, ["a", "b"])
    return {
        "weights": weights(model), "ok": report.ok, "backend": report.backend, "granularity": report.granularity,
        "type": str(driver.distributed_type.value), "ranks": report.ranks,
    }  # fmt: skip


def refused(way: str) -> None:
    """Set-ups that would wrap a model twice."""
    if way == "fsdp1":
        prepare_model(accelerator(1), toys.build())
    else:
        prepare_model(accelerator(), mls.shard(toys.build()))


if __name__ == "__main__":
    found = train(sys.argv[1], "ours", sys.argv[2])
    torch.save(found, f"{sys.argv[1]}/{sys.argv[2]}-{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter: it aborts now and then
