"""Pickles of torch's checkpoints, read without running what they name.

Plain files go through torch's weights-only loading. Where that is not enough (the metadata of distributed checkpoints,
FSDP1's sharded tensors) an unpickler with a fixed list of names is used: values and dtypes are made as torch makes
them, and every class of `torch.distributed` becomes an inert record of what was written for it.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final

import torch

from multilora_store.errors import DamagedError

__all__ = ["Piece", "Sharded", "load_rank", "load_torch", "read_metadata"]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and where in it it begins, by dimension."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Sharded:
    """One rank's share of a tensor of `shape`."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def load_torch(file: Path) -> dict[str, Any]:
    """The tensors of a torch file by weights-only loading, nested mappings flattened with dots.

    Raises:
        DamagedError: it is damaged, or holds more than weights-only loading takes.
    """
    import torch.distributed.tensor  # lets weights-only loading know DTensors

    assert torch.distributed.tensor is not None
    return _tensors(file, {"weights_only": True})


def load_rank(file: Path) -> dict[str, Any]:
    """The tensors in the file of one rank: plain ones, DTensors, and FSDP1's as `Sharded`.

    Raises:
        DamagedError: it is damaged, or holds more than tensors and shards.
    """
    try:
        return load_torch(file)
    except DamagedError as error:
        if "ShardedTensor" not in error.why:
            raise
    module = ModuleType("shards")
    module.__dict__.update(Unpickler=_ShardUnpickler)
    return _tensors(file, {"weights_only": False, "pickle_module": module})


def _tensors(file: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old pickle protocols, old storages: the result is judged below
            loaded: Any = torch.load(file, map_location="cpu", **options)
    except Exception as error:  # hostile bytes make an unpickler raise anything at all
        raise DamagedError(
            f"{file} cannot be read without running what it names",
            why=_reason(error),
            remedy="it is damaged, or holds more than tensors; save a state dict, or a distributed checkpoint",
        ) from error
    found = dict(_flatten(loaded, ""))
    if not found:
        raise DamagedError(f"{file} holds no tensors", remedy="give the file that holds the model's state dict")
    return found


def _reason(error: Exception) -> str:
    """The line of an error that names what was refused, else its first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "unsupported" in line.lower()), lines[0])[:300]


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, Sharded)):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))


class _Record:
    """Stands for an object of `torch.distributed`: keeps what was written for it and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def field(self, name: str) -> Any:
        """One attribute that was written, whether kept in a dictionary or in slots."""
        kept = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return kept[name]


def _rebuild_sharded(function: Any, kind: Any, arguments: Any, state: Any) -> Sharded:
    """What torch calls to make a tensor subclass anew, here for ShardedTensor alone."""
    shards, metadata = state[0], state[1]
    return Sharded(
        shape=tuple(int(size) for size in metadata.field("size")),
        pieces=tuple(
            Piece(tuple(int(o) for o in shard.field("metadata").field("shard_offsets")), shard.field("tensor"))
            for shard in shards
        ),
    )


def _nested(holder: Any, name: str) -> type[_Record]:
    """Stands for getattr, by which pickles name nested classes and members of enumerations."""
    return _Record


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


# Of the tensors in a torch file; its storages are found by torch.load itself.
_VALUES: Final = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.serialization", "_get_layout"),
    }
)


class _ShardUnpickler(pickle.Unpickler):
    """Makes plain tensors, and inert records of everything that belongs to sharding."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES or _is_dtype(module, name):
            return super().find_class(module, name)
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _rebuild_sharded
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _nested
        if module.startswith("torch.distributed.") or (module, name) == ("torch._utils", "_rebuild_wrapper_subclass"):
            return _Record
        raise pickle.UnpicklingError(f"Unsupported: {module}.{name} has no place among shards")


_METADATA: Final = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the record types of a distributed checkpoint's metadata, and dtypes; nothing else is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 says that its paths are; no other has such a module
            module = "pathlib"
        if (module, name) in _METADATA or _is_dtype(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"Unsupported: {module}.{name} has no place in the metadata of a checkpoint")


def read_metadata(stream: BinaryIO, where: str) -> Any:
    """The metadata of a torch distributed checkpoint.

    Raises:
        DamagedError: it is something else, damaged, or names code.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = _MetadataUnpickler(stream).load()
    except Exception as error:  # hostile bytes make an unpickler raise anything at all
        raise DamagedError(
            f"{where} is not the metadata of a distributed checkpoint",
            why=_reason(error),
            remedy="it is damaged, or names code, which is never run from here",
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedError(f"{where} holds a {type(metadata).__name__}, no metadata of a checkpoint")
    return metadata
