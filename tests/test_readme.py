"""The README tells the truth: its example runs and prints what it says, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def test_the_complete_example_prints_what_it_says(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert found, "the README has no example followed by its output"
    code, output = found.groups()
    assert len([line for line in code.splitlines() if line.strip()]) < 25
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_of_the_table_exists() -> None:
    from multilora_store.cli.catalogue import COMMANDS

    named = set(re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE))
    assert named == set(COMMANDS), f"the table and the program differ: {named ^ set(COMMANDS)}"


def test_every_test_that_a_promise_names_exists() -> None:
    for name in re.findall(r"`(tests/[^`]+\.py)`", README):
        assert (ROOT / name).exists(), name
