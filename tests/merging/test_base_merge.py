"""Base and adapters as one folder: equal to PEFT's merge of the loaded model, or refused; the base is not touched."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from multilora_store.errors import BaseModelError, CoverageError, ExistsError, MergeError, UnsupportedError
from multilora_store.merging import MergeSource, export_merged

# PEFT reads deprecated names of transformers, and warns of tied layers, which is what these tests are about.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

TOKENS = torch.arange(1, 13).reshape(2, 6)


def llama(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def adapted(base: Path, *, seed: int = 1, **fields: Any) -> tuple[Any, MergeSource]:
    """The base with one random adapter in PEFT, and the adapter as its file would hold it."""
    torch.manual_seed(seed)
    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(base),
        LoraConfig(**({"r": 3, "lora_alpha": 5, "init_lora_weights": False} | fields)),
    )
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return model.eval(), MergeSource.in_memory(f"a{seed}", model.peft_config["default"].to_dict(), tensors)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_the_folder_equals_the_adapted_model(shard: str, tmp_path: Path) -> None:
    base = llama(tmp_path / "base", shard=shard)
    before = digests(base)
    model, source = adapted(base, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True)
    report = export_merged(base, [source], [1.0], tmp_path / "out")
    torch.testing.assert_close(logits(opened(tmp_path / "out")), logits(model), rtol=1e-5, atol=1e-5)
    assert digests(base) == before
    assert set(digests(tmp_path / "out")) == {*before, "multilora_merge.json"}
    assert "model.layers.0.mlp.down_proj.weight" in report.changed
    assert len(report.changed) == 6
    assert not report.untied
    record = json.loads((tmp_path / "out" / "multilora_merge.json").read_text())
    assert record["adapters"][0]["digest"] == source.digest


def test_several_adapters_are_summed_with_their_weights_and_rounded_once(tmp_path: Path) -> None:
    base = llama(tmp_path / "base", dtype=torch.bfloat16)
    sources = [adapted(base, seed=seed, target_modules=["q_proj", "k_proj"])[1] for seed in (1, 2)]
    export_merged(base, sources, [0.7, -0.2], tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert list(before) == list(after)
    for name in before:
        delta = torch.zeros(before[name].shape, dtype=torch.float64)
        path = name.removesuffix(".weight")
        for source, weight in zip(sources, [0.7, -0.2], strict=True):
            if path in source.layout.pairs:
                delta += source.layout.pairs[path].read(source.tensors).dense()[0] * weight
        expected = (before[name].double() + delta).to(torch.bfloat16)
        torch.testing.assert_close(after[name], expected, rtol=2**-8, atol=1e-6)
        assert after[name].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dora_takes_its_lengths(dtype: torch.dtype, tmp_path: Path) -> None:
    """`W' = m (W + BA) / |W + BA|`, linear layers by rows and embeddings by columns, as PEFT merges them."""
    base = llama(tmp_path / "base", dtype=dtype)
    model, source = adapted(base, target_modules=["q_proj", "down_proj", "embed_tokens"], use_dora=True)
    magnitudes = source.layout.magnitudes
    assert len(magnitudes) == 5
    random = torch.Generator().manual_seed(2)
    for name, value in model.named_parameters():
        if "lora_magnitude_vector" in name:
            value.data.mul_(1.0 + torch.rand(value.shape, generator=random))
    tensors = {k: v.clone() for k, v in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
    source = MergeSource.in_memory("d", source.config, tensors)
    export_merged(base, [source], [1.0], tmp_path / "out")
    if dtype is torch.float32:
        torch.testing.assert_close(logits(opened(tmp_path / "out")), logits(model), rtol=1e-5, atol=1e-5)
    merged = model.merge_and_unload().state_dict()
    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-4}
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert value.dtype == dtype
        torch.testing.assert_close(value, merged[name].to(dtype), **rounding)


def test_dora_is_merged_alone_and_whole(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    dora = adapted(base, target_modules=["q_proj"], use_dora=True)[1]
    plain = adapted(base, seed=2, target_modules=["q_proj"])[1]
    for sources, weights in (([dora, plain], [1.0, 1.0]), ([dora], [0.5])):
        with pytest.raises(UnsupportedError, match="alone and with weight 1"):
            export_merged(base, sources, weights, tmp_path / "out")
    lost = dora.layout.magnitudes["model.layers.1.self_attn.q_proj"]
    tensors = {name: value for name, value in dora.tensors.items() if name != lost}
    half = MergeSource.in_memory("half", dora.config, tensors)
    assert len(tensors) == len(dora.tensors) - 1
    with pytest.raises(MergeError, match="only one of magnitude and factors"):
        export_merged(base, [half], [1.0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


TIED = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("ends", TIED)
def test_tied_ends_are_written_apart_when_one_changes(ends: str, tmp_path: Path) -> None:
    """Case 34: the merged model equals the adapted one after a reload. Case 35: a head's delta leaves the embedding.

    Case 100: two trained copies of a tied pair are both kept.
    """
    base = llama(tmp_path / "base", tied=True)
    assert "lm_head.weight" not in load_file(base / "model.safetensors")
    model, source = adapted(base, **TIED[ends])
    trained = {name: tensor for name, tensor in source.tensors.items() if "lora" not in name}
    for seed, name in enumerate(sorted(trained)):  # what a training would have done to a saved module
        changed = trained[name] + torch.randn(trained[name].shape, generator=torch.Generator().manual_seed(seed))
        source = MergeSource.in_memory("a", source.config, {**source.tensors, name: changed})
        wrapper = model.base_model.model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".weight"))
        wrapper.modules_to_save["default"].weight.data = changed.clone()
    report = export_merged(base, [source], [1.0], tmp_path / "out")
    assert report.untied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    merged = opened(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)
    if ends == "head":
        original = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(merged.get_input_embeddings().weight, original)


def test_a_tied_base_stays_tied_when_neither_end_changes(tmp_path: Path) -> None:
    base = llama(tmp_path / "base", tied=True)
    _, source = adapted(base, target_modules=["q_proj"])
    report = export_merged(base, [source], [1.0], tmp_path / "out")
    assert not report.untied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    _, head = adapted(base, target_modules=["lm_head"])
    with pytest.raises(UnsupportedError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        export_merged(base, [head], [1.0], tmp_path / "other", tied="refuse")
    assert not (tmp_path / "other").exists()


def test_tied_shards_get_the_head_in_the_index(tmp_path: Path) -> None:
    base = llama(tmp_path / "base", tied=True, shard="4KB")
    model, source = adapted(base, target_modules=["lm_head"])
    export_merged(base, [source], [1.0], tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["lm_head.weight"] == index["weight_map"]["model.embed_tokens.weight"]
    torch.testing.assert_close(logits(opened(tmp_path / "out")), logits(model), rtol=1e-5, atol=1e-5)


def test_a_lora_bias_is_added_to_the_bases_bias(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    model, source = adapted(base, target_modules=["q_proj"], lora_bias=True)
    biases = {n: torch.randn(t.shape) for n, t in source.tensors.items() if n.endswith("lora_B.bias")}
    source = MergeSource.in_memory("a", source.config, {**source.tensors, **biases})
    for name, value in biases.items():
        module = model.get_submodule(name.removesuffix(".bias"))
        module["default"].bias.data = value.clone()
    export_merged(base, [source], [1.0], tmp_path / "out")
    torch.testing.assert_close(logits(opened(tmp_path / "out")), logits(model), rtol=1e-5, atol=1e-5)


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    """Case 65: never into quantised weights, whether the config or the weights say so."""
    base = llama(tmp_path / "base")
    _, source = adapted(base, target_modules=["q_proj"])
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedError, match=r"quantised \(gptq\)"):
        export_merged(base, [source], [1.0], tmp_path / "out")
    (base / "config.json").write_text(json.dumps(config))
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match="stored as I8: merging into quantised weights is refused"):
        export_merged(base, [source], [1.0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"init_lora_weights": "pissa"}, "mutated_base"),
        ({"init_lora_weights": "olora"}, "mutated_base"),
        ({"peft_type": "LOHA"}, "other_method"),
    ],
)
def test_adapters_that_are_no_delta_to_this_base_are_refused(fields: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """Case 62: PiSSA, OLoRA and CorDA changed the base that they were trained on."""
    base = llama(tmp_path / "base")
    _, source = adapted(base, target_modules=["q_proj"])
    odd = MergeSource.in_memory("odd", {**source.config.raw, **fields}, source.tensors)
    with pytest.raises(UnsupportedError, match=f"'odd' cannot be merged from files: it is of the kind {kind}"):
        export_merged(base, [odd], [1.0], tmp_path / "out")


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    _, source = adapted(base, target_modules=["q_proj"])
    renamed = {n.replace("self_attn", "attention"): t for n, t in source.tensors.items()}
    with pytest.raises(CoverageError, match=r"changes model\.layers\.0\.attention\.q_proj\.weight") as caught:
        export_merged(base, [MergeSource.in_memory("b", source.config, renamed)], [1.0], tmp_path / "out")
    assert "did you mean model.layers.0.self_attn.q_proj.weight" in str(caught.value)
    wider = {n: torch.cat([t, t], dim=1) if "lora_A" in n else t for n, t in source.tensors.items()}
    with pytest.raises(CoverageError, match=r"has the shape \(16, 32\), the base's .* is \(16, 16\)"):
        export_merged(base, [MergeSource.in_memory("b", source.config, wider)], [1.0], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_targets_that_would_touch_something_are_refused(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    _, source = adapted(base, target_modules=["q_proj"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    for target, message in (("full", "not empty"), ("base", "not empty"), ("base/merged", "lies in the base's folder")):
        with pytest.raises(ExistsError, match=message):
            export_merged(base, [source], [1.0], tmp_path / target)
    with pytest.raises(MergeError, match="2 weights for 1 adapters"):
        export_merged(base, [source], [1.0, 2.0], tmp_path / "out")
    with pytest.raises(BaseModelError, match=r"has no config\.json"):
        export_merged(tmp_path / "full", [source], [1.0], tmp_path / "out")


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    _, source = adapted(base, target_modules=["q_proj"])
    poisoned = {n: t * float("nan") if "layers.1" in n else t for n, t in source.tensors.items()}
    with pytest.raises(MergeError, match="not finite"):
        export_merged(base, [MergeSource.in_memory("b", source.config, poisoned)], [1.0], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_modules_trained_in_full_by_several_need_a_rule(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    sources = [adapted(base, seed=seed, target_modules=["q_proj"], modules_to_save=["lm_head"])[1] for seed in (1, 2)]
    with pytest.raises(MergeError, match=r"lm_head\.weight \(in a1, a2\)"):
        export_merged(base, sources, [0.5, 0.5], tmp_path / "out")
    export_merged(base, sources, [0.5, 0.5], tmp_path / "out", modules_to_save="a2")


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_merged_in_the_orientation_of_their_shapes(transposed: bool, tmp_path: Path) -> None:
    """Grouped experts, (experts, out, in) or (experts, in, out); which one, the shapes say, or it is refused."""
    base = llama(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    up, down = torch.randn(3, 10, 16), torch.randn(3, 16, 5)
    fused = {"mlp.experts.up": up.mT.contiguous() if transposed else up, "mlp.experts.down": down}
    save_file(tensors | fused, base / "model.safetensors", {"format": "pt"})
    factors = {
        "base_model.model.mlp.experts.lora_A.weight": torch.randn(6, 16),
        "base_model.model.mlp.experts.lora_B.weight": torch.randn(10, 6),
    }
    config = {"peft_type": "LORA", "r": 2, "target_modules": [], "target_parameters": ["experts.up", "experts.down"]}
    source = MergeSource.in_memory("e", config, factors)
    export_merged(base, [source], [1.0], tmp_path / "out")
    delta = source.layout.pairs["mlp.experts"].read(factors).dense().float()
    expected = up + delta
    merged = load_file(tmp_path / "out" / "model.safetensors")["mlp.experts.up"]
    torch.testing.assert_close(merged.mT if transposed else merged, expected)
    square = fused | {"mlp.experts.up": torch.randn(3, 16, 16)}
    save_file(tensors | square, base / "model.safetensors", {"format": "pt"})
    factors["base_model.model.mlp.experts.lora_B.weight"] = torch.randn(16, 6)
    with pytest.raises(UnsupportedError, match="exactly one is needed"):
        export_merged(base, [MergeSource.in_memory("e", config, factors)], [1.0], tmp_path / "other")
