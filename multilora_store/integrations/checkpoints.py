"""Rescue: adapters taken out of checkpoints of whole models, into versions of a store.

Whoever saved a model with adapters by torch or accelerate has the adapters' tensors somewhere among those of the base:
in one state dict, in a distributed checkpoint, or in one file for each rank. Only the adapters' bytes are read.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from multilora_store.adapter import AdapterConfig, canonical_tensor_name, check_name
from multilora_store.assembly.bridge.record import inside_name
from multilora_store.errors import CoverageError, DamagedError, UnsupportedError, UsageError, choices
from multilora_store.integrations.checkpoint_files import Checkpoint, open_checkpoint
from multilora_store.storage.contents import CONFIG_FILE

if TYPE_CHECKING:
    from multilora_store.storage import Store, Version
    from multilora_store.storage.progress import Listener

__all__ = ["PAIRS", "Config", "adapter_in", "from_root", "read_adapters", "rescue"]

log = logging.getLogger(__name__)

Config = AdapterConfig | Mapping[str, Any] | str | os.PathLike[str]
"""A configuration, its fields, or where an `adapter_config.json` lies (the file or its folder)."""

PREFIX: Final = "base_model.model."
# PEFT keeps one entry for each adapter below these segments; the segment that follows is the adapter's name.
_HOLDERS: Final = frozenset(
    {
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "modules_to_save",
        "trainable_tokens_delta",
    }
)
PAIRS: Final = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))


def rescue(
    store: Store,
    path: str | os.PathLike[str],
    *,
    configs: Mapping[str, Config],
    allow_pickle: bool = False,
    tags: Sequence[str] = (),
    step: int | None = None,
    progress: Listener | None = None,
) -> list[Version]:
    """Puts the adapters that a checkpoint of a whole PEFT model holds into the store, all in one entry.

    Args:
        store: The store.
        path: A torch distributed checkpoint (a folder with `.metadata`); a state dict (`.safetensors`, `.bin`, `.pt`);
            a folder that accelerate or a Trainer saved, with any of these or with one file for each rank.
        configs: Name of an adapter, as the model called it -> its configuration, which such checkpoints lack. An
            adapter-only checkpoint carries no names: give one configuration, under the name to store it by.
        allow_pickle: Takes files that are pickles, all but `.safetensors`. They are read by weights-only loading, and
            the metadata of distributed checkpoints by an unpickler that knows torch's own record types only.
        tags: Tags for every version.
        step: The training step, recorded with the versions.
        progress: Called after each adapter.

    Returns:
        The versions, in the order of `configs`.

    Raises:
        UsageError: nothing there, a pickle without leave, an adapter that it does not hold.
        UnsupportedError: a format that lacks names or shapes.
        DamagedError: shards are missing, empty or do not fit together. Nothing was stored.
        CoverageError: an adapter's tensors are not whole. Nothing was stored.
    """
    parsed = _parse(configs)
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    found = read_adapters(checkpoint, parsed)
    requests = [
        {
            "name": name, "tensors": tensors, "config": parsed[name], "step": step, "tags": tags,
            "metadata": {"rescued_from": checkpoint.where},
        }
        for name, tensors in found.items()
    ]  # fmt: skip
    versions = store.commit(store.stage_many(requests, progress=progress)).versions
    return [versions[name] for name in parsed]


def read_adapters(checkpoint: Checkpoint, configs: Mapping[str, AdapterConfig]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each adapter of `configs` by canonical name, checked for wholeness.

    Raises:
        UsageError, DamagedError, CoverageError: see `rescue`.
    """
    owned = _owned(checkpoint, configs)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, keys in owned.items():
        where = f"{checkpoint.where}: adapter {name}"
        shapes = {canonical: checkpoint.shapes[key] for canonical, key in keys.items()}
        if checkpoint.flat:
            shapes = {canonical: _unflat(canonical, shape, configs[name], where) for canonical, shape in shapes.items()}
        _check_shapes(shapes, where)
        _check_whole(keys, shapes, configs[name], where)
        _check_targets(keys, checkpoint, configs[name], where)
        read = checkpoint.read(list(keys.values()))
        found[name] = {canonical: read[key].reshape(shapes[canonical]) for canonical, key in sorted(keys.items())}
    return found


def _parse(configs: Mapping[str, Config]) -> dict[str, AdapterConfig]:
    if not configs:
        raise UsageError(
            "rescue() got no configs",
            why="a checkpoint of a whole model does not say how its adapters are scaled",
            remedy="give configs={name: LoraConfig fields, or the path of its adapter_config.json}",
        )
    parsed: dict[str, AdapterConfig] = {}
    for name, given in configs.items():
        check_name(name)
        where = f"config of {name}"
        if isinstance(given, AdapterConfig):
            parsed[name] = given
        elif isinstance(given, (str, os.PathLike)):
            file = Path(given) / CONFIG_FILE if Path(given).is_dir() else Path(given)
            if not file.is_file():
                raise UsageError(f"{where}: there is no {file}", remedy=f"give its {CONFIG_FILE} or its fields")
            parsed[name] = AdapterConfig.parse(file.read_bytes(), where=str(file))
        else:
            fields = given if isinstance(given, Mapping) else given.to_dict()
            parsed[name] = AdapterConfig.parse({"peft_type": "LORA", **fields}, where=where)
    return parsed


def _owned(checkpoint: Checkpoint, configs: Mapping[str, AdapterConfig]) -> dict[str, dict[str, str]]:
    """Adapter -> canonical name -> key in the checkpoint.

    Raises:
        UsageError: an adapter of `configs` is not there.
        DamagedError: two keys are one tensor.
    """
    names = {inside_name(name): name for name in configs}
    named: dict[str, dict[str, str]] = defaultdict(dict)
    nameless: dict[str, str] = {}
    for key in checkpoint.shapes:
        plain = from_root(key)
        inside = adapter_in(plain)
        if inside is None:
            continue
        canonical = canonical_tensor_name(plain, inside or None)
        keep = named[names.get(inside, inside)] if inside else nameless
        if keep.setdefault(canonical, key) != key:
            raise DamagedError(
                f"{checkpoint.where} holds {canonical} twice, as {keep[canonical]} and as {key}", tensor=canonical
            )
    if nameless and not named:
        if len(configs) > 1:
            raise UsageError(
                f"{checkpoint.where} holds one adapter without its name, {len(configs)} configs were given",
                why="accelerate's adapter-only checkpoints hold the active adapter alone",
                remedy="give the configuration of that one adapter",
            )
        return {next(iter(configs)): nameless}
    for name in configs:
        if name not in named:
            raise UsageError(
                f"{checkpoint.where} holds no adapter {name!r}", remedy=choices(name, named, noun="adapter"), name=name
            )
    rest = sorted(set(named) - set(configs))
    if rest:
        log.warning("%s also holds %s, left out: no config was given", checkpoint.where, ", ".join(rest))
    return {name: named[name] for name in configs}


def from_root(key: str) -> str:
    """The key from the PeftModel on: what holds the model (`model.`, `module.`) goes, as do wrappers' segments."""
    start = key.find(PREFIX)
    return canonical_tensor_name(key[start:] if start > 0 and key[start - 1] == "." else key)


def adapter_in(key: str) -> str | None:
    """The adapter's name inside the model, "" where the key is an adapter's but names none, None for the base's."""
    segments = key.split(".")
    for index in range(len(segments) - 1, -1, -1):
        if segments[index] in _HOLDERS:
            follows = segments[index + 1] if index + 1 < len(segments) else ""
            return "" if follows in ("", "weight", "bias") else follows
    return None


def _unflat(key: str, shape: tuple[int, ...], config: AdapterConfig, where: str) -> tuple[int, ...]:
    """The shape of a linear layer's factor, by its rank, where only the number of its elements is known.

    Raises:
        UnsupportedError: a tensor whose shape its number of elements does not tell.
        CoverageError: the number is no multiple of the rank.
    """
    path, _, factor = key.removeprefix(PREFIX).rpartition(".lora_")
    if factor == "magnitude_vector":
        return shape
    if factor not in ("A.weight", "B.weight"):
        raise UnsupportedError(
            f"{where}: the shape of {key} is lost",
            why="FSDP1's local state has flat rows only, and no rank tells how this one is cut",
            remedy="load it where it was made and save a full or sharded state dict",
            tensor=key,
        )
    rank, numel = config.rank_for(path), shape[0]
    if numel % rank:
        _refuse([f"{key} has {numel} elements, no multiple of its rank {rank}"], where, "is not whole")
    return (rank, numel // rank) if factor == "A.weight" else (numel // rank, rank)


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises DamagedError for tensors that are a rank's empty or flat slice of what they should be."""
    for key, shape in shapes.items():
        if 0 in shape:
            raise DamagedError(
                f"{where}: {key} is empty, of shape {shape}",
                why="one rank's share of a sharded save was written as if it were the whole",
                remedy="use the files of all ranks, or an earlier checkpoint",
                tensor=key,
            )
        if len(shape) < 2 and key.rpartition(".lora_")[2] in ("A.weight", "B.weight", "embedding_A", "embedding_B"):
            raise DamagedError(
                f"{where}: {key} is flat, of shape {shape}",
                why="it is a slice of FSDP1's flat parameter, written without its place in it",
                remedy="load the checkpoint where it was made and save a full or sharded state dict",
                tensor=key,
            )


def _check_whole(
    keys: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: AdapterConfig, where: str
) -> None:
    """Raises CoverageError unless every factor has its partner, of the rank that the configuration says."""
    wrong: list[str] = []
    for left, right in PAIRS:
        for one, other in ((left, right), (right, left)):
            paths = [key.removesuffix(one) for key in keys if key.endswith("." + one)]
            wrong += [f"{path}{other} is missing" for path in paths if path + other not in keys]
    for key, shape in shapes.items():
        path, _, factor = key.removeprefix(PREFIX).rpartition(".lora_")
        axis = {"A.weight": 0, "B.weight": 1, "embedding_A": 0, "embedding_B": 1}.get(factor)
        if axis is not None and len(shape) == 2 and shape[axis] != config.rank_for(path):
            wrong.append(f"{key} has rank {shape[axis]}, its configuration says {config.rank_for(path)}")
        if factor == "A.weight" and config.raw.get("use_dora") and f"{PREFIX}{path}.lora_magnitude_vector" not in keys:
            wrong.append(f"{PREFIX}{path}.lora_magnitude_vector is missing")
    for module in config.raw.get("modules_to_save") or ():
        if not any(f".{module}." in key and ".lora_" not in key for key in keys):
            wrong.append(f"no tensor of the saved module {module!r}")
    _refuse(wrong, where, "is not whole")


def _check_targets(keys: Mapping[str, str], checkpoint: Checkpoint, config: AdapterConfig, where: str) -> None:
    """Raises CoverageError if a target has no factors at all, or none on a layer whose base is in the checkpoint."""
    targets = config.target_modules
    if targets is None or isinstance(targets, str):
        return
    adapted = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in keys if ".lora_" in key}
    wrong = [
        f"target {target!r} has no tensors"
        for target in targets
        if not any(path == target or path.endswith(f".{target}") for path in adapted)
    ]
    if not any(config.raw.get(key) for key in ("layers_to_transform", "exclude_modules")):
        bases = {
            plain.removeprefix(PREFIX).removesuffix(".base_layer.weight")
            for plain in map(from_root, checkpoint.shapes)
            if plain.endswith(".base_layer.weight")
        }
        wrong += [
            f"{path} is a target, but has no tensors"
            for path in sorted(bases - adapted)
            if any(path == target or path.endswith(f".{target}") for target in targets)
        ]
    _refuse(wrong, where, "does not cover its targets")


def _refuse(wrong: Sequence[str], where: str, what: str) -> None:
    if wrong:
        raise CoverageError(
            f"{where} {what}: {len(wrong)} faults",
            why="; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else ""),
            remedy="give the configuration that it was trained with, and the files of all ranks",
            tensors=list(wrong),
        )
