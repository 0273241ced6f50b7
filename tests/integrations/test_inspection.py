"""The doctor on other tools' checkpoints: what each is, which adapters it holds, every fault with cause and remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

from multilora_store.errors import UsageError
from multilora_store.integrations.inspection import inspect_checkpoint

MODEL = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy set as PEFT saves it: `a`, `b` and `c` in folders of their own, with B factors that do something."""
    folder = tmp_path_factory.mktemp("saved")
    model = toys.build()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.fill_(0.5)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of adapter `a`, to be damaged."""
    copy = tmp_path / "a"
    copy.mkdir()
    for file in ("adapter_config.json", MODEL):
        (copy / file).write_bytes((saved / "a" / file).read_bytes())
    return copy


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = {key: value.clone() for key, value in load_file(folder / MODEL).items()}
    save_file(change(tensors), folder / MODEL)


def test_a_whole_peft_folder_is_told_and_nothing_is_found(saved: Path) -> None:
    found = inspect_checkpoint(saved)
    assert (found.recognised.kind, found.recognised.title) == ("peft", "PEFT adapters")
    assert [(one.name, one.declared) for one in found.adapters] == [("a", True), ("b", True), ("c", True)]
    assert all(one.tensors and one.numel for one in found.adapters)
    assert found.findings == ()


def first(tensors: dict[str, torch.Tensor], side: str = "A") -> str:
    return next(key for key in sorted(tensors) if f".lora_{side}." in key)


def emptied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {first(tensors): torch.empty(0)}


def flattened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {first(tensors): tensors[first(tensors)].flatten()}


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    del tensors[first(tensors)]
    return tensors


def diverged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors[first(tensors)][0, 0] = float("nan")
    return tensors


def untrained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value * 0 if ".lora_B." in key else value for key, value in tensors.items()}


def wrapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.replace("layers.0", "layers.0._fsdp_wrapped_module"): value for key, value in tensors.items()}


def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.replace(".weight", ".default.weight"): value for key, value in tensors.items()}


def with_base(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"base_model.model.embed.weight": torch.zeros(3, 3)}


def without_a_target(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if ".v_proj." not in key}


@pytest.mark.parametrize(
    ("fault", "says", "cause"),
    [
        (emptied, "tensors are empty", "one rank's share"),
        (flattened, "factors are flat", "FSDP1's flat parameter"),
        (halved, "have no partner", "one half of a pair"),
        (diverged, "NaN", "diverged"),
        (untrained, "no effect", "never trained"),
        (wrapped, "a wrapper's prefix", "wrapped model"),
        (named, "the adapter's own name", "instead of PEFT's"),
        (with_base, "are the base's", "embeddings"),
        (without_a_target, "targets have no tensors", "lost them"),
    ],
)
def test_each_fault_of_a_folder_is_found_once(folder: Path, fault: Any, says: str, cause: str) -> None:
    """Cases of the checklist: empty shards, wrappers' names, half pairs, NaN, adapters without effect."""
    rewrite(folder, fault)
    findings = inspect_checkpoint(folder).findings
    mine = [one for one in findings if says in one.what]
    assert len(mine) == 1, findings
    assert cause in mine[0].cause
    assert mine[0].evidence
    assert mine[0].remedy
    assert mine[0].subject == "default"


def test_an_adapter_that_is_declared_without_tensors_and_one_without_a_configuration(
    folder: Path, saved: Path, tmp_path: Path
) -> None:
    """Only the active adapter was saved: the other folder has its configuration alone."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "adapter_config.json").write_bytes((saved / "b" / "adapter_config.json").read_bytes())
    (folder / "adapter_config.json").unlink()
    found = inspect_checkpoint(tmp_path)
    assert [(one.name, one.declared, bool(one.tensors)) for one in found.adapters] == [
        ("a", False, True),
        ("b", True, False),
    ]
    assert [(one.subject, one.what) for one in found.findings] == [
        ("a", "weights without their configuration"),
        ("b", "declared, but it has no tensors"),
    ]


def test_another_training_s_configuration(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "r": config["r"] + 1, "modules_to_save": ["head"]})
    )
    said = [one.what for one in inspect_checkpoint(folder).findings]
    assert "modules trained in full are not in the file" in said
    assert any("another rank" in one for one in said)
    (folder / "adapter_config.json").write_text("{")
    assert "not JSON" in inspect_checkpoint(folder).findings[0].what


def test_a_trainer_s_checkpoint_says_its_step_and_what_is_missing(folder: Path, tmp_path: Path) -> None:
    """What a Trainer saves with save_only_model, and whole."""
    checkpoint = folder.rename(tmp_path / "checkpoint-40")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 40}))
    found = inspect_checkpoint(checkpoint)
    assert found.recognised.title == "a checkpoint of transformers' Trainer, step 40: PEFT adapters"
    assert [one.what for one in found.findings] == ["no optimizer state, no scheduler state, no random state"]
    for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (checkpoint / file).write_bytes(b"never opened")
    assert inspect_checkpoint(checkpoint).findings == ()
    (checkpoint / "trainer_state.json").write_text("{")
    with pytest.raises(Exception, match="not JSON"):
        inspect_checkpoint(checkpoint)


def test_a_whole_model_tells_its_adapters(tmp_path: Path) -> None:
    save_file({key: value.clone() for key, value in toys.build().state_dict().items()}, tmp_path / "model.safetensors")
    found = inspect_checkpoint(tmp_path)
    assert found.recognised.title == "a model as safetensors"
    assert [one.name for one in found.adapters] == ["a", "b", "c"]
    assert all(one.tensors and not one.declared for one in found.adapters)
    (last,) = [one for one in found.findings if "without configurations" in one.what]
    assert last.remedy.startswith("take its adapters out: import")


def test_a_merged_model_has_no_adapter(tmp_path: Path) -> None:
    save_file({"model.embed.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (only,) = inspect_checkpoint(tmp_path).findings
    assert only.what == "there is no adapter in it"


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE_TARGET"],)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "adapter_model.bin", "last.pt"])
def test_pickles_are_opened_with_leave_alone_and_never_run(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTILE_TARGET", str(tmp_path / "ran"))
    place = tmp_path / "checkpoint"
    place.mkdir()
    torch.save({"x": _Hostile()}, place / file)
    if file == "adapter_model.bin":
        (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["up"]}))
    target = place / file if file == "last.pt" else place
    said = [one.what for one in inspect_checkpoint(target).findings]
    assert said == ["it is a pickle, so it was not looked into"]
    refused = inspect_checkpoint(target, allow_pickle=True).findings[0]
    assert "cannot be read without running" in refused.what
    assert "mkdir" in refused.cause
    assert not (tmp_path / "ran").exists()


def test_deepspeed_s_model_states_are_opened_when_told(tmp_path: Path) -> None:
    """The newest step's; whole under ZeRO-1 and -2, empty where ZeRO-3 has partitioned; in parts, it says so."""
    for step, zero3 in ((9, False), (10, True)):
        folder = tmp_path / "run" / f"global_step{step}"
        folder.mkdir(parents=True)
        layer = "base_model.model.model.layers.0.q_proj"
        module = {f"{layer}.lora_{side}.a.weight": torch.empty(0) if zero3 else torch.ones(4, 4) for side in "AB"} | {
            f"{layer}.base_layer.weight": torch.ones(4, 4)
        }
        whole = {
            "module": module,
            "param_shapes": [{layer: torch.Size([4, 4])}],
            "optimizer": None,
            "ds_version": "0.18",
        }
        torch.save(whole, folder / f"{'zero_pp_rank_0_' if zero3 else ''}mp_rank_00_model_states.pt")
    closed = inspect_checkpoint(tmp_path / "run")
    assert closed.recognised.title == "a DeepSpeed checkpoint"
    assert "global_step10" in closed.findings[0].evidence
    assert "allow_pickle=true" in closed.findings[0].remedy
    found = inspect_checkpoint(tmp_path / "run", allow_pickle=True)
    assert [(one.name, one.tensors) for one in found.adapters] == [("a", 2)]
    assert "2 of 2 tensors are empty" in found.findings[0].what
    assert "zero_to_fp32" in found.findings[-1].remedy
    whole = inspect_checkpoint(tmp_path / "run" / "global_step9", allow_pickle=True)
    assert [(one.name, one.numel) for one in whole.adapters] == [("a", 32)]
    assert ["zero_to_fp32" in one.remedy for one in whole.findings] == [True]
    (tmp_path / "run" / "global_step9" / "mp_rank_01_model_states.pt").write_bytes(b"never opened")
    (cut,) = inspect_checkpoint(tmp_path / "run" / "global_step9", allow_pickle=True).findings
    assert (cut.what, "zero_to_fp32" in cut.remedy) == ("DeepSpeed's files are not looked into", True)


def test_what_is_no_checkpoint_is_a_usage_error(tmp_path: Path) -> None:
    import multilora_store as mls

    with pytest.raises(UsageError, match="nothing at"):
        inspect_checkpoint(tmp_path / "nothing")
    with pytest.raises(UsageError, match="holds no checkpoint of a whole model"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "run" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-7" / MODEL).touch()
    with pytest.raises(UsageError, match="holds no checkpoint itself, only checkpoint-7"):
        inspect_checkpoint(tmp_path / "run")
    mls.open_store(tmp_path / "store").journal.make_store()
    with pytest.raises(UsageError, match="is a store of this program"):
        inspect_checkpoint(tmp_path / "store")
