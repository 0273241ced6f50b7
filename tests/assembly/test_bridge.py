"""The bridge: adapters of a live model by position, through wrappers, with two separate states."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from multilora_store.assembly import assemble
from multilora_store.assembly.bridge import (
    active_adapters,
    adapter_buffers,
    adapter_config,
    adapter_modules,
    adapter_names,
    adapter_parameters,
    base_fingerprint,
    eject_adapter,
    inject_adapter,
    innermost,
    peft_model,
    record,
    set_active,
    set_trainable,
    trainable_adapters,
)
from multilora_store.errors import UnsupportedError, UsageError
from tests.assembly.conftest import Convolutions, Put, Toy, made_by_peft, seeded
from tests.assembly.test_equals_peft import QV, Q

NAMES = ("mlp", "lora_A", "a", "a1", "q_proj", "team/x.v2", "train", "keys", "weight", "default", "layers")


def test_every_name_is_safe(toy: Toy, put: Put) -> None:
    """Case 38, 41: names of modules, prefixes of each other, words of PEFT and torch, dots and slashes."""
    store = put(**{name: {**QV, "modules_to_save": ["head"]} for name in NAMES})
    stored = {name: dict(store.get(name).tensors) for name in NAMES}
    model = assemble(toy, {name: {"active": False} for name in NAMES}, store=store)
    assert adapter_names(model) == NAMES
    for name in NAMES:
        found = adapter_parameters(model, name)
        assert set(found) == set(stored[name]), name
        assert all(torch.equal(found[key], stored[name][key]) for key in found), name
        set_active(model, {name: 1.0})
        assert active_adapters(model) == {name: 1.0}
        model(toy.example())


@pytest.mark.filterwarnings("ignore:Adapter one was active")
def test_a_model_that_peft_built_gets_its_record_on_first_use(toy: Toy) -> None:
    model = get_peft_model(toy, LoraConfig(**Q), adapter_name="one")
    assert adapter_names(model) == ("one",)
    model.add_adapter("two", LoraConfig(**QV))
    assert adapter_names(model) == ("one", "two")
    assert adapter_config(model, "two").max_rank == 2
    assert record(model).versions == {"one": None, "two": None}
    model.delete_adapter("one")
    assert adapter_names(model) == ("two",)
    with pytest.raises(UsageError, match="carries no adapter 'one'"):
        adapter_parameters(model, "one")


def test_a_plain_model_has_no_adapters(toy: Toy) -> None:
    with pytest.raises(UsageError, match="Toy carries no adapters"):
        adapter_names(toy)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.compile imports what torch itself deprecates
@pytest.mark.parametrize(
    "wrap", [lambda m: m, nn.DataParallel, torch.compile, lambda m: torch.compile(nn.DataParallel(m))]
)
def test_wrappers_are_seen_through(wrap, toy: Toy, put: Put) -> None:  # type: ignore[no-untyped-def]
    """Case 73, 81: the same call whatever the wrapper, and names free of its prefixes."""
    model = assemble(toy, {"a": {}, "b": {"active": False}}, store=put(a=Q, b=QV))
    plain = {name: list(adapter_parameters(model, name)) for name in "ab"}
    for index, block in enumerate(toy.layers):
        toy.layers[index] = checkpoint_wrapper(block)
    wrapped = wrap(model)
    assert {name: list(adapter_parameters(wrapped, name)) for name in "ab"} == plain
    assert peft_model(wrapped) is model
    assert innermost(wrapped) is toy
    set_active(wrapped, {"b": 0.5})
    assert active_adapters(model) == {"b": 0.5}


def test_a_base_module_called_module_keeps_its_name(put: Put) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(4, 4))

    base = seeded(Odd)
    model = assemble(base, {"a": {"if_missing": "init", "config": {"r": 2, "target_modules": ["module.0"]}}})
    assert next(iter(adapter_parameters(model, "a"))) == "base_model.model.module.0.lora_A.weight"


def test_modules_for_wrapping_hold_all_that_can_be_wrapped(toy: Toy, put: Put) -> None:
    store = put(a={**QV, "use_dora": True, "modules_to_save": ["head"]}, b=Q)
    model = assemble(toy, {"a": {}, "b": {}}, store=store)
    modules = adapter_modules(model, "a")
    owned = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    assert owned == {id(parameter) for parameter in adapter_parameters(model, "a").values()}
    assert all(module is model.base_model.model.get_submodule(path) for path, module in modules.items())


def test_buffers_of_saved_modules(put: Put) -> None:
    base = seeded(Convolutions)
    model = assemble(
        base, {"a": {}}, store=put(on=base, a={"r": 2, "target_modules": ["conv1"], "modules_to_save": ["norm"]})
    )
    assert [key.rpartition(".")[2] for key in adapter_buffers(model, "a")] == [
        "num_batches_tracked",
        "running_mean",
        "running_var",
    ]


# Activation.


def test_weights_scale_exactly_and_are_restored(toy: Toy, put: Put) -> None:
    store = put(a={**Q, "use_rslora": True}, b=QV)
    model = assemble(toy, {"a": {}, "b": {}}, store=store)
    layer = toy.layers[0].q_proj
    nominal = dict(layer.scaling)
    assert nominal == {"a": 8 / 4**0.5, "b": 3 / 2}
    set_active(model, {"a": 0.7, "b": 0.3})
    assert layer.scaling == {"a": 0.7 * 8 / 4**0.5, "b": 0.3 * 3 / 2}
    assert active_adapters(model) == {"a": 0.7, "b": 0.3}
    set_active(model, {"b": 1.0})
    assert layer.scaling == nominal
    set_active(model, {})
    assert active_adapters(model) == {}


def test_a_weighted_pair_is_the_sum_of_its_deltas(put: Put) -> None:
    """Case 87: what several active adapters do is the weighted sum of what each does."""
    base = seeded(lambda: nn.Sequential(nn.Linear(6, 5)))
    fields = {"r": 2, "target_modules": ["0"]}
    model = assemble(base, {"a": {}, "b": {}}, store=put(on=base, a=fields, b=fields))
    x = torch.randn(3, 6)
    outputs = {}
    for key, weights in {"base": {}, "a": {"a": 1.0}, "b": {"b": 1.0}, "ab": {"a": 0.6, "b": 0.4}}.items():
        set_active(model, weights)
        outputs[key] = model(x)
    expected = outputs["base"] + 0.6 * (outputs["a"] - outputs["base"]) + 0.4 * (outputs["b"] - outputs["base"])
    torch.testing.assert_close(outputs["ab"], expected)


def test_an_empty_set_is_the_base_alone(toy: Toy, put: Put) -> None:
    expected = toy(toy.example())
    model = assemble(toy, {"a": {}, "b": {}}, store=put(a={**Q, "modules_to_save": ["head"]}, b=QV))
    assert not torch.equal(model(toy.example()), expected)
    set_active(model, {})
    assert torch.equal(model(toy.example()), expected)
    set_active(model, {"a": 0.0})
    assert torch.equal(model(toy.example()), expected)


def test_activation_touches_no_flag(toy: Toy, put: Put) -> None:
    """Case 19, 21, 84: which adapters take part and which receive gradients are two states."""
    model = assemble(toy, {"a": {"trainable": True}, "b": {}}, store=put(a=Q, b=QV))
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for weights in ({"a": 1.0}, {"b": 1.0}, {}, {"a": 0.5, "b": 0.5}):
        set_active(model, weights)
        model(toy.example())
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert trainable_adapters(model) == {"a"}
    set_trainable(model, ["b"])
    assert active_adapters(model) == {"a": 0.5, "b": 0.5}
    assert trainable_adapters(model) == {"b"}
    assert not any(parameter.requires_grad for parameter in adapter_parameters(model, "a").values())


def test_several_copies_of_one_module_are_refused(toy: Toy, put: Put) -> None:
    """Case 30, 94: a whole module cannot be added to another; with one copy among the active it is used."""
    head = {**Q, "modules_to_save": ["head"]}
    model = assemble(toy, {"a": {}, "b": {"active": False}, "c": {"active": False}}, store=put(a=head, b=head, c=QV))
    before = active_adapters(model)
    with pytest.raises(UsageError, match="each bring their own head"):
        set_active(model, {"a": 0.5, "b": 0.5})
    assert active_adapters(model) == before
    set_active(model, {"a": 1.0, "c": 1.0})
    assert model.base_model.model.head.active_adapters == ["a"]
    set_active(model, {"c": 1.0})
    assert model.base_model.model.head.active_adapters == []


def test_merged_layers_are_refused(toy: Toy, put: Put) -> None:
    model = assemble(toy, {"a": {}, "b": {"active": False}}, store=put(a=Q, b=Q))
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match=r"merged into layers\.0\.q_proj"):
        set_active(model, {"b": 1.0})
    model.unmerge_adapter()
    set_active(model, {"b": 1.0})


@pytest.mark.parametrize("weights", [{"x": 1.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_wrong_weights_change_nothing(weights: dict[str, float], toy: Toy, put: Put) -> None:
    model = assemble(toy, {"a": {}}, store=put(a=Q))
    with pytest.raises(UsageError):
        set_active(model, weights)
    assert active_adapters(model) == {"a": 1.0}


def test_the_time_of_a_switch_does_not_grow_with_inactive_adapters(toy: Toy) -> None:
    """Case 123: O(layers x active)."""

    def seconds(count: int) -> float:
        config = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
        entries = {f"x{i}": {"if_missing": "init", "config": config, "active": i == 0} for i in range(count)}
        model = assemble(seeded(Toy), entries)
        best = float("inf")
        for _ in range(30):
            start = time.perf_counter()
            set_active(model, {"x1": 1.0})
            set_active(model, {"x0": 1.0})
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(100) < 4 * seconds(2)


# Live.


def test_a_hundred_cycles_leave_nothing_behind(toy: Toy, put: Put) -> None:
    """Case 52: what comes with an adapter goes with it, copies of saved modules included."""
    fields = {**QV, "use_dora": True, "modules_to_save": ["head"], "trainable_token_indices": {"embed": [1, 2]}}
    model = assemble(toy, {"keep": {}}, store=put(keep=Q))
    expected = model(toy.example())
    config, tensors = made_by_peft(toy_again(), fields, 3)
    keys = list(model.state_dict())
    gone = []
    for _ in range(100):
        inject_adapter(model, "a", config, tensors)
        gone.extend(weakref.ref(parameter) for parameter in adapter_parameters(model, "a").values())
        eject_adapter(model, "a")
        assert list(model.state_dict()) == keys
    gc.collect()
    assert not [reference for reference in gone if reference() is not None]
    assert torch.equal(model(toy.example()), expected)
    assert list(model.peft_config) == ["keep"]


def toy_again() -> Toy:
    made: Toy = seeded(Toy)
    return made


def test_injecting_changes_no_other(toy: Toy, put: Put) -> None:
    """Case 23: values, flags, mode, dtype, device and activation of what is there stay."""
    model = assemble(
        toy, {"a": {"weight": 0.25}, "b": {"trainable": True}}, store=put(a=Q, b={**QV, "modules_to_save": ["head"]})
    )
    model.train()
    toy.layers[1].v_proj.weight.requires_grad_(True)
    before = {name: (value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    config, tensors = made_by_peft(
        toy_again(), {**QV, "target_modules": ["mlp.0", "v_proj"], "modules_to_save": ["head"]}, 5
    )
    inject_adapter(model, "c", config, tensors, trainable=True)
    after = dict(model.named_parameters())
    for name, (value, flag) in before.items():
        kept = after.get(name, after.get(name.replace("v_proj.weight", "v_proj.base_layer.weight")))
        kept = kept if kept is not None else after[name.replace("mlp.0.", "mlp.0.base_layer.")]
        assert torch.equal(kept, value)
        assert kept.requires_grad == flag, name
    assert active_adapters(model) == {"a": 0.25, "b": 1.0}
    assert trainable_adapters(model) == {"b", "c"}
    assert all(module.training for module in model.modules())


def test_ejecting_keeps_the_state_of_the_others(toy: Toy, put: Put) -> None:
    model = assemble(
        toy, {"a": {"weight": 0.5}, "b": {}, "c": {"active": False, "trainable": True}}, store=put(a=Q, b=QV, c=Q)
    )
    eject_adapter(model, "b")
    assert adapter_names(model) == ("a", "c")
    assert active_adapters(model) == {"a": 0.5}
    assert trainable_adapters(model) == {"c"}
    assert type(toy.layers[0].v_proj) is nn.Linear
    eject_adapter(model, "a")
    assert active_adapters(model) == {}
    model(toy.example())
    with pytest.raises(UsageError, match="the last one"):
        eject_adapter(model, "c")


def test_a_failed_injection_leaves_the_model_as_it_was(toy: Toy, put: Put) -> None:
    model = assemble(toy, {"a": {}}, store=put(a=Q))
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    config, tensors = made_by_peft(toy_again(), QV, 5)
    tensors.popitem()
    with pytest.raises(Exception, match="1 missing"):
        inject_adapter(model, "b", config, tensors)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    assert adapter_names(model) == ("a",)
    assert list(model.peft_config) == ["a"]


# The base.


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_the_fingerprint_is_of_the_base_alone(toy: Toy, put: Put) -> None:
    bare = base_fingerprint(toy)
    fields = {**QV, "modules_to_save": ["head"], "trainable_token_indices": {"embed": [1]}}
    model = assemble(toy, {"a": {}, "b": {}}, store=put(a=fields, b=Q))
    assert base_fingerprint(model) == base_fingerprint(torch.compile(model)) == bare
    assert record(model).base.fingerprint == bare
    assert base_fingerprint(copy.deepcopy(toy).to(torch.bfloat16)) == bare
    assert base_fingerprint(seeded(Toy, 1)) != bare
    assert base_fingerprint(seeded(Toy, 1)).partition("-")[0] == bare.partition("-")[0]
    with torch.device("meta"):
        empty = Toy()
    assert base_fingerprint(empty) == bare.partition("-")[0]


def test_a_record_survives_a_copy(toy: Toy, put: Put, tmp_path: Path) -> None:
    model = copy.deepcopy(assemble(toy, {"a": {}}, store=put(a=Q)))
    set_active(model, {"a": 0.5})
    assert model.base_model.model.layers[0].q_proj.scaling["a"] == 1.0
    assert toy.layers[0].q_proj.scaling["a"] == 2.0
