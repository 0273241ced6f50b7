"""The drop-ins that are shipped: each does what it says, chosen by name on a command line or given to `assemble`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_store import open_store
from multilora_store import plugins as plugin_door
from multilora_store.adapter import AdapterConfig
from multilora_store.assembly import assemble
from multilora_store.assembly.bases import demo_adapters, demo_base
from multilora_store.assembly.bridge import (
    active_adapters,
    adapter_config,
    adapter_names,
    adapter_parameters,
    record,
    trainable_adapters,
)
from multilora_store.cli.plugins import dropin_folder
from multilora_store.errors import DamagedError, ManifestError, MultiLoRAError, UnsupportedError, UsageError
from multilora_store.plugins import Registry, default_registry
from multilora_store.storage import Store, import_peft

IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The built-ins and every shipped drop-in, for one test."""
    monkeypatch.setattr(plugin_door, "_DEFAULT", [])
    found = default_registry()
    found.load_dropins([dropin_folder()], strict=True)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = open_store(tmp_path / "store")
    for name, (config, tensors) in demo_adapters().items():
        opened.put(name, tensors, config)
    return opened


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


def test_every_shipped_file_declares_a_plugin_with_a_promise(registry: Registry) -> None:
    origins = {Path(item.origin).stem for item in registry.all() if item.origin != "built-in"}
    assert origins >= {path.stem for path in dropin_folder().glob("[!_]*.py")}
    for item in registry.all():
        assert item.description, item.name


def test_fuse_set_is_exact(store: Store, registry: Registry) -> None:
    manifest = {"a": {"weight": 0.7}, "b": {"weight": -0.4}, "c": {}}
    apart = assemble(demo_base(), manifest, store=store)
    fuse = registry.get("assembler", "fuse_set").load()
    fused = assemble(demo_base(), manifest, store=store, assembler=lambda work, steps: fuse(work, steps, into="abc"))
    assert adapter_names(fused) == ("abc",)
    assert active_adapters(fused) == {"abc": 1.0}
    assert adapter_config(fused, "abc").r == 20
    torch.testing.assert_close(logits(fused), logits(apart), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(fused), logits(demo_base()), atol=1e-3)


def test_fuse_set_leaves_inactive_ones_out_and_says_so(store: Store) -> None:
    manifest = {"a": {"active": False}, "b": {}}
    model = assemble(demo_base(), manifest, store=store, assembler="fuse_set")
    alone = assemble(demo_base(), {"b": {}}, store=store)
    torch.testing.assert_close(logits(model), logits(alone), rtol=1e-5, atol=1e-5)
    assert any("not fused: a" in note for note in record(model).notes)


def test_fuse_set_refuses_what_it_cannot_fuse_and_leaves_the_base(store: Store) -> None:
    base = demo_base()
    before = list(base.state_dict())
    for manifest in (
        {"a": {"active": False}},
        {"n1": {"if_missing": "init", "config": {"r": 2, "target_modules": ["q_proj"]}}},
    ):
        with pytest.raises(ManifestError, match="fuse"):
            assemble(base, manifest, store=store, assembler="fuse_set")
    assert list(base.state_dict()) == before


def test_cast_changes_the_set_alone(store: Store) -> None:
    base = assemble(demo_base(), {"a": {}}, store=store)
    model = assemble(base, {"b": {}}, store=store, steps={"after:load": "cast_to_bfloat16"})
    assert {value.dtype for value in adapter_parameters(model, "b").values()} == {torch.bfloat16}
    assert {value.dtype for value in adapter_parameters(model, "a").values()} == {torch.float32}
    stored = store.get("b").tensors
    for key, value in adapter_parameters(model, "b").items():
        assert torch.equal(value.detach(), stored[key].bfloat16())


def test_rounding_is_to_255_levels_a_row(store: Store) -> None:
    model = assemble(demo_base(), {"a": {}}, store=store, steps={"after:load": "round_to_int8"})
    stored = store.get("a").tensors
    for key, value in adapter_parameters(model, "a").items():
        row, exact = value.detach()[0], stored[key][0]
        assert row.unique().numel() <= 255
        assert not torch.equal(row, exact)
        assert float((row - exact).abs().max()) <= float(exact.abs().max()) / 127 / 2 + 1e-7
    assert any("largest relative error" in note for note in record(model).notes)


def test_merged_ones_stay_frozen_beside_the_others(store: Store, registry: Registry) -> None:
    """At strategy linear the whole answers as the set does one by one; only what was left out is trained."""
    manifest = {"a": {"weight": 0.7}, "b": {"weight": -0.4}, "c": {"trainable": True}}
    apart = assemble(demo_base(), manifest, store=store)
    model = assemble(demo_base(), manifest, store=store, assembler="merge_then_wrap")
    assert adapter_names(model) == ("merged", "c")
    assert (active_adapters(model), trainable_adapters(model)) == ({"merged": 1.0, "c": 1.0}, {"c"})
    torch.testing.assert_close(logits(model), logits(apart), rtol=1e-5, atol=1e-5)
    assert any("a (0.7), b (-0.4), merged by linear" in note for note in record(model).notes)


def test_members_are_merged_by_any_strategy(store: Store, registry: Registry) -> None:
    merge = registry.get("assembler", "merge_then_wrap").load()

    def build(**params: Any) -> Any:
        return assemble(
            demo_base(), {"a": {}, "b": {}, "c": {}}, store=store, assembler=lambda w, s: merge(w, s, **params)
        )

    model = build(members=["c", "a"], into="ac", strategy="ties", rank=6, params={"density": 0.5})
    assert adapter_names(model) == ("ac", "b")
    assert adapter_config(model, "ac").r == 6
    for params, words in (
        ({"members": ["a", "d"]}, "not in the set"),
        ({"strategy": "tiez"}, "tiez"),
        ({"params": {"density": 0.5}}, "density"),
        ({"members": ["a"], "into": "b"}, "b"),
    ):
        with pytest.raises(MultiLoRAError, match=words):
            build(**params)
    for entry, words in (({"trainable": True}, "trainable"), ({"active": False}, "nothing to merge")):
        with pytest.raises(ManifestError, match=words):
            assemble(
                demo_base(),
                {"a": entry},
                store=store,
                assembler=lambda w, s, e=entry: merge(w, s, members=["a"] if "trainable" in e else []),
            )


def test_mlx_round_trip_gives_the_same_model(store: Store, tmp_path: Path, registry: Registry) -> None:
    write = registry.get("exporter", "mlx").load()
    folder = write(store, "a", tmp_path / "mlx")
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["lora_parameters"] == {"rank": 8, "dropout": 0.0, "scale": 2.0}
    model = assemble(demo_base(), {"m": {"source": f"mlx://{folder}"}})
    wanted = assemble(demo_base(), {"a": {}}, store=store)
    torch.testing.assert_close(logits(model), logits(wanted), rtol=0, atol=0)


def test_a_bare_file_is_read_by_its_shapes(store: Store, tmp_path: Path, registry: Registry) -> None:
    from safetensors.torch import save_file

    config, tensors = demo_adapters()["b"]
    file = tmp_path / "lora.safetensors"
    save_file(dict(tensors), file)
    model = assemble(demo_base(), {"x": {"source": f"bare://{file}#alpha={config.raw['lora_alpha']}"}})
    wanted = assemble(demo_base(), {"b": {}}, store=store)
    torch.testing.assert_close(logits(model), logits(wanted), rtol=0, atol=0)
    assert adapter_config(model, "x").r == 8


def test_a_bare_file_of_several_ranks_scales_all_alike(tmp_path: Path, registry: Registry) -> None:
    from safetensors.torch import save_file

    _, tensors = demo_adapters()["a"]
    small = dict(tensors)
    for side, cut in (("A", lambda t: t[:2]), ("B", lambda t: t[:, :2])):
        key = f"base_model.model.layers.0.self_attn.q_proj.lora_{side}.weight"
        small[key] = cut(small[key]).contiguous()
    save_file(small, tmp_path / "x.safetensors")
    config = registry.get("source", "bare").load()(f"bare://{tmp_path}/x.safetensors#alpha=16").config
    assert config.raw["rank_pattern"] == {"layers.0.self_attn.q_proj": 2}
    assert config.raw["alpha_pattern"] == {"layers.0.self_attn.q_proj": 4.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(next(iter(t))), "no pair"),
        (lambda t: t.update({"embed.weight": torch.ones(2, 2)}), "is no factor"),
        (lambda t: t.clear(), "any module"),
    ],
)
def test_a_bare_file_of_something_else_is_refused(tmp_path: Path, registry: Registry, change: Any, words: str) -> None:
    from safetensors.torch import save_file

    tensors = dict(demo_adapters()["a"][1])
    change(tensors)
    save_file(tensors, tmp_path / "x.safetensors")
    read = registry.get("source", "bare").load()
    with pytest.raises(DamagedError, match=words):
        read(f"bare://{tmp_path}/x.safetensors")
    with pytest.raises(UsageError, match="alpha"):
        read(f"bare://{tmp_path}/x.safetensors#alpha=lots")
    with pytest.raises(DamagedError, match="cannot be read"):
        read(f"bare://{tmp_path}/nothing.safetensors")


def test_mlx_exporter_refuses_more_than_plain_lora(store: Store, tmp_path: Path, registry: Registry) -> None:
    config, tensors = demo_adapters()["a"]
    raw = {**config.raw, "rank_pattern": {"layers.0.self_attn.q_proj": 8}}
    store.put("odd", tensors, AdapterConfig.parse(raw, where="odd"))
    with pytest.raises(UnsupportedError, match="rank_pattern"):
        registry.get("exporter", "mlx").load()(store, "odd", tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_effect_check_finds_dead_partial_and_huge_adapters(store: Store, registry: Registry) -> None:
    check = registry.get("audit_check", "effect_check").load()
    model = assemble(demo_base(), {"a": {}, "b": {}, "c": {}}, store=store)
    assert list(check(model)) == []
    ups = {name: [v for k, v in adapter_parameters(model, name).items() if "lora_B" in k] for name in "abc"}
    with torch.no_grad():
        for value in ups["a"]:
            value.zero_()
        ups["b"][0].zero_()
        for value in ups["c"]:
            value.mul_(1e4)
    found = "\n".join(check(model))
    assert "adapter a: every lora_B is zero" in found
    assert "adapter b: 1 of 16 lora_B are zero" in found
    assert "adapter c: its lora_B are" in found


def test_real_adapters_pass_through_mlx(shared: Path, tmp_path: Path, registry: Registry) -> None:
    """A really trained adapter, written for MLX-LM and read back, has the same tensors and scale."""
    opened = open_store(tmp_path / "real")
    import_peft(opened, shared / "data" / "adapters" / "safety")
    folder = registry.get("exporter", "mlx").load()(opened, "safety", tmp_path / "mlx")
    back = registry.get("source", "mlx").load()(f"mlx://{folder}")
    stored = opened.get("safety")
    assert set(back.tensors) == set(stored.tensors)
    assert all(torch.equal(back.tensors[key], stored.tensors[key]) for key in stored.tensors)
    assert back.config.raw["lora_alpha"] / back.config.r == stored.config.raw["lora_alpha"] / stored.config.r
