"""Completion: verbs, what Hydra knows, and adapters inside brackets, from files and from the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[[str], Any]


@pytest.fixture
def complete(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    def complete(line: str) -> list[str]:
        monkeypatch.setenv("COMP_LINE", f"multilora-store {line}")
        result = run("-sc query=bash")
        assert result.code == 0, result.err
        return result.out.split()

    return complete


def test_verbs(complete: Callable[[str], list[str]]) -> None:
    assert complete("ass") == ["assemble"]
    assert complete("s") == ["show", "snapshots", "sync"]
    assert "list" in complete("")


def test_options_and_choices_of_the_verb(complete: Callable[[str], list[str]]) -> None:
    assert complete("assemble shard=") == ["shard=fsdp1", "shard=fsdp2", "shard=none"]
    assert complete("list pat") == ["pattern="]
    assert "merge=ties" in complete("merge merge=")
    assert "base=hf" in complete("assemble base=")


def test_inside_brackets(complete: Callable[[str], list[str]], store: str, configs: Callable[..., Path]) -> None:
    folder = configs(adapters__mine="mine: {source: /x}\n", adapters__team__own="own: {source: /x}\n")
    assert complete(f"assemble store={store} +adapters=[") == ["+adapters=[a", "+adapters=[b", "+adapters=[team/zh"]
    assert complete(f"assemble store={store} --config-dir {folder} +adapters=[a,") == [
        "+adapters=[a,b",
        "+adapters=[a,mine",
        "+adapters=[a,team/own",
        "+adapters=[a,team/zh",
    ]
    assert complete(f"assemble store={store} '+adapters=[a,te") == ["'+adapters=[a,team/zh"]
    assert complete(f"assemble store={store} +adapters=te") == ["+adapters=team/zh"]


def test_refs_behind_a_verb(complete: Callable[[str], list[str]], store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTILORA_STORE", store)
    assert complete("show ") == ["a", "b", "team/zh"]
    assert complete("export te") == ["team/zh"]


def test_a_store_that_is_not_there_is_no_error(complete: Callable[[str], list[str]]) -> None:
    assert complete("assemble store=./nowhere +adapters=[") == []


def test_the_shell_s_script(run: Run) -> None:
    for shell, words in (("bash", "complete "), ("zsh", "compdef _multilora_store "), ("fish", "complete ")):
        assert words in run(f"-sc install={shell}").out
        assert run(f"-sc uninstall={shell}").code == 0
    assert run("-sc").code == 2


def test_values_plugins_and_words_behind_the_verb(complete: Callable[[str], list[str]], here: Path) -> None:
    text = (
        "from multilora_store.plugins import plugin\n\n\n@plugin('base_provider')\ndef tiny(*, layers: int = 2): ...\n"
    )
    (here / "mine.py").write_text(text, encoding="utf-8")
    assert complete("assemble plugins=[./mine.py] base=t") == ["base=tiny"]
    assert complete("gc dry_run=") == ["dry_run=true", "dry_run=false"]
    assert complete("list output=j") == ["output=json"]
    assert complete("import ./x reader=ko") == ["reader=kohya"]
    assert complete("assemble steps.after_l") == ["steps.after_load="]
    line = "assemble plugins=[cast_adapters] steps.after_load="
    assert complete(f"{line}cast") == ["steps.after_load=cast_to_bfloat16"]
    assert complete("doctor plugins=[./nowhere.py] checks=[eff") == []
    assert complete("doctor plugins=[effect_check] checks=[eff") == ["checks=[effect_check"]
    assert not {"demo/", "options=", "hydra"} & set(complete("assemble "))


def test_help_and_composition_never_ask_the_store(run: Run, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from multilora_store import storage

    monkeypatch.setattr(storage, "open_store", lambda *_: pytest.fail("the store was asked"))
    for line in (
        "assemble --help",
        "assemble --hydra-help",
        "assemble '+adapters=[x,y1]' --cfg job",
        "assemble --info searchpath",
    ):
        assert run(f"{line} store={store}").code == 0
