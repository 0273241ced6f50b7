"""The model states of a DeepSpeed checkpoint: what one file of them holds whole, by restricted loading."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from multilora_store.errors import DamagedError
from multilora_store.integrations.checkpoint_files import Checkpoint
from multilora_store.integrations.checkpoint_pickles import load_torch

__all__ = ["deepspeed_checkpoint", "model_states"]

_STATES: Final = re.compile(
    r"(?P<folder>(?:.*/)?)(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt"
)
_MODULE: Final = "module."


def model_states(files: Sequence[str]) -> str | None:
    """The file of the newest step that holds the whole model's names; None where tensors are parallel, and so in parts.

    Under ZeRO-1 and -2 its tensors are whole; under ZeRO-3 those that are partitioned are empty in it.
    """
    found: dict[str, list[re.Match[str]]] = {}
    for file in files:
        if match := _STATES.fullmatch(file):
            found.setdefault(match["folder"], []).append(match)
    if not found:
        return None
    newest = found[max(found, key=lambda folder: [int(number) for number in re.findall(r"\d+", folder)])]
    first = min(newest, key=lambda match: int(match["rank"] or 0))
    return first[0] if {int(match["part"]) for match in newest} == {0} else None


def deepspeed_checkpoint(file: Path) -> Checkpoint:
    """The tensors of the model in such a file, by weights-only loading.

    Raises:
        DamagedError: it is damaged, or holds more than weights-only loading takes.
    """
    tensors = {key.removeprefix(_MODULE): value for key, value in load_torch(file).items() if key.startswith(_MODULE)}
    if not tensors:
        raise DamagedError(f"{file} holds no model", why="there is no tensor under its key `module`")
    return Checkpoint(
        where=str(file),
        shapes={key: tuple(tensor.shape) for key, tensor in tensors.items()},
        load=lambda keys: {key: tensors[key].detach().contiguous() for key in keys},
    )
