"""The process as Hydra shall see it: our argument vector, and errors raised to us instead of printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

__all__ = ["through_hydra"]


def through_hydra(
    arguments: Sequence[str], config_name: str | None, job: Callable[[Any], None], *, mode_by_flag: bool = False
) -> None:
    """Run Hydra's main on `arguments`; `sys.argv` and the environment are as before afterwards.

    Args:
        arguments: The command line, without the verb.
        config_name: The primary config.
        job: What is called with the composed config, once or for each job of a sweep.
        mode_by_flag: Nothing but `-m` can make it a sweep.
    """
    import hydra

    from multilora_store.cli.sources import conf_folder

    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _mode_by_flag() if mode_by_flag else nullcontext():
            hydra.main(config_path=str(conf_folder()), config_name=config_name, version_base="1.3")(job)()
    finally:
        sys.argv = argv
        if full is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


@contextmanager
def _mode_by_flag() -> Iterator[None]:
    """Spare Hydra the composition of the whole config that only asks for `hydra.mode`: half the time of a command."""
    from hydra._internal import hydra as inside

    original = inside.Hydra.get_mode
    inside.Hydra.get_mode = lambda *_, **__: None  # None: as the flags say
    try:
        yield
    finally:
        inside.Hydra.get_mode = original
