"""What cannot be assembled is refused in words, and the base is exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly import BaseIdentity, assemble, base_fingerprint
from multilora_store.assembly.bridge import adapter_names, record
from multilora_store.assembly.resolve import resolve_manifest
from multilora_store.assembly.steps import Assembly
from multilora_store.errors import (
    BaseMismatchError,
    ConfigError,
    CoverageError,
    DamagedError,
    ManifestError,
    MultiLoRAError,
    PluginError,
    UnsupportedError,
    UsageError,
)
from multilora_store.storage import Store, export_adapter
from tests.assembly.conftest import Mixture, Put, Toy, made_by_peft, seeded
from tests.assembly.test_equals_peft import QV, Q

HEAD = {**Q, "modules_to_save": ["head"]}


def anatomy(model: nn.Module) -> list[Any]:
    """Everything about a model's structure that an assembly could change, tensors by identity."""
    found: list[Any] = []
    for path, module in model.named_modules():
        plain = {
            key: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, (list, set)) else value
            for key, value in vars(module).items()
        }
        found.append((path, type(module), id(module), plain))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.append((name, id(tensor), tensor.requires_grad, tensor.device, tensor.dtype))
    return found


def unchanged(base: nn.Module, work: Callable[[], object], error: type[MultiLoRAError], match: str) -> MultiLoRAError:
    """Run `work`, which must fail with `error`, and check that `base` is exactly as it was."""
    before, values = anatomy(base), {key: value.clone() for key, value in base.state_dict().items()}
    classes = {kind: dict(vars(kind)) for kind in {type(module) for module in base.modules()}}
    state = torch.get_rng_state()
    with pytest.raises(error, match=match) as caught:
        work()
    assert anatomy(base) == before
    assert all(torch.equal(base.state_dict()[key], value) for key, value in values.items())
    assert {kind: dict(vars(kind)) for kind in classes} == classes
    assert torch.equal(torch.get_rng_state(), state)
    return caught.value


def put_tensors(
    store: Store, name: str, fields: Mapping[str, Any], change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    config, tensors = made_by_peft(seeded(Toy), fields, 1)
    change(tensors)
    store.put(name, tensors, config)


FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a tensor is missing": (lambda t: t.pop("base_model.model.layers.1.v_proj.lora_B.weight"), "1 missing"),
    "a tensor has no place": (
        lambda t: t.update({"base_model.model.layers.9.v_proj.lora_A.weight": torch.ones(2, 16)}),
        "1 without a place",
    ),
    "another shape": (
        lambda t: t.update({"base_model.model.layers.1.v_proj.lora_B.weight": torch.ones(9, 2)}),
        r"(?s)1 of another shape.*\[9, 2\] in the file, \[8, 2\] on the model",
    ),
    "another rank": (
        lambda t: t.update({key: torch.ones(5, 16) for key in t if "lora_A" in key}),
        "6 of another shape",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("position", ["first", "second"])
def test_partial_coverage_loads_nothing(fault: str, position: str, toy: Toy, store: Store) -> None:
    """Promise 3: coverage is 100 percent in both directions or it is an error that names keys, shapes, candidates."""
    change, words = FAULTS[fault]
    put_tensors(store, "bad", QV, change)
    put_tensors(store, "good", HEAD, lambda t: None)
    names = ["bad", "good"] if position == "first" else ["good", "bad"]
    error = unchanged(toy, lambda: assemble(toy, {name: {} for name in names}, store=store), CoverageError, words)
    assert error.facts["name"] == "bad"


def test_a_path_that_moved_gets_its_rename_proposed(toy: Toy, store: Store) -> None:
    """Case 36, 42, 103: another prefix is an error that names the map, and the map makes it load."""
    moved = {"base_model.model.layers.": "base_model.model.model.language_model.layers."}

    def move(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace(*next(iter(moved.items())))] = tensors.pop(key)

    put_tensors(store, "a", QV, move)
    error = unchanged(toy, lambda: assemble(toy, {"a": {}}, store=store), CoverageError, "rename=")
    rename = error.facts["rename"]
    assert rename == {"model.language_model": ""}
    model = assemble(toy, {"a": {}}, store=store, rename=rename)
    assert adapter_names(model) == ("a",)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    """Case 135: `gate_proj` on fused experts adapts nothing; a fresh adapter must not be born half."""
    base = seeded(Mixture)

    def fresh(*targets: str) -> Callable[[], object]:
        return lambda: assemble(
            base, {"a": {"if_missing": "init", "config": {"r": 2, "target_modules": list(targets)}}}
        )

    unchanged(base, fresh("gate_proj"), CoverageError, "match no module of the base: gate_proj")
    unchanged(base, fresh("q_proj", "gate_proj"), CoverageError, "match no module of the base: gate_proj")


def test_a_stored_pattern_that_matches_nothing_is_told(toy: Toy, put: Put) -> None:
    """Case 135: what the file holds is covered in full, so an idle pattern is a note, not a loss."""
    model = assemble(toy, {"a": {}}, store=put(a={**Q, "target_modules": ["q_proj", "fc1"]}))
    assert record(model).notes == ["adapter 'a': these targets match no module of the base: fc1"]


OTHER_TUNERS = ["ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA", "HRA", "ROAD", "PREFIX_TUNING", "XLORA"]


@pytest.mark.parametrize("kind", OTHER_TUNERS)
def test_other_tuners_are_refused(kind: str, toy: Toy, store: Store, put: Put) -> None:
    put(good=Q)
    config = AdapterConfig.parse({"peft_type": kind, "target_modules": ["q_proj"], "r": 4})
    store.put("other", {"base_model.model.layers.0.q_proj.x": torch.ones(2)}, config)
    unchanged(
        toy, lambda: assemble(toy, {"good": {}, "other": {}}, store=store), UnsupportedError, f"of the type {kind}"
    )


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "pissa": ({**Q, "init_lora_weights": "pissa"}, "changes the base's weights"),
    "pissa_niter_4": ({**Q, "init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
    "olora": ({**Q, "init_lora_weights": "olora"}, "changes the base's weights"),
    "corda": ({**Q, "init_lora_weights": "corda"}, "changes the base's weights"),
    "loftq": ({**Q, "init_lora_weights": "loftq"}, "changes the base's weights"),
    "lora_ga": ({**Q, "init_lora_weights": "lora_ga"}, "changes the base's weights"),
    "bias": ({**Q, "bias": "lora_only"}, "bias = 'lora_only'"),
    "bias all": ({**Q, "bias": "all"}, "bias = 'all'"),
    "layer_replication": ({**Q, "layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "megatron": ({**Q, "megatron_config": {"hidden_size": 4}}, "megatron_config"),
    "lora_bias on embeddings": ({**Q, "target_modules": ["embed"], "lora_bias": True}, "PEFT cannot adapt embed"),
    "a layer norm": ({**Q, "target_modules": ["layers.0.mlp.1"]}, "PEFT cannot adapt layers.0.mlp.1, a ReLU"),
    "saved inside saved": ({**Q, "modules_to_save": ["layers.1", "layers.1.mlp"]}, "saves layers.1 as a whole"),
    "tied saving": ({**HEAD, "ensure_weight_tying": True}, "ensure_weight_tying"),
    "eva": ({**Q, "init_lora_weights": "eva"}, "cannot be initialised with 'eva'"),
    "odd orthogonal": ({**Q, "r": 3, "init_lora_weights": "orthogonal"}, "even rank"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*eva_config")
def test_what_a_set_cannot_carry_is_refused(case: str, toy: Toy, put: Put) -> None:
    """Case 62: what changes the base, or cannot live beside others, is refused before anything is touched."""
    fields, words = REFUSED[case]
    entries = {"good": {}, "bad": {"if_missing": "init", "config": fields}}
    store = put(good={**Q, "r": 2})
    unchanged(toy, lambda: assemble(toy, entries, store=store), UnsupportedError, words)


@pytest.mark.parametrize("order", [("saver", "target"), ("target", "saver")])
def test_a_module_saved_by_one_and_adapted_by_another_is_refused(order: tuple[str, ...], toy: Toy, put: Put) -> None:
    store = put(saver=HEAD, target={**Q, "target_modules": ["head"]})
    unchanged(toy, lambda: assemble(toy, dict.fromkeys(order), store=store), UnsupportedError, "saves head as a whole")


def test_experts_need_one_set_of_parameters(put: Put) -> None:
    """Case 63, 134: adapters on different parameters are refused, never applied in part."""
    base = seeded(Mixture)
    both = {"r": 2, "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    store = put(on=base, a=both, b={**both, "target_parameters": ["experts.down_proj"]})
    unchanged(
        base, lambda: assemble(base, {"a": {}, "b": {}}, store=store), UnsupportedError, "the same target_parameters"
    )


def test_the_wrong_base_is_an_error_unless_forced(toy: Toy, store: Store) -> None:
    """Case 106: same architecture, other weights."""
    config, tensors = made_by_peft(toy, Q, 1)
    store.put("a", tensors, config, base=BaseIdentity(name="toy", fingerprint=base_fingerprint(toy)).to_mapping())
    other = seeded(Toy, 7)
    error = unchanged(
        other, lambda: assemble(other, {"a": {}}, store=store), BaseMismatchError, "made for another base"
    )
    assert error.facts["expected"].name == "toy"
    model = assemble(other, {"a": {}}, store=store, allow_base_mismatch=True)
    assert "made for another base" in record(model).notes[0]
    assemble(toy, {"a": {}}, store=store)


def test_another_revision_is_an_error(toy: Toy, store: Store) -> None:
    """Case 106: the revision in the configuration counts where nothing better is recorded."""
    config, tensors = made_by_peft(toy, Q, 1)
    store.put("a", tensors, config.replace(revision="1111aaaa"))
    identity = BaseIdentity(name="toy", revision="2222bbbb")
    unchanged(
        toy, lambda: assemble(toy, {"a": {}}, store=store, identity=identity), BaseMismatchError, "revision 1111aaaa"
    )
    assemble(toy, {"a": {}}, store=store, identity=BaseIdentity(revision="1111aaaa"))


def test_a_name_that_is_taken(toy: Toy, put: Put) -> None:
    store = put(a=Q, b=Q)
    model = assemble(toy, {"a": {}}, store=store)
    unchanged(
        model, lambda: assemble(model, {"b": {}, "a": {}}, store=store), UsageError, "already carries an adapter 'a'"
    )


def test_adapters_that_are_not_in_a_peft_model(toy: Toy, put: Put) -> None:
    """A second PeftModel around the same layers would switch off what the first reports as active."""
    store = put(a=Q, b=Q)
    model = get_peft_model(toy, LoraConfig(target_modules=["q_proj"]))
    unchanged(model, lambda: assemble(toy, {"a": {}}, store=store), UsageError, "but not as a PeftModel")
    assert assemble(model, {"a": {}}, store=store) is model
    bare = model.unload()
    model = get_peft_model(bare, LoraConfig(target_modules=["v_proj"]))  # layers that no record knows
    unchanged(model, lambda: assemble(bare, {"b": {}}, store=store), UsageError, "but not as a PeftModel")


@pytest.mark.parametrize("adapters", [{}, None, [], "a"])
def test_an_empty_or_shapeless_manifest(adapters: Any, toy: Toy) -> None:
    unchanged(toy, lambda: assemble(toy, adapters), ManifestError, "manifest")


def test_nan_weights_of_a_folder(toy: Toy, put: Put, tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = put(a=Q).path("a")
    copy = tmp_path / "bad"
    copy.mkdir()
    (copy / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, copy / "adapter_model.safetensors")
    unchanged(toy, lambda: assemble(toy, {"a": str(copy)}), MultiLoRAError, "not finite")


def test_a_step_that_raises_leaves_the_base(toy: Toy, put: Put) -> None:
    def broken(work: Assembly) -> None:
        raise RuntimeError("broken plugin")

    before = anatomy(toy)
    store = put(a={**HEAD, "use_dora": True}, b=QV)
    for where in ("load", "after:load", "activate", "before:cover"):
        with pytest.raises(RuntimeError, match="broken plugin"):
            assemble(toy, {"a": {}, "b": {}}, store=store, steps={where: broken})
        assert anatomy(toy) == before
    model = assemble(toy, {"a": {}}, store=store)
    grown = anatomy(model)
    with pytest.raises(RuntimeError, match="broken plugin"):
        assemble(model, {"b": {}}, store=store, steps={"after:activate": broken})
    assert anatomy(model) == grown


def test_steps_are_replaced_and_added_by_name(toy: Toy, put: Put) -> None:
    seen: list[str] = []
    steps = {"before:load": lambda work: seen.append("before"), "after:cover": lambda work: seen.append("after cover")}
    assemble(toy, {"a": {}}, store=put(a=Q), steps=steps)
    assert seen == ["after cover", "before"]
    with pytest.raises(UsageError, match="no step 'lod'"):
        assemble(toy, {"a": {}}, steps={"lod": lambda work: None})
    with pytest.raises(PluginError, match="unknown assembler 'x'"):
        assemble(toy, {"a": {}}, assembler="x")


def test_a_misspelt_field_of_a_fresh_adapter_is_named() -> None:
    """What a stored file may hold from a newer PEFT is, in a declaration, a typo that would be lost."""
    base = seeded(Toy)
    before = anatomy(base)
    entry = {"if_missing": "init", "config": {**Q, "lora_dropuot": 0.1}}
    with pytest.raises(ConfigError, match="no field 'lora_dropuot'") as caught:
        assemble(base, {"a": entry})
    assert "lora_dropout" in caught.value.remedy
    assert anatomy(base) == before


def test_a_base_or_device_that_is_none_is_named() -> None:
    entry = {"if_missing": "init", "config": Q}
    with pytest.raises(UsageError, match="the base is a NoneType"):
        assemble(None, {"a": entry})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown device 'gpu9'"):
        assemble(seeded(Toy), {"a": entry}, device="gpu9")


def test_a_folder_that_changed_since_it_was_locked_is_refused(store: Store, put: Put, tmp_path: Path) -> None:
    put(a=Q)
    folder = Path(export_adapter(store, "a", tmp_path / "a"))
    lock = resolve_manifest({"x": {"source": str(folder)}}, store)
    assert adapter_names(assemble(seeded(Toy), lock)) == ("x",)
    file = folder / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    base = seeded(Toy)
    before = anatomy(base)
    with pytest.raises(DamagedError, match="another content than was locked"):
        assemble(base, lock)
    assert anatomy(base) == before
