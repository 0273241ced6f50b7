"""`adapter_config.json` as met in the wild: read, or refused with the place and the reason."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_store.adapter import AdapterConfig, TensorInfo, content_digest, version_id
from multilora_store.adapter.fields import LORA_FIELDS, PEFT_TYPES
from multilora_store.errors import ConfigError, StoreFormatError

REFUSED = {
    "p23_lerobot_not_peft": "LeRobot",
    "p24_mlx_lm": "mlx-lm",
    "x02_unknown_peft_type": "unknown peft_type 'FUTURELORA'",
    "x03_lower_peft_type": "did you mean LORA",
    "x04_r_string": "r = '8'",
    "x05_r_zero": "r = 0",
    "x06_only_peft_type": "no targets",
    "x08_trailing_comma": "line 5",  # 50 or 51: Python 3.13 names the comma, others what comes after it
    "x09_duplicate_key": "the key 'r' stands in it twice",
    "x10_alpha_float_nan": "NaN",
    "x11_target_null_regex_layers": "layers_to_transform",
    "x12_array_not_object": "line 1 column 1",
    "x13_empty_file": "line 1 column 1",
}
NOTED = {"p01_bloom_enable_lora_2023": "enable_lora, merge_weights", "x01_unknown_fields": "use_quantum"}
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]}


def test_real_configs_are_read_or_refused_in_words(shared: Path) -> None:
    files = sorted((shared / "data" / "configs").glob("*.json"))
    assert len(files) >= 40
    for file in files:
        if file.stem in REFUSED:
            with pytest.raises(ConfigError) as caught:
                AdapterConfig.parse(file.read_bytes(), where=str(file))
            assert str(file) in caught.value.what
            assert REFUSED[file.stem] in str(caught.value)
        else:
            config = AdapterConfig.parse(file.read_bytes(), where=str(file))
            assert AdapterConfig.parse(config.to_json()).canonical() == config.canonical()
            assert "".join(config.notes).endswith(NOTED.get(file.stem, "")), file.stem


def test_the_words_of_peft_are_the_installed_ones() -> None:
    assert frozenset(kind.value for kind in peft.PeftType) == PEFT_TYPES
    assert frozenset(field.name for field in dataclasses.fields(peft.LoraConfig)) == LORA_FIELDS


def test_scales_are_those_of_peft() -> None:
    config = AdapterConfig.parse(
        {**LORA, "use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0.q_proj": 32}}
    )
    assert config.rank_for("model.layers.0.q_proj") == 4
    assert config.alpha_for("model.layers.0.q_proj") == 32
    assert config.alpha_for("model.layers.1.q_proj") == 16
    assert config.scaling_for("model.layers.0.q_proj") == 32 / math.sqrt(4)
    assert AdapterConfig.parse(LORA).scaling_for("v_proj") == 2.0
    assert config.max_rank == 8


def test_a_mapping_of_peft_is_taken_as_it_is() -> None:
    config = AdapterConfig.parse(peft.LoraConfig(r=4, target_modules={"b", "a"}, task_type="CAUSAL_LM").to_dict())
    assert config.target_modules == ("a", "b")
    assert config.peft_type == "LORA"
    assert json.loads(config.to_json())["target_modules"] == ["a", "b"]


def test_order_of_sets_and_the_writer_do_not_count_for_identity() -> None:
    one = AdapterConfig.parse({**LORA, "peft_version": "0.1", "inference_mode": True})
    two = AdapterConfig.parse({**LORA, "target_modules": ["q_proj", "v_proj"], "inference_mode": False})
    info = TensorInfo(name="base_model.model.q.lora_A.weight", dtype="F32", shape=(2, 3), sha256="0" * 64)
    other = dataclasses.replace(info, name="base_model.model.q.lora_B.weight")
    assert content_digest(one, [info, other]) == content_digest(two, [other, info])
    assert content_digest(one, [info]) != content_digest(one, [dataclasses.replace(info, shape=(3, 2))])
    assert content_digest(one, [info]) != content_digest(one.replace(lora_alpha=17), [info])


def test_ids_are_the_published_ones() -> None:
    """The vector of docs/format.md: whoever computes another id has another format."""
    info = TensorInfo(name="base_model.model.q_proj.lora_A.weight", dtype="F32", shape=(1, 2), sha256="a" * 64)
    digest = content_digest(AdapterConfig.parse(LORA), [info])
    assert digest == "2279f146824d08c020003ed202cdd10b4510269442e22d9b9e42ca5e7b153162"
    assert version_id(digest) == "v" + digest[:16]


@pytest.mark.parametrize(
    "changes", [{"dtype": "F31"}, {"shape": (-1,)}, {"sha256": "0" * 63}, {"sha256": "../" * 21 + "x"}]
)
def test_a_tensor_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {"name": "x", "dtype": "F32", "shape": (2,), "sha256": "0" * 64}
    assert TensorInfo(**good).nbytes == 8
    with pytest.raises(StoreFormatError):
        TensorInfo(**{**good, **changes})


@given(st.binary(max_size=200))
def test_any_bytes_are_a_config_or_a_typed_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        AdapterConfig.parse(data)


@pytest.mark.parametrize("value", [b"[" * 100_000, b'{"a":' * 50_000, b" " * (5 * 2**20)])
def test_hostile_sizes_and_depths_are_typed_errors(value: bytes) -> None:
    with pytest.raises(ConfigError):
        AdapterConfig.parse(value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": [1]},
        {"alpha_pattern": "q_proj"},
        {"target_modules": 3},
        {"target_modules": ["q_proj", 3]},
        {"target_modules": {"q_proj": 1}},
        {"modules_to_save": ["head", None]},
        {"layers_to_transform": [1, "2"]},
        {"layers_to_transform": True},
    ],
)
def test_a_field_of_another_type_is_named(fields: dict[str, Any]) -> None:
    raw = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **fields}
    with pytest.raises(ConfigError, match=next(iter(fields))):
        AdapterConfig.parse(json.dumps(raw))


PATHS = ["q_proj", "layers.0.q_proj", "model.layers.0.q_proj", "model.layers.1.q_proj", "model.layers.1.k_proj"]


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_of_which_the_first_counts_are_settled_without_their_order(field: str) -> None:
    """PEFT takes the first that matches; what identity knows sorted must not depend on which that is."""
    from peft.utils.other import get_pattern_key

    names = [f"base_model.model.{path}.lora_{side}.weight" for path in PATHS for side in "AB"]
    for patterns in (
        {"q_proj": 8, "layers.0.q_proj": 16},
        {"layers.0.q_proj": 16, "q_proj": 8},
        {"^q_proj": 4, "q_proj": 2},
    ):
        given = AdapterConfig.parse({**LORA, field: patterns})
        settled = given.settled(lambda: names)
        read = AdapterConfig.parse(settled.to_json())
        for path in PATHS:
            found = get_pattern_key(list(read.raw[field]), path)
            wanted = patterns.get(get_pattern_key(list(patterns), path))
            assert (read.raw[field].get(found), settled.scaling_for(path)) == (wanted, given.scaling_for(path))
        assert settled.settled(lambda: names) is settled
    for patterns in ({}, {"q_proj": 8}, {"q_proj": 8, "k_proj": 4}, {"q_proj": 8, "layers.0.q_proj": 8}):
        given = AdapterConfig.parse({**LORA, field: patterns})
        assert given.settled(lambda: names) is given
    fused = {**LORA, "target_parameters": ["experts.up"], field: {"q_proj": 8, "layers.0.q_proj": 16}}
    with pytest.raises(ConfigError, match="disagree"):
        AdapterConfig.parse(fused).settled(lambda: names)
