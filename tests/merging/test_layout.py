"""The delta read from a file is the one that PEFT computes, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn

from multilora_store.errors import MergeError
from multilora_store.merging import MergeSource


class Experts(nn.Module):
    """Grouped experts as transformers has them: two fused parameters of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 12))  # (experts, out, in)
        self.down_proj = nn.Parameter(torch.randn(3, 12, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->beo", x, self.gate_up_proj)


class Layers(nn.Module):
    """One layer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 24)
        self.emb = nn.Embedding(30, 16)
        self.conv1 = nn.Conv1d(16, 12, 3)
        self.conv2 = nn.Conv2d(16, 12, (3, 2))
        self.point = nn.Conv2d(16, 12, 1)
        self.conv3 = nn.Conv3d(16, 12, 2)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x


def adapted(*, seed: int = 0, **fields: Any) -> tuple[Any, MergeSource]:
    """A PEFT model with one random adapter, and that adapter as its file would hold it."""
    torch.manual_seed(seed)
    config = LoraConfig(init_lora_weights=False, **fields)
    model = get_peft_model(Layers(), config)
    tensors = {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}
    return model, MergeSource.in_memory("a", config.to_dict(), tensors)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("path", ["lin", "emb", "conv1", "conv2", "point", "conv3"])
def test_deltas_equal_pefts(path: str, rslora: bool) -> None:
    """Case 27: the effective scale is counted once, with rsLoRA and with patterns. Case 91: every convolution."""
    model, source = adapted(
        r=4,
        lora_alpha=6,
        target_modules=["lin", "emb", "conv1", "conv2", "point", "conv3"],
        use_rslora=rslora,
        rank_pattern={"emb": 3, "conv2": 5},
        alpha_pattern={"lin": 32, "conv1": 1},
    )
    pair = source.layout.pairs[path]
    delta = pair.read(source.tensors).dense()[0]
    layer = model.base_model.model.get_submodule(path)
    expected = layer.get_delta_weight("default").detach().double()
    expected = expected.T if path == "emb" else expected.flatten(1)
    torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-5)
    assert pair.kind == {"lin": "linear", "emb": "embedding"}.get(path, "conv")
    again = pair.write(pair.read(source.tensors), torch.float64)
    assert {name: t.shape for name, t in again.items()} == {n: source.tensors[n].shape for n in (pair.down, pair.up)}


def test_deltas_of_grouped_experts_equal_pefts() -> None:
    model, source = adapted(
        r=2, lora_alpha=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    pairs = source.layout.pairs
    assert sorted(pairs) == ["experts", "experts.base_layer"]
    wrapper = model.base_model.model.experts
    while hasattr(wrapper, "parameter_name"):
        path = "experts" if wrapper is model.base_model.model.experts else "experts.base_layer"
        expected = wrapper.get_delta_weight("default").detach().double()
        delta = pairs[path].read(source.tensors)
        assert (pairs[path].kind, pairs[path].groups, delta.rank) == ("experts", 3, 2)
        torch.testing.assert_close(delta.dense(), expected, rtol=1e-5, atol=1e-5)
        written = pairs[path].write(delta, torch.float32)
        assert torch.equal(written[pairs[path].up], source.tensors[pairs[path].up])
        wrapper = wrapper.base_layer


def test_a_grouped_convolution_is_one_delta_for_each_group() -> None:
    up, down = torch.randn(8, 2, 1), torch.randn(4, 6, 3)
    prefix = "base_model.model.conv"
    source = MergeSource.in_memory(
        "a",
        {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["conv"]},
        {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up},
    )
    pair = source.layout.pairs["conv"]
    assert (pair.kind, pair.groups, pair.rank, pair.shape) == ("grouped_conv", 2, 2, (4, 18))
    x = torch.randn(1, 6, 10)
    between = torch.conv1d(x, down)
    expected = torch.conv1d(between, up, groups=2)
    weight = pair.read(source.tensors).dense().reshape(8, 6, 3).float()
    torch.testing.assert_close(torch.conv1d(x, weight), expected, rtol=1e-4, atol=1e-4)
    written = pair.write(pair.read(source.tensors), torch.float32)
    assert torch.equal(written[pair.up], up)


def test_half_a_pair_is_refused() -> None:
    source = MergeSource.in_memory(
        "a",
        {"peft_type": "LORA", "r": 4, "target_modules": ["q"]},
        {"base_model.model.q.lora_A.weight": torch.ones(4, 8)},
    )
    with pytest.raises(MergeError, match="module q has no lora_B"):
        _ = source.layout


@pytest.mark.parametrize("shapes", [((4, 8), (6, 3)), ((3, 8), (6, 3)), ((4, 8), (6, 4, 1))])
def test_a_shape_that_contradicts_the_rank_is_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source = MergeSource.in_memory(
        "a",
        {"peft_type": "LORA", "r": 4, "target_modules": ["q"]},
        {
            "base_model.model.q.lora_A.weight": torch.ones(shapes[0]),
            "base_model.model.q.lora_B.weight": torch.ones(shapes[1]),
        },
    )
    with pytest.raises(MergeError, match="do not fit the configured rank 4"):
        _ = source.layout


def test_parameters_of_one_module_with_two_ranks_are_refused() -> None:
    source = MergeSource.in_memory(
        "a",
        {
            "peft_type": "LORA",
            "r": 4,
            "target_modules": [],
            "target_parameters": ["experts.up", "experts.down"],
            "rank_pattern": {"experts.up": 2},
        },
        {
            "base_model.model.experts.lora_A.weight": torch.ones(8, 8),
            "base_model.model.experts.lora_B.weight": torch.ones(8, 8),
        },
    )
    with pytest.raises(MergeError, match="different ranks or alphas"):
        _ = source.layout
