"""When a plain training loop saves: every so many steps or minutes, when it is told to stop; and what is kept."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from multilora_store.assembly.bridge import adapter_names
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.handle import SaveHandle
from multilora_store.distributed.saving import save
from multilora_store.distributed.sharded import ranks_of
from multilora_store.errors import UsageError
from multilora_store.storage import Snapshot, Store
from multilora_store.storage.retention import apply_retention

__all__ = ["SaveSchedule", "retain"]

logger = logging.getLogger(__name__)


def retain(model: nn.Module, store: Store, keep: Mapping[str, Mapping[str, Any]], ranks: Ranks) -> None:
    """Lets retention policies of the store go over the snapshots and versions of this model's set, by one rank."""
    names = adapter_names(model)
    ranks.from_first("retention", lambda: apply_retention(store, keep, adapters=names).to_json())


class SaveSchedule:
    """Saves a set from a training loop at the steps that are due, on all ranks alike; used as a context manager.

    A signal (SIGTERM, as schedulers send it before they kill) on any rank makes every rank save at the end of the
    step that is running, and sets `stopping`; the loop then leaves. Ranks tell each other in one small exchange a step,
    which is left out where only `every` is given and `signals` is empty.

        with SaveSchedule(model, store, every=100, optimizer=optimizer, keep={"keep_last": {"count": 3}}) as saves:
            for step in range(1, steps + 1):
                ...
                saves.after_step(step, metrics={"eval_loss": loss})
                if saves.stopping:
                    break

    Args:
        model: As for `save`.
        store: As for `save`.
        every: Steps between two saves; None: not by steps.
        minutes: Minutes between two saves, by the first rank's clock; None: not by time.
        signals: Signals that ask for a last save; the handlers that were there come back at the end of the block.
        keep: Retention after each save, by policies of the store: `{"keep_last": {"count": 3}, "keep_best": {"metric":
            "eval_loss"}}`. Only snapshots and versions of this set are judged. None: everything stays.
        optimizer: Its state is saved too.
        tags: Tags for every version.
        blocking: False: upload and commit in the background; retention then follows when the save is done.

    Attributes:
        snapshot: The last one that was committed.
        stopping: Whether a signal has come, to any rank.

    Raises:
        UsageError: nothing would ever be saved, or `every` or `minutes` is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        *,
        every: int | None = None,
        minutes: float | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        keep: Mapping[str, Mapping[str, Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        tags: Sequence[str] = (),
        blocking: bool = True,
    ) -> None:
        for name, value in (("every", every), ("minutes", minutes)):
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be above 0, got {value}")
        if every is None and minutes is None and not signals:
            raise UsageError("this schedule never saves", remedy="give every=STEPS, minutes=MINUTES or signals")
        self.snapshot: Snapshot | None = None
        self.stopping = False
        self._model, self._store, self._optimizer = model, store, optimizer
        self._every, self._minutes, self._signals = every, minutes, tuple(signals)
        self._keep, self._tags, self._blocking = keep, tuple(tags), blocking
        self._asked = False
        self._handle: SaveHandle | None = None
        self._since = time.monotonic()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SaveSchedule:
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be caught in the main thread only", remedy="give signals=()")
        self._before = {each: signal.signal(each, self._ask) for each in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        if kind is None:
            self._settle()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def after_step(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Saves if a save is due; the same call on every rank, once a step. Whether it did.

        Args:
            step: The step that is done.
            metrics: Recorded in the snapshot, for `keep_best`.
            extra: Files of the trainer's own, as for `save`.

        Raises:
            What `save` raises; in the background, at the next save or at the end of the block.
        """
        ranks = ranks_of(self._model)
        due = self._every is not None and step % self._every == 0
        if self._minutes is not None or self._signals:
            late = self._minutes is not None and time.monotonic() - self._since >= 60 * self._minutes
            told = ranks.share("whether to save", (self._asked, late))
            self.stopping = self.stopping or any(asked for asked, _ in told)
            due = due or told[0][1] or any(asked for asked, _ in told)
        if not due:
            return False
        if self.stopping:
            logger.info("saving step %d, since a signal asked to stop", step)
        self._asked, self._since = False, time.monotonic()
        self._settle()
        options: dict[str, Any] = {"metadata": dict(metrics or {}), "extra": extra, "tags": self._tags}
        if self._blocking:
            self.snapshot = save(self._model, self._store, step=step, optimizer=self._optimizer, **options)
            self._retain()
        else:
            self._handle = save(
                self._model, self._store, step=step, optimizer=self._optimizer, blocking=False, **options
            )
        return True

    def _settle(self) -> None:
        """Waits for the save in the background, if there is one."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self.snapshot = handle.result()
            self._retain()

    def _retain(self) -> None:
        if self._keep:
            retain(self._model, self._store, self._keep, ranks_of(self._model))
