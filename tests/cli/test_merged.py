"""Sets merged on their way: before the wrap, and into the files of a base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from multilora_store import open_store
from multilora_store.assembly import assemble
from multilora_store.assembly.bases import demo_base
from multilora_store.assembly.bridge import adapter_parameters
from multilora_store.cli.merged import MergeStep
from multilora_store.distributed import save

Run = Callable[[str], Any]
SET = "'+adapters=[a,b]' adapters.a.weight=0.7 adapters.b.weight=0.3"


def test_the_set_is_merged_before_the_wrap(run: Run, store: str, here: Path) -> None:
    """The model carries one adapter, with the bytes that a merge in the store has."""
    choice = "merge=ties merge.into=ab merge.params.density=0.3 merge.rank=16"
    line = f"assemble {SET} {choice} shard=fsdp2 export=./out store={store} base=demo output=json"
    document = run(line).document
    assert [(row["name"], row["rank"], row["active"], row["source"]) for row in document["adapters"]] == [
        ("ab", 16, True, "merge")
    ]
    assert list(document["shard"]["ranks"][0]["adapters"]) == ["ab"]
    assert document["merge"]["weights"] == {"a": 0.7, "b": 0.3}
    assert document["merge"]["recipe"]["params"]["density"] == 0.3
    assert run(f"merge {SET} {choice} store={store}").code == 0
    stored = open_store(store).get("ab")
    exported = load_file(here / "out" / "ab" / "adapter_model.safetensors")
    assert exported.keys() == stored.tensors.keys()
    assert all(torch.equal(exported[key], value) for key, value in stored.tensors.items())


def test_a_merged_set_is_said_and_saved(run: Run, store: str) -> None:
    line = "assemble '+adapters=[a,b,team/zh]' adapters.b.active=false merge=linear merge.into=ac save.step=4"
    result = run(f"{line} store={store} base=demo")
    assert result.code == 0, result.err
    assert "ac is a (1), team/zh (1), merged by linear" in result.out
    assert list(open_store(store).snapshot().adapters) == ["ac"]
    assert run("assemble '+adapters=[a,b]' merge=linear merge.into=ab").code == 0  # the demo too


def test_a_merge_saved_from_the_model_is_told_as_one_in_the_store(run: Run, store: str) -> None:
    choice = "merge=dare_linear merge.into=ab merge.seed=3"
    assert run(f"assemble {SET} {choice} save=true store={store} base=demo").code == 0
    saved = open_store(store).get("ab").version
    assert run(f"merge {SET} merge.if_exists=version {choice} store={store}").code == 0
    merged = open_store(store).get("ab").version
    assert saved.id == merged.id  # the same content
    assert saved.seq < merged.seq
    assert (saved.parents, saved.recipe) == (merged.parents, merged.recipe)
    assert saved.metadata["merge_report"] == merged.metadata["merge_report"]


def test_what_was_trained_after_the_merge_claims_no_recipe(run: Run, store: str) -> None:
    choice = {"strategy": "linear", "into": "ab"}
    opened = open_store(store)
    model = assemble(demo_base(), {"a": "a", "b": "b"}, store=opened, steps={"after:read": MergeStep(choice=choice)})
    for parameter in adapter_parameters(model, "ab").values():
        parameter.data.mul_(2.0)
    save(model, opened)
    version = opened.get("ab").version
    parents = sorted(f"{name}@{opened.get(name).version.id}" for name in ("a", "b"))
    assert (version.recipe, sorted(version.parents)) == (None, parents)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("merge=ties", "merge.into="),
        ("merge=ties merge.into=a/../b", "name"),
        ("merge=ties merge.into=ab merge.params.density=7", "density"),
        ("merge=nope merge.into=ab", "nope"),
        ("merge=linear merge.into=ab adapters.a.active=false adapters.b.active=false", "no adapter of the set"),
        ("merge=linear merge.into=ab plugins=[cast_adapters] steps.after_read=cast_to_bfloat16", "steps.before_check"),
        (
            "merge=linear merge.into=ab '+adapters={nn: {if_missing: init, config: {target_modules: [q_proj]}}}'",
            "created fresh",
        ),
    ],
)
def test_a_merge_on_the_way_is_refused_in_words(run: Run, store: str, words: str, said: str) -> None:
    result = run(f"assemble '+adapters=[a,b]' {words} store={store} base=demo")
    assert result.code in {1, 2}
    assert result.err.startswith("error: ")
    assert said in result.err


def test_an_adapter_is_merged_into_its_base(run: Run, store: str, base_folder: Path, here: Path) -> None:
    before = (base_folder / "model.safetensors").read_bytes()
    line = f"export a@best ./merged kind=merged base=hf base.path={base_folder} store={store}"
    document = run(f"{line} output=json").document
    assert document["weights"] == {"a": 1.0}
    assert len(document["changed"]) == 8
    model = assemble(demo_base(), {"a": "a@best"}, store=open_store(store)).merge_and_unload()
    written = load_file(here / "merged" / "model.safetensors")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(written[key], value, rtol=1e-6, atol=1e-7)
    assert (base_folder / "model.safetensors").read_bytes() == before
    assert json.loads((here / "merged" / "multilora_merge.json").read_text())["adapters"][0]["name"] == "a"
    assert run(line).code == 1  # it is there
    assert "8 tensors of the base changed" in run(line.replace("./merged", "./again")).out


def test_a_set_is_merged_into_its_base(run: Run, store: str, base_folder: Path, here: Path) -> None:
    """With the weights of the manifest, from a store and from a folder, what is not active left out."""
    assert run(f"export team/zh ./zh store={store}").code == 0
    entries = "{a: {source: a@best, weight: 0.7}, zh: {source: ./zh, weight: -0.4}, b: {active: false}}"
    line = f"export '+adapters={entries}' target=./merged kind=merged base=hf base.path={base_folder} store={store}"
    result = run(f"{line} output=json")
    assert result.code == 0, result.err
    assert result.document["weights"] == {"a": 0.7, "zh": -0.4}
    beside = {"a": {"source": "a@best", "weight": 0.7}, "zh": {"source": "team/zh", "weight": -0.4}}
    model = assemble(demo_base(), beside, store=open_store(store))
    bare = demo_base()
    bare.load_state_dict(load_file(here / "merged" / "model.safetensors"))
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(bare(ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a ./out kind=whole", "merged"),
        ("a ./out kind=merged", "base=hf"),
        ("a ./out kind=merged base=demo", "base=hf"),
        ("a memory://out kind=merged base=hf base.path=./b", "local folder"),
        ("target=./out kind=merged base=hf base.path=./b", "one adapter or a set"),
        ("a ./out '+adapters=[b]' kind=merged base=hf base.path=./b", "one adapter or a set"),
        ("a ./out kind=merged base=hf base.path=./b params.teid=refuse", "tied"),
        ("a ./out kind=merged base=hf base.path=./b exporter=kohya", "exporter"),
        ("a ./out base=hf base.path=./b", "kind=merged"),
        ("target=./out", "export NAME TARGET"),
    ],
)
def test_a_base_merge_is_refused_in_words(run: Run, store: str, words: str, said: str, here: Path) -> None:
    result = run(f"export {words} store={store}")
    assert result.code == 2
    assert said in result.err
    assert list(here.iterdir()) == []
