"""The process as Hydra shall see it: our argument vector, and errors raised to us instead of printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

__all__ = ["through_hydra"]


def through_hydra(
    arguments: Sequence[str],
    config_name: str | None,
    job: Callable[[Any], Any],
    failed: Callable[[Exception], Any] | None = None,
) -> list[Any]:
    """Run Hydra's main on `arguments`; `sys.argv` and the environment are as before afterwards.

    Args:
        arguments: Without the program's name.
        config_name: The primary config.
        job: Called with each composed config, by a sweep's launcher perhaps in another process.
        failed: What stands for the result of a job of a sweep that raised; None: the error is raised.

    Returns:
        What the jobs of a sweep returned, wherever its launcher ran them; nothing for a single job.
    """
    import hydra

    from multilora_store.cli.sources import conf_folder

    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    found: list[Any] = []
    try:
        with _told_by_launchers(lambda returned: found.append(_result(returned, failed))):
            hydra.main(config_path=str(conf_folder()), config_name=config_name, version_base="1.3")(job)()
    finally:
        sys.argv = argv
        if full is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full
    return found


def _result(returned: JobReturn, failed: Callable[[Exception], Any] | None) -> Any:
    from hydra.core.utils import JobStatus

    if returned.status is JobStatus.FAILED and failed is not None:
        return failed(returned._return_value)
    return returned.return_value


class _Heard:
    """A launcher whose jobs' returns are told as well; beside it, for what lies in it may be pickled."""

    def __init__(self, launcher: Any, tell: Callable[[JobReturn], None]) -> None:
        self._launcher, self._tell = launcher, tell

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        returns = self._launcher.launch(*args, **kwargs)
        for returned in returns:
            self._tell(returned)
        return returns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


@contextmanager
def _told_by_launchers(tell: Callable[[JobReturn], None]) -> Iterator[None]:
    """Hear what each job of a sweep returned: Hydra hands it to the sweeper, and no sweeper hands it on."""
    from hydra.core.plugins import Plugins

    instantiate = Plugins.instantiate_launcher

    Plugins.instantiate_launcher = lambda *args, **kwargs: _Heard(instantiate(*args, **kwargs), tell)
    try:
        yield
    finally:
        Plugins.instantiate_launcher = instantiate
