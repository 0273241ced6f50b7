"""Small models with several adapters, the same on every rank, and the unsharded run they are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

WIDTH = 16
VOCABULARY = 24


class Block(nn.Module):
    """A residual block with two attention-like and two MLP-like projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + torch.tanh(self.q_proj(y)) * torch.sigmoid(self.v_proj(y))
        return x + self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Routes each token to one of several experts, by a fixed router."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        out = x
        for index, expert in enumerate(self.experts):
            mask = (chosen == index).unsqueeze(-1)
            if bool(mask.any()):
                out = out + torch.where(mask, expert(x), 0.0)
        return out


class ExpertBlock(Block):
    """A block with experts after it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.moe = Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(super().forward(x))


class Toy(nn.Module):
    """Embedding, blocks, head: tokens (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, depth: int = 3, width: int = WIDTH, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()  # a view as output makes FSDP2 warn


DEFAULTS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "b": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "up", "head"]},
    "c": {"r": 3, "lora_alpha": 3, "target_modules": ["v_proj", "down"]},
}


def build(
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    adapter_dtypes: Mapping[str, torch.dtype] | None = None,
    block: type[Block] = Block,
    depth: int = 3,
    width: int = WIDTH,
    active: Iterable[str] | None = None,
    trainable: Iterable[str] = (),
) -> nn.Module:
    """A PeftModel over a Toy; every value depends on names alone, so it is the same in every process."""
    configs = DEFAULTS if configs is None else configs
    torch.manual_seed(0)
    base = Toy(depth, width, block).to(dtype)
    model: Any = None
    with warnings.catch_warnings():  # PEFT fears for names such as `a`, which are a part of `lora_`
        warnings.filterwarnings("ignore", "Adapter name", UserWarning)
        for name, fields in configs.items():
            config = LoraConfig(**fields)
            if model is None:
                model = get_peft_model(base, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
    from multilora_store.assembly.bridge import adapter_names, adapter_parameters, set_active, set_trainable

    with torch.no_grad():
        for name in adapter_names(model):
            for key, parameter in adapter_parameters(model, name).items():
                generator = torch.Generator().manual_seed(sum(map(ord, name + key)))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
                if "magnitude" in key:
                    parameter.abs_().add_(0.5)
                wanted = (adapter_dtypes or {}).get(name)
                if wanted is not None:
                    parameter.data = parameter.data.to(wanted)
    set_active(model, dict.fromkeys(configs if active is None else active, 1.0))
    set_trainable(model, trainable)
    return model


def tokens(rank: int, size: int = 5, length: int = 6) -> torch.Tensor:
    """The batch of one rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, VOCABULARY, (size, length), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy of predicting each token from itself, a scalar."""
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global value of a parameter or gradient."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """`name: canonical tensor` -> the global gradient of each adapter tensor that has one."""
    from multilora_store.assembly.bridge import adapter_names
    from multilora_store.distributed.layout import layouts
    from multilora_store.distributed.sharded import reshard

    reshard(model)
    found = {}
    for name in adapter_names(model):
        adapter = layouts(model, (name,))[name]
        for key, tensor in adapter.tensors.items():
            layout = adapter.layouts[key]
            if layout.dim is None and layout.group is not None:
                found |= _flat_gradient(name, key, tensor, layout)
            elif tensor.grad is not None:
                found[f"{name}: {key}"] = whole(tensor.grad).clone()
    return found


def _flat_gradient(name: str, key: str, tensor: torch.Tensor, layout: Any) -> dict[str, torch.Tensor]:
    """Gradients of FSDP1's pieces, put together by a sum over ranks."""
    import torch.distributed as dist

    total = torch.zeros(layout.numel)
    has = torch.tensor(float(tensor.grad is not None))
    if tensor.grad is not None and tensor.numel():
        layout.view(total, layout.place).copy_(tensor.grad.reshape(-1))
    dist.all_reduce(total)
    dist.all_reduce(has)
    return {f"{name}: {key}": total.view(layout.shape)} if has > 0 else {}


def reference_gradients(world: int, **options: Any) -> dict[str, torch.Tensor]:
    """The same work unsharded: gradients of the mean over the batches of all ranks."""
    model = build(**options)
    for rank in range(world):
        (loss_of(model, tokens(rank)) / world).backward()
    return gradients(model)


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two sets of tensors of the same names."""
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))[:6]
    return max((float((found[k].float() - expected[k].float()).abs().max()) for k in found), default=0.0)


def worst_present(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Like `worst`, where a gradient that one side lacks counts as zero."""
    names = set(found) | set(expected)
    shapes = {**found, **expected}
    sides = ({k: side.get(k, torch.zeros_like(shapes[k])) for k in names} for side in (found, expected))
    return worst(*sides)


def to_meta(model: nn.Module) -> None:
    """Takes the values of every adapter away."""
    from multilora_store.assembly.bridge import adapter_names, adapter_parameters, walk

    gone = {id(p) for name in adapter_names(model) for p in adapter_parameters(model, name).values()}
    for _, module in walk(model):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in gone:
                empty = torch.empty_like(parameter, device="meta")
                module._parameters[key] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
