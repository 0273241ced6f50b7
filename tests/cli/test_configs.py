"""The user's own folder of configs: found first, checked before Hydra loses half of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Run = Callable[[str], Any]


A = "a:\n  source: /data/a\n  trainable: true\n"
B = "b:\n  source: /data/b\n"


def test_two_files_compose(run: Run, configs: Callable[..., Path]) -> None:
    """Case 55: N chosen files give N entries."""
    folder = configs(adapters__a=A, adapters__b=B)
    result = run(f"assemble --cfg job --config-dir {folder} '+adapters=[a,b,x@best]' -p adapters")
    entries = yaml.safe_load(result.out)
    assert list(entries) == ["a", "b", "x"]
    assert (entries["a"]["source"], entries["a"]["trainable"], entries["x"]["source"]) == ("/data/a", True, "x@best")


@pytest.mark.parametrize("flag", ["--config-dir", "-cd", "--config-path", "-cp"])
def test_the_user_s_folder_wins_over_ours(run: Run, configs: Callable[..., Path], flag: str) -> None:
    folder = configs(shard__fsdp2="backend: fsdp2\ngranularity: layer\n")
    result = run(f"assemble '+adapters=[a]' --cfg job {flag} {folder} shard=fsdp2 -p shard")
    assert yaml.safe_load(result.out).items() >= {"backend": "fsdp2", "granularity": "layer"}.items()


def test_the_first_of_two_folders_wins(run: Run, configs: Callable[..., Path], here: Path) -> None:
    configs(adapters__a=A)
    other = here.parent / "other" / "adapters"
    other.mkdir(parents=True)
    (other / "a.yaml").write_text("a: {source: /other/a}\n")
    result = run(f"assemble --cfg job -cd {other.parent} -cd {here.parent / 'conf'} +adapters=a -p adapters.a.source")
    assert "/other/a" in result.out


def test_a_primary_config_of_the_user_s_own(run: Run, configs: Callable[..., Path]) -> None:
    folder = configs(mine="defaults:\n  - assemble\n  - adapters: [a]\n  - _self_\nseed: 7\n", adapters__a=A)
    text = (folder / "mine.yaml").read_text().replace("  - adapters: [a]\n", "  - override adapters: [a]\n")
    (folder / "mine.yaml").write_text(text)
    result = run(f"assemble --config-dir {folder} --config-name mine --cfg job")
    assert result.code == 0, result.err
    config = yaml.safe_load(result.out)
    assert (config["seed"], list(config["adapters"])) == (7, ["a"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- name: a\n  source: /x\n", "a mapping keyed by the adapter's name was expected, found a list"),
        ("source: /x\ntrainable: true\n", "the fields source, trainable stand where adapters' names belong"),
        ("just words\n", "found a str"),
        ("a: {source: [}\n", "not YAML"),
    ],
)
def test_files_of_another_shape_are_refused(run: Run, configs: Callable[..., Path], text: str, found: str) -> None:
    """Case 55: list-style files would leave only the last; the error says the form that works."""
    result = run(f"assemble --config-dir {configs(adapters__a=text)} '+adapters=[a]' base=demo")
    assert result.code == 2
    assert found in result.err
    assert "a.yaml" in result.err


def test_two_files_of_one_name_are_refused(run: Run, configs: Callable[..., Path]) -> None:
    result = run(f"assemble --config-dir {configs(adapters__a=A, adapters__b=A)} '+adapters=[a,b]' base=demo")
    assert result.code == 2
    assert "defined in two chosen files" in result.err


def test_a_file_in_a_subfolder_needs_its_package_line(run: Run, configs: Callable[..., Path]) -> None:
    folder = configs(adapters__team__a="team/a: {source: /data/a}\n")
    result = run(f"assemble --config-dir {folder} '+adapters=[team/a]' base=demo")
    assert result.code == 2
    assert "# @package adapters" in result.err
    file = folder / "adapters" / "team" / "a.yaml"
    file.write_text("# @package adapters\n" + file.read_text())
    result = run(f"assemble --config-dir {folder} '+adapters=[team/a]' --cfg job -p adapters")
    assert "/data/a" in result.out


def test_an_unknown_field_in_a_file(run: Run, configs: Callable[..., Path]) -> None:
    result = run(f"assemble --config-dir {configs(adapters__a='a: {sauce: /x}')} +adapters=a base=demo")
    assert result.code == 2
    assert "no adapters.a.sauce\n  did you mean source?" in result.err


def test_choices_in_a_file_stand_in_its_defaults_list(run: Run, configs: Callable[..., Path], store: str) -> None:
    """Several of a group, and a step at its place; a bare word is refused with the spelling that works."""
    defaults = "defaults: [options/{}, store: env, adapters: [], base: null, assembler: null, {}, _self_]\n"
    folder = configs(
        gc="defaults: [options/gc, store: env, policies: [keep_last, keep_tagged], _self_]\n"
        "policies: {keep_last: {count: 7}}\n",
        assemble=defaults.format("assemble", "steps@steps.after_load: load"),
        plan="defaults: [options/plan, store: env, _self_]\nbase: demo\nworld_size: 2\n",
    )
    assert "count: 7" in run(f"gc --config-dir {folder} --cfg job -p policies store={store}").out
    assert "name: load" in run(f"assemble --config-dir {folder} --cfg job -p steps store={store}").out
    assert "- base: hf" in run(f"plan --config-dir {folder} +adapters=a store={store}").err


def test_a_folder_that_is_not_there(run: Run) -> None:
    result = run("assemble --config-dir nowhere +adapters=a")
    assert result.code == 2
    assert "nowhere' is not there" in result.err


def test_a_folder_of_one_s_own_is_no_demo(run: Run, configs: Callable[..., Path]) -> None:
    """A typo must never yield one of the demo's random adapters."""
    result = run(f"assemble --config-dir {configs(adapters__mine='mine: {source: /x}')} +adapters=a base=demo")
    assert result.code == 2
    assert "there is no store" in result.err


def test_the_default_search_path_holds_no_adapter() -> None:
    from multilora_store.cli.sources import conf_folder

    assert not (conf_folder() / "adapters").exists()
    assert sorted(path.stem for path in (conf_folder() / "demo" / "adapters").glob("*")) == ["a", "b", "c"]


def test_every_command_has_a_primary_config_and_every_config_a_command() -> None:
    from multilora_store.cli.catalogue import COMMANDS
    from multilora_store.cli.sources import conf_folder

    assert {path.stem for path in conf_folder().glob("*.yaml")} == set(COMMANDS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:\n  source: /x\n  source: /y\n", "duplicate key source"),
        ("a: &me\n  source: /x\n  config: *me\n", "holds its own alias"),
    ],
)
def test_yaml_that_cannot_be_meant_is_a_usage_error(
    run: Run, configs: Callable[..., Path], text: str, found: str
) -> None:
    result = run(f"assemble --config-dir {configs(adapters__a=text)} +adapters=a")
    assert result.code == 2
    assert found in result.err
    assert "not an error that was foreseen" not in result.err


def test_a_primary_config_with_a_key_twice(run: Run, configs: Callable[..., Path]) -> None:
    folder = configs(mine="defaults:\n  - assemble\n  - _self_\nseed: 7\nseed: 8\n")
    result = run(f"assemble --config-dir {folder} --config-name mine")
    assert (result.code, "duplicate key seed" in result.err) == (2, True), result.err
