"""Every reported fault has a test that names it, or a reason in CASES.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def named_in_tests() -> set[int]:
    found: set[int] = set()
    suites = (
        TESTS.parent / "multilora_store" / "testing"
    )  # shipped suites, which our own storages and plugins run through
    for path in [*TESTS.rglob("test_*.py"), *suites.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                for run in re.findall(r"\b[Cc]ases? (\d+(?:(?:,| and|, and) \d+)*)", text):
                    found.update(int(number) for number in re.findall(r"\d+", run))
    return found


def test_every_case_has_a_test_or_a_reason(shared: Path) -> None:
    cases = {int(number) for number in re.findall(r"^\*\*(\d+)\.", (shared / "cases.md").read_text(), re.MULTILINE)}
    reasons = {int(number) for number in re.findall(r"^\| (\d+) \|", (TESTS / "CASES.md").read_text(), re.MULTILINE)}
    assert len(cases) > 90
    assert cases - named_in_tests() - reasons == set()
    assert reasons <= cases
