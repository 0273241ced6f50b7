"""The door: verbs and flags in any order, exit codes, help, sweeps, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multilora_store.cli.argv import parse
from multilora_store.cli.catalogue import COMMANDS
from multilora_store.cli.failures import worst
from multilora_store.errors import UsageError

Run = Callable[[str], Any]


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "argv",
    [
        ["assemble", "+adapters=[a]", "--cfg", "job"],
        ["--cfg", "job", "assemble", "+adapters=[a]"],
        ["+adapters=[a]", "--cfg", "job", "assemble"],
        ["+adapters=[a]", "assemble", "-c", "job"],
    ],
)
def test_verb_flags_and_overrides_in_any_order(argv: list[str]) -> None:
    line = parse(argv, COMMANDS)
    assert (line.verb, line.overrides, line.flags) == ("assemble", ("+adapters=[a]",), ("--cfg", "job"))


def test_overrides_on_both_sides_of_a_flag(run: Run) -> None:
    result = run("'+adapters=[a]' --cfg job adapters.a.weight=0.3 -p adapters.a.weight assemble")
    assert (result.code, result.out.strip().splitlines()[-1]) == (0, "0.3")


@pytest.mark.parametrize("argv", [["assemble", "--nope"], ["--cfg", "nope", "assemble"], ["--experimental-rerun", "x"]])
def test_wrong_flags_are_usage_errors(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(argv, COMMANDS)


def test_a_mistyped_command_names_the_nearest(run: Run) -> None:
    result = run("asemble +adapters=a")
    assert result.code == 2
    assert "did you mean assemble" in result.err


def test_no_command_at_all(run: Run) -> None:
    assert run("").code == 0
    assert run("+adapters=a").code == 2


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("multilora_store ")


def test_bare_words_are_the_options_they_stand_for(run: Run, store: str) -> None:
    assert "a" in run(f"show a@best store={store}").out
    result = run(f"list a b store={store}")
    assert result.code == 2
    assert "'b' is not an override" in result.err


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_shows_examples_first_and_every_option_in_80_columns(run: Run, verb: str) -> None:
    from multilora_store.cli.options import options_of

    result = run(f"{verb} --help")
    assert result.code == 0
    assert result.out.index("examples:") < result.out.index("options:")
    for option in options_of(COMMANDS[verb].schema):
        assert f"  {option.key}  " in result.out
    lines = result.out[result.out.index("options:") :].splitlines()
    assert max(map(len, lines)) <= 80


def test_help_shows_the_parameters_of_a_chosen_plugin(run: Run) -> None:
    result = run("merge --help merge=ties")
    assert "merge.params.density  float, 0.2" in result.out
    assert "ties" in run("merge --help").out


def test_help_brackets_only_words_that_may_be_left_out(run: Run) -> None:
    assert "usage: multilora-store import SOURCE [NAME] [key=value ...]" in run("import --help").out
    assert "each adapter" in run("merge --help").out
    assert "each adapter" not in run("restore --help").out, "its adapters= is a list of patterns"


def test_help_imports_no_torch_and_is_quick(here: Path) -> None:
    code = (
        "import sys; from multilora_store.cli import main; from multilora_store.cli.catalogue import COMMANDS;"
        "rc = [main([*v, '--help']) for v in ([], *([name] for name in COMMANDS))];"
        "heavy = {'torch', 'peft', 'transformers', 'fsspec'} & set(sys.modules);"
        "print(heavy, file=sys.stderr); sys.exit(max(rc) or bool(heavy))"
    )
    start = time.perf_counter()
    done = _python("-c", code)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5  # under 1 s on a quiet machine; the bound is for a busy one


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=120, check=False
    )


def test_the_whole_program_in_an_empty_folder(here: Path) -> None:
    """Nothing is left behind in the working folder, and results alone are on stdout."""
    done = _python("-m", "multilora_store", "assemble", "+adapters=[a,b]", "output=json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["demo"] is True
    assert [row["name"] for row in document["adapters"]] == ["a", "b"]
    assert "This is the embedded demo" in done.stderr
    assert list(here.iterdir()) == []
    done = _python("-m", "multilora_store", "assemble", "+adapters=[1]")
    assert (done.returncode, done.stdout) == (2, "")
    assert list(here.iterdir()) == []


def test_nothing_is_left_behind(run: Run, here: Path) -> None:
    for line in (
        "assemble '+adapters=[a,b]' dry_run=true",
        "assemble -m '+adapters=[a,b],[b,c]' dry_run=true",
        "assemble '+adapters=[a,b]' --cfg job",
        "assemble '+adapters=[nope]'",
        "list",
    ):
        run(line)
        assert list(here.iterdir()) == [], line


def test_a_sweep_runs_every_job_and_ends_with_the_worst_code(run: Run, store: str) -> None:
    result = run(f"diff -m left=a,b right=b store={store} quiet=true")
    assert result.code == 3
    result = run(f"diff -m left=a,nope,b right=b store={store}")
    assert result.code == 1
    assert result.err.count("error:") == 1
    assert "hold the same content" in result.out
    assert (worst([]), worst([0, 3]), worst([3, 2]), worst([2, 1, 0])) == (0, 3, 2, 1)


def test_sweeps_over_lists_groups_and_fields(run: Run, store: str) -> None:
    lines = run(
        f"assemble -m '+adapters=[a,b],[b]' adapters.b.weight=0.1,0.2 store={store} dry_run=true output=json"
    ).out
    documents = [json.loads(line) for line in lines.splitlines()]
    assert [len(item["adapters"]) for item in documents] == [2, 2, 1, 1]
    assert [item["adapters"][-1]["weight"] for item in documents] == [0.1, 0.2, 0.1, 0.2]
    result = run(f"merge -m '+adapters=[a,b]' merge=ties,linear merge.into=ab dry_run=true store={store} output=json")
    assert result.code == 0, result.err
    *jobs, last = [json.loads(line) for line in result.out.splitlines()]
    assert [job["report"]["strategy"] for job in jobs] == ["ties", "linear"]
    assert [row["version"] for row in last["sweep"]] == [None, None]


def test_full_errors_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in run("assemble '+adapters=[a]' base=nope").err
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback" in run("assemble '+adapters=[a]' base=nope").err


def test_errors_as_json(run: Run, store: str) -> None:
    result = run(f"show nope store={store} output=json")
    document = result.document
    assert (result.code, document["exit"], document["command"]) == (1, 1, "show")
    assert document["error"]["type"] == "NotInStoreError"
    assert "team/zh" in document["error"]["remedy"]


@pytest.mark.parametrize("line", ["show nope", "assemble '+adapters=[a]' base=nope", "list nope=1", "asemble"])
def test_errors_are_at_most_what_why_and_remedy(run: Run, store: str, line: str) -> None:
    result = run(f"{line} store={store}")
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert len(result.err.splitlines()) <= 3


def test_an_unforeseen_error_is_one_line_and_code_1(run: Run, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    from multilora_store.storage import Store

    monkeypatch.setattr(Store, "state", lambda _: 1 / 0)
    result = run(f"list store={store}")
    assert result.code == 1
    assert result.err.startswith("error: ZeroDivisionError: division by zero")


def test_only_rank_0_prints(run: Run, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 56: ranks above 0 print no result, and a wrong line ends on every rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = run(f"list store={store}")
    assert (result.code, result.out, result.err) == (0, "", "")
    result = run(f"list store={store} nope=1")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("rank 1: error: ")  # nothing tells it that another rank speaks
    result = run(f"assemble '+adapters=[a]' --cfg job store={store}")
    assert (result.code, result.out) == (0, "")


def test_ranks_that_fail_alike_say_so_once_and_a_rank_that_fails_alone_says_so(
    run: Run, store: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is missing on one machine, a variable that one rank alone has: it must not end in silence."""
    said = []
    for rank, line in (("0", "list"), ("1", "list nope=1"), ("2", "list nope=1"), ("3", "list other=1")):
        (here.parent / "attempt_0" / rank).mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(here.parent / "attempt_0" / rank / "error.json"))
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        result = run(f"{line} store={store}")
        assert result.code == (0 if rank == "0" else 2)
        said.append(result.err.partition(":")[0])
    assert said == ["", "rank 1", "", "rank 3"]


def test_quiet_and_verbose(run: Run, store: str) -> None:
    assert run(f"list store={store} quiet=true").out == ""
    assert run(f"list store={store} verbose=true").code == 0


def test_no_control_codes_when_piped(run: Run, store: str) -> None:
    for line in (f"list store={store}", f"log store={store}", f"verify store={store}", "show plugins"):
        result = run(line)
        assert result.code == 0, result.err
        assert "\x1b" not in result.out + result.err


def test_tables_fit_80_columns_on_a_terminal(run: Run, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    result = run(f"assemble '+adapters=[a,b,team/zh]' store={store} base=demo")
    assert result.code == 0, result.err
    table = re.sub(r"\x1b\[[0-9;]*m", "", result.out).splitlines()
    heads = table[: next(at for at, line in enumerate(table) if "<-" in line)]
    assert max(map(len, heads)) <= 80
    assert any(re.match(r"team/zh +v[0-9a-f]{8} .* fp32 +\d", line) for line in heads)
