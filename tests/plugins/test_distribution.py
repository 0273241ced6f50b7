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


TEAM = """
import sys

import multilora_store as mls
import pytest
import torch
from multilora_store.testing import tiny_decoder


@pytest.fixture
def model():
    fields = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    entry = {"if_missing": "init", "config": fields, "trainable": True}
    return mls.assemble(tiny_decoder(depth=2), {"a": entry, "b": entry})


def test_it_is_the_installed_one():
    assert mls.__file__.startswith(sys.prefix)


def test_a_sound_model(model, multilora_guard, multilora_store):
    multilora_guard(model)
    mls.save(model, multilora_store)
    multilora_guard.store(multilora_store, profile="vllm")


def test_a_step_that_moves_too_much(model, multilora_guard):
    with multilora_guard.only(model, "a"), torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b." in name:
                parameter += 1
"""


def call(*line: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in line]
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=200, check=False
    )


def built(source: Path, work: Path, *what: str) -> list[Path]:
    """What the build of a source tree gives: an sdist and a wheel out of it, or `--wheel` alone."""
    at_hand = importlib.util.find_spec("hatchling") is not None
    isolation = ["--no-isolation", "--skip-dependency-check"] if at_hand else []
    done = call(sys.executable, "-m", "build", *what, *isolation, "--outdir", work / "dist", source, cwd=work)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted((work / "dist").iterdir())


def fresh(work: Path, wheel: Path, *paths: str | Path) -> Path:
    """The interpreter of a fresh environment that holds a wheel, and sees `paths` for what it needs."""
    assert call(sys.executable, "-m", "venv", "--without-pip", work / "venv", cwd=work).returncode == 0
    found = work / "venv" / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    installed = call(sys.executable, "-m", "pip", "--python", found, *install, cwd=work)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    (site / "needed.pth").write_text("\n".join(map(str, paths)) + "\n", encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the example distribution."""
    work = tmp_path_factory.mktemp("distribution")
    shutil.copytree(DIST, work / "source")
    (wheel,) = built(work / "source", work, "--wheel")
    return fresh(work, wheel, ROOT, sysconfig.get_paths()["purelib"])


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


@pytest.mark.long  # CI does the same with the wheel that it builds
def test_our_own_sdist_gives_a_wheel_whose_guards_a_team_can_use(tmp_path: Path) -> None:
    """An index would take both; the fixtures are there without a conftest, and what was installed is what runs."""
    sdist, wheel = sorted(built(ROOT, tmp_path), key=lambda file: file.suffix != ".gz")
    checked = call(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    python = fresh(tmp_path, wheel, sysconfig.get_paths()["purelib"])
    team = tmp_path / "team"
    team.mkdir()
    (team / "test_ours.py").write_text(TEAM, encoding="utf-8")
    line = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_ours.py")
    ran = call(*line, cwd=team, env={"PYTHONPATH": "", "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed, 2 passed" in ran.stdout
    assert "AuditError: 4 tensors changed that belong to none of a" in ran.stdout
    shown = program(python, team, "assemble", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "fsdp2" in shown.stdout
    assert program(python, team, "show", "plugins", "plugins=[fuse_set]").returncode == 0
