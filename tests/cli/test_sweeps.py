"""Sweeps under launchers that run their jobs elsewhere: the worst exit code comes back, drop-ins are there."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher

Run = Callable[[str], Any]
STRONGEST = """
from multilora_store.plugins import plugin


@plugin("merge_strategy")
def strongest(deltas, weights, *, margin: float = 1.0):
    \"\"\"The first.\"\"\"
    return deltas[0].scaled(weights[0] * margin)
"""


class ElsewhereLauncher(Launcher):  # type: ignore[misc]  # hydra ships no types
    """Runs each job in a process of its own, as joblib and submitit do: nothing comes back but what the job returns."""

    __module__ = "hydra_plugins.elsewhere"  # Hydra takes a launcher from nowhere else

    def __init__(self, **_: Any) -> None:
        self.setting: Any = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.setting = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        return [self._elsewhere(list(words)) for words in job_overrides]

    def _elsewhere(self, words: list[str]) -> JobReturn:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        process = fork.Process(target=self._job, args=(words, theirs))
        process.start()
        theirs.close()
        returned = ours.recv()
        process.join()
        return returned

    def _job(self, words: list[str], end: Any) -> None:
        context, task, config = self.setting
        composed = context.config_loader.load_sweep_config(config, words)
        HydraConfig.instance().set_config(composed)
        returned = run_job(task, composed, "hydra.sweep.dir", "hydra.sweep.subdir", context)
        returned.cfg = None  # joblib and submitit pickle its class by value, which pickle itself does not
        end.send(returned)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher, where an installed one would lie."""
    plugins = Plugins.instance()  # scans what is installed, before that is hidden
    package, module = ModuleType("hydra_plugins"), ModuleType("hydra_plugins.elsewhere")
    package.elsewhere, module.ElsewhereLauncher = module, ElsewhereLauncher  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hydra_plugins", package)
    monkeypatch.setitem(sys.modules, "hydra_plugins.elsewhere", module)
    plugins.register(ElsewhereLauncher)
    target = {"_target_": "hydra_plugins.elsewhere.ElsewhereLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="elsewhere", node=target)


@pytest.mark.usefixtures("elsewhere")
def test_the_worst_code_comes_back_from_another_process(run: Run, store: str) -> None:
    line = f"diff -m right=b store={store} quiet=true hydra/launcher=elsewhere"
    assert run(f"{line} left=b,a").code == 3
    assert run(f"{line} left=nope,a,b").code == 1


@pytest.mark.slow
def test_joblib_gives_the_worst_code_and_finds_drop_ins(run: Run, store: str, here: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (here.parent / "strongest.py").write_text(STRONGEST, encoding="utf-8")
    joblib = f"store={store} hydra/launcher=joblib hydra.launcher.n_jobs=2 quiet=true"
    assert run(f"diff -m left=b,nope right=b {joblib}").code == 1
    line = "merge -m '+adapters=[a,b]' merge=strongest,linear merge.into=ab dry_run=true plugins=[../strongest.py]"
    assert run(f"{line} {joblib}").code == 0
    assert list(here.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_merges_of_a_cluster_write_separate_versions_and_one_table(
    run: Run, store: str, launcher: str, here: Path
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    line = f"merge -m '+adapters=[a,b]' merge=ties,linear merge.into=ab store={store} hydra/launcher={launcher}"
    rows = run(f"{line} output=json").document["sweep"]
    assert [row["strategy"] for row in rows] == ["ties", "linear"]
    assert len({row["version"] for row in rows}) == 2
    told = run(f"report store={store} output=json").document["merges"]  # in the order in which they were done
    assert sorted(told, key=lambda row: row["version"]) == sorted(
        ({**row, "seconds": None} for row in rows), key=lambda row: row["version"]
    )
    assert list(here.iterdir()) == []


def test_a_sweep_of_merges_ends_with_one_table_of_separate_versions(run: Run, store: str) -> None:
    line = f"merge -m '+adapters=[a,b]' merge=ties,linear merge.into=ab store={store}"
    result = run(f"{line} adapters.a.weight=0.3,0.7")
    assert result.code == 0, result.err
    table = result.out.split("\n\n")[-1].splitlines()
    assert table[0].split()[:4] == ["merge", "strategy", "params", "weights"]
    assert [row.split()[1] for row in table[1:]] == ["ties", "ties", "linear", "linear"]
    assert len({row.split()[0] for row in table[1:]}) == 4
    stored = run(f"report store={store} output=json pattern=ab").document
    assert [row["weights"]["a"] for row in stored["merges"]] == [0.3, 0.7, 0.3, 0.7]
    refused = run(f"{line} merge.if_exists=error")
    assert (refused.code, "already has an adapter 'ab'" in refused.err) == (1, True)


@pytest.mark.usefixtures("elsewhere")
def test_the_table_is_that_of_jobs_in_other_processes_and_of_what_they_stored(run: Run, store: str) -> None:
    line = f"merge -m '+adapters=[a,b]' merge=svd,linear merge.into=ab store={store} hydra/launcher=elsewhere"
    rows = run(f"{line} output=json").document["sweep"]
    assert [row["strategy"] for row in rows] == ["svd", "linear"]
    assert all(row["seconds"] > 0.0 and row["error"] < 1.0 and row["norm"] > 0.0 for row in rows)
    assert run(f"report store={store} output=json").document["merges"] == [{**row, "seconds": None} for row in rows]
