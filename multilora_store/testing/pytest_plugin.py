"""The pytest plugin: fixtures that give any project the guards and a store of its own, in one line each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from multilora_store.storage import Store
    from multilora_store.testing.guards import Guard

__all__ = ["multilora_guard", "multilora_store"]

pytest.register_assert_rewrite(
    "multilora_store.testing.blobs", "multilora_store.testing.suites", "multilora_store.testing.model_suites"
)


@pytest.fixture
def multilora_guard() -> Guard:
    """`multilora_guard(model)` audits it; `.store(store)` verifies; `with .only(model, "a"):` lets only `a` change."""
    from multilora_store.testing.guards import Guard

    return Guard()


@pytest.fixture
def multilora_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store on the disk, with a cache of this test's own."""
    from multilora_store.storage import open_store

    monkeypatch.setenv("MULTILORA_CACHE", str(tmp_path / "multilora-cache"))
    return open_store(tmp_path / "multilora-store")
