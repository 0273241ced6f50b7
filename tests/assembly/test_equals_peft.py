"""An assembled model equals the one that PEFT builds by its own calls: tensors, configurations, states, forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

from multilora_store.assembly import assemble
from multilora_store.assembly.bridge import set_active
from multilora_store.storage import Store
from tests.assembly.conftest import Convolutions, Mixture, Put, Toy, built_by_peft, seeded

Fields = Mapping[str, Any]
Q: Fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
QV: Fields = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}

ON_TOY: dict[str, tuple[Fields, ...]] = {
    "one": (Q,),
    "different ranks and targets": (Q, QV, {**Q, "r": 8, "target_modules": ["v_proj", "mlp.0"]}),
    "the first targets least": ({**Q, "target_modules": ["layers.1.q_proj"]}, QV),
    "rank_pattern and alpha_pattern": (
        {**QV, "rank_pattern": {"layers.0.q_proj": 6, r".*\.v_proj": 3}, "alpha_pattern": {"v_proj": 16}},
        {**QV, "rank_pattern": {"layers.2.v_proj": 1}},
    ),
    "rsLoRA": ({**Q, "use_rslora": True}, Q),
    "DoRA": ({**QV, "use_dora": True}, QV, {**Q, "use_dora": True, "use_rslora": True}),
    "DoRA second": (QV, {**QV, "use_dora": True}),
    "lora_bias": ({**Q, "lora_bias": True}, Q, {**QV, "lora_bias": True}),
    "embeddings": ({**Q, "target_modules": ["embed", "q_proj"]}, {**QV, "target_modules": ["embed"]}),
    "DoRA on embeddings": ({**Q, "target_modules": ["embed"], "use_dora": True}, {**Q, "target_modules": ["embed"]}),
    "modules_to_save": ({**Q, "modules_to_save": ["head"]}, {**QV, "modules_to_save": ["head"]}, Q),
    "modules_to_save of the second": (Q, {**Q, "modules_to_save": ["head"]}),
    "a whole block saved": ({**Q, "target_modules": ["layers.0.q_proj"], "modules_to_save": ["layers.1.mlp"]}, Q),
    "regular expression": ({**Q, "target_modules": r".*layers\.[02]\.(q|v)_proj"}, Q),
    "all-linear": ({**Q, "target_modules": "all-linear"}, QV, {**Q, "r": 1, "target_modules": "all-linear"}),
    "layers_to_transform": (
        {**QV, "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {**QV, "layers_to_transform": 1, "layers_pattern": ["layers"]},
        QV,
    ),
    "exclude_modules": ({**QV, "exclude_modules": ["layers.1.q_proj"]}, {**QV, "exclude_modules": r".*v_proj"}),
    "trainable tokens": (
        {**Q, "trainable_token_indices": {"embed": [1, 3]}},
        {**Q, "trainable_token_indices": {"embed": [2, 5, 7]}},
    ),
    "dropout": ({**Q, "lora_dropout": 0.5}, Q),
    "gaussian and orthogonal inits": ({**Q, "init_lora_weights": "gaussian"}, {**Q, "init_lora_weights": "orthogonal"}),
    "MiCA": ({**Q, "init_lora_weights": "mica"}, Q),
    "fan_in_fan_out set by mistake": ({**Q, "fan_in_fan_out": True}, {**Q, "fan_in_fan_out": True}),
}


def check_equal(ours: PeftModel, theirs: PeftModel, names: list[str], example: torch.Tensor) -> None:
    """State dicts, configurations, layers' books and forwards with each adapter, with none and with several."""
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(reference)
    for key, value in reference.items():
        assert mine[key].dtype == value.dtype, key
        assert torch.equal(mine[key], value), key
    assert list(ours.peft_config) == list(theirs.peft_config) == names
    for name in names:
        assert ours.peft_config[name].to_dict() == theirs.peft_config[name].to_dict()
    assert ours.base_model.targeted_module_names == theirs.base_model.targeted_module_names
    assert [path for path, _ in ours.named_modules()] == [path for path, _ in theirs.named_modules()]
    for layer, other in zip(ours.modules(), theirs.modules(), strict=True):
        assert type(layer) is type(other)
        for book in (
            "r",
            "lora_alpha",
            "scaling",
            "use_rslora",
            "use_dora",
            "lora_bias",
            "in_features",
            "out_features",
        ):
            assert getattr(layer, book, None) == getattr(other, book, None) or book == "scaling"
    for active in [*([name] for name in names), names[:2]]:
        if any(_several_copies(theirs, active)):
            continue
        set_active(ours, dict.fromkeys(active, 1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's attention merges in its forward, and says so
            theirs.base_model.set_adapter(active)
            assert ours.active_adapters == theirs.active_adapters
            assert torch.equal(ours(example), theirs(example)), active
            for layer, other in zip(ours.modules(), theirs.modules(), strict=True):
                assert getattr(layer, "active_adapters", None) == getattr(other, "active_adapters", None)
                assert getattr(layer, "scaling", None) == getattr(other, "scaling", None)


def _several_copies(model: PeftModel, active: list[str]) -> list[bool]:
    return [
        len(layer._get_available_adapters() & set(active)) > 1
        for layer in model.modules()
        if hasattr(layer, "_get_available_adapters") and hasattr(layer, "original_module")
    ]


def assembled(base: nn.Module, store: Store, names: list[str]) -> PeftModel:
    return assemble(base, {name: {"active": position == 0} for position, name in enumerate(names)}, store=store)


@pytest.mark.parametrize("case", ON_TOY)
def test_on_linear_layers(case: str, toy: Toy, put: Put) -> None:
    """Case 1, 30, 32: every adapter of the set, whatever it saves, in the order of the manifest."""
    names = ["a", "b", "c"][: len(ON_TOY[case])]
    store = put(**dict(zip(names, ON_TOY[case], strict=True)))
    theirs = built_by_peft(toy, {name: store.path(name) for name in names})
    ours = assembled(toy, store, names)
    check_equal(ours, theirs, names, toy.example())


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_the_manifest_counts(reverse: bool, toy: Toy, put: Put) -> None:
    """Case 32: adapters whose saved modules differ load in any order."""
    store = put(a={**Q, "modules_to_save": ["head"]}, b=Q, c={**QV, "modules_to_save": ["layers.0.mlp", "head"]})
    names = ["a", "b", "c"][:: -1 if reverse else 1]
    theirs = built_by_peft(toy, {name: store.path(name) for name in names})
    check_equal(assembled(toy, store, names), theirs, names, toy.example())


@pytest.mark.parametrize("targets", [["conv1"], ["conv2"], ["conv3"], ["conv1", "conv2", "conv3", "head"]])
@pytest.mark.parametrize("dora", [False, True])
def test_on_convolutions(targets: list[str], dora: bool, put: Put) -> None:
    base = seeded(Convolutions)
    store = put(
        on=base,
        a={"r": 2, "target_modules": targets, "use_dora": dora},
        b={"r": 3, "target_modules": ["conv1", "conv3"], "modules_to_save": ["norm"]},
    )
    theirs = built_by_peft(base, {name: store.path(name) for name in "ab"})
    check_equal(assembled(base, store, ["a", "b"]), theirs, ["a", "b"], base.example())


def test_on_fused_experts(put: Put) -> None:
    """Case 63: adapters on fused expert parameters, the names of tensors as PEFT has them."""
    base = seeded(Mixture)
    fields = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    store = put(on=base, a=fields, b={**fields, "r": 3, "lora_alpha": 5}, c=Q)
    theirs = built_by_peft(base, {name: store.path(name) for name in "abc"})
    check_equal(assembled(base, store, ["a", "b", "c"]), theirs, ["a", "b", "c"], base.example())


def test_on_attention_of_torch(put: Put) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(x, x, x)[0]

    base = seeded(Attention)
    store = put(on=base, a={"r": 2, "target_modules": ["attn"]}, b={"r": 4, "target_modules": ["attn"]})
    theirs = built_by_peft(base, {name: store.path(name) for name in "ab"})
    check_equal(assembled(base, store, ["a", "b"]), theirs, ["a", "b"], torch.randn(2, 3, 16))


def test_on_a_transformers_model(store: Store) -> None:
    """A Hugging Face base gets the class that PEFT chooses by the task."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.assembly.conftest import made_by_peft

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    base = seeded(lambda: LlamaForCausalLM(config))
    shared = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    for seed, (name, fields) in enumerate(
        {
            "a": shared,
            "b": {**shared, "layers_to_transform": [1]},
            "c": {**shared, "target_modules": "all-linear"},
        }.items()
    ):
        adapter, tensors = made_by_peft(base, fields, seed)
        store.put(name, tensors, adapter)
    theirs = built_by_peft(base, {name: store.path(name) for name in "abc"})
    ours = assembled(copy.deepcopy(base), store, ["a", "b", "c"])
    assert type(ours) is type(theirs)
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(reference)
    assert all(torch.equal(mine[key], reference[key]) for key in mine)
    ids = torch.arange(8)[None]
    for name in "abc":
        set_active(ours, {name: 1.0})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.set_adapter(name)
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_tokens_of_a_tied_transformers_model(store: Store) -> None:
    """Trainable tokens reach the tied head too; PEFT itself cannot load a set where one adapter has none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.assembly.conftest import made_by_peft

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    base = seeded(lambda: LlamaForCausalLM(config))
    shared = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    for seed, (name, extra) in enumerate({"a": [0, 5], "b": [1], "c": None}.items()):
        adapter, tensors = made_by_peft(base, {**shared, "trainable_token_indices": extra}, seed)
        store.put(name, tensors, adapter)
    theirs = built_by_peft(base, {name: store.path(name) for name in "ab"})
    alone = built_by_peft(base, {"c": store.path("c")})
    ours = assembled(copy.deepcopy(base), store, ["a", "b", "c"])
    ids = torch.arange(8)[None]
    for name in "abc":
        set_active(ours, {name: 1.0})
        reference = alone if name == "c" else theirs
        reference.set_adapter(name)
        assert torch.equal(ours(input_ids=ids).logits, reference(input_ids=ids).logits), name


def test_layers_of_one_kind_share_no_book(toy: Toy, put: Put) -> None:
    """Layers made like the first one of their kind are as PEFT makes each: no attribute of one reaches another."""
    store = put(a=QV, b={**QV, "use_dora": True}, c={**QV, "lora_dropout": 0.1})
    theirs = built_by_peft(toy, {name: store.path(name) for name in "abc"})
    ours = assembled(toy, store, ["a", "b", "c"])
    for path, layer in theirs.named_modules():
        mine = ours.get_submodule(path)
        assert set(vars(mine)) - {"_multilora_record"} == set(vars(layer)), path
        assert getattr(mine, "adapter_layer_names", None) == getattr(layer, "adapter_layer_names", None)
        assert getattr(mine, "kwargs", None) == getattr(layer, "kwargs", None)
