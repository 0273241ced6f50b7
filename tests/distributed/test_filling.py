"""A base, adapters or both that one rank alone holds: every rank gets its shards, and the model is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from launch import results
from torch import nn

from multilora_store.errors import MultiLoRAError


class Scaled(toys.Block):
    """A block with a buffer that no checkpoint keeps, as rotary embeddings have."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


def tied(**options: Any) -> nn.Module:
    model = toys.build(block=Scaled, trainable=["a"], **options)
    return retied(model)


def retied(model: nn.Module) -> nn.Module:
    from multilora_store.assembly.bridge import innermost

    base = innermost(model)
    base.head.base_layer.weight = base.embed.weight
    return model


def on_meta(model: nn.Module, *, adapters: bool) -> nn.Module:
    """The structure of `model`, with the adapters' values unless they go too."""
    from multilora_store.assembly.bridge import adapter_names, adapter_parameters

    kept = {id(p) for name in adapter_names(model) for p in adapter_parameters(model, name).values()}
    gone: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and (adapters or id(parameter) not in kept):
                if id(parameter) not in gone:
                    gone[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[key] = gone[id(parameter)]
        for key, buffer in module._buffers.items():
            module._buffers[key] = buffer.to("meta") if buffer is not None else None
    return model


def looked_at(model: nn.Module, rank: int) -> dict[str, Any]:
    from multilora_store.assembly.bridge import record
    from multilora_store.distributed import audit
    from multilora_store.distributed.sharded import reshard

    loss = toys.loss_of(model, toys.tokens(rank))
    loss.backward()
    reshard(model)
    gradients = {n: toys.whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    values = {n: toys.whole(p.detach()).clone() for n, p in model.named_parameters()}
    return {
        "loss": float(loss), "gradients": gradients, "values": values, "ok": audit(model).ok,
        "base": record(model).base.fingerprint, "buffers": {n: b.clone() for n, b in model.named_buffers()},
    }  # fmt: skip


def filled(mesh: tuple[int, ...], holder: int) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from multilora_store.distributed import shard

    rank = dist.get_rank()
    found = [looked_at(shard(tied(), mesh), rank)]
    for adapters in (False, True):
        model = tied() if rank == holder else on_meta(tied(), adapters=adapters)
        found.append(looked_at(shard(model, mesh), rank))
    return found


@pytest.mark.parametrize(("world", "mesh", "holder"), [(2, (2,), 1), (4, (2, 2), 0)], ids=["fsdp", "hsdp"])
def test_one_rank_alone_holds_the_values(world: int, mesh: tuple[int, ...], holder: int) -> None:
    """Case 96: the base lies on meta elsewhere, buffers and ties included; nothing differs afterwards."""
    for everywhere, base_only, all_of_it in results(filled, world, mesh, holder):
        for found in (base_only, all_of_it):
            assert found["ok"]
            assert "-" in found["base"]
            assert found["base"] == everywhere["base"]
            assert found["loss"] == everywhere["loss"]
            for part in ("values", "buffers", "gradients"):
                assert found[part].keys() == everywhere[part].keys()
                assert all(torch.equal(found[part][name], value) for name, value in everywhere[part].items())


def refused() -> list[str]:
    import torch.distributed as dist

    from multilora_store.distributed import shard
    from multilora_store.distributed.sharded import backend_of

    rank = dist.get_rank()
    found = []

    def note(model: nn.Module, **options: Any) -> None:
        with pytest.raises(MultiLoRAError) as caught:
            shard(model, **options)
        found.append(f"{type(caught.value).__name__}: {caught.value} {backend_of(model)}")

    halves = tied()
    part = halves.base_model.model.layers if rank else halves.base_model.model.embed
    for module in part.modules():
        for key, value in module._parameters.items():
            module._parameters[key] = value if value is None else nn.Parameter(value.to("meta"), value.requires_grad)
    if not rank:
        retied(halves)
    note(halves)
    note(on_meta(tied(), adapters=True) if rank else tied(), backend="fsdp1")
    return found


def test_values_that_no_rank_has_in_full_are_refused() -> None:
    for halves, old in results(refused, 2):
        assert halves.startswith("UsageError: no rank has all of the values")
        assert halves.endswith("plain")
        assert old.startswith("UnsupportedError")
        assert "fsdp2" in old
        assert old.endswith("plain")
