"""What is no store, no model, no optimizer or no number is refused in words by every public call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import multilora_store as mls
from multilora_store.assembly.bases import demo_base
from multilora_store.errors import MultiLoRAError

FRESH = {"if_missing": "init", "trainable": True, "config": {"r": 2, "target_modules": ["q_proj"]}}


@pytest.fixture(scope="module")
def model() -> Any:
    return mls.assemble(demo_base(layers=1), {"a": FRESH, "b": FRESH})


@pytest.fixture(scope="module")
def store(model: Any, tmp_path_factory: pytest.TempPathFactory) -> mls.Store:
    store = mls.open_store(tmp_path_factory.mktemp("arguments") / "store")
    mls.save(model, store, step=1)
    return store


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "plan(world_size)": lambda model, store: mls.plan(model, world_size="x"),
    "plan(replicas)": lambda model, store: mls.plan(model, world_size=2, replicas=None),
    "save(model)": lambda model, store: mls.save("m", store),
    "save(store)": lambda model, store: mls.save(model, None),
    "save(optimizer)": lambda model, store: mls.save(model, store, optimizer="x"),
    "save(step)": lambda model, store: mls.save(model, store, step="x"),
    "restore(store)": lambda model, store: mls.restore(model, 3),
    "restore(snapshot)": lambda model, store: mls.restore(model, store, snapshot=None),
    "restore(optimizer)": lambda model, store: mls.restore(model, store, optimizer=3),
    "merge(weights)": lambda model, store: mls.merge(store, ["a"], into="c"),
    "merge(weight)": lambda model, store: mls.merge(store, {"a": "x"}, into="c"),
    "merge(store)": lambda model, store: mls.merge(None, {"a": 1.0}, into="c"),
    "merge(into)": lambda model, store: mls.merge(store, {"a": 1.0}, into=3),
    "activate(weights)": lambda model, store: mls.activate(model, None),
    "activate(trainable)": lambda model, store: mls.activate(model, ["a"], trainable=3),
    "attach(name)": lambda model, store: mls.attach(model, 3, config=FRESH["config"]),
    "attach(source)": lambda model, store: mls.attach(model, "z", source=3, store=store),
    "attach(store)": lambda model, store: mls.attach(model, "z", source="a", store=3),
    "detach(name)": lambda model, store: mls.detach(model, None),
    "audit(model)": lambda model, store: mls.audit(None),
    "audit(optimizer)": lambda model, store: mls.audit(model, "x"),
    "shard(model)": lambda model, store: mls.shard(None),
    "sync": lambda model, store: mls.sync(None, None),
    "sync(include)": lambda model, store: mls.sync(store, store, include=3),
    "open_store": lambda model, store: mls.open_store(None),
    "get": lambda model, store: store.get(3),
    "put(config)": lambda model, store: store.put("a", {}, None),
    "tag": lambda model, store: store.tag("a", None),
    "assemble(base)": lambda model, store: mls.assemble("base", {"a": "a"}),
    "assemble(store)": lambda model, store: mls.assemble(demo_base(layers=1), {"a": "a"}, store=3),
    "assemble(steps)": lambda model, store: mls.assemble(demo_base(layers=1), {"c": FRESH}, steps=3),
    "assemble(assembler)": lambda model, store: mls.assemble(demo_base(layers=1), {"c": FRESH}, assembler=3),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_a_wrong_type_is_refused_in_words(call: str, model: Any, store: mls.Store) -> None:
    before = len(store.log())
    with pytest.raises(MultiLoRAError) as caught:
        CALLS[call](model, store)
    assert caught.value.what
    assert len(store.log()) == before


def test_a_url_stands_for_its_store(model: Any, store: mls.Store, tmp_path: Path) -> None:
    """Wherever a store is taken, not only at assembly."""
    url = str(tmp_path / "other")
    saved = mls.save(model, url, step=3)
    assert mls.restore(model, url).id == saved.id
    merged = mls.merge(url, {"a": 1.0, "b": 1.0}, into="ab")
    assert merged.version is not None
    assert mls.open_store(url).names() == ["a", "ab", "b"]
