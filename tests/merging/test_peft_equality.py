"""`peft_*` against PEFT's own add_weighted_adapter, and every merged adapter against PEFT's reading of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from multilora_store.merging import Merged, MergeSource, merge_adapters

PATHS = ("a.lin", "a.wide", "emb", "conv")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 24)
        self.wide = nn.Linear(16, 40)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.emb = nn.Embedding(30, 16)
        self.conv = nn.Conv2d(8, 12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


def two_adapters(ranks: tuple[int, int] = (4, 4), **fields: Any) -> tuple[Any, list[MergeSource]]:
    """A PEFT model with the adapters x and y, and the two as their files would hold them, in canonical order."""
    torch.manual_seed(0)
    common: dict[str, Any] = {"target_modules": ["lin", "wide", "emb", "conv"], "init_lora_weights": False, **fields}
    model = get_peft_model(Model(), LoraConfig(r=ranks[0], lora_alpha=6, **common), adapter_name="x")
    model.add_adapter("y", LoraConfig(r=ranks[1], lora_alpha=12, **common))
    sources = [
        MergeSource.in_memory(
            name,
            model.peft_config[name].to_dict(),
            {key: t.detach().clone() for key, t in get_peft_model_state_dict(model, adapter_name=name).items()},
        )
        for name in ("x", "y")
    ]
    return model, sources


def peft_delta(model: Any, adapter: str, path: str) -> Tensor:
    delta: Tensor = model.base_model.model.get_submodule(path).get_delta_weight(adapter)
    return delta.detach()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("linear", {}),
        ("cat", {}),
        ("svd", {}),
        ("ties", {"density": 0.4}),
        ("ties", {"density": 0.4, "election": "frequency"}),
        ("ties_svd", {"density": 0.4}),
        ("magnitude_prune", {"density": 0.4}),
        ("magnitude_prune_svd", {"density": 0.4}),
        ("dare_linear", {"density": 1.0}),
        ("dare_linear_svd", {"density": 1.0}),
        ("dare_ties", {"density": 1.0}),
        ("dare_ties_svd", {"density": 1.0}),
    ],
)
@pytest.mark.filterwarnings("ignore:The density:UserWarning")
def test_our_result_is_pefts(name: str, params: dict[str, Any]) -> None:
    """Case 91: convolutions too. DARE is random in PEFT and has no seed: at density 1 it is not."""
    model, sources = two_adapters()
    theirs = dict(params)
    if "election" in theirs:
        theirs["majority_sign_method"] = theirs.pop("election")
    model.add_weighted_adapter(["x", "y"], [0.7, -0.4], "m", combination_type=name, **theirs)
    merged = merge_adapters(sources, [0.7, -0.4], strategy=f"peft_{name}", **params)
    ours = as_adapter(merged)
    for path in PATHS:
        torch.testing.assert_close(
            peft_delta(ours, "default", path), peft_delta(model, "m", path), rtol=2e-4, atol=2e-5
        )
    assert merged.config.r == model.peft_config["m"].r


def test_the_factors_of_cat_and_linear_are_pefts_too() -> None:
    model, sources = two_adapters()
    order = sorted(sources, key=lambda source: source.digest)
    names, weights = [source.name for source in order], [0.7, 0.4]
    for name in ("cat", "linear"):
        model.add_weighted_adapter(names, weights, name, combination_type=name)
        merged = merge_adapters(order, weights, strategy=f"peft_{name}")
        for key, tensor in get_peft_model_state_dict(model, adapter_name=name).items():
            torch.testing.assert_close(merged.tensors[key], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["linear", "svd", "ties", "peft_linear", "peft_svd", "peft_ties_svd"])
def test_peft_reads_what_we_merged_with_the_scale_that_we_meant(strategy: str) -> None:
    """Case 27: sources with rsLoRA and patterns; PEFT's own merge of them is over-scaled by the root of the rank."""
    model, sources = two_adapters(use_rslora=True, rank_pattern={"wide": 2}, alpha_pattern={"a.lin": 3, "emb": 40})
    params = {"density": 1.0} if "ties" in strategy else {}
    merged = merge_adapters(sources[:1], [1.0], strategy=strategy, **params)
    ours = as_adapter(merged)
    for path in PATHS:
        torch.testing.assert_close(
            peft_delta(ours, "default", path), peft_delta(model, "x", path), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("strategy", ["linear", "svd", "knots", "core_space"])
def test_peft_reads_a_merge_of_unequal_ranks_targets_and_patterns(strategy: str) -> None:
    model, sources = two_adapters((3, 5), rank_pattern={"conv": 2, "a.wide": 7})
    merged = merge_adapters(sources, [0.5, 2.0], strategy=strategy)
    ours = as_adapter(merged)
    if strategy == "linear":
        for path in PATHS:
            expected = 0.5 * peft_delta(model, "x", path) + 2.0 * peft_delta(model, "y", path)
            torch.testing.assert_close(peft_delta(ours, "default", path), expected, rtol=1e-4, atol=1e-5)
    assert merged.config.rank_for("conv") == {"svd": 2}.get(strategy, 4)
    assert merged.config.rank_for("a.wide") == {"svd": 7}.get(strategy, 14)


def as_adapter(merged: Merged) -> Any:
    """The merged adapter in a PEFT model that was built from its configuration."""
    config = LoraConfig(**{key: value for key, value in merged.config.raw.items() if key != "peft_version"})
    model = get_peft_model(Model(), config)
    result = set_peft_model_state_dict(model, dict(merged.tensors))
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora" in key]
    return model
