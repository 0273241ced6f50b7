"""Base providers: the demo, a local Hugging Face folder, an importable callable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multilora_store.assembly import assemble, base_fingerprint, build_base, demo_adapters
from multilora_store.assembly.bridge import adapter_parameters, set_active
from multilora_store.errors import BaseModelError, PluginError, UsageError
from multilora_store.storage import Store
from tests.assembly.conftest import Toy, seeded


def test_the_demo_base_is_the_same_everywhere() -> None:
    torch.manual_seed(1)
    one = build_base("demo")
    torch.manual_seed(2)
    assert base_fingerprint(build_base("demo")) == base_fingerprint(one)
    assert base_fingerprint(build_base("demo", seed=1)) != base_fingerprint(one)
    names = {path.rpartition(".")[2] for path, _ in one.named_modules()}
    assert names >= set("embed_tokens q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head".split())
    assert one(torch.arange(6)[None]).shape == (1, 6, 256)
    assert all(parameter.is_meta for parameter in build_base("demo", device="meta").parameters())


def test_each_demo_adapter_has_an_effect_of_its_own(store: Store) -> None:
    for name, (config, tensors) in demo_adapters().items():
        store.put(name, tensors, config)
        again = demo_adapters()[name][1]
        assert all(torch.equal(again[key], tensors[key]) for key in tensors)
    model = assemble(build_base("demo"), {"a": {}, "b": {}, "c": {}}, store=store)
    assert {name: len(adapter_parameters(model, name)) for name in "abc"} == {"a": 16, "b": 32, "c": 16}
    outputs = []
    for weights in ({}, {"a": 1.0}, {"b": 1.0}, {"c": 1.0}, {"a": 0.5, "c": 0.5}):
        set_active(model, weights)
        outputs.append(model(torch.arange(6)[None]))
    for index, output in enumerate(outputs):
        assert all((output - other).abs().max() > 1e-3 for other in outputs[index + 1 :])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny Llama as a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    seeded(lambda: LlamaForCausalLM(config)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_hugging_face_folder(llama: Path) -> None:
    model = build_base("hf", path=str(llama))
    assert not model.training
    empty = build_base("hf", path=str(llama), device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert base_fingerprint(model).startswith(base_fingerprint(empty))
    for device in ("cpu", "meta"):
        cast = build_base("hf", path=str(llama), dtype="bfloat16", device=device)
        assert {parameter.dtype for parameter in cast.parameters()} == {torch.bfloat16}


def test_a_folder_that_is_no_model(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(BaseModelError, match="there is no folder"):
        build_base("hf", path=str(tmp_path / "absent"))
    with pytest.raises(BaseModelError, match="cannot be opened as a Hugging Face model"):
        build_base("hf", path=str(tmp_path))
    with pytest.raises(BaseModelError, match="unknown dtype 'floaty'"):
        build_base("hf", path=str(llama), dtype="floaty")


def test_code_in_a_folder_does_not_run(llama: Path, tmp_path: Path) -> None:
    """Promise 9: no remote code unless asked for."""
    import json

    config = json.loads((llama / "config.json").read_text())
    config.update(model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (llama / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (llama / "own.py").write_text(f"open({str(marker)!r}, 'w')\nC = M = object\n")
    with pytest.raises(BaseModelError):
        build_base("hf", path=str(llama))
    assert not marker.exists()


def test_a_callable() -> None:
    assert isinstance(build_base("python", target="torch.nn:Linear", in_features=2, out_features=3), nn.Linear)


def test_a_callable_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A console script does not see the working folder: the error says so, and a file can be named."""
    (tmp_path / "mine_alone.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    with pytest.raises(BaseModelError) as caught:
        build_base("python", target="mine_alone:build")
    assert caught.value.remedy.startswith("name the file, ./mine_alone.py:build")
    assert isinstance(build_base("python", target="./mine_alone.py:build"), nn.Linear)
    with pytest.raises(BaseModelError, match="not a Python file that exists"):
        build_base("python", target="./nowhere.py:build")


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("torch.nn.Linear", UsageError, "not spelled package.module:callable"),
        ("torch.absent:x", BaseModelError, "ModuleNotFoundError"),
        ("torch.nn:Absent", BaseModelError, "AttributeError"),
        ("torch.nn:Linear", BaseModelError, "TypeError"),
        ("builtins:dict", BaseModelError, "returned a dict"),
    ],
)
def test_a_callable_that_cannot_be_used(target: str, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        build_base("python", target=target)


def test_an_unknown_provider() -> None:
    with pytest.raises(PluginError, match="unknown base_provider 'dem'"):
        build_base("dem")


def test_weights_of_the_base_that_peft_saves_along(toy: Toy, store: Store) -> None:
    """Case 110: PEFT's file may hold the embedding of the base; left out if it is the base's own, else an error."""
    from multilora_store.assembly.bridge import record
    from multilora_store.errors import CoverageError
    from tests.assembly.conftest import made_by_peft

    config, tensors = made_by_peft(toy, {"r": 2, "target_modules": ["embed", "q_proj"]}, 1)
    key = "base_model.model.embed.base_layer.weight"
    store.put("same", {**tensors, key: toy.embed.weight.detach().clone()}, config)
    store.put("other", {**tensors, key: toy.embed.weight.detach() + 1}, config)
    model = assemble(toy, {"same": {}}, store=store)
    assert any("the base's own" in note for note in record(model).notes)
    with pytest.raises(CoverageError, match="1 without a place"):
        assemble(model, {"other": {}}, store=store)
