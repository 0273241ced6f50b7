"""What another tool's checkpoint is, told from the names of its files alone; nothing is opened but small JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from multilora_store.errors import DamagedError, UsageError
from multilora_store.integrations.checkpoint_files import find_checkpoint
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.peft_folder import CHECKPOINT, PICKLE_FILE, Folder

__all__ = ["Recognised", "recognise"]

_PARTS: Final = {
    "optimizer state": re.compile(r"optimizer[\w.]*(/.*)?|.*optim_states\.pt"),
    "scheduler state": re.compile(r"scheduler\.(pt|bin)"),
    "random state": re.compile(r"rng_state[\w.]*|random_states_\d+\.pkl"),
    "trainer state": re.compile(r"trainer_state\.json"),
}
_TITLES: Final = {
    "peft": "PEFT adapters",
    "distributed": "a torch distributed checkpoint",
    "ranks": "FSDP1's files of ranks",
    "safetensors": "a model as safetensors",
    "torch": "a model as a pickle",
    "deepspeed": "a DeepSpeed checkpoint",
    "gguf": "a GGUF file of llama.cpp",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """A checkpoint, by its files.

    Attributes:
        path: Where it lies.
        kind: `peft`, `distributed`, `ranks`, `safetensors`, `torch`, `deepspeed` or `gguf`.
        writer: `transformers`, `accelerate` or "": whose folder it is.
        step: The training step, if a trainer recorded one.
        folders: Of `peft`: its adapters' folders, relative.
        parts: What lies beside the weights: optimizer, scheduler, random and trainer state.
        files: Relative paths of all files.
    """

    path: Path
    kind: str
    writer: str = ""
    step: int | None = None
    folders: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    files: Sequence[str] = field(default=(), repr=False)

    @property
    def title(self) -> str:
        """What it is, in words."""
        whose = {"transformers": "of transformers' Trainer", "accelerate": "of accelerate's save_state"}
        step = f", step {self.step}" if self.step is not None else ""
        what = _TITLES[self.kind]
        return f"a checkpoint {whose[self.writer]}{step}: {what}" if self.writer else what


def recognise(path: str | Path) -> Recognised:
    """Tell what lies at a local path.

    Raises:
        UsageError: nothing is there, it is a store, or nothing that is known.
        DamagedError: an index that is none, or the file of a rank is missing.
    """
    target = Path(path)
    if target.is_file() or not target.exists():
        kind = "gguf" if target.suffix == ".gguf" and target.is_file() else find_checkpoint(target)[0]
        return Recognised(path=target, kind=kind, files=(target.name,))
    files = Folder(target).keys()
    if "multilora-store.json" in files:
        raise UsageError(f"{target} is a store of this program", remedy=f"doctor store.url={target}")
    writer = _writer(files)
    return Recognised(
        path=target,
        kind=_kind(target, files),
        writer=writer,
        step=_step(target, files) if writer == "transformers" else None,
        folders=tuple(sorted(set(_adapter_folders(files)))),
        parts=tuple(part for part, shape in _PARTS.items() if any(map(shape.fullmatch, files))),
        files=files,
    )


def _kind(target: Path, files: Sequence[str]) -> str:
    if list(_adapter_folders(files)):
        return "peft"
    if any(re.fullmatch(r"(.*/)?(mp_rank_\d+_model_states|zero_pp_rank_\d+_.*)\.pt", file) for file in files):
        return "deepspeed"
    if any(file.endswith(".gguf") for file in files):
        return "gguf"
    try:
        return find_checkpoint(target)[0]
    except UsageError:
        runs = sorted({part for file in files for part in file.split("/")[:-1] if CHECKPOINT.fullmatch(part)})
        if not runs:
            raise
        raise UsageError(
            f"{target} holds no checkpoint itself, only {', '.join(runs[:10])}", remedy=f"look at {target / runs[-1]}"
        ) from None


def _adapter_folders(files: Sequence[str]) -> Iterator[str]:
    """Folders of adapters; those of a run's own checkpoints belong to these."""
    for file in files:
        folder, _, name = file.rpartition("/")
        if name in (CONFIG_FILE, MODEL_FILE, PICKLE_FILE) and not any(map(CHECKPOINT.fullmatch, folder.split("/"))):
            yield folder


def _writer(files: Sequence[str]) -> str:
    if {"trainer_state.json", "training_args.bin"} & set(files):
        return "transformers"
    return "accelerate" if any(re.fullmatch(r"random_states_\d+\.pkl", file) for file in files) else ""


def _step(target: Path, files: Sequence[str]) -> int | None:
    named = CHECKPOINT.fullmatch(target.resolve().name)
    if "trainer_state.json" not in files:
        return int(named[1]) if named else None
    file = target / "trainer_state.json"
    try:
        state: Any = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise DamagedError(f"{file} is not JSON", why=str(error), remedy="use an earlier checkpoint") from error
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None
