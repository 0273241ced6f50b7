"""The process as Hydra shall see it: our argument vector, and errors raised to us instead of printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["through_hydra"]


def through_hydra(arguments: Sequence[str], config_name: str | None, job: Callable[[Any], None]) -> None:
    """Run Hydra's main on `arguments`; `sys.argv` and the environment are as before afterwards."""
    import hydra

    from multilora_store.cli.sources import conf_folder

    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(conf_folder()), config_name=config_name, version_base="1.3")(job)()
    finally:
        sys.argv = argv
        if full is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full
