"""assemble(): dtypes, devices, fresh adapters, what is added to, what does not move, and what it costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multilora_store.assembly import assemble
from multilora_store.assembly.bridge import (
    active_adapters,
    adapter_names,
    adapter_parameters,
    innermost,
    record,
    set_active,
    set_trainable,
    trainable_adapters,
)
from multilora_store.assembly.resolve import resolve_manifest
from multilora_store.errors import ConfigError, ManifestError, UnsupportedError
from multilora_store.manifest import Lock
from multilora_store.storage import Store
from tests.assembly.conftest import Convolutions, Mixture, Put, Toy, made_by_peft, seeded
from tests.assembly.test_equals_peft import QV, Q

HEAD = {**QV, "modules_to_save": ["head"]}


def fresh(**fields: Any) -> dict[str, Any]:
    return {"if_missing": "init", "config": {"r": 4, "target_modules": ["q_proj", "v_proj"], **fields}}


def put_as(store: Store, name: str, dtype: torch.dtype, fields: Any, seed: int = 1) -> None:
    config, tensors = made_by_peft(seeded(Toy), fields, seed)
    store.put(name, {key: value.to(dtype) for key, value in tensors.items()}, config)


# Dtype and device.


def test_dtypes_are_as_stored_for_every_adapter_alike(toy: Toy, store: Store) -> None:
    """Case 76: the same rule whatever the order; nobody's dtype depends on who came first."""
    put_as(store, "a", torch.float16, QV)
    put_as(store, "b", torch.bfloat16, QV)
    put_as(store, "c", torch.float32, QV)
    for names in ("abc", "cba"):
        model = assemble(seeded(Toy), {name: {} for name in names}, store=store)
        for name, dtype in {"a": torch.float16, "b": torch.bfloat16, "c": torch.float32}.items():
            assert {value.dtype for value in adapter_parameters(model, name).values()} == {dtype}
        model(toy.example())


def test_fields_of_a_newer_peft_are_kept_and_told_for_what_is_stored_and_refused_for_what_is_new(store: Store) -> None:
    """A stored adapter is what its tensors are; one that is yet to be made would lose what the field meant."""
    config, tensors = made_by_peft(seeded(Toy), QV, 1)
    store.put("a", tensors, config.replace(hyper_rank_schedule="cosine"))
    model = assemble(seeded(Toy), {"a": {}}, store=store)
    assert any("hyper_rank_schedule" in note for note in record(model).notes)
    assert store.get("a").config.raw["hyper_rank_schedule"] == "cosine"
    with pytest.raises(ConfigError, match="has no field 'hyper_rank_schedule'"):
        assemble(seeded(Toy), {"b": fresh(hyper_rank_schedule="cosine")})


def test_one_dtype_for_the_set_or_one_per_entry(toy: Toy, store: Store) -> None:
    """Case 75: a uniform dtype before the wrap; the file keeps what it has."""
    put_as(store, "a", torch.float32, HEAD)
    put_as(store, "b", torch.float16, QV)
    base = toy.to(torch.bfloat16)
    model = assemble(base, {"a": {}, "b": {}}, store=store, dtype="bfloat16")
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in store.get("a").tensors.values()} == {torch.float32}
    model(toy.example())
    entries = {"a": {"dtype": "float16"}, "b": {}}
    model = assemble(seeded(Toy), entries, store=store)
    assert {value.dtype for value in adapter_parameters(model, "a").values()} == {torch.float16}
    with pytest.raises(ManifestError, match="unknown dtype 'int8'"):
        assemble(seeded(Toy), {"a": {}}, store=store, dtype="int8")


def test_a_saved_module_runs_in_the_dtype_of_the_base(toy: Toy, store: Store) -> None:
    """A head stored in float32 replaces one of a bfloat16 base, whose inputs it gets; the record tells."""
    put_as(store, "a", torch.float32, HEAD)
    model = assemble(toy.to(torch.bfloat16), {"a": {}}, store=store)
    dtypes = {key: value.dtype for key, value in adapter_parameters(model, "a").items()}
    assert dtypes["base_model.model.head.weight"] == torch.bfloat16
    assert dtypes["base_model.model.layers.0.q_proj.lora_A.weight"] == torch.float32
    assert any("head.weight is stored as torch.float32" in note for note in record(model).notes)
    assert model(toy.example()).dtype == torch.bfloat16


def test_structure_without_bytes(store: Store) -> None:
    put_as(store, "a", torch.float32, HEAD)
    with torch.device("meta"):
        base = Toy()
    model = assemble(base, {"a": {}, "new": fresh()}, store=store, device="meta")
    assert all(value.is_meta for value in model.parameters())
    assert {key: tuple(value.shape) for key, value in adapter_parameters(model, "a").items()} == {
        key: info.shape for key, info in store.get("a").infos.items()
    }


def test_adapters_are_real_on_an_empty_base(store: Store) -> None:
    """Case 11, 122: the base on meta on some ranks, the adapters real everywhere, all on one device in one dtype."""
    put_as(store, "reference", torch.float32, QV)
    put_as(store, "policy", torch.float32, QV, seed=2)
    with torch.device("meta"):
        base = Toy()
    model = assemble(base, {"reference": {}, "policy": {}, "new": fresh()}, store=store)
    kinds = {(v.device.type, v.dtype) for n in adapter_names(model) for v in adapter_parameters(model, n).values()}
    assert kinds == {("cpu", torch.float32)}
    with torch.device("meta"):
        base = Toy()
    with pytest.raises(UnsupportedError, match="the base lies on meta"):
        assemble(base, {"new": fresh(use_dora=True)})


# What does not move.


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_random_state_do_not_move(training: bool, toy: Toy, put: Put) -> None:
    toy.train(training)
    store = put(a={**HEAD, "lora_dropout": 0.1}, b={**QV, "use_dora": True, "target_modules": ["embed", "mlp.0"]})
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    model = assemble(toy, {"a": {}, "b": {}, "new": fresh(lora_dropout=0.2)}, store=store)
    assert torch.equal(torch.get_rng_state(), expected)
    assert {module.training for module in model.modules()} == {training}


@pytest.mark.parametrize("whole", [True, False], ids=["the PeftModel", "the base inside"])
def test_a_model_with_adapters_is_added_to(whole: bool, toy: Toy, put: Put) -> None:
    """Case 23: nothing is nested, and the one that is there keeps its flags and its place."""
    store = put(a=Q, b=HEAD, c=QV)
    first = assemble(toy, {"a": {"trainable": True, "weight": 0.5}}, store=store)
    given = first if whole else innermost(first)
    second = assemble(given, {"b": {"active": False}, "c": {"trainable": True}}, store=store)
    assert second is first
    assert adapter_names(first) == ("a", "b", "c")
    assert active_adapters(first) == {"a": 0.5, "c": 1.0}
    assert trainable_adapters(first) == {"a", "c"}
    at_once = assemble(
        seeded(Toy),
        {"a": {"trainable": True, "weight": 0.5}, "b": {"active": False}, "c": {"trainable": True}},
        store=store,
    )
    assert list(at_once.state_dict()) == list(first.state_dict())
    assert torch.equal(at_once(toy.example()), first(toy.example()))


def test_states_come_from_the_manifest(toy: Toy, put: Put) -> None:
    """Case 84: active and frozen is a state like any other."""
    entries = {"a": {"trainable": False}, "b": {"active": False, "trainable": True}, "c": {"weight": 0.25}}
    model = assemble(toy, entries, store=put(a=Q, b=HEAD, c=QV))
    assert active_adapters(model) == {"a": 1.0, "c": 0.25}
    assert trainable_adapters(model) == {"b"}
    assert {id(p) for p in model.parameters() if p.requires_grad} == {
        id(p) for p in adapter_parameters(model, "b").values()
    }
    assert [model.peft_config[name].inference_mode for name in "abc"] == [True, False, True]


def test_training_writes_into_no_file(toy: Toy, put: Put) -> None:
    store = put(a=Q)
    before = {key: value.clone() for key, value in store.get("a").tensors.items()}
    model = assemble(toy, {"a": {"trainable": True}}, store=store)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(toy.example()).sum().backward()
    optimizer.step()
    changed = adapter_parameters(model, "a")
    assert any(not torch.equal(changed[key], before[key]) for key in before)
    assert all(torch.equal(store.get("a").tensors[key], before[key]) for key in before)


def test_a_lock_gives_the_same_set(toy: Toy, put: Put) -> None:
    store = put(a=Q, b=QV)
    lock = Lock.from_json(resolve_manifest({"a": {"weight": 0.5}, "b": {}}, store).to_json())
    store.put("a", *reversed(made_by_peft(toy, {**Q, "r": 1}, 9)))  # a newer version, which the lock does not name
    model = assemble(toy, lock, store=store)
    assert record(model).versions["a"].id == lock.entries["a"].version
    assert model.peft_config["a"].r == 4


def test_a_folder_that_is_in_no_store(toy: Toy, put: Put) -> None:
    folder = put(a=Q).path("a")
    model = assemble(toy, {"x": str(folder)})
    assert adapter_names(model) == ("x",)
    assert record(model).versions["x"] is None


# Fresh adapters.


def test_fresh_weights_depend_on_seed_adapter_and_tensor_alone() -> None:
    """The same on every rank and beside whatever else: not the order, not the global random state."""
    torch.manual_seed(1)
    alone = assemble(seeded(Toy), {"x": fresh()}, seed=3)
    torch.manual_seed(2)
    crowd = assemble(seeded(Toy, 1), {"w": fresh(r=2), "x": fresh(), "z": fresh()}, seed=3)
    mine, theirs = adapter_parameters(alone, "x"), adapter_parameters(crowd, "x")
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    other = adapter_parameters(crowd, "z")
    reseeded = adapter_parameters(assemble(seeded(Toy), {"x": fresh()}, seed=4), "x")
    factors = [key for key in mine if "lora_A" in key]
    assert not any(torch.equal(mine[key], other[key]) or torch.equal(mine[key], reseeded[key]) for key in factors)
    assert not torch.equal(mine[factors[0]], mine[factors[1]])


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_fresh_weights_have_peft_distribution(init: bool | str) -> None:
    base = nn.Sequential(nn.Linear(400, 300))
    model = assemble(base, {"x": fresh(r=16, target_modules=["0"], init_lora_weights=init, lora_bias=init is False)})
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    reference = get_peft_model(
        nn.Sequential(nn.Linear(400, 300)),
        LoraConfig(r=16, target_modules=["0"], init_lora_weights=init, lora_bias=init is False),
    )
    theirs = adapter_parameters(reference, "default")
    for key, value in adapter_parameters(model, "x").items():
        other = theirs[key].detach()
        assert value.shape == other.shape
        assert value.dtype == other.dtype
        assert abs(value.mean().item() - other.mean().item()) < 0.2 * other.std().item() + 1e-9, key
        assert math.isclose(value.std().item(), other.std().item(), rel_tol=0.15, abs_tol=1e-9), key
        assert math.isclose(value.abs().max().item(), other.abs().max().item(), rel_tol=0.4, abs_tol=1e-9), key


HARMLESS = [
    {},
    {"use_dora": True},
    {"modules_to_save": ["head"]},
    {"target_modules": ["embed"]},
    {"trainable_token_indices": {"embed": [1]}},
]


@pytest.mark.parametrize("fields", HARMLESS)
def test_a_fresh_adapter_changes_nothing_yet(fields: dict[str, Any], toy: Toy) -> None:
    expected = toy(toy.example())
    model = assemble(toy, {"x": fresh(**fields), "z": fresh(r=2)})
    assert set(adapter_names(model)) == set(active_adapters(model))
    torch.testing.assert_close(model(toy.example()), expected)


def test_fresh_on_convolutions_and_experts() -> None:
    for kind, fields in ((Convolutions, {"target_modules": ["conv1", "conv2", "conv3"]}), (Mixture, EXPERTS)):
        base = seeded(kind)
        expected = base(base.example())
        model = assemble(base, {"x": fresh(**fields)})
        torch.testing.assert_close(model(base.example()), expected)


EXPERTS = {"target_modules": [], "target_parameters": ["experts.down_proj"]}


def test_tied_ends_are_told(store: Store) -> None:
    """Case 100: an adapter on one or both ends of a tied pair; the two drift apart."""

    class Tied(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

    one = assemble(seeded(Tied), {"x": fresh(target_modules=["q_proj", "head"])})
    both = assemble(seeded(Tied), {"x": fresh(modules_to_save=["embed", "head"])})
    neither = assemble(seeded(Tied), {"x": fresh()})
    notes = [[note for note in record(model).notes if "one tensor" in note] for model in (one, both, neither)]
    assert [len(found) for found in notes] == [1, 1, 0]
    assert "adapter 'x' changes head;" in notes[0][0]
    assert "adapter 'x' changes embed, head;" in notes[1][0]


# The four guards of the article on several adapters and FSDP.


@pytest.fixture
def net() -> Any:
    base = seeded(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
    entry = fresh(r=4, lora_alpha=8, target_modules=["0", "1"])
    return assemble(base, {"a": {**entry, "trainable": True}, "b": {**entry, "active": False}})


def test_guard_adapters_coexist(net: Any) -> None:
    assert adapter_names(net) == ("a", "b")
    assert all(len(adapter_parameters(net, name)) == 4 for name in "ab")


def test_guard_switching_changes_the_active_one(net: Any) -> None:
    set_active(net, {"b": 1.0})
    assert active_adapters(net) == {"b": 1.0}
    assert [layer.active_adapters for layer in innermost(net)] == [["b"], ["b"]]


def test_guard_only_the_target_is_trainable(net: Any) -> None:
    set_trainable(net, ["b"])
    trainable = {id(p): p.numel() for p in net.parameters() if p.requires_grad}
    assert set(trainable) == {id(p) for p in adapter_parameters(net, "b").values()}
    assert sum(trainable.values()) == (4 * 16 + 16 * 4) + (4 * 16 + 4 * 4) == 208


def test_guard_the_others_are_frozen(net: Any) -> None:
    set_trainable(net, ["b"])
    assert not any(p.requires_grad for p in adapter_parameters(net, "a").values())
    assert not any(p.requires_grad for name, p in net.named_parameters() if "base_layer" in name)


# Cost.


def test_cost_is_linear_in_adapters(tmp_path: Path) -> None:
    """Case 54: each added adapter costs what the last one cost. Counted in calls, which no busy machine changes."""
    import cProfile
    import pstats

    def calls(count: int) -> int:
        base = seeded(Toy)
        entries = {f"x{index}": fresh() for index in range(count)}
        profile = cProfile.Profile()
        profile.enable()
        assemble(base, entries)
        profile.disable()
        return int(pstats.Stats(profile).total_calls)

    calls(1)
    one, twenty, forty = calls(1), calls(20), calls(40)
    assert forty - twenty < 1.1 * 20 / 19 * (twenty - one)
