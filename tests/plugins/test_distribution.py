"""A plugin as a distribution: built, installed into an environment of its own, found, chosen, run; its faults named."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIST = Path(__file__).parent / "distribution"


def call(*line: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in line]
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the distribution, and sees ours for what it needs."""
    work = tmp_path_factory.mktemp("distribution")
    shutil.copytree(DIST, work / "source")
    at_hand = importlib.util.find_spec("hatchling") is not None
    isolation = ["--no-isolation", "--skip-dependency-check"] if at_hand else []
    line = (sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", work / "wheels", work / "source")
    built = call(*line, cwd=work)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (work / "wheels").glob("*.whl")
    assert call(sys.executable, "-m", "venv", "--without-pip", work / "venv", cwd=work).returncode == 0
    found = work / "venv" / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    installed = call(sys.executable, "-m", "pip", "--python", found, *install, cwd=work)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
    return found


def program(python: Path, folder: Path, *words: str) -> Any:
    env = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": ""}
    return call(python, "-m", "multilora_store", *words, cwd=folder, env=env)


@pytest.mark.slow
def test_an_installed_plugin_is_chosen_by_name(python: Path, tmp_path: Path) -> None:
    """Its strategy merges, with its own parameter; its check looks; the broken third one is named, and harms nobody."""
    shown = program(python, tmp_path, "show", "plugins", "output=json")
    assert shown.returncode == 0, shown.stderr
    rows = {row["name"]: row for row in json.loads(shown.stdout)["plugins"] if row["origin"] == "multilora-halves"}
    assert set(rows) == {"halves", "named_by_ten", "gone"}
    assert rows["halves"]["parameters"] == [{"name": "share", "type": "float", "required": False, "default": "0.5"}]
    assert "gone" in rows["gone"]["error"]
    assert "multilora-halves" in shown.stderr
    assert program(python, tmp_path, "show", "plugins", "plugins.strict=true").returncode == 2

    line = ("assemble", "+adapters=[a,b]", "merge=halves", "merge.into=quarter", "merge.params.share=0.25")
    merged = program(python, tmp_path, *line, "export=./out", "output=json")
    assert merged.returncode == 0, merged.stderr
    assert "gone" in merged.stderr
    recipe = json.loads(merged.stdout)["merge"]["recipe"]
    assert (recipe["strategy"], recipe["params"]) == ("halves", {"share": 0.25})
    whole = program(python, tmp_path, *line[:2], "merge=linear", "merge.into=whole", "export=./out", "output=json")
    norms = [
        [module["norm"] for module in json.loads(one.stdout)["merge"]["report"]["modules"]] for one in (merged, whole)
    ]
    assert norms[0] == pytest.approx([0.25 * norm for norm in norms[1]], rel=1e-5)
    assert program(python, tmp_path, *line[:4], "merge.params.share=much").returncode == 2
    assert program(python, tmp_path, *line[:2], "merge=gone", "merge.into=x").returncode == 2


@pytest.mark.slow
def test_its_audit_check_is_part_of_the_doctor(python: Path, tmp_path: Path) -> None:
    exported = program(python, tmp_path, "assemble", "+adapters=[a]", "export=./out")
    assert exported.returncode == 0, exported.stderr
    line = ("doctor", "+adapters={a_very_long_name: {source: ./out/a}}", "base=demo", "output=json")
    found = program(python, tmp_path, *line)
    assert found.returncode == 3, found.stderr
    findings = json.loads(found.stdout)["findings"]
    assert [(one["area"], one["what"]) for one in findings] == [
        ("named_by_ten", "adapter a_very_long_name: a long name")
    ]
