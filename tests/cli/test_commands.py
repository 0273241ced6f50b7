"""Each command on a real store: what it does, prints, and says as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multilora_store import open_store

Run = Callable[[str], Any]


def test_list(run: Run, store: str) -> None:
    rows = run(f"list store={store} output=json").document["adapters"]
    assert [(row["name"], row["versions"], sorted(row["tags"])) for row in rows] == [
        ("a", 2, ["best"]),
        ("b", 1, []),
        ("team/zh", 1, []),
    ]
    assert rows[0]["latest"]["step"] == 2
    assert len(run(f"list 'team/*' store={store}").out.splitlines()) == 2
    assert "no adapter matches" in run(f"list 'nope*' store={store}").out


def test_show(run: Run, store: str) -> None:
    document = run(f"show a@best tensors=true store={store} output=json").document
    assert (document["adapter"]["step"], document["config"]["r"], document["parameters"]) == (1, 8, 8192)
    assert len(document["tensors"]) == 16
    assert [item["step"] for item in document["versions"]] == [1, 2]
    words = run(f"show a@best tensors=true store={store}").out
    assert "best" in words
    assert "layers.3.self_attn.v_proj.lora_B" in words
    assert "中文" in run(f"show team/zh store={store}").out


def test_log(run: Run, store: str) -> None:
    document = run(f"log store={store} output=json").document
    assert [entry["seq"] for entry in document["entries"]] == sorted(
        (entry["seq"] for entry in document["entries"]), reverse=True
    )
    assert document["entries"][0]["changes"][0]["name"] == "team/zh"
    assert "put a@v" in run(f"log a store={store}").out
    assert "older entries" in run(f"log limit=1 store={store}").out
    assert len(run(f"log a limit=0 store={store} output=json").document["entries"]) == 2


def test_tag_and_untag(run: Run, store: str) -> None:
    assert run(f"tag a@latest prod store={store}").code == 0
    tags = run(f"list store={store} output=json").document["adapters"][0]["tags"]
    assert set(tags) == {"best", "prod"}
    assert tags["best"] != tags["prod"]
    assert run(f"tag a prod remove=true store={store}").code == 0
    assert run(f"show a@prod store={store}").code == 1
    assert run(f"tag a v0123456789abcdef store={store}").code == 2


def test_delete(run: Run, store: str) -> None:
    first = run(f"show a store={store} output=json").document["versions"][0]["version"]
    assert run(f"delete a@{first} store={store}").code == 1  # the tag `best` names it
    assert run(f"tag a best remove=true store={store}").code == 0
    assert run(f"delete a@{first} store={store}").code == 0
    assert run(f"show a@{first} store={store}").code == 1
    assert run(f"delete b store={store} output=json").document["deleted"]["versions"]
    assert run(f"delete store={store}").code == 2
    assert run(f"delete nope store={store}").code == 1


def test_delete_takes_one_version_or_all(run: Run, store: str) -> None:
    assert "a keeps 1 other version" in run(f"delete a store={store}").out
    assert run(f"delete a all=true store={store}").code == 1  # the tag `best` names the other
    assert run(f"tag a best remove=true store={store}").code == 0
    run(f"import {run(f'path b store={store}').out.strip()} a store={store}")
    entries = len(run(f"log limit=0 store={store} output=json").document["entries"])
    assert len(run(f"delete a all=true store={store} output=json").document["deleted"]["versions"]) == 2
    assert len(run(f"log limit=0 store={store} output=json").document["entries"]) == entries + 1
    assert run(f"show a store={store}").code == 1
    assert run(f"delete b@latest all=true store={store}").code == 2
    assert run(f"delete snapshot=x all=true store={store}").code == 2


def test_path_prints_the_folder_alone(run: Run, store: str) -> None:
    result = run(f"path a@best store={store}")
    folder = Path(result.out.strip())
    assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


def test_export_and_import_keep_the_version(run: Run, store: str, here: Path) -> None:
    assert run(f"export a@best ./out/a store={store}").code == 0
    assert run("import ./out/a copy store=./other tags=[first]").code == 0
    one = run(f"show a@best store={store} output=json").document["adapter"]
    two = run("show copy@first store=./other output=json").document["adapter"]
    assert one["digest"] == two["digest"]
    document = run(f"export 'team/*' ./many store={store} output=json").document
    assert [item["ref"] for item in document["exported"]] == ["team/zh"]
    assert (here / "many" / "team" / "zh" / "adapter_config.json").is_file()
    assert run(f"export 'nope*' ./many store={store}").code == 1


def test_import_takes_contradicting_ranks_only_when_told(run: Run, store: str, here: Path) -> None:
    assert run(f"export a ./out store.url={store}").code == 0
    config = here / "out" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 3}))
    refused = run("import ./out odd store=./other")
    assert refused.code == 2
    assert "contradicts itself" in refused.err
    assert "allow_rank_mismatch=true" in refused.err
    assert run("import ./out odd store=./other allow_rank_mismatch=true").code == 0


def test_import_of_real_adapters(run: Run, shared: Path) -> None:
    document = run(f"import {shared}/data/adapters store=./s prefix=team/ output=json").document
    assert [item["name"] for item in document["adapters"]] == ["team/code_style", "team/safety", "team/zh_tone"]
    assert run("verify store=./s").code == 0


def test_import_refuses_other_tools_folders(run: Run, shared: Path, here: Path) -> None:
    (here / "mlx").mkdir()
    (here / "mlx" / "adapter_config.json").write_bytes((shared / "data/configs/p24_mlx_lm.json").read_bytes())
    result = run("import ./mlx store=./s")
    assert result.code in {1, 2}
    assert "Traceback" not in result.err


def test_verify_finds_damage_with_code_3(run: Run, store: str) -> None:
    assert run(f"verify store={store}").code == 0
    file = Path(run(f"path b store={store}").out.strip()) / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    result = run(f"verify store={store} output=json")
    assert (result.code, result.document["exit"], result.document["ok"]) == (3, 3, False)
    assert any("b" in json.dumps(finding) for finding in result.document["findings"])
    assert run(f"verify a store={store}").code == 0


def test_diff(run: Run, store: str) -> None:
    assert run(f"diff a@best a@best store={store}").code == 0
    result = run(f"diff a@best a store={store} output=json")
    assert result.code == 3
    assert result.document["deltas"]["cosine"] == pytest.approx(1.0, abs=1e-4)
    assert result.document["config"] == {}
    result = run(f"diff a b store={store}")
    assert result.code == 3
    assert "cosine" in result.out


def test_merge(run: Run, store: str) -> None:
    """Case 96: the resolved list and the weights are printed."""
    line = f"merge '+adapters=[a@best,b]' adapters.a.weight=0.7 merge=linear merge.into=ab store={store}"
    result = run(f"{line} dry_run=true")
    assert "nothing was written" in result.out
    assert run(f"show ab store={store}").code == 1
    result = run(line)
    assert result.code == 0, result.err
    assert "0.7" in result.out
    shown = run(f"show ab store={store} output=json").document["adapter"]
    assert len(shown["parents"]) == 2
    assert shown["recipe"]["strategy"] == "linear"
    assert run(line).code == 1  # `ab` exists
    assert run(line + " merge.if_exists=version").code == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("merge=ties", 2),
        ("", 2),
        ("merge=nope merge.into=x", 2),
        ("merge=ties merge.into=x merge.params.densty=1", 2),
        ("merge=ties merge.into=x merge.params.density=7", 2),
    ],
)
def test_merge_refuses_in_words(run: Run, store: str, words: str, code: int) -> None:
    result = run(f"merge '+adapters=[a,b]' {words} store={store}")
    assert result.code == code
    assert result.err.startswith("error: ")


def test_merge_takes_only_adapters_of_the_store(run: Run, store: str) -> None:
    run(f"export a ./a store={store}")
    result = run(f"merge '+adapters={{x: {{source: ./a}}, b: {{}}}}' merge=linear merge.into=xb store={store}")
    assert result.code == 2
    assert "import ./a x" in result.err


def test_assemble_the_demo(run: Run) -> None:
    result = run("assemble '+adapters=[a,b,c]' adapters.a.weight=0.3 adapters.b.active=false adapters.c.trainable=true")
    assert result.code == 0, result.err
    assert result.err.startswith("This is the embedded demo")
    rows = [line.split() for line in result.out.splitlines()[1:4]]
    assert [(row[0], row[2], row[-2], row[-1]) for row in rows] == [
        ("a", "8", "0.3", "-"),
        ("b", "8", "-", "-"),
        ("c", "4", "1", "yes"),
    ]


def test_every_command_of_the_demo_may_be_the_first(run: Run) -> None:
    merged = run("merge '+adapters=[a,b]' merge=linear merge.into=ab")
    assert merged.code == 0, merged.err
    assert merged.err.startswith("This is the embedded demo")
    assert run("assemble '+adapters=[ab]'").code == 0
    listed = run("list output=json").document["adapters"]
    assert [adapter["name"] for adapter in listed] == ["a", "ab", "b", "c"]


def test_assemble_says_everything_as_json(run: Run, store: str) -> None:
    line = f"assemble '+adapters=[b,a@best]' store={store} base=demo output=json"
    document = run(line).document
    row = document["adapters"][1]
    assert {key: row[key] for key in ("name", "rank", "targets", "tensors", "parameters", "dtype", "bytes")} == {
        "name": "a",
        "rank": 8,
        "targets": 8,
        "tensors": 16,
        "parameters": 8192,
        "dtype": "float32",
        "bytes": 32768,
    }
    assert (row["source"], row["store"], row["active"], row["trainable"]) == ("a@best", store, True, False)
    assert document["demo"] is False


def test_a_typo_lists_config_and_store(run: Run, store: str) -> None:
    """A typo never yields a random adapter, and both lists are shown."""
    result = run("assemble '+adapters=[a,d]'")
    assert result.code == 1
    assert "configuration: a, b, c; store: a, b, c" in result.err
    result = run(f"assemble '+adapters=[c]' store={store} base=demo")
    assert result.code == 1
    assert "store: a, b, team/zh" in result.err


def test_a_dry_run_prints_the_plan_and_touches_nothing(run: Run, store: str, here: Path) -> None:
    """Case 127: adapter, action, trainable and source, before anything happens."""
    line = "'+adapters={a: {}, new: {if_missing: init, trainable: true, config: {r: 2, target_modules: [q_proj]}}}'"
    document = run(f"assemble {line} store={store} dry_run=true output=json").document
    assert [(row["name"], row["action"], row["trainable"]) for row in document["adapters"]] == [
        ("a", "load", False),
        ("new", "create", True),
    ]
    assert list(here.iterdir()) == []


def test_patterns_take_many(run: Run, store: str) -> None:
    document = run(f"assemble '+adapters=[\"*\"]' store={store} base=demo output=json").document
    assert [row["name"] for row in document["adapters"]] == ["a", "b", "team/zh"]


def test_a_lock_is_written_and_taken_back(run: Run, store: str, here: Path) -> None:
    first = run(f"assemble '+adapters=[a,b]' store={store} base=demo lock=set.json output=json").document
    from multilora_store import open_store

    opened = open_store(store)
    again = opened.get("a@best")
    opened.put("a", {key: value * 3 for key, value in again.tensors.items()}, again.config)
    locked = run("assemble lock_from=set.json base=demo output=json").document
    assert [row["version"] for row in locked["adapters"]] == [row["version"] for row in first["adapters"]]
    moved = run(f"assemble '+adapters=[a]' store={store} base=demo output=json").document
    assert moved["adapters"][0]["version"] != first["adapters"][0]["version"]
    (here / "bad.json").write_text("{}")
    assert run("assemble lock_from=bad.json base=demo").code == 2
    assert run("assemble lock_from=nope.json base=demo").code == 2
    assert run("assemble lock_from=set.json '+adapters=[a]' base=demo").code == 2


def test_save_then_snapshot_then_restore(run: Run, store: str, here: Path) -> None:
    line = f"assemble '+adapters=[a,b]' adapters.b.weight=0.5 adapters.b.trainable=true store={store} base=demo"
    saved = run(f"{line} save.step=7 output=json").document["snapshot"]
    assert (saved["step"], saved["adapters"]["b"]["weight"]) == (7, 0.5)
    rebuilt = run(f"assemble snapshot=latest store={store} base=demo output=json").document["adapters"]
    assert [(row["name"], row["weight"], row["trainable"]) for row in rebuilt] == [("a", 1.0, False), ("b", 0.5, True)]
    assert saved["id"] in run(f"snapshots store={store}").out
    assert run(f"snapshots latest store={store} output=json").document["snapshot"]["id"] == saved["id"]
    assert run(f"restore ./out store={store}").code == 0
    assert (here / "out" / "a" / "adapter_model.safetensors").is_file()
    assert run("assemble lock_from=out/set.lock.json base=demo").code == 0
    again = run(f"restore ./out store={store}")
    assert (again.code, "exists and is not empty" in again.err) == (1, True)
    assert run(f"delete snapshot={saved['id']} store={store}").code == 0
    assert run(f"snapshots latest store={store}").code == 1


def test_export_of_the_assembled_set(run: Run, store: str, here: Path) -> None:
    run(f"assemble '+adapters=[a,team/zh]' dtype=bfloat16 export=./out store={store} base=demo")
    from safetensors.torch import load_file

    tensors = load_file(here / "out" / "team" / "zh" / "adapter_model.safetensors")
    assert {str(value.dtype) for value in tensors.values()} == {"torch.bfloat16"}


def test_meta_builds_the_structure_alone(run: Run, store: str) -> None:
    assert run(f"assemble '+adapters=[a]' device=meta store={store} base=demo").code == 0
    assert run(f"assemble '+adapters=[a]' device=meta save=true store={store} base=demo").code == 2


@pytest.mark.parametrize(
    "line",
    [
        "import ./x",
        "tag a@latest best",
        "delete a",
        "assemble snapshot=latest base=demo",
    ],
)
def test_without_a_store_nothing_is_touched(run: Run, line: str, here: Path) -> None:
    result = run(line)
    assert result.code == 2
    assert "store" in result.err
    assert list(here.iterdir()) == []


def test_without_a_base(run: Run, store: str) -> None:
    result = run(f"assemble '+adapters=[a]' store={store}")
    assert result.code == 2
    assert "base=hf" in result.err


def test_the_store_of_the_environment(run: Run, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTILORA_STORE", store)
    assert run("list").code == 0
    assert run("assemble '+adapters=[a]'").code == 2  # a store is configured, so this is no demo, and there is no base


def test_a_folder_that_is_no_store_is_said_to_be_none(run: Run, here: Path) -> None:
    result = run("list store=./nothing")
    assert result.code == 1
    assert "is not a store" in result.err
    assert list(here.iterdir()) == []


def test_base_providers_and_their_parameters(run: Run, store: str) -> None:
    assert run(f"assemble '+adapters=[a]' store={store} base=demo base.layers=2").code == 1  # it does not fit
    assert run(f"assemble '+adapters=[a]' store={store} base=hf").code == 2
    assert "base.path" in run(f"assemble '+adapters=[a]' store={store} base=hf").err
    assert run(f"assemble '+adapters=[a]' store={store} base=hf base.path=./nope").code == 1
    target = "multilora_store.assembly.bases:demo_base"
    assert run(f"assemble '+adapters=[a]' store={store} base=python base.target={target}").code == 0


def test_sync_gc_and_repair(run: Run, store: str) -> None:
    plan = run(f"sync {store} ./copy dry_run=true output=json").document
    assert len(plan["versions"]) == 4
    assert run("list store=./copy").code == 1  # a dry run writes nothing
    assert run(f"sync {store} ./copy").code == 0
    assert "up to date" in run(f"sync {store} ./copy").out
    one, two = (run(f"list store={url} output=json").document["adapters"] for url in (store, "./copy"))
    assert [row["latest"]["digest"] for row in one] == [row["latest"]["digest"] for row in two]
    assert run(f"sync {store} {store}").code == 2
    file = Path(run("path b store=./copy").out.strip()) / "adapter_model.safetensors"
    file.chmod(0o644)
    file.write_bytes(b"broken")
    assert "set aside: b@v" in run("repair store=./copy dry_run=true").out
    assert run("verify store=./copy").code == 3
    assert run(f"repair source={store} store=./copy").code == 0
    assert run("verify store=./copy").code == 0
    assert run("delete b store=./copy").code == 0
    assert run("gc grace_hours=0 store=./copy output=json").document["purged"]


def test_a_past_state_is_brought_back(run: Run, store: str) -> None:
    seq = run(f"log store={store} output=json").document["entries"][0]["seq"]
    assert run(f"delete b store={store}").code == 0
    assert run(f"restore to={seq} dry_run=true store={store}").code == 0
    assert run(f"show b store={store}").code == 1
    assert run(f"restore to={seq} store={store}").code == 0
    assert run(f"show b store={store}").code == 0
    assert run(f"tag b@latest good store={store}").code == 0
    assert "nothing differs" in run(f"restore to={seq} dry_run=true store={store}").out, "what came later stays"
    told = run(f"restore to={seq} exact=true dry_run=true store={store}").out
    assert "b: tag good v" in told, "a tag that goes is a difference too"
    assert "nothing differs" not in told
    assert run(f"restore to={seq} store={store}").code == 0
    assert "nothing differs" in run(f"restore to={seq} store={store}").out
    assert run(f"restore store={store}").code == 2
    assert run(f"restore to=soon store={store}").code == 2


def test_doctor(run: Run, store: str) -> None:
    assert run(f"doctor store={store}").code == 0
    fresh = "'+adapters={nn: {if_missing: init, config: {r: 2, target_modules: [q_proj]}}}'"
    result = run(f"doctor {fresh} store={store} base=demo plugins=[effect_check] output=json")
    assert result.code == 3
    assert [one["area"] for one in result.document["findings"]] == ["effect_check"]
    result = run(f"doctor '+adapters=[a]' store={store} base=demo base.layers=2")
    assert result.code == 3
    assert "does not fit the model" in result.out


def test_doctor_says_what_exists_and_groups_what_the_audit_finds(run: Run, store: str) -> None:
    result = run(f"doctor '+adapters=[a,b]' adapters.b.active=false store={store} base=demo")
    assert result.code == 0, result.out
    assert result.out.splitlines()[:2] == ["2 adapters exist: a, b", "active: a; trainable: none"]
    line = f"doctor '+adapters=[a,b]' adapters.b.active=false adapters.b.trainable=true store={store} base=demo"
    result = run(line)
    assert result.code == 3
    assert "audit: b: 32 tensors: trainable, but its adapter is not active" in result.out
    assert "  remedy: activate it too, or leave it out of trainable: adapters.NAME.active=true or" in result.out
    (one,) = run(f"{line} output=json").document["findings"]
    assert all(one[key] for key in ("area", "subject", "what", "cause", "evidence", "remedy"))


def test_doctor_on_another_tool_s_checkpoint(run: Run, store: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of the environment is not looked at then; no store at all is needed."""
    from safetensors.torch import load_file, save_file

    assert run(f"export b ./b store={store}").code == 0
    assert run("doctor ./b").out.splitlines()[0] == "./b: PEFT adapters"
    file = here / "b" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({key: value[:0] for key, value in tensors.items()}, file)
    monkeypatch.setenv("MULTILORA_STORE", str(here.parent / "not-there"))
    result = run("doctor ./b")
    assert result.code == 3
    assert f"checkpoint: default: {len(tensors)} of {len(tensors)} tensors are empty" in result.out
    assert all(f"  {word}: " in result.out for word in ("cause", "evidence", "remedy"))
    assert result.err == ""
    assert run("doctor ./b '+adapters=[b]'").code == 2
    assert run("doctor ./nothing").code == 2


def test_import_out_of_a_checkpoint_of_a_whole_model(run: Run, store: str, here: Path) -> None:
    """What accelerate or torch saved of a model with adapters; the step is the trainer's."""
    import torch

    from multilora_store.assembly import assemble
    from multilora_store.assembly.bases import demo_base

    model = assemble(demo_base(), {name: name for name in ("a", "b")}, store=open_store(store))
    folder = here / "checkpoint-12"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text('{"global_step": 12}')
    run(f"export b ./b store={store}")
    other = f"store={here.parent / 'rescued'}"
    refused = run(f"import ./checkpoint-12 {other}")
    assert refused.code == 2
    assert "is a checkpoint of transformers' Trainer, step 12: a model as a pickle" in refused.err
    assert "configs.NAME=adapter_config.json" in refused.err
    line = f"import ./checkpoint-12 configs.b=./b/adapter_config.json {other}"
    assert "allow_pickle" in run(line).err
    assert run(f"{line} allow_pickle=true name=x").code == 2
    result = run(f"{line} allow_pickle=true output=json")
    assert result.code == 0, result.err
    assert (result.document["new"], result.document["adapters"][0]["step"]) == (["b"], 12)
    stored, mine = open_store(here.parent / "rescued").get("b"), open_store(store).get("b")
    assert stored.version.digest == mine.version.digest
    doctored = run("doctor ./checkpoint-12 allow_pickle=true output=json").document
    assert [one["name"] for one in doctored["checkpoint"]["adapters"]] == ["a", "b"]


def test_import_says_what_was_new(run: Run, store: str) -> None:
    run(f"export b ./b store={store}")
    again = run(f"import ./b store={store}")
    assert (again.code, again.out.splitlines()[-1]) == (0, "nothing was new: the store holds this very content already")
    assert run(f"import ./b c store={store} output=json").document["new"] == ["c"]
    assert run(f"import ./b c store={store} output=json").document["new"] == []


def test_a_server_s_profile(run: Run, store: str) -> None:
    assert run(f"verify a@best profile=vllm store={store}").code == 0
    result = run(f"verify profile=vllm max_rank=4 store={store} output=json")
    assert result.code == 3
    assert result.document["profile"]["ok"] is False
    assert run(f"export a@best ./out exporter=vllm exporter.params.max_rank=16 store={store}").code == 0
    for wrong, said in (
        ("exporter.params.max_rank=x", "max_rank"),
        ("exporter.params.nope=1", "nope"),
        ("params.x=1", "kind=merged"),
    ):
        refused = run(f"export a@best ./out3 exporter=vllm {wrong} store={store}")
        assert (refused.code, said in refused.err) == (2, True), refused.err
    assert "exporter.params.shrink  bool, False" in run("export --help exporter=vllm").out
    assert run(f"export a@best ./out2 exporter=nope store={store}").code == 2


def test_a_save_says_what_a_server_would_refuse(run: Run, store: str) -> None:
    """The set is saved all the same; the snapshot says what a server of it needs."""
    dora = "d: {if_missing: init, config: {r: 24, lora_alpha: 8, target_modules: [q_proj], use_dora: true}}"
    result = run(f"assemble '+adapters={{a: {{}}, {dora}}}' save.profile=vllm store={store} base=demo")
    assert result.code == 0, result.err
    assert "warning: d, vllm: it is DoRA, 4 magnitude vectors (vLLM has no magnitudes" in result.err
    assert "vllm would not serve all of it, with a rank setting of 32" in result.out
    told = open_store(store).snapshot().metadata["profiles"]["vllm"]
    assert told == {"ok": False, "max_rank": 24, "setting": 32, "findings": {"d": ["dora"]}}
    fine = run(f"assemble '+adapters=[a]' save.profile=vllm store={store} base=demo")
    assert (fine.err, fine.out.splitlines()[-1]) == ("", "vllm would serve all of it, with a rank setting of 8")
    assert run(f"assemble '+adapters=[a]' save.profile=nope store={store} base=demo").code == 2


def test_import_of_another_tool_s_file(run: Run, store: str, here: Path) -> None:
    """Written for another tool and read back by the source of that layout: the same factors, under the file's name."""
    from multilora_store import open_store

    assert run(f"export a@best ./style.safetensors exporter=kohya store={store}").code == 0
    line = f"import 'kohya://{here}/style.safetensors#component=unet' store=./other"
    document = run(f"{line} prefix=team/ tags=[first] output=json").document
    assert [item["name"] for item in document["adapters"]] == ["team/style"]
    assert document["adapters"][0]["metadata"]["imported_from"].startswith("kohya://")
    one, two = open_store(store).get("a@best"), open_store("other").get("team/style@first")
    assert one.tensors.keys() == two.tensors.keys()
    assert all(bool((one.tensors[key] == two.tensors[key]).all()) for key in one.tensors)
    path = "layers.0.self_attn.q_proj"
    assert one.config.scaling_for(path) == two.config.scaling_for(path)
    assert run(f"import 'kohya://{here}/style.safetensors' plain store=./other").code == 0
    assert run(f"import 'kohya://{here}/style.safetensors' allow_pickle=true store=./other").code == 2
    assert "name=" in run(f"import 'kohya://{here}/style.safetensors' prefix=../ store=./other").err
    assert run(f"import 'kohya://{here}/nothing.safetensors' store=./other").code in {1, 2}


def test_import_by_a_drop_in_source(run: Run, store: str, here: Path) -> None:
    assert run(f"export b ./b store={store}").code == 0
    source = f"bare://{here}/b/adapter_model.safetensors#alpha=16"
    assert run(f"import '{source}' bare store=./other plugins=[bare_file]").code == 0
    assert run("show bare store=./other output=json").document["config"]["lora_alpha"] == 16


def test_export_to_and_import_from_a_url(run: Run, store: str) -> None:
    """Plain folders and other layouts at any fsspec URL, one or many."""
    url = f"memory://bucket{abs(hash(store))}"
    assert run(f"export a@best {url}/one/a store={store}").code == 0
    assert run(f"import {url}/one/a copy tags=[x] store=./other").code == 0
    one = run(f"show a@best store={store} output=json").document["adapter"]
    assert run("show copy@x store=./other output=json").document["adapter"]["digest"] == one["digest"]
    places = run(f"export '*' {url}/many store={store} output=json").document["exported"]
    assert [item["path"].partition("/many/")[2] for item in places] == ["a", "b", "team/zh"]
    assert len(run(f"import {url}/many store=./many output=json").document["adapters"]) == 3
    assert run(f"export b {url}/b.safetensors exporter=kohya store={store}").code == 0
    assert run(f"import kohya://{url}/b.safetensors again store=./other").code == 0
    assert run(f"assemble '+adapters=[a]' export={url}/set store={store} base=demo").code == 0
    assert run(f"import {url}/set/a fromset store=./other").code == 0
