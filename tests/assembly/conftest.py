"""Toys, adapters with random weights, and the model that PEFT builds by its own calls: the reference."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.storage import Store, open_store

Put = Callable[..., Store]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.v_proj = nn.Linear(16, 8, bias=False)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.v_proj(self.q_proj(x)))


class Toy(nn.Module):
    """Embedding, blocks, head: (batch, tokens) ids to (batch, tokens, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    @staticmethod
    def example() -> torch.Tensor:
        return torch.arange(12).reshape(2, 6)


class Convolutions(nn.Module):
    """One convolution of each dimension, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(4, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.conv3 = nn.Conv3d(8, 4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        x = self.conv2(x.unsqueeze(-1))
        x = self.conv3(x.unsqueeze(-1)).flatten(2).mean(-1)
        return self.head(self.norm(x))

    @staticmethod
    def example() -> torch.Tensor:
        return torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))


class Experts(nn.Module):
    """Fused expert weights, as mixture-of-experts models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 12) / 4)
        self.down_proj = nn.Parameter(torch.randn(3, 12, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("bi,eio->ebo", x, self.gate_up_proj))
        return torch.einsum("ebo,eoi->bi", hidden, self.down_proj)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.mlp = nn.Module()
        self.mlp.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp.experts(self.q_proj(x))

    @staticmethod
    def example() -> torch.Tensor:
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def seeded(kind: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A toy with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().eval()


def made_by_peft(
    base: nn.Module, fields: Mapping[str, Any], seed: int
) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """An adapter as PEFT would save it, every tensor of it random and non-zero."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**fields))
        tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
        config = AdapterConfig.parse(model.peft_config["default"].to_dict())
        drawn = {
            key: torch.randn(value.shape) * 0.2 + 0.05 if value.is_floating_point() else value.clone()
            for key, value in tensors.items()
        }
        return config, {key: value.abs() if "var" in key else value for key, value in drawn.items()}


def built_by_peft(base: nn.Module, folders: Mapping[str, Path], **options: Any) -> PeftModel:
    """The model that PEFT builds by its own calls, one after another."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = iter(folders)
        first = next(names)
        model = PeftModel.from_pretrained(copy.deepcopy(base), folders[first], adapter_name=first, **options)
        for name in names:
            model.load_adapter(folders[name], adapter_name=name, **options)
    return model


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty local store."""
    return open_store(tmp_path / "store")


@pytest.fixture
def toy() -> Toy:
    """The toy, always with the same weights."""
    made: Toy = seeded(Toy)
    return made


@pytest.fixture
def put(store: Store, toy: Toy) -> Put:
    """Put adapters with random weights, made by PEFT for the toy, into the store: `put(a={...}, b={...})`."""

    def make(*, on: nn.Module | None = None, **adapters: Mapping[str, Any]) -> Store:
        for seed, (name, fields) in enumerate(adapters.items(), start=1):
            config, tensors = made_by_peft(toy if on is None else on, fields, seed)
            store.put(name, tensors, config)
        return store

    return make
