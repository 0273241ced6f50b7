"""The real Trainer with a set of adapters: every adapter saved at its steps, retention, and resuming bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from launch import launch, results

import multilora_store as mls
from multilora_store.errors import CoverageError, ShardedModelError, UnsupportedError, UsageError
from multilora_store.integrations.transformers import MultiLoRACallback, for_trainer, resume
from multilora_store.storage import Store, open_store

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*:UserWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def run(
    store: Store, folder: Path, *, model: Any = None, callback: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Trains from the start and returns (model, trainer, callback)."""
    saving = MultiLoRACallback(store, **(callback or {}))
    model = trained.assembled() if model is None else model
    trainer = trained.trainer(model, folder, [saving], **options)
    saving.bind(trainer)
    trainer.train()
    return model, trainer, saving


def test_every_adapter_is_saved_at_each_save_step_in_place_of_checkpoints(store: Store, tmp_path: Path) -> None:
    """Case 57: several named adapters, the inactive reference too."""
    model, _, saving = run(store, tmp_path / "out")
    assert [snapshot.step for snapshot in store.snapshots()] == [2, 4]
    last = store.snapshot()
    assert saving.snapshot == last
    assert list(last.adapters) == ["train", "second", "reference"]
    assert [(m.active, m.trainable, m.weight) for m in last.adapters.values()] == [
        (True, True, 1.0), (True, True, 0.5), (False, False, 1.0),
    ]  # fmt: skip
    assert not list((tmp_path / "out").rglob("checkpoint-*"))
    live = trained.weights(model)
    for name, member in last.adapters.items():
        held = store.get(f"{name}@{member.version}").tensors
        assert all(torch.equal(held[key], live[f"{name}: {key}"]) for key in held)
    assert len(store.versions("reference")) == 1, "an unchanged adapter is stored once"


def test_a_resumed_training_equals_the_uninterrupted_one_bit_for_bit(store: Store, tmp_path: Path) -> None:
    """Case 57, Case 128: optimizer, scheduler, dropout's random state and the place in the data come back."""
    model, whole, _ = run(store, tmp_path / "one", gradient_accumulation_steps=2, steps=6)
    again = trained.assembled()
    second = open_store(tmp_path / "second")
    trainer = trained.trainer(
        again, tmp_path / "two", [MultiLoRACallback(second)], gradient_accumulation_steps=2, steps=6
    )
    first = next(snapshot for snapshot in store.snapshots() if snapshot.step == 2)
    output = resume(trainer, store, snapshot=first.id)
    assert output.global_step == 6
    assert trained.different(trained.weights(model), trained.weights(again)) == []
    losses = [{row["step"]: row["loss"] for row in t.state.log_history if "loss" in row} for t in (whole, trainer)]
    assert all(losses[0][step] == losses[1][step] for step in (4, 5, 6))
    assert [snapshot.step for snapshot in second.snapshots()] == [4, 6]
    assert "_load_rng_state" not in vars(trainer), "the trainer's own loaders are back"


def test_retention_keeps_the_last_and_the_best_by_metric(store: Store, tmp_path: Path) -> None:
    keep = {"keep_last": {"count": 1}, "keep_best": {"metric": "eval_loss"}}
    store.put("other", {"base_model.model.q.lora_A.weight": torch.ones(1, 2)}, {**trained.FIELDS, "peft_type": "LORA"})
    _, trainer, _ = run(
        store, tmp_path, callback={"keep": keep}, steps=6, save_steps=1, eval_strategy="steps", eval_steps=1
    )
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    assert len(losses) == 6
    best = min(losses, key=lambda step: (losses[step], -step))
    assert [snapshot.step for snapshot in store.snapshots()] == sorted({best, 6})
    assert store.snapshot().metadata["eval_loss"] == losses[6]
    assert len(store.versions("other")) == 1, "what is not of this set is not judged"


def test_early_stopping_goes_on_where_it_was(store: Store, tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    options: dict[str, Any] = {
        "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss",
        "greater_is_better": False, "learning_rate": 0.0, "restore_callback_states_from_checkpoint": True,
    }  # fmt: skip

    def build(folder: str, steps: int) -> Any:
        saving = MultiLoRACallback(store)
        callbacks = [EarlyStoppingCallback(early_stopping_patience=3), saving]
        trainer = trained.trainer(trained.assembled(), tmp_path / folder, callbacks, steps=steps, **options)
        saving.bind(trainer)
        return trainer

    build("one", 2).train()
    trainer = build("two", 9)
    resume(trainer, store)
    assert trainer.state.global_step == 4, "one worse evaluation before, two after"


def test_a_callback_that_is_used_again_saves_again(store: Store, tmp_path: Path) -> None:
    """A step that is the end of an epoch is saved once; the same step of another training is another snapshot."""
    saving = MultiLoRACallback(store)
    for folder in ("one", "two"):
        trained.trainer(trained.assembled(), tmp_path / folder, [saving], steps=2).train()
    assert [snapshot.step for snapshot in store.snapshots()] == [2, 2]


def test_saves_by_epochs_after_their_evaluation_hold_its_metrics(store: Store, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "steps": 24}
    _, trainer, _ = run(store, tmp_path, **options)
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    assert {snapshot.step: snapshot.metadata["eval_loss"] for snapshot in store.snapshots()} == losses
    assert sorted(losses) == [12, 24]


def test_the_trainers_own_checkpoints_can_stay_beside(store: Store, tmp_path: Path) -> None:
    run(store, tmp_path / "out", callback={"checkpoints": True})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-2", "checkpoint-4"}
    assert [snapshot.step for snapshot in store.snapshots()] == [2, 4]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best'"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end"),
    ],
)
def test_what_needs_checkpoint_folders_is_refused_before_the_first_step(
    store: Store, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, **options}
    with pytest.raises(UsageError, match=says):
        run(store, tmp_path, **options)


def test_snapshots_that_hold_no_trainers_state_are_told_apart(store: Store, tmp_path: Path) -> None:
    model = trained.assembled()
    mls.save(model, store, step=1)
    trainer = trained.trainer(model, tmp_path, [MultiLoRACallback(store)])
    with pytest.raises(UsageError, match="not saved by a trainer"):
        resume(trainer, store)
    run(store, tmp_path / "b", callback={"optimizer": False})
    with pytest.raises(UsageError, match="state of an optimizer"):
        resume(trainer, store)


def test_a_set_of_another_rank_is_refused_and_the_trainer_is_as_before(store: Store, tmp_path: Path) -> None:
    run(store, tmp_path / "one")
    other = mls.assemble(trained.base(), {**trained.SET, "second": trained.SET["train"]})
    trainer = trained.trainer(other, tmp_path / "two", [])
    with pytest.raises(CoverageError, match="second"):
        resume(trainer, store)
    assert "_load_from_checkpoint" not in vars(trainer)


def test_a_scheduler_whose_state_is_no_plain_data_is_refused(store: Store, tmp_path: Path) -> None:
    from multilora_store.integrations.trainer_state import plain

    assert plain({"a": (1, 2.5, None), "b": torch.tensor(3)}, "x") == {"a": [1, 2.5, None], "b": 3}
    with pytest.raises(UnsupportedError, match="keeps a Tensor"):
        plain({"a": torch.zeros(2)}, "MyScheduler")


def test_only_a_sharded_model_is_marked_for_the_trainer() -> None:
    with pytest.raises(UsageError, match="this one is plain"):
        for_trainer(trained.assembled())


# Two ranks.


@pytest.mark.parametrize("wrapper", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_on_two_ranks_the_set_is_saved_once_and_resumed_bit_for_bit(tmp_path: Path, wrapper: str) -> None:
    """Sharded by us and driven by the Trainer, or wrapped by it in DDP.

    Case 128: step n+1 as if never interrupted. Case 66: adapters alone are written, and the base stays as it was.
    """
    whole = results(trained.trained_on_ranks, 2, str(tmp_path), wrapper, "whole", timeout=120)
    resumed = results(trained.trained_on_ranks, 2, str(tmp_path), wrapper, "resumed", timeout=120)
    for before, after in zip(whole, resumed, strict=True):
        assert trained.different(before["weights"], after["weights"]) == []
        assert before["loss"] == after["loss"]
        assert before["base_kept"]
        assert after["base_kept"]
        assert before["steps"] == [2, 4]
        assert after["steps"] == [4]
        assert after["report"] == (True, "fsdp2" if wrapper == "fsdp2" else "plain")
        assert after["wrapped"] == ("PeftModel" if wrapper == "fsdp2" else "DistributedDataParallel")
    assert trained.different(whole[0]["weights"], whole[1]["weights"]) == []
    store = open_store(tmp_path / "store")
    assert all(".lora_" in key for name in store.names() for key in store.get(name).tensors)


@pytest.mark.slow
def test_a_training_of_two_ranks_goes_on_on_four_and_on_one(tmp_path: Path) -> None:
    """Case 7: weights, optimizer and step come back on any number of ranks; random states stay as they are."""
    whole = results(trained.trained_on_ranks, 2, str(tmp_path), "fsdp2", "whole", timeout=120)
    for world in (4, 1):
        resumed = results(trained.trained_on_ranks, world, str(tmp_path), "fsdp2", f"on-{world}", timeout=120)
        for each in resumed:
            assert each["steps"] == [4]
            assert each["report"] == (True, "fsdp2")
            assert each["base_kept"]
        assert trained.different(resumed[0]["weights"], resumed[-1]["weights"]) == []
        moved = set(trained.different(whole[0]["weights"], resumed[0]["weights"]))
        assert moved, "other data on each rank, so other weights"
        assert not [key for key in moved if key.startswith("reference")]


@pytest.mark.slow
def test_the_trainers_own_checkpoints_of_a_sharded_set_are_refused(tmp_path: Path) -> None:
    outcomes = launch(trained.own_checkpoints, 2, str(tmp_path))
    assert all(isinstance(outcome.error, UnsupportedError) for outcome in outcomes), outcomes[0].trace
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_trainer_without_the_callback_cannot_write_shards_as_if_whole(tmp_path: Path) -> None:
    """The guard names the call that saves adapters."""
    outcomes = launch(trained.saved_without_us, 2, str(tmp_path), timeout=30)
    first = outcomes[0].error
    assert isinstance(first, ShardedModelError), outcomes[0].trace
    assert "multilora_store.save" in str(first)


@pytest.mark.slow
def test_an_fsdp_setting_for_a_model_that_is_sharded_is_refused_by_name(tmp_path: Path) -> None:
    outcomes = launch(trained.told_to_wrap_again, 2, str(tmp_path))
    assert all(isinstance(outcome.error, ShardedModelError) for outcome in outcomes), outcomes[0].trace
    assert "leave out the fsdp argument" in str(outcomes[0].error)
