"""PEFT folders whose tensor names are not the canonical ones: older PEFT, unsloth, trainers that add segments."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from multilora_store.adapter import AdapterConfig, canonical_tensor_name
from multilora_store.errors import ConfigError, DamagedError
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.dialects.foreign import open_foreign, source
from multilora_store.storage.dialects.pairs import PREFIX, MappedTensors, one_component
from multilora_store.storage.peft_dirs import PeftFolder, read_peft_dir

__all__ = ["read_legacy", "read_peft"]

log = logging.getLogger(__name__)

# `<holder>.<adapter>` or `<holder>.<adapter>.weight` where the canonical name has `<holder>` or `<holder>.weight`.
_SEGMENT: Final = re.compile(
    r".*\.(?:(?:lora_A|lora_B)\.(?P<factor>[^.]+)\.(?:weight|bias)"
    r"|(?:lora_embedding_A|lora_embedding_B|trainable_tokens_delta)\.(?P<bare>[^.]+)"
    r"|lora_magnitude_vector\.(?P<magnitude>(?!weight$)[^.]+)(?:\.weight)?"
    r"|modules_to_save\.(?P<saved>[^.]+)\..+)"
)
_BASE: Final = re.compile(r"(?:.*\.)?(?:base_layer\.(?!lora_)[^.]+|original_module\..+|token_adapter\.base_layer\..+)")


@source("peft")
def read_peft(location: str, *, allow_pickle: bool = False) -> PeftFolder:
    """Read a PEFT folder exactly as it is, from a path or any fsspec URL; its bytes are kept.

    Args:
        location: The folder.
        allow_pickle: Also reads an `adapter_model.bin`, with weights-only loading.
    """
    return read_peft_dir(location, allow_pickle=allow_pickle)


@source("peft_legacy")
def read_legacy(location: str, *, adapter: str | None = None, base: str | None = None) -> PeftFolder:
    """Read a PEFT folder whose tensor names are those of older PEFT, unsloth and trainers.

    Without `base_model.model.`, with it in the middle or twice, with the adapter's own name in the keys
    (`lora_A.default.weight`), with tensors of the base among them.

    Args:
        location: The folder, or its safetensors file; a path or any fsspec URL.
        adapter: Which adapter is read, where the keys name several.
        base: Name of the base in the configuration, where the file names a quantised copy or a path.

    Raises:
        ConfigError: the configuration is absent or broken, or the keys name several adapters.
        DamagedError: two keys are one tensor, or the file is not whole.
    """
    location = location.removeprefix("unsloth://")
    file = open_foreign(location, names=(MODEL_FILE,), config=CONFIG_FILE)
    if file.config is None:
        raise ConfigError(
            f"{file.folder} has no {CONFIG_FILE}",
            why="without its configuration nobody can tell what the weights are",
            remedy=f"copy its {CONFIG_FILE} there",
        )
    config = AdapterConfig.parse(file.config, where=f"{file.folder}/{CONFIG_FILE}")
    for note in config.notes:
        log.warning("%s/%s: %s", file.folder, CONFIG_FILE, note)
    if base is not None:
        config = config.replace(base_model_name_or_path=base)
    kept = [name for name in file.tensors if not _BASE.fullmatch(name)]
    if len(kept) < len(file.tensors):
        log.warning("%s: %d tensors of the base are left out", file.where, len(file.tensors) - len(kept))
    names = _renamed(kept, adapter, file.where)
    return PeftFolder(config=config, tensors=MappedTensors(file.tensors, names), where=file.where)


def _renamed(keys: Iterable[str], wanted: str | None, where: str) -> dict[str, str]:
    """Canonical name -> key, for the keys of one adapter."""
    owners = {key: _owner(key) for key in keys}
    present = sorted({owner for owner in owners.values() if owner is not None})
    chosen = one_component(present, wanted, where) if present else None
    names: dict[str, str] = {}
    for key, owner in owners.items():
        if owner not in (None, chosen):
            continue
        name = _canonical(key, owner)
        if name in names:
            raise DamagedError(f"{where}: {names[name]!r} and {key!r} are both the tensor {name}", tensor=name)
        names[name] = key
    return names


def _owner(key: str) -> str | None:
    """The adapter's name that stands in a key, by its position alone."""
    match = _SEGMENT.fullmatch(key)
    return None if match is None else next(value for value in match.groups() if value is not None)


def _canonical(key: str, owner: str | None) -> str:
    before, found, after = key.rpartition(PREFIX)
    if found:  # doubled, or behind a component that belongs after it
        key = PREFIX + before.replace(PREFIX, "") + after
    name = canonical_tensor_name(key, owner)
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name
