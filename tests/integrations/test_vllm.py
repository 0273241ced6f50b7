"""Export to vLLM: as stored where it fits, refused with all reasons where not, made to fit when asked, errors told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import ExistsError, UnsupportedError, UsageError
from multilora_store.integrations.vllm import export_vllm, fit
from multilora_store.storage import PeftFolder, Store, open_store, read_peft_dir
from multilora_store.storage.codec import lazy_from_file
from multilora_store.storage.profiles import lint

LAYERS = tuple(f"model.layers.{i}.self_attn.{target}" for i in range(2) for target in ("q_proj", "v_proj"))


def tensors(rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for path in LAYERS:
        found[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, 24, generator=generator)
        found[f"base_model.model.{path}.lora_B.weight"] = torch.randn(32, rank, generator=generator)
    return found


def config(**fields: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **fields}


def deltas(found: AdapterConfig, held: Any) -> dict[str, torch.Tensor]:
    stem = "base_model.model."
    return {
        path: found.scaling_for(path) * held[f"{stem}{path}.lora_B.weight"] @ held[f"{stem}{path}.lora_A.weight"]
        for path in LAYERS
    }


def clean(folder: PeftFolder) -> bool:
    return not lint(folder.config, {name: tuple(tensor.shape) for name, tensor in folder.tensors.items()})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", cache=False)


def test_what_fits_is_written_as_it_is_stored(store: Store, tmp_path: Path) -> None:
    version = store.put("a", tensors(), config())
    folder = Path(export_vllm(store, "a", tmp_path / "out"))
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (folder / "adapter_model.safetensors").read_bytes() == (
        store.path(version) / "adapter_model.safetensors"
    ).read_bytes()


def test_what_does_not_fit_is_refused_with_every_reason(store: Store, tmp_path: Path) -> None:
    """Case 109."""
    store.put("a", tensors(), config(use_dora=True, bias="all"))
    for options in ({}, {"shrink": True, "split": True}):
        with pytest.raises(UnsupportedError) as caught:
            export_vllm(store, "a", tmp_path / "out", **options)
        assert {finding.code for finding in caught.value.facts["findings"]} == {"dora", "bias"}
    assert not (tmp_path / "out").exists()


def test_a_rank_above_the_servers_is_refused_or_shrunk_with_its_error(store: Store, tmp_path: Path) -> None:
    """Case 43."""
    store.put("a", tensors(20), config(r=20, lora_alpha=10))
    with pytest.raises(UnsupportedError, match="its rank is 20"):
        export_vllm(store, "a", tmp_path / "out", max_rank=16)
    folder = read_peft_dir(export_vllm(store, "a", tmp_path / "out", max_rank=16, shrink=True))
    assert folder.config.max_rank == 16
    assert clean(folder)
    report = json.loads((tmp_path / "out" / "multilora_vllm.json").read_text())
    stored = store.get("a")
    before, after = deltas(stored.config, stored.tensors), deltas(folder.config, folder.tensors)
    apart = sum(float((before[path] - after[path]).square().sum()) for path in LAYERS) ** 0.5
    whole = sum(float(before[path].square().sum()) for path in LAYERS) ** 0.5
    assert report["error"] == pytest.approx(apart / whole, rel=1e-4)
    assert report["error"] > 0.01
    assert (report["max_lora_rank"], report["rank"], report["split"]) == (16, 16, [])
    assert report["worst"]["module"] in LAYERS


def test_scales_that_a_server_may_not_read_go_into_the_factors(store: Store, tmp_path: Path) -> None:
    store.put("a", tensors(), config(alpha_pattern={"v_proj": 80}))
    plain = read_peft_dir(export_vllm(store, "a", tmp_path / "plain"))
    assert plain.config.raw["alpha_pattern"] == {"v_proj": 80}
    folded = read_peft_dir(export_vllm(store, "a", tmp_path / "folded", shrink=True))
    assert clean(folded)
    before, after = deltas(plain.config, plain.tensors), deltas(folded.config, folded.tensors)
    assert all(torch.allclose(before[path], after[path], rtol=1e-4, atol=1e-4) for path in LAYERS)


def test_full_modules_are_split_off_and_kept_beside(store: Store, tmp_path: Path) -> None:
    """Cases 44 and 110."""
    extra = {
        "base_model.model.lm_head.weight": torch.randn(9, 24),
        "base_model.model.model.embed_tokens.base_layer.weight": torch.randn(9, 24),
    }
    store.put("a", {**tensors(), **extra}, config(modules_to_save=["lm_head"]))
    with pytest.raises(UnsupportedError, match="lm_head"):
        export_vllm(store, "a", tmp_path / "out")
    folder = read_peft_dir(export_vllm(store, "a", tmp_path / "out", split=True))
    assert clean(folder)
    assert set(folder.tensors) == set(tensors())
    assert all(torch.equal(folder.tensors[name], tensor) for name, tensor in tensors().items())
    kept = lazy_from_file(tmp_path / "out" / "full_modules" / "tensors.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in extra.items())
    original = (tmp_path / "out" / "full_modules" / "original_adapter_config.json").read_bytes()
    assert AdapterConfig.parse(original).raw["modules_to_save"] == ["lm_head"]
    with pytest.raises(UsageError, match="no LoRA factors"):
        fit(AdapterConfig.parse(config(modules_to_save=["lm_head"])), extra, split=True)


def test_both_at_once_and_never_over_another_adapter(store: Store, tmp_path: Path) -> None:
    extra = {"base_model.model.lm_head.weight": torch.randn(9, 24)}
    store.put("a", {**tensors(20), **extra}, config(r=20, modules_to_save=["lm_head"]))
    store.put("b", tensors(), config())
    export_vllm(store, "b", tmp_path / "out")
    with pytest.raises(ExistsError):
        export_vllm(store, "a", tmp_path / "out", max_rank=8, shrink=True, split=True)
    folder = read_peft_dir(
        export_vllm(store, "a", tmp_path / "out", max_rank=8, shrink=True, split=True, overwrite=True)
    )
    assert clean(folder)
    assert folder.config.max_rank == 8
