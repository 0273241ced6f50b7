"""Following: one store kept up to another for as long as it is written, through what passes by itself."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from multilora_store.errors import (
    MultiLoRAError,
    OutcomeUnknownError,
    ReplicaIncompleteError,
    StorageDeniedError,
    StorageError,
    StorageFullError,
    StoreNotFoundError,
    UsageError,
)
from multilora_store.storage.store import Store, open_store
from multilora_store.storage.sync import SyncReport, sync

__all__ = ["Round", "follow"]

_LONGEST_WAIT: Final = 300.0
# A source that is no store yet is a training run that has not saved; a file that is missing may be on its way.
_PASSING: Final = (StorageError, OutcomeUnknownError, ReplicaIncompleteError, StoreNotFoundError)
_LASTING: Final = (StorageDeniedError, StorageFullError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of following: what was synced, or what failed and will be tried again.

    Attributes:
        report: What the sync did; None: it failed.
        error: What failed.
        wait: Seconds until the next round.
    """

    report: SyncReport | None = None
    error: MultiLoRAError | None = None
    wait: float


def follow(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    every: float,
    sleep: Callable[[float], Any] = time.sleep,
    **options: Any,
) -> Iterator[Round]:
    """Syncs, waits, and syncs again, until the caller stops asking.

    A round that finds nothing new costs two requests a side. A storage that does not answer, a commit whose outcome
    is unknown, and a source that is no store yet are tried again, each time after twice as long (five minutes at
    most). Everything else ends it.

    Args:
        source, target, options: As for `sync`.
        every: Seconds between two rounds.
        sleep: Waits; ends the generator if it returns true, as `threading.Event.wait` does.

    Raises:
        UsageError: `every` is not a positive number.
        MultiLoRAError: whatever `sync` raises and time will not mend.
    """
    if isinstance(every, bool) or not isinstance(every, (int, float)) or not 0 < every < float("inf"):
        raise UsageError(f"every is {every!r}", remedy="give seconds, more than 0")
    ours = source if isinstance(source, Store) else open_store(source)
    theirs = target if isinstance(target, Store) else open_store(target)
    return _rounds(ours, theirs, float(every), sleep, options)


def _rounds(
    source: Store, target: Store, every: float, sleep: Callable[[float], Any], options: dict[str, Any]
) -> Iterator[Round]:
    failures = 0
    while True:
        try:
            done, failures = Round(report=sync(source, target, **options), wait=every), 0
        except _PASSING as error:
            if isinstance(error, _LASTING):
                raise
            longest = max(every, _LONGEST_WAIT)
            wait = min(every * 2**failures, longest) * random.uniform(0.75, 1.0)  # noqa: S311 (jitter)
            log.info("a round of following failed: %s", error.what)
            done, failures = Round(error=error, wait=wait), min(failures + 1, 30)
        yield done
        if sleep(done.wait):
            return
