"""transformers: a Trainer whose checkpoints are snapshots of the whole set in a store, and that resumes from one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from multilora_store.assembly.bridge import peft_model
from multilora_store.distributed import restore, save
from multilora_store.distributed.agreement import Ranks
from multilora_store.distributed.random import set_random_state
from multilora_store.distributed.schedule import retain
from multilora_store.distributed.sharded import backend_of, ranks_of, wrapping_of
from multilora_store.errors import ShardedModelError, UnsupportedError, UsageError
from multilora_store.integrations.accelerate import mark_prepared, plain_optimizer
from multilora_store.integrations.trainer_state import (
    FORMAT,
    TRAINER_FILE,
    plain,
    python_random_state,
    read_trainer,
    set_python_random_state,
)
from multilora_store.storage import Snapshot, Store

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput

__all__ = ["MultiLoRACallback", "for_trainer", "resume"]

logger = logging.getLogger(__name__)

# What Trainer.train(resume_from_checkpoint=...) reads a folder by; replaced while it resumes from a snapshot.
_LOADERS: Final = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")


class MultiLoRACallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types that mypy follows
    """Saves every adapter of the set whenever the trainer would write a checkpoint, in place of that checkpoint.

    A snapshot holds the adapters, active or not, the optimizer's state, each rank's random state, the scheduler, and
    the trainer's own state with its place in the data; its metadata holds the newest metrics (`eval_loss`, ...).

    Args:
        store: Where to; every rank must reach it.
        keep: Retention after each save, by policies of the store: `{"keep_last": {"count": 3}, "keep_best": {"metric":
            "eval_loss"}}`. Only versions and snapshots of this set are judged. None: everything stays.
        tags: Tags for every version.
        optimizer: Whether the optimizer's state is saved; without it there is no resuming.
        checkpoints: Let the trainer write its own checkpoint folders too; not for a model that `shard` wrapped.
        profile: A server (`vllm`): each save says what it would refuse, see `multilora_store.save`.

    Attributes:
        snapshot: The last one saved.
    """

    def __init__(
        self,
        store: Store,
        *,
        keep: Mapping[str, Mapping[str, Any]] | None = None,
        tags: Sequence[str] = (),
        optimizer: bool = True,
        checkpoints: bool = False,
        profile: str | None = None,
    ) -> None:
        self.store = store
        self.keep = keep
        self.tags = tuple(tags)
        self.with_optimizer = optimizer
        self.checkpoints = checkpoints
        self.profile = profile
        self.snapshot: Snapshot | None = None
        self._pending = False
        self._saved_step: int | None = None
        self._trainer: Trainer | None = None
        self._metrics: dict[str, float] = {}

    def bind(self, trainer: Trainer) -> None:
        """Lets snapshots hold the state of the trainer's other callbacks (early stopping) and of its loss scaler."""
        self._trainer = trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuses an `fsdp` argument for a model that `shard` has wrapped.

        Raises:
            ShardedModelError: the Trainer would wrap it a second time.
        """
        asked = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if asked and wrapping_of(kwargs["model"]) is not None:
            raise ShardedModelError(
                "the Trainer was told to wrap in FSDP a model that shard() has wrapped",
                why="its wrap around ours would shard shards",
                remedy="leave out the fsdp argument and accelerate's FSDP plugin; or give it the assembled model, "
                "unsharded, and let it wrap that",
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuses what cannot work before the first step.

        Raises:
            UsageError: `load_best_model_at_end` or `save_strategy="best"` without the trainer's own checkpoints.
            UnsupportedError: the trainer's own checkpoints of a model that `shard` wrapped.
        """
        model = kwargs["model"]
        peft_model(model)
        self._pending, self._saved_step, self._metrics = False, None, {}
        if args.save_strategy == SaveStrategy.BEST and not self.checkpoints:
            raise UsageError(
                "save_strategy='best' is decided after every callback has been asked",
                remedy="save by steps or epochs, and keep the best with keep={'keep_best': ...}",
            )
        if args.load_best_model_at_end and not self.checkpoints:
            raise UsageError(
                "load_best_model_at_end looks for a checkpoint folder, and there is none",
                remedy="leave it out, keep the best with keep={'keep_best': ...}, and restore() that snapshot",
            )
        if self.checkpoints and wrapping_of(model) is not None:
            raise UnsupportedError(
                "the trainer's own checkpoints of a sharded set",
                why="they are written by PEFT's save_pretrained, which sees one rank's shards",
                remedy="leave checkpoints=False: the snapshots hold everything that resuming needs",
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Takes the save over; it is done now, or after the evaluation that is due."""
        return self._take_over(state, control, kwargs)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """As at the end of a step."""
        return self._take_over(state, control, kwargs)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keeps the metrics, and does the save that waited for them."""
        metrics = kwargs.get("metrics") or {}
        self._metrics = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        if self._pending:
            self._pending = False
            self._save(_judged(args, state, self._metrics), kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves beside the trainer's own checkpoint, where that was asked for."""
        self._save(state, kwargs)

    def _take_over(self, state: TrainerState, control: TrainerControl, given: Mapping[str, Any]) -> TrainerControl:
        if control.should_save and not self.checkpoints:
            control.should_save = False
            if control.should_evaluate:
                self._pending = True
            else:
                self._save(state, given)
        return control

    def _save(self, state: TrainerState, given: Mapping[str, Any]) -> None:
        model, optimizer = given["model"], plain_optimizer(given["optimizer"])
        if self._saved_step == state.global_step:
            return  # the end of a step that is the end of an epoch too
        ranks = ranks_of(model)
        extra = ranks.together("trainer state", lambda: self._extra(state, given, ranks))
        self.snapshot = save(
            model,
            self.store,
            step=state.global_step,
            optimizer=optimizer if self.with_optimizer else None,
            tags=self.tags,
            metadata=self._metrics,
            extra=extra,
            profile=self.profile,
        )
        self._saved_step = state.global_step
        if self.keep:
            retain(model, self.store, self.keep, ranks)

    def _extra(self, state: TrainerState, given: Mapping[str, Any], ranks: Ranks) -> dict[str, bytes]:
        scheduler = given.get("lr_scheduler")
        content = {
            "format": FORMAT,
            "state": {**dataclasses.asdict(state), "stateful_callbacks": self._callbacks(state)},
            "scheduler": None if scheduler is None else plain(scheduler.state_dict(), type(scheduler).__name__),
            "scaler": self._scaler(),
            "random": ranks.share("random state of Python and NumPy", python_random_state()),
        }
        return {TRAINER_FILE: json.dumps(content, sort_keys=True).encode()}

    def _callbacks(self, state: TrainerState) -> dict[str, Any]:
        """States of the trainer's own callbacks by class, as its checkpoints have them."""
        if self._trainer is None:
            return dict(state.stateful_callbacks)
        found: dict[str, Any] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return found

    def _scaler(self) -> dict[str, Any] | None:
        accelerator = None if self._trainer is None else self._trainer.accelerator
        scaler = getattr(accelerator, "scaler", None)
        return None if scaler is None else plain(scaler.state_dict(), "the loss scaler")


def _judged(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, float]) -> TrainerState:
    """The state as the trainer will have it once it has compared these metrics with its best."""
    name = args.metric_for_best_model
    value = None if name is None else metrics.get(name if name.startswith("eval_") else f"eval_{name}")
    if value is None:
        return state
    best = state.best_metric
    if best is not None and not (value > best if args.greater_is_better else value < best):
        return state
    return dataclasses.replace(state, best_metric=value, best_global_step=state.global_step)


def for_trainer(model: nn.Module) -> nn.Module:
    """Tells a Trainer to leave a model that `shard` has wrapped as it is; call it before making the Trainer.

    The Trainer then builds its optimizer over the shards and drives them; give it no `fsdp` argument, which would wrap
    the model a second time.

    Raises:
        UsageError: `shard` has not wrapped it.
    """
    if wrapping_of(model) is None:
        raise UsageError(
            f"for_trainer() takes a model that shard() has wrapped, this one is {backend_of(model)}",
            remedy="shard it first, or give an assembled model to the Trainer as it is (DDP)",
        )
    mark_prepared(model)
    return model


def resume(trainer: Trainer, store: Store, *, snapshot: str = "latest") -> TrainOutput:
    """Goes on with the training that left `snapshot`: as `trainer.train()`, from its next step.

    Weights, flags, optimizer, scheduler, loss scaler, each rank's random states and the place in the data come from
    the store; the trainer's set must be the snapshot's, under any wrapper, and with the same data and arguments step
    n+1 is the one of the uninterrupted run. On another number of ranks random states are left as they are.

    Args:
        trainer: A Trainer over the assembled set, as it would start anew.
        store: The store that `MultiLoRACallback` saved to.
        snapshot: `latest` or an id.

    Returns:
        What `trainer.train()` returns.

    Raises:
        UsageError: the snapshot was not saved by a trainer, or its set is not the model's.
        UnsupportedError: this version of transformers resumes in another way.
        DamagedError: the trainer's state in the snapshot cannot be read.
    """
    missing = [name for name in _LOADERS if not callable(getattr(trainer, name, None))]
    if missing:
        raise UnsupportedError(
            f"this Trainer has no {missing[0]}()",
            why="resuming from a snapshot stands in for it",
            remedy="use transformers 5.24, which this is tested with",
        )
    ranks = ranks_of(trainer.model)
    source, content, states = ranks.from_first("resume", lambda: read_trainer(store, snapshot))
    with tempfile.TemporaryDirectory(prefix="multilora-resume-") as folder:
        state = Path(folder, "trainer_state.json")
        state.write_text(json.dumps(content["state"]))
        with _standing_in(trainer, store, source, content, states):
            return trainer.train(resume_from_checkpoint=folder)


@contextlib.contextmanager
def _standing_in(
    trainer: Trainer,
    store: Store,
    source: Snapshot,
    content: Mapping[str, Any],
    states: Sequence[dict[str, bytes]],
) -> Iterator[None]:
    """Within the block the trainer's loaders read the snapshot, not a folder; the one place that knows their names."""

    def load_all(*_: Any) -> None:
        restore(trainer.model, store, snapshot=source.id, optimizer=plain_optimizer(trainer.optimizer))
        if content["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(content["scheduler"])

    def load_scaler(*_: Any) -> None:
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and content["scaler"] is not None:
            scaler.load_state_dict(content["scaler"])

    def load_random(*_: Any) -> None:
        ranks = ranks_of(trainer.model)
        if len(states) == ranks.size == len(content["random"]):
            set_random_state(states[ranks.rank])
            set_python_random_state(content["random"][ranks.rank])

    stand_ins = (lambda *_, **__: None, load_all, load_scaler, load_random)
    trainer.__dict__.update(zip(_LOADERS, stand_ins, strict=True))
    try:
        yield
    finally:
        for name in _LOADERS:
            trainer.__dict__.pop(name, None)
