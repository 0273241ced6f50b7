"""Profiles: what vLLM would refuse or serve wrongly is said before upload, with the reason and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import NotInStoreError, UsageError
from multilora_store.storage import open_store, read_peft_dir
from multilora_store.storage.experts import flatten, unflatten
from multilora_store.storage.placement import place
from multilora_store.storage.profiles import PROFILES, lint, set_needs, verify_profile
from multilora_store.storage.vllm_rules import RANK_STEPS, rank_setting

Shapes = dict[str, tuple[int, ...]]


def config(**fields: Any) -> AdapterConfig:
    return AdapterConfig.parse(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **fields}
    )


def shapes(rank: int = 4, targets: tuple[str, ...] = ("q_proj", "v_proj"), beginning: str = "model.layers") -> Shapes:
    found: Shapes = {}
    for layer in range(2):
        for target in targets:
            path = f"base_model.model.{beginning}.{layer}.self_attn.{target}"
            found[f"{path}.lora_A.weight"] = (rank, 16)
            found[f"{path}.lora_B.weight"] = (16, rank)
    return found


def codes(*given: Any, **options: Any) -> list[str]:
    return [finding.code for finding in lint(*given, **options)]


def test_a_plain_adapter_has_no_findings() -> None:
    assert lint(config(), shapes()) == ()
    assert lint(config(use_rslora=True, init_lora_weights="gaussian"), shapes()) == ()
    embedding = {"base_model.model.embed.lora_embedding_A": (4, 9), "base_model.model.embed.lora_embedding_B": (8, 4)}
    assert lint(config(), {**shapes(), **embedding}) == ()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"use_dora": True}, "dora"),
        ({"lora_bias": True}, "lora-bias"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"alora_invocation_tokens": [1, 2]}, "alora"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer-replication"),
        ({"init_lora_weights": "pissa"}, "init"),
        ({"init_lora_weights": "pissa_niter_4"}, "init"),
        ({"init_lora_weights": "olora"}, "init"),
        ({"init_lora_weights": "corda"}, "init"),
        ({"init_lora_weights": "loftq"}, "init"),
        ({"modules_to_save": ["lm_head"]}, "modules-to-save"),
        ({"modules_to_save": ["classifier", "score"]}, "modules-to-save"),
        ({"trainable_token_indices": [1]}, "tokens"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "expert-layout"),
    ],
)
def test_each_thing_that_vllm_refuses_is_named_with_a_way_out(fields: dict[str, Any], code: str) -> None:
    (found,) = lint(config(**fields), shapes())
    assert (found.code, found.severity) == (code, "error")
    assert found.what
    assert found.why
    assert found.remedy
    assert found.to_json()["code"] == code


def test_another_method_and_absent_fields_are_named() -> None:
    assert "peft-type" in codes(AdapterConfig.parse({"peft_type": "IA3", "target_modules": ["k"]}), shapes())
    bare = AdapterConfig.parse({"peft_type": "LORA", "target_modules": ["q_proj"]})
    assert codes(bare, shapes()).count("field") == 2


def test_dora_is_flagged_before_upload() -> None:
    """Case 109: a magnitude vector is enough, whatever the configuration says."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    (found,) = lint(config(), {**shapes(), name: (16,)})
    assert found.code == "dora"
    assert "magnitude" in found.what


def test_fully_trained_heads_are_listed_and_a_split_is_offered() -> None:
    """Case 44."""
    head = {"base_model.model.lm_head.weight": (9, 16)}
    (found,) = lint(config(modules_to_save=["lm_head"]), {**shapes(), **head})
    assert found.code == "modules-to-save"
    assert "lm_head.weight" in found.what
    assert "split" in found.remedy
    score = {"base_model.model.score.weight": (2, 16)}
    assert lint(config(modules_to_save=["score"]), {**shapes(), **score}) == ()


def test_tensors_of_the_base_are_flagged() -> None:
    """Case 110."""
    assert codes(config(), {**shapes(), "base_model.model.lm_head.base_layer.weight": (9, 16)}) == ["base-layer"]


def test_names_that_vllm_does_not_know_are_flagged() -> None:
    named = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": (4, 16)}
    assert "key" in codes(config(), {**shapes(), **named})
    assert "prefix" in codes(config(), {key.removeprefix("base_model.model."): s for key, s in shapes().items()})
    assert codes(config(), dict(list(shapes().items())[:-1])) == ["half"]
    assert codes(config(), {}) == ["empty"]
    assert codes(config(), {**shapes(), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (0,)}) == [
        "empty"
    ]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "lora-bias"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "tokens"),
        ("model.layers.0.self_attn.q_proj.bias", "key"),
        ("lm_head.weight", "key"),
    ],
)
def test_a_tensor_is_enough_whatever_the_configuration_says(name: str, code: str) -> None:
    assert codes(config(), {**shapes(), f"base_model.model.{name}": (16,)}) == [code]


def test_flat_expert_factors_are_flagged_and_can_be_restored() -> None:
    """Case 136: the converter gives (experts, rank, in) back, as PEFT itself reads the flat pair."""
    path = "base_model.model.model.layers.0.mlp.experts.base_layer"
    flat = {f"{path}.lora_A.weight": (12, 16), f"{path}.lora_B.weight": (8, 12)}
    assert codes(config(target_parameters=["mlp.experts.down_proj"]), flat) == ["expert-layout"]
    assert codes(config(), flat) == ["expert-layout"]
    down, up = torch.randn(3 * 4, 16), torch.randn(8, 4 * 3)
    each_down, each_up = unflatten(down, up, 4)
    assert (each_down.shape, each_up.shape) == ((3, 4, 16), (3, 8, 4))
    # PEFT's ParamWrapper.get_delta_weight, written out.
    reference = torch.einsum("o r e, e r i -> e o i", up.reshape(8, 4, 3), down.reshape(3, 4, 16))
    assert torch.allclose(each_up @ each_down, reference, atol=1e-5)
    back_down, back_up = flatten(each_down, each_up)
    assert torch.equal(back_down, down)
    assert torch.equal(back_up, up)
    for rank in (0, 5):
        with pytest.raises(UsageError, match="not those of experts"):
            unflatten(down, up, rank)


def test_the_rank_setting_is_the_next_step() -> None:
    """Case 43: ranks 4, 20 and 64 need 64, and the limit of a running server is compared with the rank."""
    assert [rank_setting(rank) for rank in (1, 2, 16, 17, 64, 257, 512, 513)] == [1, 8, 16, 32, 64, 320, 512, None]
    adapters = {f"r{rank}": (config(r=rank), shapes(rank)) for rank in (4, 20, 64)}
    needs = set_needs(adapters)
    assert (needs.max_rank, needs.setting, needs.ranks) == (64, 64, {"r4": 4, "r20": 20, "r64": 64})
    assert codes(config(r=64), shapes(64), max_rank=16) == ["rank"]
    assert codes(config(r=64), shapes(64), max_rank=64) == []
    (found,) = lint(config(r=600), shapes(600))
    assert "512" in found.why
    assert RANK_STEPS[-1] == 512


def test_a_rank_pattern_counts() -> None:
    (found,) = lint(config(rank_pattern={"v_proj": 40}, alpha_pattern={"v_proj": 80}), shapes(), max_rank=16)
    assert found.code == "rank"
    assert "40" in found.what
    assert codes(config(), shapes(40), max_rank=16) == ["rank"]


def test_a_module_of_another_scale_is_a_warning() -> None:
    (found,) = lint(config(alpha_pattern={"v_proj": 80}), shapes())
    assert (found.code, found.severity) == ("scale", "warning")
    assert "2 modules" in found.what


def test_what_a_server_must_be_set_to_grows_with_the_set() -> None:
    """Case 111: ranks 8 and 8, then one of 32; the union of targets."""
    first = {"a": (config(r=8), shapes(8, ("q_proj",))), "b": (config(r=8), shapes(8, ("v_proj",)))}
    assert set_needs(first).setting == 8
    needs = set_needs({**first, "c": (config(r=32), shapes(32, ("o_proj",)))})
    assert (needs.setting, needs.targets) == (32, ("o_proj", "q_proj", "v_proj"))
    assert set_needs({}).max_rank == 0


def test_modules_that_the_base_does_not_have_are_an_error_with_a_rename() -> None:
    """Case 42: only the whole path counts; 0 and partial coverage are errors."""
    targets = ("q_proj", "k_proj", "v_proj")
    layout = [f"language_model.model.layers.{i}.self_attn.{target}" for i in range(2) for target in targets]
    (none,) = lint(config(), shapes(), layout=layout)
    assert none.code == "coverage"
    assert none.what.startswith("0 of 4")
    assert "{'model': 'language_model.model'}" in none.remedy
    known = [name.removeprefix("language_model.") for name in layout]
    assert lint(config(), shapes(), layout=known) == ()
    (partial,) = lint(config(), shapes(), layout=[name for name in known if ".1." not in name])
    assert partial.what.startswith("2 of 4")
    assert "rename" not in partial.remedy


def test_a_rename_is_proposed_only_where_it_places_everything() -> None:
    """Case 36."""
    assert place(["model.layers.0.q"], ["model.language_model.layers.0.q", "x"]).rename == {
        "model": "model.language_model"
    }
    assert place(["language_model.model.a.q"], ["model.a.q"]).rename == {"language_model": ""}
    assert place(["model.a.q", "model.b.q"], ["m.a.q"]).rename == {}
    assert not place([], ["m.a.q"]).complete
    assert place(["a.q"], ["a.q"]).complete


def test_a_server_restricted_to_other_targets_would_serve_the_base() -> None:
    """Case 108."""
    (found,) = lint(config(target_modules=["down_proj"]), shapes(targets=("down_proj",)), targets=["qkv_proj"])
    assert (found.code, found.severity) == ("targets", "error")
    assert "down_proj" in found.remedy
    assert lint(config(), shapes(), targets=["q_proj", "v_proj", "o_proj"]) == ()


def test_a_stored_set_is_verified_from_headers(memory_url: str) -> None:
    store = open_store(memory_url)
    for name, fields in {"good": {}, "dora": {"use_dora": True}}.items():
        tensors = {key: torch.zeros(shape) for key, shape in shapes().items()}
        store.put(name, tensors, config(**fields))
    report = verify_profile(store)
    assert not report.ok
    assert [finding.code for finding in report.findings] == ["dora"]
    assert report.adapters["good"] == ()
    assert report.to_json()["needs"] == {
        "max_rank": 4,
        "setting": 8,
        "targets": ["q_proj", "v_proj"],
        "ranks": {"dora": 4, "good": 4},
    }
    assert verify_profile(store, ["good@latest"]).ok
    with pytest.raises(NotInStoreError):
        verify_profile(store, ["nobody"])
    with pytest.raises(UsageError, match="did you mean vllm"):
        verify_profile(store, profile="vlm")
    assert list(PROFILES) == ["vllm"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("r07_bias_lora_only", "bias"),
        ("r08_bias_all", "bias"),
        ("r14_alora", "alora"),
        ("r16_mts_embed_head", "modules-to-save"),
        ("r17_layer_replication", "layer-replication"),
        ("r18_pissa", "init"),
        ("r19_dora_rslora", "dora"),
        ("r20_lora_bias", "lora-bias"),
        ("r13_corda", "init"),
        ("x00_loftq", "init"),
        ("r06_target_parameters", "expert-layout"),
    ],
)
def test_configurations_of_the_field_are_judged(shared: Path, file: str, code: str) -> None:
    found = AdapterConfig.parse((shared / "data/configs" / f"{file}.json").read_bytes(), where=file)
    assert code in codes(found, shapes(found.max_rank))


def test_real_adapters_are_servable(shared: Path) -> None:
    folders = [read_peft_dir(path) for path in sorted((shared / "data/adapters").iterdir())]
    assert folders
    for folder in folders:
        names = {key: tuple(tensor.shape) for key, tensor in folder.tensors.items()}
        assert lint(folder.config, names, max_rank=16) == ()
