"""Dialects: an adapter of another tool means the same delta in PEFT's form, or is refused by name."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from multilora_store.errors import (
    ConfigError,
    DamagedError,
    MultiLoRAError,
    StorageUnreachableError,
    UnsupportedError,
    UsageError,
)
from multilora_store.plugins import default_registry
from multilora_store.storage import PeftFolder, open_store
from multilora_store.storage.dialects import (
    read_diffusers,
    read_hf,
    read_kohya,
    read_legacy,
    read_mlx,
    read_peft,
)
from multilora_store.storage.dialects.kohya_names import _WORDS, flatten, from_sgm, restore
from multilora_store.testing import tiny_decoder

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."
TO_Q = "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q"
TO_OUT = "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0"
CONV = "up_blocks.1.resnets.2.conv1"


def factors(seed: int, rank: int = 2, rows: int = 6, columns: int = 5, kernel: int = 0) -> tuple[torch.Tensor, ...]:
    """B and A of one module, of a convolution where `kernel` is given."""
    generator = torch.Generator().manual_seed(seed)
    sides = (kernel, kernel) if kernel else ()
    ones = (1, 1) if kernel else ()
    return torch.randn(rows, rank, *ones, generator=generator), torch.randn(rank, columns, *sides, generator=generator)


def delta(folder: PeftFolder, path: str) -> torch.Tensor:
    """The weight delta that PEFT makes of the module, flattened to a matrix."""
    up = folder.tensors[f"{PREFIX}{path}.lora_B.weight"].flatten(1)
    down = folder.tensors[f"{PREFIX}{path}.lora_A.weight"].flatten(1)
    return folder.config.scaling_for(path) * up @ down


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected.flatten(1), rtol=1e-5, atol=1e-6)


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, str(folder / name), metadata=metadata)
    return folder / name


def kohya(component: str, modules: Mapping[str, tuple[Any, float | None]]) -> Tensors:
    found: Tensors = {}
    for path, ((up, down), alpha) in modules.items():
        stem = f"lora_{component}_{flatten(path)}"
        found |= {f"{stem}.lora_up.weight": up, f"{stem}.lora_down.weight": down}
        if alpha is not None:
            found[f"{stem}.alpha"] = torch.tensor(alpha)
    return found


# Kohya.


def test_kohya_deltas_are_equal_whatever_the_ranks_and_alphas(tmp_path: Path) -> None:
    modules = {TO_Q: (factors(1), 1.0), TO_OUT: (factors(2, rank=4), 8.0), CONV: (factors(3, kernel=3), None)}
    path = write(tmp_path, "style.safetensors", kohya("unet", modules))
    found = read_kohya(str(path), base="stable")
    assert sorted(found.config.target_modules or ()) == sorted(modules)
    assert found.config.base_model == "stable"
    for name, ((up, down), alpha) in modules.items():
        rank = down.shape[0]
        assert close(delta(found, name), (alpha or rank) / rank * up.flatten(1) @ down.flatten(1)), name
    assert found.tensors[f"{PREFIX}{CONV}.lora_A.weight"].shape == (2, 5, 3, 3)


def test_kohya_of_several_models_asks_which(tmp_path: Path) -> None:
    text = "text_model.encoder.layers.3.self_attn.q_proj"
    both = {**kohya("unet", {TO_Q: (factors(1), 1.0)}), **kohya("te1", {text: (factors(2), 2.0)})}
    path = write(tmp_path, "style.safetensors", both)
    with pytest.raises(ConfigError, match="adapts several models") as caught:
        read_kohya(str(path))
    assert caught.value.facts["components"] == ("unet", "te1")
    with pytest.raises(ConfigError, match="has no component 'te2'"):
        read_kohya(str(path), component="te2")
    assert list(read_kohya(str(path), component="te1").config.target_modules or ()) == [text]
    assert list(read_kohya(f"kohya://{path}#component=unet").config.target_modules or ()) == [TO_Q]


def test_kohya_names_of_the_original_unet_become_those_of_diffusers(tmp_path: Path) -> None:
    original = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
    path = write(tmp_path, "xl.safetensors", kohya("unet", {original: (factors(1), 1.0)}))
    (found,) = read_kohya(str(path)).config.target_modules or ()
    assert found == "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.mark.parametrize(
    ("original", "path"),
    [
        ("input_blocks.0.0", "conv_in"),
        ("input_blocks.3.0.op", "down_blocks.0.downsamplers.0.conv"),
        ("input_blocks.1.0.in_layers.2", "down_blocks.0.resnets.0.conv1"),
        ("input_blocks.8.1.proj_in", "down_blocks.2.attentions.1.proj_in"),
        ("middle_block.0.emb_layers.1", "mid_block.resnets.0.time_emb_proj"),
        ("middle_block.1.proj_out", "mid_block.attentions.0.proj_out"),
        ("middle_block.2.out_layers.3", "mid_block.resnets.1.conv2"),
        ("output_blocks.2.2.conv", "up_blocks.0.upsamplers.0.conv"),
        ("output_blocks.5.0.skip_connection", "up_blocks.1.resnets.2.conv_shortcut"),
        ("output_blocks.8.1.proj_in", "up_blocks.2.attentions.2.proj_in"),
        ("time_embed.2", "time_embedding.linear_2"),
        (TO_Q, TO_Q),
    ],
)
def test_blocks_of_the_original_unet(original: str, path: str) -> None:
    assert from_sgm(original) == path
    assert restore(flatten(original)) == original


@pytest.mark.parametrize("path", ["middle_block.7.proj_in", "input_blocks.1.5.proj_in", "input_blocks.1"])
def test_blocks_that_no_unet_has_are_refused(path: str) -> None:
    with pytest.raises(UnsupportedError, match="no module of the original"):
        from_sgm(path)


@pytest.mark.parametrize(
    "path",
    [
        TO_Q,
        TO_OUT,
        CONV,
        "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj",
        "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2",
        "text_model.encoder.layers.11.mlp.fc1",
        "model.layers.31.mlp.gate_proj",
        "double_blocks.18.img_attn.qkv",
        "single_blocks.0.linear1",
        "transformer_blocks.3.norm1.linear",
        "encoder.block.0.layer.0.SelfAttention.q",
        "encoder.block.0.layer.1.DenseReluDense.wi_0",
    ],
)
def test_paths_of_common_models_come_back(path: str) -> None:
    assert restore(flatten(path)) == path


def test_names_that_cannot_be_told_are_refused_and_a_list_of_modules_helps(tmp_path: Path) -> None:
    path = write(tmp_path, "x.safetensors", kohya("unet", {"my_own.block_7": (factors(1), 1.0)}))
    with pytest.raises(UnsupportedError, match="cannot be told"):
        read_kohya(str(path))
    found = read_kohya(str(path), modules=["other", "my_own.block_7"])
    assert list(found.config.target_modules or ()) == ["my_own.block_7"]
    with pytest.raises(UnsupportedError, match=r"my\.own_block_7 or my_own\.block_7"):
        read_kohya(str(path), modules=["my.own_block_7", "my_own.block_7"])


@pytest.mark.parametrize(
    ("suffix", "error", "words"),
    [
        ("hada_w1_a", UnsupportedError, "LoHa"),
        ("lokr_w1", UnsupportedError, "LoKr"),
        ("dora_scale", UnsupportedError, "DoRA"),
        ("lora_mid.weight", UnsupportedError, "LoCon"),
        ("surprise", DamagedError, "has no place"),
    ],
)
def test_kohya_of_other_methods_is_refused_by_name(
    tmp_path: Path, suffix: str, error: type[MultiLoRAError], words: str
) -> None:
    tensors = kohya("unet", {TO_Q: (factors(1), 1.0)})
    tensors[f"lora_unet_{flatten(TO_Q)}.{suffix}"] = torch.ones(2, 2)
    with pytest.raises(error, match=words):
        read_kohya(str(write(tmp_path, "x.safetensors", tensors)))


@pytest.mark.parametrize("lost", ["lora_up.weight", "lora_down.weight"])
def test_half_a_pair_is_damage(tmp_path: Path, lost: str) -> None:
    tensors = kohya("unet", {TO_Q: (factors(1), 1.0)})
    del tensors[f"lora_unet_{flatten(TO_Q)}.{lost}"]
    with pytest.raises(DamagedError, match="only one factor"):
        read_kohya(str(write(tmp_path, "x.safetensors", tensors)))


def test_factors_and_alphas_that_do_not_belong_together_are_damage(tmp_path: Path) -> None:
    up, down = factors(1)
    stem = f"lora_unet_{flatten(TO_Q)}"
    with pytest.raises(DamagedError, match="share no rank"):
        read_kohya(str(write(tmp_path, "a.safetensors", kohya("unet", {TO_Q: ((up[:, :1], down), 1.0)}))))
    with pytest.raises(DamagedError, match="not one finite number"):
        read_kohya(str(write(tmp_path, "b.safetensors", kohya("unet", {TO_Q: ((up, down), math.nan)}))))
    with pytest.raises(DamagedError, match="an alpha but no factors"):
        read_kohya(str(write(tmp_path, "c.safetensors", {f"{stem}.alpha": torch.tensor(1.0)})))


# Diffusers.


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("lora.down.weight", "lora.up.weight"),
        ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
        ("lora_A.weight", "lora_B.weight"),
        ("lora_A.default.weight", "lora_B.default.weight"),
    ],
)
def test_diffusers_deltas_are_equal_in_every_spelling(tmp_path: Path, down: str, up: str) -> None:
    (b, a), (d, c) = factors(1), factors(2, rank=3)
    tensors = {f"unet.{TO_Q}.{down}": a, f"unet.{TO_Q}.{up}": b, f"unet.{TO_OUT}.{down}": c, f"unet.{TO_OUT}.{up}": d}
    write(tmp_path, "pytorch_lora_weights.safetensors", {**tensors, f"unet.{TO_Q}.alpha": torch.tensor(6.0)})
    found = read_diffusers(str(tmp_path))
    assert close(delta(found, TO_Q), 3.0 * b @ a)
    assert close(delta(found, TO_OUT), d @ c)


def test_diffusers_attention_processors_of_the_first_releases(tmp_path: Path) -> None:
    (b, a), (d, c) = factors(1), factors(2)
    holder = "mid_block.attentions.0.transformer_blocks.0.attn2"
    text = "text_model.encoder.layers.0.self_attn"
    tensors = {
        f"{holder}.processor.to_out_lora.down.weight": a,
        f"{holder}.processor.to_out_lora.up.weight": b,
        f"text_encoder.{text}.to_out_lora.down.weight": c,
        f"text_encoder.{text}.to_out_lora.up.weight": d,
    }
    path = write(tmp_path, "x.safetensors", tensors)
    assert close(delta(read_diffusers(str(path), component="unet"), TO_OUT), b @ a)
    assert close(delta(read_diffusers(f"diffusers://{path}#component=text_encoder"), f"{text}.out_proj"), d @ c)
    with pytest.raises(ConfigError, match="adapts several models"):
        read_diffusers(str(path))


def test_diffusers_alphas_of_the_header_count(tmp_path: Path) -> None:
    (b, a), (d, c) = factors(1), factors(2, rank=4)
    stored = {"unet.r": 2, "unet.lora_alpha": 4, "unet.alpha_pattern": {"attn2.to_out.0": 12}, "text_encoder.r": 9}
    tensors = {
        f"unet.{TO_Q}.lora_A.weight": a,
        f"unet.{TO_Q}.lora_B.weight": b,
        f"unet.{TO_OUT}.lora_A.weight": c,
        f"unet.{TO_OUT}.lora_B.weight": d,
    }
    for rslora, first, second in ((False, 2.0, 3.0), (True, 4 / math.sqrt(2), 6.0)):
        metadata = {"lora_adapter_metadata": json.dumps({**stored, "unet.use_rslora": rslora})}
        found = read_diffusers(str(write(tmp_path, f"{rslora}.safetensors", tensors, metadata)))
        assert close(delta(found, TO_Q), first * b @ a)
        assert close(delta(found, TO_OUT), second * d @ c)
    path = write(tmp_path, "broken.safetensors", tensors, {"lora_adapter_metadata": "{"})
    with pytest.raises(DamagedError, match="is not JSON"):
        read_diffusers(str(path))


def test_diffusers_dora_is_refused(tmp_path: Path) -> None:
    b, a = factors(1)
    stem = f"unet.{TO_Q}"
    tensors = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b, f"{stem}.lora_magnitude_vector": torch.ones(6)}
    with pytest.raises(UnsupportedError, match="DoRA"):
        read_diffusers(str(write(tmp_path, "x.safetensors", tensors)))


# Older PEFT.

PATH = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "b"}


def peft(folder: Path, names: Mapping[str, torch.Tensor], **fields: Any) -> Path:
    write(folder, "adapter_model.safetensors", names)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("beginning", "segment", "path"),
    [
        ("", "", PATH),
        ("base_model.model.", "", PATH),
        ("base_model.model.base_model.model.", "", PATH),
        ("base_model.model.", ".default", PATH),
        ("", ".team_a", PATH),
        ("thinker.base_model.model.", "", f"thinker.{PATH}"),
        ("base_model.model._orig_mod.", "", PATH),
    ],
)
def test_older_names_of_peft_become_canonical(tmp_path: Path, beginning: str, segment: str, path: str) -> None:
    """Case 103: a component before `base_model.model` belongs after it."""
    b, a = factors(1)
    names = {f"{beginning}{PATH}.lora_A{segment}.weight": a, f"{beginning}{PATH}.lora_B{segment}.weight": b}
    found = read_legacy(str(peft(tmp_path, names)))
    assert sorted(found.tensors) == [f"{PREFIX}{path}.lora_A.weight", f"{PREFIX}{path}.lora_B.weight"]
    assert close(delta(found, path), 4.0 * b @ a)
    assert found.files == {}


def test_other_roles_lose_the_adapters_segment_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    b, a = factors(1)
    names = {
        f"{PATH}.lora_A.default.weight": a,
        f"{PATH}.lora_B.default.weight": b,
        f"{PATH}.lora_magnitude_vector.default.weight": torch.ones(6),
        "embed.lora_embedding_A.default": torch.ones(2, 9),
        "embed.lora_embedding_B.default": torch.ones(4, 2),
        "score.modules_to_save.default.weight": torch.ones(3, 4),
        "score.original_module.weight": torch.zeros(3, 4),
        "lm_head.base_layer.weight": torch.zeros(9, 4),
    }
    with caplog.at_level(logging.WARNING):
        found = read_legacy(f"unsloth://{peft(tmp_path, names)}", base="unquantised")
    assert sorted(name.removeprefix(PREFIX) for name in found.tensors) == [
        "embed.lora_embedding_A",
        "embed.lora_embedding_B",
        f"{PATH}.lora_A.weight",
        f"{PATH}.lora_B.weight",
        f"{PATH}.lora_magnitude_vector",
        "score.weight",
    ]
    assert torch.equal(found.tensors[f"{PREFIX}score.weight"], torch.ones(3, 4))
    assert "2 tensors of the base are left out" in caplog.text
    assert found.config.base_model == "unquantised"


def test_canonical_names_stay_as_they_are(shared: Path) -> None:
    for folder in sorted((shared / "data/adapters").iterdir()):
        plain, tolerant = read_peft(str(folder)), read_legacy(str(folder))
        assert set(plain.tensors) == set(tolerant.tensors)
        assert all(torch.equal(plain.tensors[name], tolerant.tensors[name]) for name in plain.tensors)


def test_keys_of_several_adapters_ask_which(tmp_path: Path) -> None:
    (b, a), (d, c) = factors(1), factors(2)
    names = {
        f"{PATH}.lora_A.one.weight": a,
        f"{PATH}.lora_B.one.weight": b,
        f"{PATH}.lora_A.two.weight": c,
        f"{PATH}.lora_B.two.weight": d,
    }
    peft(tmp_path, names)
    with pytest.raises(ConfigError, match="several"):
        read_legacy(str(tmp_path))
    assert close(delta(read_legacy(str(tmp_path), adapter="two"), PATH), 4.0 * d @ c)


def test_two_keys_of_one_tensor_and_a_lost_configuration_are_errors(tmp_path: Path) -> None:
    """Case 37."""
    b, a = factors(1)
    names = {f"{PATH}.lora_A.weight": a, f"{PREFIX}{PATH}.lora_A.weight": a + 1, f"{PATH}.lora_B.weight": b}
    with pytest.raises(DamagedError, match="are both the tensor"):
        read_legacy(str(peft(tmp_path, names)))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        read_legacy(str(tmp_path))


# MLX.


def mlx(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None) -> Path:
    write(folder, "adapters.safetensors", tensors)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_mlx_deltas_are_equal(tmp_path: Path, shared: Path) -> None:
    (b, a), (d, c) = factors(1), factors(2, rank=4)
    other = PATH.replace("q_proj", "v_proj")
    tensors = {f"{PATH}.lora_a": a.T, f"{PATH}.lora_b": b.T, f"{other}.lora_a": c.T, f"{other}.lora_b": d.T}
    config = json.loads((shared / "data/configs/p24_mlx_lm.json").read_text())
    found = read_mlx(f"mlx://{mlx(tmp_path, tensors, config)}")
    x = torch.randn(3, 5)
    for path, up, down in ((PATH, b, a), (other, d, c)):
        assert torch.allclose(x @ delta(found, path).T, 20.0 * (x @ down.T) @ up.T, rtol=1e-4, atol=1e-4)
    assert found.config.base_model == "mlx-community/Mistral-7B-Instruct-v0.3-4bit"
    open_store(tmp_path / "store").put("a", found.tensors, found.config)


def test_mlx_without_a_scale_and_other_kinds_are_refused(tmp_path: Path) -> None:
    b, a = factors(1)
    tensors = {f"{PATH}.lora_a": a.T, f"{PATH}.lora_b": b.T}
    with pytest.raises(ConfigError, match="tells no scale"):
        read_mlx(str(mlx(tmp_path / "a", tensors, None)))
    found = read_mlx(f"mlx://{tmp_path / 'a' / 'adapters.safetensors'}#scale=2.5")
    assert close(delta(found, PATH), 2.5 * b @ a)
    with pytest.raises(UnsupportedError, match="'dora'"):
        read_mlx(str(mlx(tmp_path / "b", tensors, {"fine_tune_type": "dora"})))
    with pytest.raises(UnsupportedError, match="DoRA"):
        read_mlx(str(mlx(tmp_path / "c", {**tensors, f"{PATH}.m": torch.ones(6)}, None)), scale=1.0)
    experts = {f"{PATH}.lora_a": torch.ones(3, 2, 5), f"{PATH}.lora_b": torch.ones(3, 6, 2)}
    with pytest.raises(UnsupportedError, match="experts"):
        read_mlx(str(mlx(tmp_path / "d", experts, None)), scale=1.0)
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_mlx(str(tmp_path / "a"))


# The hub.


class FakeHub(MemoryFileSystem):  # type: ignore[misc]
    """A hub in memory: `hf://org/repo@revision/file`."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(FakeHub, "store", {})
    real = fsspec.get_filesystem_class("hf")
    fsspec.register_implementation("hf", FakeHub, clobber=True)
    yield FakeHub()
    fsspec.register_implementation("hf", real, clobber=True)


def upload(hub: FakeHub, folder: Path, place: str) -> None:
    for file in folder.iterdir():
        hub.pipe_file(f"{place}/{file.name}", file.read_bytes())


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("org/repo@main", "org/repo"),
        ("org/repo@main/sub/folder", "org/repo/sub/folder"),
        ("org/repo@v1.0", "hf://org/repo@v1.0"),
        ("org/repo@refs%2Fpr%2F7/a", "hf://org/repo@refs/pr/7/a"),
        ("org/repo@feature%2Fx", "hf://org/repo@feature%2Fx"),
    ],
)
def test_an_adapter_on_the_hub_is_read_at_its_revision(hub: FakeHub, tmp_path: Path, place: str, address: str) -> None:
    b, a = factors(1)
    names = {f"{PREFIX}{PATH}.lora_A.weight": a, f"{PREFIX}{PATH}.lora_B.weight": b}
    upload(hub, peft(tmp_path, names), place)
    found = read_hf(address, offline=False)
    assert close(delta(found, PATH), 4.0 * b @ a)
    assert found.files["adapter_model.safetensors"] == (tmp_path / "adapter_model.safetensors").read_bytes()


def test_what_the_hub_does_not_have_is_said_with_a_way_out(hub: FakeHub) -> None:
    with pytest.raises(UsageError, match="HF_TOKEN"):
        read_hf("hf://org/nobody", offline=False)
    for address in ("hf://repo", "hf://org/repo@", "hf://org/repo@main@x"):
        with pytest.raises(UsageError, match="no address"):
            read_hf(address, offline=False)


def test_offline_only_the_cache_is_read(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    b, a = factors(1)
    names = {f"{PREFIX}{PATH}.lora_A.weight": a, f"{PREFIX}{PATH}.lora_B.weight": b}
    kept = tmp_path / "models--org--repo"
    peft(kept / "snapshots" / commit, names)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    for address in ("hf://org/repo", f"hf://org/repo@{commit}"):
        assert close(delta(read_hf(address), PATH), 4.0 * b @ a)
    assert close(delta(read_hf(f"org/repo@{commit}", offline=False), PATH), 4.0 * b @ a)  # a commit never changes
    with pytest.raises(StorageUnreachableError, match="HF_HUB_OFFLINE"):
        read_hf("hf://org/other")
    assert hub.store == {}


# Where files lie.


def test_any_url_serves_and_fragments_are_checked(memory_url: str, tmp_path: Path) -> None:
    b, a = factors(1)
    path = write(tmp_path, "style.safetensors", kohya("unet", {TO_Q: ((b, a), 4.0)}))
    fsspec.filesystem("memory").pipe_file(f"{memory_url}/style.safetensors", path.read_bytes())
    for address in (
        f"kohya://{memory_url}/style.safetensors",
        f"kohya://{memory_url}",
        f"{memory_url}/#component=unet",
    ):
        assert close(delta(read_kohya(address), TO_Q), 2.0 * b @ a)
    with pytest.raises(UsageError, match="did you mean component"):
        read_kohya(f"{path}#componet=unet")
    with pytest.raises(UsageError, match="not of type float"):
        read_mlx(f"{path}#scale=much")
    with pytest.raises(UsageError, match="is not there"):
        read_kohya(f"{memory_url}/absent.safetensors")


def test_a_hash_in_a_path_is_no_fragment(tmp_path: Path) -> None:
    path = write(tmp_path / "run#3", "style.safetensors", kohya("te1", {PATH: (factors(1), 1.0)}))
    for address in (str(path), f"kohya://{path}#component=te1&base=org/name"):
        assert list(read_kohya(address).config.target_modules or ()) == [PATH]
    assert read_kohya(f"{path}#base=org/name").config.base_model == "org/name"


@given(st.lists(st.sampled_from([*sorted(_WORDS), "0", "1", "27"]), min_size=1, max_size=8))
def test_a_kohya_name_is_told_rightly_or_refused(parts: list[str]) -> None:
    path = ".".join(parts)
    with suppress(UnsupportedError):
        assert restore(flatten(path)) == path


def test_peft_computes_with_a_converted_adapter_what_its_own_tool_would(tmp_path: Path) -> None:
    """PEFT is the reference: y + alpha / rank * up(down(x)), as the layout defines it."""
    from peft import PeftModel

    (up, down), (up2, down2) = factors(1, rows=16, columns=16), factors(2, rank=4, rows=16, columns=32)
    other = "model.layers.1.mlp.down_proj"
    path = write(tmp_path, "x.safetensors", kohya("te", {PATH: ((up, down), 3.0), other: ((up2, down2), 1.0)}))
    found = read_kohya(str(path))
    store = open_store(tmp_path / "store", cache=False)
    store.put("a", found.tensors, found.config)
    base, edited = tiny_decoder(), tiny_decoder()
    with torch.no_grad():
        edited.get_submodule(PATH).weight += 1.5 * up @ down
        edited.get_submodule(other).weight += 0.25 * up2 @ down2
        model = PeftModel.from_pretrained(base, str(store.path("a")))
        assert torch.allclose(model(base.example()), edited(edited.example()), rtol=1e-4, atol=1e-5)


def test_only_one_safetensors_file_is_taken(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no safetensors files"):
        read_kohya(str(tmp_path))
    with pytest.raises(UsageError, match="is not there"):
        read_kohya(str(tmp_path / "x.safetensors"))
    for name in ("a", "b"):
        write(tmp_path, f"{name}.safetensors", kohya("unet", {TO_Q: (factors(1), 1.0)}))
    with pytest.raises(UsageError, match=r"a\.safetensors, b\.safetensors"):
        read_kohya(str(tmp_path))
    for pickle in ("x.pt", "x.ckpt", "x.bin"):
        (tmp_path / pickle).write_bytes(b"\x80\x02")
        with pytest.raises(UsageError, match="not a safetensors file"):
            read_kohya(str(tmp_path / pickle))
    (tmp_path / "c.safetensors").write_bytes(b"\x80\x02" * 20)
    with pytest.raises(DamagedError, match="pickle"):
        read_kohya(str(tmp_path / "c.safetensors"))


def test_every_source_is_a_plugin_with_typed_parameters() -> None:
    registry = default_registry()
    assert {"diffusers", "hf", "kohya", "mlx", "peft", "peft_legacy", "unsloth"} <= set(registry.names("source"))
    kohya_source = registry.get("source", "kohya")
    assert [item.name for item in kohya_source.parameters] == ["component", "base", "modules"]
    assert kohya_source.description
