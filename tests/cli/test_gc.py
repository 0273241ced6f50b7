"""`gc` with policies: what would go and why, then what went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from multilora_store.storage import open_store

Run = Callable[[str], Any]


def test_policies_decide_and_every_folder_has_its_reason(run: Run, here: Path) -> None:
    store = open_store(here / "s")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    for value in range(4):
        pair = {"lora_A": torch.full((1, 4), float(value)), "lora_B": torch.ones(4, 1)}
        store.put("a", {f"base_model.model.q.{key}.weight": tensor for key, tensor in pair.items()}, config)
    store.tag(str(store.versions("a")[0]), "best")
    words = "gc store.url=s grace_hours=0 policies=[keep_last,keep_tagged] policies.keep_last.count=2"
    planned = run(f"{words} dry_run=true")
    gone = store.versions("a")[1]
    assert planned.out.splitlines()[0] == f"delete {gone}: no policy keeps it"
    assert sum(line.startswith("keep adapters/a/") for line in planned.out.splitlines()) == 4
    assert len(store.versions("a")) == 4
    done = run(f"{words} output=json").document
    assert done["retention"]["deleted"] == [str(gone)]
    assert [folder["path"] for folder in done["freed"]] == [gone.directory]
    assert len(store.versions("a")) == 3
    wrong = run("gc store.url=s policies=[keep_lst]")
    assert wrong.code == 2
    assert "keep_last" in wrong.err
