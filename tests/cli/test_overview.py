"""What `plan` and `report` count, against what is really there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_store import open_store

Run = Callable[[str], Any]


def test_a_plan_adds_up(run: Run, store: str) -> None:
    line = f"plan '+adapters=[a,b]' adapters.b.trainable=true store={store} base=demo output=json"
    four = run(f"{line} world_size=4").document
    assert {name: share["bytes"] for name, share in four["adapters"].items()} == {"a": 32768, "b": 65536}
    assert {name: share["local_bytes"] for name, share in four["adapters"].items()} == {"a": 8192, "b": 16384}
    assert four["optimizer_bytes"] == 2 * four["gradient_bytes"] == 2 * 16384
    kept = four["base"]["local_bytes"] + 8192 + 16384 + four["gradient_bytes"] + four["optimizer_bytes"]
    assert four["local_bytes"] == kept
    assert four["save_bytes"] == 32768 + 65536
    assert (four["adapters"]["b"]["trainable"], four["adapters"]["a"]["trainable"]) == (True, False)
    two = run(f"{line} world_size=4 replicas=2").document
    assert two["adapters"]["a"]["local_bytes"] == 16384
    idle = run(f"{line} world_size=4 adapters.a.active=false").document
    assert four["forward_bytes"] - idle["forward_bytes"] == 32768
    layer = run(f"{line} world_size=4 granularity=layer adapters.a.active=false").document
    assert layer["adapters"]["a"]["resident_bytes"] == 32768
    assert any("every adapter is gathered" in words for words in layer["warnings"])


def test_a_plan_counts_the_dtype_that_is_stored(run: Run, store: str) -> None:
    """A file of bfloat16 takes half, whatever a fresh adapter of its configuration would take."""
    opened = open_store(store)
    stored = opened.get("a")
    opened.put("half", {key: value.bfloat16() for key, value in stored.tensors.items()}, stored.config)
    line = f"plan '+adapters=[a,half]' store={store} base=demo world_size=2 output=json"
    shares = run(line).document["adapters"]
    assert (shares["a"]["bytes"], shares["half"]["bytes"]) == (32768, 16384)
    shares = run(f"{line} adapters.a.dtype=float16").document["adapters"]
    assert shares["a"]["bytes"] == 16384


def test_a_plan_takes_what_is_not_stored(run: Run, store: str, here: Path) -> None:
    assert run(f"export a@best ./a store={store}").code == 0
    fresh = "new: {if_missing: init, config: {r: 2, target_modules: [q_proj]}}"
    line = f"plan '+adapters={{x: {{source: ./a}}, {fresh}}}' base=demo world_size=2 output=json"
    shares = run(f"{line} store={store}").document["adapters"]
    assert shares["x"]["bytes"] == 32768
    assert shares["new"]["bytes"] == 4 * 2 * (64 + 64) * 4


def test_a_plan_is_what_the_shards_hold(run: Run, store: str) -> None:
    """One rank that shards holds what a plan for one rank says."""
    planned = run(f"plan '+adapters=[a,b]' world_size=1 store={store} base=demo output=json").document
    held = run(f"assemble '+adapters=[a,b]' shard=fsdp2 store={store} base=demo output=json").document["shard"]
    assert planned["units"] == held["units"]
    assert planned["base"]["local_bytes"] == held["ranks"][0]["base_bytes"]
    assert {name: one["local_bytes"] for name, one in planned["adapters"].items()} == held["ranks"][0]["adapters"]


def test_a_plan_for_people(run: Run) -> None:
    result = run("plan '+adapters=[a,b,c]' world_size=4 adapters.c.active=false")
    assert result.code == 0, result.err
    assert result.err.startswith("This is the embedded demo")
    rows = {line.split()[0]: line for line in result.out.splitlines()[1:6]}
    assert "32.8 kB" in rows["a"]
    assert rows["c"].split()[-2:] == ["-", "-"]
    assert "4 ranks, 17 units" in result.out
    assert all(len(line) <= 80 for line in result.out.splitlines() if not line.startswith("note: "))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "world_size="),
        ("world_size=0", "ranks"),
        ("world_size=4 replicas=3", "replicas"),
        ("world_size=4 granularity=rank", "layer"),
        ("world_size=4 optimizer=adam", "adamw"),
    ],
)
def test_a_plan_refuses_in_words(run: Run, store: str, words: str, said: str) -> None:
    assert "base=hf" in run(f"plan '+adapters=[a]' store={store} world_size=2").err
    result = run(f"plan '+adapters=[a]' store={store} base=demo {words}")
    assert result.code == 2
    assert said in result.err


def test_a_report_counts(run: Run, store: str) -> None:
    opened = open_store(store)
    again = opened.get("b")
    opened.put("copy", again.tensors, again.config)
    document = run(f"report store={store} output=json").document
    rows = {row["name"]: row for row in document["adapters"]}
    assert {name: row["versions"] for name, row in rows.items()} == {"a": 2, "b": 1, "copy": 1, "team/zh": 1}
    assert list(rows["a"]["tags"]) == ["best"]
    assert document["saved_bytes"] == rows["b"]["bytes"] == rows["copy"]["bytes"]
    assert document["contents"] == 4
    assert document["bytes"] - document["saved_bytes"] == document["stored_bytes"]
    assert document["bytes"] == sum(version.nbytes for version in opened.state().live())
    assert document["entries"] == len(opened.log())
    assert (document["needs"]["max_rank"], document["needs"]["setting"]) == (8, 8)
    assert document["needs"]["targets"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert rows["team/zh"]["rank"] == 4


def test_a_report_of_a_part(run: Run, store: str) -> None:
    run(f"assemble '+adapters=[a,b]' save.step=1 store={store} base=demo")
    part = run(f"report 'team/*' store={store} output=json").document
    assert [row["name"] for row in part["adapters"]] == ["team/zh"]
    assert part["needs"]["targets"] == ["q_proj", "v_proj"]
    assert part["snapshots"] == {"count": 0, "latest": None}
    whole = run(f"report needs=false store={store} output=json").document
    assert (whole["needs"], whole["adapters"][0]["rank"]) == (None, None)
    assert whole["snapshots"]["count"] == 1
    assert {row["name"]: row["snapshots"] for row in whole["adapters"]} == {"a": 1, "b": 1, "team/zh": 0}
    assert "no adapter matches" in run(f"report 'nope*' store={store}").out


def test_a_report_for_people(run: Run, store: str) -> None:
    opened = open_store(store)
    stored = opened.get("a")
    wide = {key: torch.zeros(12, 64) if "lora_A" in key else torch.ones(64, 12) for key in stored.tensors}
    opened.put("wide", wide, {**stored.config.raw, "r": 12})
    out = run(f"report store={store}").out
    assert "4 adapters, 5 versions" in out
    assert "--max-lora-rank 16 (the highest rank is 12)" in out
    assert "k_proj, o_proj, q_proj, v_proj" in out
