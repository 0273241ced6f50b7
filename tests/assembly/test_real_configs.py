"""Configurations as met in public repositories, and rare ones: each finds the right targets or is refused in words."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftConfig, get_peft_model
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.adapter.fields import LORA_FIELDS
from multilora_store.assembly import assemble
from multilora_store.assembly.bridge import adapter_parameters
from multilora_store.errors import ConfigError, MultiLoRAError, UnsupportedError
from tests.assembly.conftest import Experts, seeded

LINEARS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj query_key_value fc1 fc2 out_proj".split()
REFUSED = {
    "p23_lerobot_not_peft": "LeRobot",
    "p24_mlx_lm": "mlx-lm",
    "r07_bias_lora_only": "bias = 'lora_only'",
    "r08_bias_all": "bias = 'all'",
    "r13_corda": "changes the base's weights",
    "r15_megatron": "megatron_config",
    "r17_layer_replication": "layer_replication",
    "r18_pissa": "changes the base's weights",
    "r21_ensure_weight_tying": "ensure_weight_tying",
    "x00_loftq": "changes the base's weights",
    "x02_unknown_peft_type": "unknown peft_type",
    "x03_lower_peft_type": "unknown peft_type",
    "x04_r_string": "a rank is a whole number",
    "x05_r_zero": "a rank is a whole number",
    "x06_only_peft_type": "no targets",
    "x08_trailing_comma": "line",
    "x09_duplicate_key": "twice",
    "x10_alpha_float_nan": "NaN",
    "x11_target_null_regex_layers": "layers_to_transform",
    "x12_array_not_object": "an object was expected",
    "x13_empty_file": "empty",
}
NAMES = sorted(path.stem for path in Path(__file__).parents[3].glob("shared/data/configs/*.json")) or ["none"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({name: nn.Linear(4, 4) for name in LINEARS})
        self.mlp = nn.Module()
        self.mlp.experts = Experts()


class Zoo(nn.Module):
    """Thirty layers with every projection that the configurations name, fused experts, embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(49152, 4)
        self.model.layers = nn.ModuleList(Layer() for _ in range(30))
        self.language_model = nn.Module()
        self.language_model.q_proj = nn.Linear(4, 4)
        self.custom_text_proj = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 49152, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens


@pytest.fixture(scope="module")
def zoo() -> nn.Module:
    made: nn.Module = seeded(Zoo)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_peft_own_or_it_is_refused(name: str, shared: Path, zoo: nn.Module, tmp_path: Path) -> None:
    path = shared / "data" / "configs" / f"{name}.json"
    if name in REFUSED:
        with pytest.raises((ConfigError, UnsupportedError), match=REFUSED[name]) as caught:
            _assembled(path, zoo)
        assert isinstance(caught.value, MultiLoRAError)
        return
    ours = _assembled(path, zoo)
    theirs = _by_peft(path, tmp_path)
    assert {key: tuple(value.shape) for key, value in adapter_parameters(ours, "x").items()} == {
        key: tuple(value.shape) for key, value in adapter_parameters(theirs, "default").items()
    }


def _assembled(path: Path, zoo: nn.Module) -> nn.Module:
    """On meta, with tensors of the shapes that the model asks for: the configuration alone is under test."""
    config = AdapterConfig.parse(path.read_bytes(), where=path.name)
    # What is stored may have unknown fields, idle patterns, any initialisation; a fresh adapter is refused for these.
    known = LORA_FIELDS if config.peft_type == "LORA" else set(config.raw)
    fields = {key: value for key, value in config.raw.items() if value is not None and key in known}
    fields["init_lora_weights"] = config.raw.get("init_lora_weights", True) if "eva" not in path.stem else True
    with torch.device("meta"):
        base = Zoo()
    if isinstance(fields.get("target_modules"), list):
        named = {place for place, _ in base.named_modules()}
        fields["target_modules"] = [
            item for item in fields["target_modules"] if any(place.endswith(f".{item}") for place in named)
        ]
    return assemble(base, {"x": {"if_missing": "init", "config": fields}}, device="meta")


def _by_peft(path: Path, folder: Path) -> nn.Module:
    (folder / "adapter_config.json").write_text(path.read_text(encoding="utf-8-sig"), encoding="utf-8")
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = PeftConfig.from_pretrained(folder)
        config.task_type = None  # the zoo is no Hugging Face model
        return get_peft_model(Zoo(), config, low_cpu_mem_usage=True)
