"""Arguments of another type than the documented one: an error of ours that says what would do, and no change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import CONFIG, tensors

from multilora_store import export_adapter, import_peft
from multilora_store.errors import UsageError
from multilora_store.storage import Store, apply_retention, open_store, read_peft_dir, repair, restore_state, sync

GOOD = tensors(1, layers=1, width=2)
CALLS: dict[str, Callable[[Any], Any]] = {
    "open_store(None)": lambda _: open_store(None),  # type: ignore[arg-type]
    "open_store(3)": lambda _: open_store(3),  # type: ignore[arg-type]
    "open_store(bytes)": lambda _: open_store(b"x"),  # type: ignore[arg-type]
    "get(3)": lambda s: s.get(3),
    "get(None)": lambda s: s.get(None),
    "resolve(None)": lambda s: s.resolve(None),
    "path([])": lambda s: s.path([]),
    "snapshot(None)": lambda s: s.snapshot(None),
    "snapshot(3)": lambda s: s.snapshot(3),
    "drop_snapshot(None)": lambda s: s.drop_snapshot(None),
    "read_snapshot_file(id)": lambda s: s.read_snapshot_file("s1", "x"),
    "snapshot_files(id)": lambda s: s.snapshot_files("s1"),
    "stage_snapshot_file(None)": lambda s: s.stage_snapshot_file(None, "x", b""),
    "versions(3)": lambda s: s.versions(3),
    "tags(None)": lambda s: s.tags(None),
    "tag(3)": lambda s: s.tag(3, "x"),
    "tag(a, 3)": lambda s: s.tag("a", 3),
    "untag([])": lambda s: s.untag("a", []),
    "delete(None)": lambda s: s.delete(None),
    "delete_all(None)": lambda s: s.delete_all(None),
    "verify(3)": lambda s: s.verify(3),
    "gc(3)": lambda s: s.gc(grace=3),
    "put(None)": lambda s: s.put(None, GOOD, CONFIG),
    "tensors None": lambda s: s.put("a", None, CONFIG),
    "tensors a list": lambda s: s.put("a", [1], CONFIG),
    "a tensor's name is no string": lambda s: s.put("a", {3: torch.ones(1)}, CONFIG),
    "a tensor is none": lambda s: s.put("a", {"x": 3}, CONFIG),
    "config None": lambda s: s.put("a", GOOD, None),
    "config 3": lambda s: s.put("a", GOOD, 3),
    "metadata a list": lambda s: s.put("a", GOOD, CONFIG, metadata=[1]),
    "recipe 3": lambda s: s.put("a", GOOD, CONFIG, recipe=3),
    "tags 3": lambda s: s.put("a", GOOD, CONFIG, tags=3),
    "tags a string": lambda s: s.put("a", GOOD, CONFIG, tags="best"),
    "parents a string": lambda s: s.put("a", GOOD, CONFIG, parents="a"),
    "files 3": lambda s: s.put("a", GOOD, CONFIG, files=3),
    "commit(3)": lambda s: s.commit(3),
    "commit([3])": lambda s: s.commit([3]),
    "commit(snapshot=id)": lambda s: s.commit([], snapshot="s1"),
    "commit(tags=3)": lambda s: s.commit([], tags=3),
    "stage_many([3])": lambda s: s.stage_many([3]),
    "sync(None)": lambda s: sync(None, s),  # type: ignore[arg-type]
    "sync(include=None)": lambda s: sync(s, "memory://x", include=None),  # type: ignore[arg-type]
    "sync(jobs=x)": lambda s: sync(s, "memory://x", jobs="x"),  # type: ignore[arg-type]
    "import_peft(3)": lambda s: import_peft(s, 3),  # type: ignore[arg-type]
    "read_peft_dir(None)": lambda _: read_peft_dir(None),  # type: ignore[arg-type]
    "export_adapter(None)": lambda s: export_adapter(s, None, "out"),  # type: ignore[arg-type]
    "export_adapter(to None)": lambda s: export_adapter(s, "a", None),  # type: ignore[arg-type]
    "repair(from a URL)": lambda s: repair(s, from_="memory://x"),  # type: ignore[arg-type]
    "restore_state(None)": lambda s: restore_state(s, None),  # type: ignore[arg-type]
    "restore_state(text)": lambda s: restore_state(s, "yesterday"),  # type: ignore[arg-type]
    "apply_retention(None)": lambda s: apply_retention(s, None),  # type: ignore[arg-type]
    "apply_retention(3)": lambda s: apply_retention(s, {"keep_last": 3}),  # type: ignore[dict-item]
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(tmp_path_factory.mktemp("store"))
    store.put("a", GOOD, CONFIG)
    return store


@pytest.mark.parametrize("call", CALLS)
def test_another_type_is_refused_in_words(call: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        CALLS[call](store)
    assert caught.value.what
    assert caught.value.remedy
    assert store.state().seq == 1
