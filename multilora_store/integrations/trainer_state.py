"""What a snapshot keeps of a transformers Trainer, as JSON: its state, scheduler, scaler and random states."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Final

import torch

from multilora_store.distributed.random import RANDOM_FILE, decode_random
from multilora_store.errors import DamagedError, UnsupportedError, UsageError
from multilora_store.storage import Snapshot, Store

__all__ = ["FORMAT", "TRAINER_FILE", "plain", "python_random_state", "read_trainer", "set_python_random_state"]

FORMAT: Final = 1
TRAINER_FILE: Final = "trainer.json"


def read_trainer(store: Store, wanted: str) -> tuple[Snapshot, dict[str, Any], list[dict[str, bytes]]]:
    """The snapshot, what it keeps of the trainer, and each rank's torch random states.

    Raises:
        UsageError: it was not saved by a trainer with its optimizer.
        DamagedError: what it keeps cannot be read, or is of another format.
    """
    found = store.snapshot(wanted)
    path, files = f"extra/{TRAINER_FILE}", store.snapshot_files(found)
    if path not in files or RANDOM_FILE not in files:
        raise UsageError(
            f"snapshot {found.id} was not saved by a trainer with its optimizer",
            why=f"it lacks {path if path not in files else 'the state of an optimizer'}",
            remedy="restore() its weights and start a new training, or choose a snapshot of MultiLoRACallback",
        )
    try:
        content = json.loads(store.read_snapshot_file(found, path))
        whole = content["format"] == FORMAT and isinstance(content["state"], dict)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} of snapshot {found.id} is not a trainer's state", why=repr(error)) from error
    if not whole:
        raise DamagedError(
            f"{path} of snapshot {found.id} has format {content['format']!r}, this reads {FORMAT}",
            remedy="resume it with the version that saved it",
        )
    return found, content, decode_random(store.read_snapshot_file(found, RANDOM_FILE))


def python_random_state() -> dict[str, Any]:
    """This process's states of Python's and NumPy's generators, as JSON has them; torch's are saved with the set."""
    import numpy as np

    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(place), int(has_gauss), float(cached)],
    }


def set_python_random_state(state: Mapping[str, Any]) -> None:
    import numpy as np

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))


def plain(value: Any, what: str) -> Any:
    """`value` as JSON has it.

    Raises:
        UnsupportedError: it holds more than numbers, texts, lists and mappings of texts.
    """
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, what) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, what) for key, item in value.items()}
    raise UnsupportedError(
        f"{what} keeps a {type(value).__name__} in its state, which cannot be stored without a pickle",
        remedy="use a scheduler whose state is plain numbers, as those of transformers.get_scheduler are",
    )
