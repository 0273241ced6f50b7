"""A save that goes on in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from multilora_store.storage import Snapshot

__all__ = ["SaveHandle"]

logger = logging.getLogger(__name__)


class SaveHandle:
    """A save that goes on in the background; exactly one is in flight, and a program's end waits for it."""

    def __init__(self, work: Callable[[], Snapshot]) -> None:
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        self.told = False

        def run() -> None:
            try:
                self._snapshot = work()
            except BaseException as error:
                self._error = error
                logger.error("a save in the background failed: %s", error)  # result() raises it

        self._thread = threading.Thread(target=run, name="multilora_store save", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has finished, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Snapshot:
        """The snapshot, once it is committed.

        Raises:
            TimeoutError: it is not done within `timeout` seconds.
            Exception: what made the save fail; the former snapshot is still there.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the save is still running after {timeout} s")
        self.told = True
        if self._error is not None:
            raise self._error
        assert self._snapshot is not None
        return self._snapshot
