"""Exporters: what is written means the same to the tool that it is written for, and overwrites nobody's files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from multilora_store.errors import ExistsError, UnsupportedError
from multilora_store.plugins import default_registry
from multilora_store.storage import Store, open_store, read_peft_dir
from multilora_store.storage.dialects import read_kohya
from multilora_store.storage.exporters import export_kohya, export_peft, write_files

ATTENTION = "down_blocks.0.attentions.1.transformer_blocks.0.attn1"
PATHS = (f"{ATTENTION}.to_q", f"{ATTENTION}.to_out.0", "up_blocks.1.resnets.2.conv1")


def tensors(paths: tuple[str, ...] = PATHS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for path in paths:
        kernel = (3, 3) if "conv" in path else ()
        ones = (1, 1) if kernel else ()
        rank = 4 if path.endswith("to_q") else 2
        found[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, 5, *kernel, generator=generator)
        found[f"base_model.model.{path}.lora_B.weight"] = torch.randn(6, rank, *ones, generator=generator)
    return found


def config(**fields: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "rank_pattern": {"to_q": 4},
        "alpha_pattern": {"conv1": 7},
        "target_modules": list(PATHS),
        **fields,
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.mark.parametrize("rslora", [False, True])
def test_kohya_and_back_gives_the_same_factors_and_scales(store: Store, tmp_path: Path, rslora: bool) -> None:
    store.put("style", tensors(), config(use_rslora=rslora))
    path = export_kohya(store, "style", tmp_path / "out")
    assert path == tmp_path / "out" / "style.safetensors"
    back, stored = read_kohya(str(path)), store.get("style")
    assert set(back.tensors) == set(stored.tensors)
    assert all(torch.equal(back.tensors[name], stored.tensors[name]) for name in stored.tensors)
    for module in PATHS:
        assert back.config.scaling_for(module) == pytest.approx(stored.config.scaling_for(module), rel=1e-6)
        assert back.config.rank_for(module) == stored.config.rank_for(module)
    alpha = load_file(str(path))[f"lora_unet_{PATHS[2].replace('.', '_')}.alpha"]
    assert float(alpha) == pytest.approx(7 * (2**0.5 if rslora else 1))


def test_kohya_files_go_to_any_url_under_the_name_asked_for(store: Store, memory_url: str) -> None:
    store.put("team/style", tensors(), config())
    assert export_kohya(store, "team/style", memory_url) == f"{memory_url}/team--style.safetensors"
    target = f"{memory_url}/x/mine.safetensors"
    assert export_kohya(store, "team/style", target, component="te2") == target
    assert set(read_kohya(target, component="te2").tensors) == set(tensors())


@pytest.mark.parametrize(
    ("extra", "fields", "word"),
    [
        ({"base_model.model.x.lora_magnitude_vector": torch.ones(6)}, {"use_dora": True}, "use_dora"),
        ({"base_model.model.x.weight": torch.ones(6, 6)}, {"modules_to_save": ["x"]}, "modules_to_save"),
        ({"base_model.model.x.lora_embedding_A": torch.ones(2, 9)}, {}, "lora_embedding_A"),
    ],
)
def test_what_kohya_cannot_hold_is_refused(
    store: Store, tmp_path: Path, extra: dict[str, torch.Tensor], fields: dict[str, Any], word: str
) -> None:
    store.put("style", {**tensors(), **extra}, config(**fields))
    with pytest.raises(UnsupportedError, match=word):
        export_kohya(store, "style", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_modules_that_kohya_cannot_tell_apart_are_refused(store: Store, tmp_path: Path) -> None:
    paths = ("a.b_c", "a_b.c")
    store.put("style", tensors(paths), config(target_modules=list(paths), rank_pattern={}))
    with pytest.raises(UnsupportedError, match="are both 'a_b_c'"):
        export_kohya(store, "style", tmp_path / "out")


def test_words_that_the_way_back_does_not_know_are_told(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("style", tensors(("my.own",)), config(target_modules=["my.own"], rank_pattern={}))
    with caplog.at_level(logging.WARNING):
        path = export_kohya(store, "style", tmp_path / "out")
    assert "my.own" in caplog.text
    assert read_kohya(str(path), modules=["my.own"]).config.rank_for("my.own") == 2


def test_peft_folders_keep_the_stored_bytes(store: Store, tmp_path: Path) -> None:
    version = store.put("style", tensors(), config())
    folder = export_peft(store, "style", tmp_path / "out")
    assert (
        read_peft_dir(folder).files["adapter_model.safetensors"]
        == (store.path(version) / "adapter_model.safetensors").read_bytes()
    )
    export_peft(store, "style", tmp_path / "out")
    store.put("other", {name: tensor + 1 for name, tensor in tensors().items()}, config())
    with pytest.raises(ExistsError):
        export_peft(store, "other", tmp_path / "out")
    export_peft(store, "other", tmp_path / "out", overwrite=True)
    assert set(read_peft_dir(folder).tensors) == set(tensors())


def test_nothing_is_written_over_another_file(store: Store, tmp_path: Path) -> None:
    store.put("style", tensors(), config())
    (tmp_path / "style.safetensors").write_bytes(b"mine")
    with pytest.raises(ExistsError, match="already holds another"):
        export_kohya(store, "style", tmp_path)
    assert (tmp_path / "style.safetensors").read_bytes() == b"mine"
    export_kohya(store, "style", tmp_path, overwrite=True)
    assert read_kohya(str(tmp_path / "style.safetensors"))
    with pytest.raises(ExistsError):
        write_files(tmp_path, {"new": b"x", "style.safetensors": [b"a", b"b"]})
    assert not (tmp_path / "new").exists()


def test_every_exporter_is_a_plugin_with_typed_parameters() -> None:
    registry = default_registry()
    assert {"kohya", "peft", "vllm"} <= set(registry.names("exporter"))
    assert [item.name for item in registry.get("exporter", "vllm").parameters] == [
        "max_rank",
        "shrink",
        "split",
        "overwrite",
    ]
