"""What every test may use: the real adapters and configs beside the checkout, where they are present."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# On a busy machine a slow example is no fault. CI tries the same examples each time: it fails for a change alone.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

SHARED = Path(os.environ.get("MULTILORA_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real adapters, configs and recipes; the test is skipped where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"the real adapters are not here: {SHARED}/data")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is long is slow too, so that `not slow` leaves both out."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
