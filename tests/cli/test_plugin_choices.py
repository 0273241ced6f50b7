"""Plugins at the door: chosen by name, typed from their signatures, broken ones named while the others work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from multilora_store.cli.choices import GROUPS, node
from multilora_store.plugins import KINDS, Plugin
from multilora_store.plugins.fit import ARGUMENTS

Run = Callable[[str], Any]

OF_EACH_KIND = '''
from collections.abc import Sequence
from multilora_store.errors import UsageError
from multilora_store.plugins import plugin

@plugin("{kind}")
def mine({arguments}*, share: float = 0.5, words: Sequence[str] = ("x",)):
    """Is mine.

    More words.
    """
    raise UsageError(f"mine got {{share}}, {{list(words)}}")
'''
LINES = {
    "merge": ("merge '+adapters=[a,b]' merge.into=ab", "merge=mine", "merge.params"),
    "assembler": ("assemble '+adapters=[a]' base=demo", "assembler=mine", "assembler.params"),
    "steps": ("assemble '+adapters=[a]' base=demo", "steps.after_load=mine", "steps.after_load.params"),
    "base": ("assemble '+adapters=[a]'", "base=mine", "base"),
    "reader": ("import {store}", "reader=mine", "reader.params"),
    "exporter": ("export a ./out", "exporter=mine", "exporter.params"),
    "checks": ("doctor '+adapters=[a]' base=demo", "checks=[mine]", "checks.mine"),
    "policies": ("gc", "policies=[mine]", "policies.mine"),
}

MERGE = '''
from multilora_store.merging import strategy
from multilora_store.plugins import plugin

@plugin("base_provider", name="tiny")
def tiny(*, layers: int = 2, seed: int = 0):
    """A demo base with a number of layers."""
    from multilora_store.assembly.bases import demo_base
    return demo_base(layers=layers, seed=seed)
'''


@pytest.fixture
def mine(here: Path) -> Path:
    file = here / "mine.py"
    file.write_text(MERGE)
    return file


def test_every_kind_of_plugin_is_a_group() -> None:
    assert {group.kind for group in GROUPS.values()} == set(KINDS) == set(ARGUMENTS)
    assert list(LINES) == list(GROUPS)


@pytest.mark.parametrize("group", [*LINES])
def test_a_drop_in_of_each_kind_is_chosen_typed_shown_and_completed(
    group: str, run: Run, here: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, (line, choice, prefix) = GROUPS[group].kind, LINES[group]
    arguments = "".join(f"{name}, " for name in ARGUMENTS[kind])
    (here / "mine.py").write_text(OF_EACH_KIND.format(kind=kind, arguments=arguments), encoding="utf-8")
    whole = f"{line.format(store=store)} store={store} plugins=[./mine.py] {choice}"

    done = run(f"{whole} {prefix}.share=0.25 '{prefix}.words=[y,z]'")
    assert (done.code, done.error_lines) == (2, ["error: mine got 0.25, ['y', 'z']"])
    assert "mine got 0.5, ['x']" in run(whole).err, "without a word the defaults count"

    shown = run(f"{line.split()[0]} --help plugins=[./mine.py] {choice}").out
    assert "  Is mine.\n" in shown
    assert f"  {prefix}.share  float, 0.5\n" in shown

    for wrong, told in (
        (f"{whole} {prefix}.share=much", f"{prefix}.share=much\n  Value 'much' of type 'str' could not be converted"),
        (f"{whole} {prefix}.words=3", f"{prefix}.words=3"),
        (f"{whole} {prefix}.shore=1", f"error: there is no {prefix}.shore\n  did you mean share?"),
        (whole.replace("mine]", "mne]").replace("=mine", "=mne"), f"{group}=mne is no choice\n  did you mean mine?"),
        (whole.replace(choice, f"{prefix}.share=1"), "choose it first: " + choice.replace("mine", "NAME")[:7]),
    ):
        refused = run(wrong)
        assert (refused.code, told in refused.err) == (2, True), (wrong, refused.err)

    for typed, found in ((choice.rstrip("]")[:-1], choice.rstrip("]")), (f"{choice} {prefix}.sh", f"{prefix}.share=")):
        monkeypatch.setenv("COMP_LINE", f"multilora-store {line.split()[0]} plugins=[./mine.py] {typed}")
        assert found in run("-sc query=bash").out.split()


@pytest.mark.parametrize(
    "spelling", ["plugins=[./mine.py]", "plugins=./mine.py", "plugins.paths=[./mine.py]", "plugins=[.]"]
)
def test_a_drop_in_becomes_a_choice(run: Run, mine: Path, spelling: str) -> None:
    result = run(f"assemble --cfg job '+adapters=[a]' store=./s {spelling} base=tiny base.layers=3 -p base")
    assert result.code == 0, result.err
    assert yaml.safe_load(result.out) == {"provider": "tiny", "layers": 3, "seed": 0}


def test_it_is_in_show_plugins(run: Run, mine: Path) -> None:
    rows = run("show plugins plugins=[./mine.py] output=json").document["plugins"]
    found = next(row for row in rows if row["name"] == "tiny")
    assert found["kind"] == "base_provider"
    assert found["origin"] == str(mine)
    assert found["description"] == "A demo base with a number of layers."
    assert [(one["name"], one["type"], one["default"]) for one in found["parameters"]] == [
        ("layers", "int", "2"),
        ("seed", "int", "0"),
    ]


def test_a_user_s_config_may_name_plugins(run: Run, mine: Path, configs: Callable[..., Path]) -> None:
    text = f"defaults: [options/assemble, adapters: [], base: tiny, _self_]\nplugins: {{paths: [{mine}]}}\n"
    folder = configs(assemble=text)
    result = run(f"assemble --config-dir {folder} --cfg job '+adapters=[a]' -p base")
    assert result.code == 0, result.err
    assert "tiny" in result.out
    (folder / "assemble.yaml").write_text(text.replace(f"{{paths: [{mine}]}}", f"[{mine}]"))
    assert "plugins: {paths:" in run(f"assemble --config-dir {folder} --cfg job '+adapters=[a]'").err


@pytest.mark.parametrize(
    "text", ["def f(:\n", "raise RuntimeError('boom')\n", "x = 1\n", "import nothing_of_that_name\n"]
)
def test_a_broken_one_is_named_and_the_others_work(run: Run, mine: Path, here: Path, text: str) -> None:
    (here / "broken.py").write_text(text)
    result = run("show plugins plugins=[./broken.py,./mine.py]")
    assert result.code == 0
    assert "broken.py" in result.err
    assert result.err.startswith("warning: ")
    assert "tiny" in result.out
    result = run("show plugins plugins=[./broken.py,./mine.py] plugins.strict=true")
    assert result.code == 2
    assert "broken.py" in result.err


def test_a_duplicate_is_named(run: Run, mine: Path, here: Path) -> None:
    (here / "again.py").write_text(MERGE)
    assert "already declared" in run("show plugins plugins=[./mine.py,./again.py]").err


def test_a_file_that_is_not_there_is_an_error(run: Run) -> None:
    result = run("show plugins plugins=[./nowhere.py]")
    assert result.code == 2
    assert "nowhere.py" in result.err


def test_the_working_directory_is_never_searched_by_itself(run: Run, mine: Path) -> None:
    assert "tiny" not in run("show plugins").out
    assert run("assemble '+adapters=[a]' store=./s base=tiny").code == 2


def test_shipped_ones_go_by_their_bare_name(run: Run) -> None:
    result = run(
        "assemble '+adapters=[a,b]' plugins=[fuse_set] assembler=fuse_set assembler.params.into=ab output=json"
    )
    assert result.code == 0, result.err
    assert [(row["name"], row["rank"]) for row in result.document["adapters"]] == [("ab", 16)]


def test_merge_then_wrap_from_the_command_line(run: Run) -> None:
    line = "assemble '+adapters=[a,b,c]' adapters.c.trainable=true plugins=[merge_then_wrap] assembler=merge_then_wrap"
    choice = "assembler.params.members=[a,b] assembler.params.strategy=ties '++assembler.params.params={density: 0.3}'"
    result = run(f"{line} {choice} assembler.params.rank=4 output=json")
    assert result.code == 0, result.err
    rows = [(row["name"], row["rank"], row["trainable"]) for row in result.document["adapters"]]
    assert rows == [("merged", 4, False), ("c", 4, True)]


def test_a_step_of_the_assembly(run: Run) -> None:
    line = "assemble '+adapters=[a]' plugins=[cast_adapters] output=json"
    assert run(f"{line} steps.after_load=cast_to_bfloat16").document["adapters"][0]["dtype"] == "bfloat16"
    assert run(f"{line} steps.after_lode=cast_to_bfloat16").code == 2


def test_sources_and_exporters(run: Run, store: str, here: Path) -> None:
    assert run(f"export a@best ./mlx exporter=mlx plugins=[mlx_export] store={store}").code == 0
    assert run(f"export a@best ./peft store={store}").code == 0
    source = f"bare://{here}/peft/adapter_model.safetensors#alpha=16"
    line = f"assemble '+adapters={{m: {{source: \"{source}\"}}}}' base=demo"
    assert run(line).code != 0
    assert run(f"{line} plugins=[bare_file]").code == 0


@pytest.mark.parametrize("kind", ["merge_strategy", "audit_check", "base_provider"])
def test_every_kind_of_default_has_a_place_in_the_schema(kind: str) -> None:
    def plugged(
        *,
        needed: int,
        text: str = "x",
        ratio: float = 0.5,
        flag: bool = False,
        maybe: int | None = None,
        several: tuple[int, ...] = (1, 2),
        table: dict[str, int] = {"a": 1},  # noqa: B006
        odd: object = object(),
    ) -> None:
        """Takes all kinds."""

    from omegaconf import OmegaConf, ValidationError

    made = node(Plugin(kind=kind, name="all_kinds", target=plugged, origin="here"))
    params = {"base_provider": made, "audit_check": made.get("all_kinds"), "merge_strategy": made.get("params")}[kind]
    assert OmegaConf.is_missing(params, "needed")
    assert (params.text, params.ratio, params.flag, params.maybe, params.several, params.odd) == (
        "x",
        0.5,
        False,
        None,
        [1, 2],
        None,
    )
    with pytest.raises(ValidationError):
        params.ratio = "much"
    params.maybe = 3
