"""A LoRA file of llama.cpp as a checkpoint: its tensors under PEFT's names, in the order in which they lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from multilora_store.integrations.checkpoint_files import Checkpoint
from multilora_store.storage.dialects.gguf_file import open_gguf

__all__ = ["gguf_checkpoint"]

_SIDES: Final = {"down": "lora_A", "up": "lora_B"}


def gguf_checkpoint(file: Path) -> Checkpoint:
    """Open such a file; the rows of q and k stay as llama.cpp ordered them, so that no number of heads is needed.

    Raises:
        UsageError: it holds a model, or the package `gguf` is missing.
        UnsupportedError: an architecture or a module that has no name here.
        DamagedError: it is no whole GGUF file.
    """
    opened = open_gguf(file)
    names = {
        f"base_model.model.{path}.{_SIDES[role]}.weight": name
        for path, roles in opened.pairs.items()
        for role, name in roles.items()
    }
    return Checkpoint(
        where=str(file),
        shapes={key: opened.shape(name) for key, name in names.items()},
        load=lambda keys: {key: opened.read(names[key]) for key in keys},
    )
