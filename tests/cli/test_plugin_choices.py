"""Plugins at the door: chosen by name, typed from their signatures, broken ones named while the others work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from multilora_store.cli.choices import node
from multilora_store.plugins import Plugin

Run = Callable[[str], Any]

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


@pytest.mark.parametrize(
    "spelling", ["plugins=[./mine.py]", "plugins=./mine.py", "plugins.paths=[./mine.py]", "plugins=[.]"]
)
def test_a_drop_in_becomes_a_choice(run: Run, mine: Path, spelling: str) -> None:
    result = run(f"assemble --cfg job '+adapters=[a]' store=./s {spelling} base=tiny base.layers=3 -p base")
    assert result.code == 0, result.err
    assert yaml.safe_load(result.out) == {"provider": "tiny", "layers": 3, "seed": 0}


def test_its_parameters_are_typed(run: Run, mine: Path) -> None:
    line = "assemble --cfg job '+adapters=[a]' store=./s plugins=[./mine.py] base=tiny"
    assert run(f"{line} base.layers=many").code == 2
    assert run(f"{line} base.leyers=3").code == 2


def test_it_is_in_help_and_in_show_plugins(run: Run, mine: Path) -> None:
    assert "tiny" in run("assemble --help plugins=[./mine.py]").out
    assert "base.layers  int, 2" in run("assemble --help plugins=[./mine.py] base=tiny").out
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
    source = f"bare://{here}/peft/adapter_model.safetensors?alpha=16"
    line = f"assemble '+adapters={{m: {{source: \"{source}\"}}}}' base=demo"
    assert run(line).code != 0
    assert run(f"{line} plugins=[bare_file]").code == 0


@pytest.mark.parametrize("kind", ["merge_strategy", "assembler", "base_provider"])
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
    params = made if kind == "base_provider" else made.params
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
