"""LoRA files of llama.cpp: written as its converter writes them, read back as the adapter that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multilora_store.errors import DamagedError, UnsupportedError, UsageError
from multilora_store.integrations.inspection import inspect_checkpoint
from multilora_store.storage.dialects import read_gguf

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, WIDTH, HEAD = 4, 2, 32, 8
ROWS = {"q_proj": WIDTH, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD, "o_proj": WIDTH, "up_proj": 48}
PATHS = [
    *(
        f"model.layers.{block}.self_attn.{leaf}"
        for block in (0, 1)
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    "model.layers.1.mlp.up_proj",
    "lm_head",
]


def made(paths: list[str] = PATHS, rank: int = 2) -> dict[str, torch.Tensor]:
    """Factors under PEFT's names, exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for path in paths:
        rows = ROWS.get(path.rpartition(".")[2], 64)
        for side, shape in (("A", (rank, WIDTH)), ("B", (rows, rank))):
            value = torch.randn(shape, generator=generator).bfloat16().float()
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = value
    return tensors


def permute(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py, word for word."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def convert(
    file: Path, tensors: dict[str, torch.Tensor], arch: str = "llama", kind: str = "F32", alpha: float | None = 3.0,
    **fields: str,
) -> Path:  # fmt: skip
    """What convert_lora_to_gguf.py writes of them."""
    names = gguf.get_tensor_name_map(next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), 2)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_type(fields.get("type", gguf.GGUFType.ADAPTER))
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    quantised = gguf.GGMLQuantizationType[kind]
    for key, tensor in tensors.items():
        path, _, side = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        data, leaf = tensor.numpy(), path.rpartition(".")[2]
        if arch == "llama" and side == "B" and leaf in ("q_proj", "k_proj"):
            data = permute(data, HEADS if leaf == "q_proj" else KV_HEADS)
        name = f"{names.get_name(path) or path}.weight.lora_{side.lower()}"
        if kind in ("F32", "F16"):
            writer.add_tensor(name, data.astype(np.float32 if kind == "F32" else np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_a_converted_adapter_comes_back_exactly(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    tensors = made()
    file = convert(tmp_path / "a.gguf", tensors, kind=kind)
    found = read_gguf(f"gguf://{file}#heads={HEADS}&base=org/llama")
    assert (found.config.r, found.config.raw["lora_alpha"], found.config.base_model) == (2, 3.0, "org/llama")
    assert set(found.config.target_modules or ()) == set(PATHS)
    assert set(found.tensors) == set(tensors)
    for key, tensor in tensors.items():
        assert found.tensors[key].dtype is dtype
        assert torch.equal(found.tensors[key].float(), tensor.to(dtype).float()), key


def test_quantised_factors_are_read_as_what_llama_cpp_computes_with(tmp_path: Path) -> None:
    tensors = {key: value for key, value in made(rank=32).items() if "v_proj" in key or "o_proj" in key}
    found = read_gguf(str(convert(tmp_path / "a.gguf", tensors, kind="Q8_0")))
    for key, tensor in tensors.items():
        assert found.tensors[key].dtype is torch.float32
        error = (found.tensors[key] - tensor).norm() / tensor.norm()
        assert 0 < error < 0.01


def test_rows_are_ordered_as_transformers_orders_them(tmp_path: Path) -> None:
    """transformers reads GGUF bases by the same law; here it is the reference."""
    transformers = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    tensors = made(["model.layers.0.self_attn.q_proj"])
    found = read_gguf(str(convert(tmp_path / "a.gguf", tensors)), heads=HEADS)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    raw = gguf.GGUFReader(tmp_path / "a.gguf").tensors[1].data
    wanted = transformers.LlamaTensorProcessor()._reverse_permute_weights(np.array(raw), HEADS, HEADS)
    assert np.array_equal(found.tensors[key].numpy(), wanted)
    assert not np.array_equal(raw, wanted)


def test_without_heads_llama_is_refused_and_qwen_is_not(tmp_path: Path) -> None:
    tensors = made([path for path in PATHS if path != "lm_head"])
    file = convert(tmp_path / "a.gguf", tensors)
    with pytest.raises(UsageError, match="without the number of attention heads"):
        read_gguf(str(file))
    with pytest.raises(UsageError, match="are not those of 5 heads"):
        read_gguf(str(file), heads=5)
    alone = convert(tmp_path / "k.gguf", made(["model.layers.0.self_attn.k_proj"]))
    with pytest.raises(UsageError, match="are not those of None heads"):
        read_gguf(str(alone), heads=HEADS)
    assert len(read_gguf(str(alone), heads=HEADS, kv_heads=KV_HEADS).tensors) == 2
    found = read_gguf(str(convert(tmp_path / "q.gguf", tensors, arch="qwen2")))
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in tensors.items())


def test_what_has_no_map_is_refused_by_name(tmp_path: Path) -> None:
    odd = {f"base_model.model.model.embed_tokens.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    with pytest.raises(UnsupportedError, match=r"'token_embd.weight.lora_a' belongs to no linear layer"):
        read_gguf(str(convert(tmp_path / "e.gguf", odd)))
    with pytest.raises(UnsupportedError, match="architecture 'bert'"):
        read_gguf(str(convert(tmp_path / "b.gguf", made(["lm_head"]), arch="bert")))
    with pytest.raises(UsageError, match="holds no LoRA adapter but model"):
        read_gguf(str(convert(tmp_path / "m.gguf", made(["lm_head"]), type="model")))
    with pytest.raises(DamagedError, match="tells no alpha"):
        read_gguf(str(convert(tmp_path / "n.gguf", made(["lm_head"]), alpha=None)))
    half = dict(list(made(["lm_head"]).items())[:1])
    with pytest.raises(DamagedError, match="only one factor"):
        read_gguf(str(convert(tmp_path / "h.gguf", half)))
    whole = convert(tmp_path / "t.gguf", made(["lm_head"]))
    data = whole.read_bytes()
    for cut in (0, 4, 20, len(data) // 2, len(data) - 1):
        whole.write_bytes(data[:cut])
        with pytest.raises(DamagedError, match="no whole GGUF file"):
            read_gguf(str(whole))


def test_the_doctor_looks_into_it(tmp_path: Path) -> None:
    tensors = made()
    found = inspect_checkpoint(convert(tmp_path / "a.gguf", tensors))
    assert (found.recognised.kind, [one.name for one in found.adapters], found.findings) == ("gguf", ["a"], ())
    assert found.adapters[0].tensors == len(tensors)
    tensors["base_model.model.lm_head.lora_B.weight"][0, 0] = float("nan")
    spoilt = inspect_checkpoint(convert(tmp_path / "a.gguf", tensors)).findings
    assert ["NaN" in one.what or "NaN" in one.evidence for one in spoilt] == [True], spoilt
    model = inspect_checkpoint(convert(tmp_path / "a.gguf", tensors, type="model"))
    assert "holds no LoRA adapter" in model.findings[0].what
