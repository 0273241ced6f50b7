"""Checkpoints of whole models as they lie on disk: what tensors there are, and some of them read.

Nothing in them is executed: see `checkpoint_pickles`.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from multilora_store.errors import DamagedError, UnsupportedError, UsageError
from multilora_store.integrations.checkpoint_pickles import Piece, Sharded, load_rank, load_torch, read_metadata
from multilora_store.storage.codec import lazy_from_file
from multilora_store.storage.failures import translated

__all__ = ["Checkpoint", "find_checkpoint", "open_checkpoint"]

Shape = tuple[int, ...]

_TORCH: Final = (".bin", ".pt", ".pth")
_RANK_FILE: Final = re.compile(r"(?P<stem>.+)_rank(?P<rank>\d+)\.(bin|pt)")
_INDEX: Final = "model.safetensors.index.json"
# Where a folder of accelerate's or a Trainer's keeps its model, the most telling first.
_MODEL_FILES: Final = ("model.safetensors", "pytorch_model_fsdp.bin", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors of one checkpoint.

    Attributes:
        where: Its path.
        shapes: Global shape of each tensor, by its key.
        load: Reads some of them, whole, on the host.
        flat: Whether the tensors are flat rows whose shapes were not written down.
    """

    where: str
    shapes: Mapping[str, Shape]
    load: Callable[[Sequence[str]], dict[str, torch.Tensor]] = field(repr=False)
    flat: bool = False

    def read(self, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors called `keys`, whole."""
        return self.load(keys)


def open_checkpoint(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Checkpoint:
    """Finds out what lies at a local path and which tensors it has.

    Raises:
        UsageError: there is no checkpoint, or a pickle without leave.
        UnsupportedError: a format without the names and shapes that are needed.
        DamagedError: a file is not what its name says, or a rank's file is missing.
    """
    target = Path(path)
    kind, files = find_checkpoint(target)
    if kind == "safetensors":
        return _safetensors(target, files)
    if not allow_pickle:
        raise UsageError(
            f"{files[0]} is a pickle, which can run code when it is loaded",
            why="torch's files and the metadata of its distributed checkpoints are pickles",
            remedy="if you trust its source, allow restricted loading of it with allow_pickle=True",
            path=str(files[0]),
        )
    with translated("reading", str(target)):
        if kind == "distributed":
            return _distributed(files[0].parent)
        return _rank_files(target, files) if kind == "ranks" else _torch_file(files[0])


def find_checkpoint(target: Path) -> tuple[str, list[Path]]:
    """What lies at a local path (`safetensors`, `torch`, `distributed` or `ranks`), and its files; none is opened.

    Raises:
        UsageError: nothing is there, or nothing that is known.
        DamagedError: an index that is none, or the file of a rank is missing.
    """
    if target.is_file():
        if target.suffix == ".safetensors":
            return "safetensors", [target]
        if target.suffix in _TORCH:
            return ("ranks", _of_all_ranks(target)) if _RANK_FILE.fullmatch(target.name) else ("torch", [target])
        if target.name == ".metadata":
            return "distributed", [target]
        raise UsageError(
            f"{target} is no checkpoint that is known",
            remedy=f"its name should end in .safetensors, {', '.join(_TORCH)}",
        )
    if not target.is_dir():
        raise UsageError(f"there is nothing at {target}", remedy="give the path of a checkpoint on this machine")
    for file in [target / ".metadata", *sorted(target.glob("pytorch_model_fsdp*/.metadata"))]:
        if file.is_file():
            return "distributed", [file]
    if (target / _INDEX).is_file():
        return "safetensors", _indexed(target / _INDEX)
    for name in _MODEL_FILES:
        if (target / name).is_file():
            return ("safetensors" if name.endswith(".safetensors") else "torch"), [target / name]
    ranked = sorted(file for file in target.iterdir() if _RANK_FILE.fullmatch(file.name) and "model" in file.name)
    if ranked:
        return "ranks", _of_all_ranks(ranked[0])
    held = sorted(file.name for file in target.iterdir())
    raise UsageError(
        f"{target} holds no checkpoint of a whole model",
        why=f"it holds {', '.join(held[:10]) or 'nothing'}",
        remedy="folders of PEFT adapters are for import"
        if any(target.rglob("adapter_config.json"))
        else f"expected .metadata, {_INDEX}, {', '.join(_MODEL_FILES)} or files of ranks",
    )


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{index} is not an index of safetensors files", why=repr(error)) from error
    strays = [str(name) for name in names if not isinstance(name, str) or Path(name).name != name]
    if strays:
        raise DamagedError(f"{index} names {strays[0]!r}, which is no file beside it")
    return [index.parent / name for name in sorted(names)]


def _safetensors(target: Path, files: Sequence[Path]) -> Checkpoint:
    home: dict[str, Mapping[str, torch.Tensor]] = {}
    shapes: dict[str, Shape] = {}
    for file in files:
        with translated("reading", str(file)):
            tensors = lazy_from_file(file)
        for slot in tensors.header.slots.values():
            home[slot.name], shapes[slot.name] = tensors, tuple(slot.shape)
    return Checkpoint(where=str(target), shapes=shapes, load=lambda keys: {key: home[key][key] for key in keys})


def _torch_file(file: Path) -> Checkpoint:
    tensors = load_torch(file)
    _refuse_sharded(tensors, file)
    return Checkpoint(
        where=str(file),
        shapes={key: tuple(tensor.shape) for key, tensor in tensors.items()},
        load=lambda keys: {key: tensors[key].detach().contiguous() for key in keys},
    )


def _refuse_sharded(tensors: Mapping[str, Any], file: Path) -> None:
    from torch.distributed.tensor import DTensor

    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise DamagedError(
                f"{file}: {key} is one rank's shard of a tensor of shape {tuple(tensor.shape)}",
                remedy="give the folder with the files of all ranks, named ..._rank0.bin and so on",
                tensor=key,
            )


# One file for each rank.


def _of_all_ranks(one: Path) -> list[Path]:
    """The files of all ranks of the save that `one` belongs to, in the order of ranks."""
    match = _RANK_FILE.fullmatch(one.name)
    assert match is not None
    found: dict[int, Path] = {}
    for file in one.parent.iterdir():
        theirs = _RANK_FILE.fullmatch(file.name)
        if theirs is not None and theirs["stem"] == match["stem"]:
            found[int(theirs["rank"])] = file
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        raise DamagedError(
            f"{one.parent}: the file of rank {', '.join(map(str, missing))} is missing",
            why=f"there are files of ranks {', '.join(map(str, sorted(found)))}",
            remedy="copy the files of all ranks, of every node, into one folder",
        )
    return [found[rank] for rank in sorted(found)]


def _rank_files(target: Path, files: Sequence[Path]) -> Checkpoint:
    held = [load_rank(file) for file in files]
    if any(key.endswith("_flat_param") for key in held[0]):
        return _flat_files(target, held)
    shapes: dict[str, Shape] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank, (file, tensors) in enumerate(zip(files, held, strict=True)):
        for key, tensor in tensors.items():
            shape, mine = _pieces(tensor, rank, len(files), f"{file}: {key}")
            if shapes.setdefault(key, shape) != shape:
                raise DamagedError(f"{file}: {key} is of shape {shape}, another rank says {shapes[key]}", tensor=key)
            pieces.setdefault(key, []).extend(mine)
    return Checkpoint(
        where=str(target),
        shapes=shapes,
        load=lambda keys: {key: _joined(shapes[key], pieces[key], f"{target}: {key}") for key in keys},
    )


def _flat_files(target: Path, held: Sequence[Mapping[str, Any]]) -> Checkpoint:
    """FSDP1's local state: each rank's slice of each original parameter, in the order of ranks, its shape lost."""
    keys = [key for key, tensor in held[0].items() if isinstance(tensor, torch.Tensor)]
    sliced = {key: [tensors[key] for tensors in held if key in tensors] for key in keys}
    whole = {k: torch.cat(parts) for k, parts in sliced.items() if all(p.ndim == 1 for p in parts)}
    return Checkpoint(
        where=str(target),
        shapes={key: tuple(tensor.shape) for key, tensor in whole.items()},
        load=lambda keys: {key: whole[key] for key in keys},
        flat=True,
    )


def _pieces(tensor: Any, rank: int, world: int, where: str) -> tuple[Shape, list[Piece]]:
    """The global shape of what one rank's file holds, and its own part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if isinstance(tensor, Sharded):
        return tensor.shape, list(tensor.pieces)
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), [Piece((0,) * tensor.ndim, tensor)]
    mesh = tensor.device_mesh.mesh
    place = (mesh == rank).nonzero().tolist()
    if mesh.numel() != world or len(place) != 1:
        raise DamagedError(
            f"{where} was saved by {mesh.numel()} ranks, there are files of {world}",
            remedy="copy the files of all ranks, of every node, into one folder",
        )
    offsets = [0] * tensor.ndim
    sizes = list(tensor.shape)
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise UnsupportedError(
                f"{where} is placed as {tensor.placements}", remedy="save a full state dict where it was made"
            )
        cut = placement.dim
        chunk = -(-sizes[cut] // mesh.shape[dim])
        first = min(place[0][dim] * chunk, sizes[cut])
        offsets[cut], sizes[cut] = offsets[cut] + first, max(min(chunk, sizes[cut] - first), 0)
    return tuple(tensor.shape), [Piece(tuple(offsets), tensor.to_local())]


def _joined(shape: Shape, pieces: Sequence[Piece], where: str) -> torch.Tensor:
    """The whole tensor; every element must be given by some piece.

    Raises:
        DamagedError: pieces stick out, or do not cover it.
    """
    whole = torch.empty(shape, dtype=pieces[0].tensor.dtype)
    given = torch.zeros(shape, dtype=torch.bool)
    for piece in pieces:
        window = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        if whole[window].shape != piece.tensor.shape:
            raise DamagedError(f"{where}: a piece of {tuple(piece.tensor.shape)} at {piece.offsets} is not in {shape}")
        whole[window] = piece.tensor.detach()
        given[window] = True
    if not bool(given.all()):
        raise DamagedError(
            f"{where}: {int((~given).sum())} of {given.numel()} elements are in no file",
            remedy="copy the files of all ranks, of every node, into one folder",
        )
    return whole


# torch's distributed checkpoints.


def _distributed(folder: Path) -> Checkpoint:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    file = folder / ".metadata"
    with open(file, "rb") as stream:
        metadata = read_metadata(stream, str(file))
    _check_files(metadata, folder)
    held = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    def load(keys: Sequence[str]) -> dict[str, torch.Tensor]:
        state = {key: torch.empty(held[key].size, dtype=held[key].properties.dtype) for key in keys}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it reads in one process, which is what is wanted
                load_state(state, storage_reader=Reader(folder), no_dist=True)
        except Exception as error:  # torch wraps what its readers raise
            raise DamagedError(
                f"{folder} cannot be read",
                why=(str(error) or type(error).__name__).strip().splitlines()[-1][:300],
                remedy="copy the files of all ranks again",
            ) from error
        return state

    return Checkpoint(where=str(folder), shapes={key: tuple(v.size) for key, v in held.items()}, load=load)


def _check_files(metadata: Any, folder: Path) -> None:
    """Raises DamagedError for a file that the metadata names and that is missing or too short, or lies elsewhere."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        name = str(info.relative_path)
        ends[name] = max(ends.get(name, 0), int(info.offset) + int(info.length))
    for name, end in sorted(ends.items()):
        file = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DamagedError(f"{folder}/.metadata names {name!r}, which lies outside the checkpoint")
        if not file.is_file() or file.stat().st_size < end:
            found = f"{file.stat().st_size} bytes long" if file.is_file() else "missing"
            raise DamagedError(
                f"{file} is {found}, the metadata says at least {end} bytes",
                remedy="copy the files of all ranks, of every node, into one folder",
                path=str(file),
            )
