"""A Hugging Face folder of safetensors, read through the map of its files and written shard by shard as a stream."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from multilora_store.errors import BaseModelError
from multilora_store.storage.codec import LazyTensors, lazy_from_file, tensor_bytes

__all__ = ["BaseFolder", "ShardEntry", "copy_other_files", "write_index", "write_shard"]

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_WEIGHTS: Final = frozenset(".safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .tflite .ot .index.json".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One tensor of a shard to be written: its name, dtype (spelling of safetensors) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BaseFolder:
    """A base model's files; nothing of it is ever written.

    Attributes:
        path: The folder.
        config: Its `config.json`.
        shards: File name -> its tensors, mapped from disk, in the order of the file's header.
        home: Tensor name -> the shard that holds it.
        indexed: Whether the folder has an index of shards.
    """

    path: Path
    config: Mapping[str, Any]
    shards: Mapping[str, LazyTensors]
    home: Mapping[str, str]
    indexed: bool

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> BaseFolder:
        """Open a folder; only headers are read.

        Raises:
            BaseModelError: no `config.json`, or no weights as safetensors.
            DamagedError: a shard is not a whole safetensors file.
        """
        folder = Path(path)
        config = _read_json(folder / "config.json", folder)
        index = folder / _INDEX
        weight_map = _read_json(index, folder).get("weight_map", {}) if index.is_file() else {"": _SINGLE}
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise BaseModelError(
                    f"the base {folder} has no weights in {name}",
                    why="a base is merged from its safetensors files, shard by shard",
                    remedy="save it with save_pretrained, which writes safetensors",
                )
        shards = {name: lazy_from_file(folder / name) for name in names}
        home = {tensor: name for name, shard in shards.items() for tensor in shard}
        return cls(path=folder, config=config, shards=shards, home=home, indexed=index.is_file())

    def entry(self, name: str) -> ShardEntry:
        """Dtype and shape of one of its tensors."""
        slot = self.shards[self.home[name]].header.slots[name]
        return ShardEntry(name=name, dtype=slot.dtype, shape=slot.shape)

    def tensor(self, name: str) -> Tensor:
        """One of its tensors, mapped from disk."""
        return self.shards[self.home[name]][name]


def write_shard(
    path: Path,
    entries: Iterable[ShardEntry],
    parts: Callable[[str], Iterator[Tensor]],
    nbytes: Callable[[ShardEntry], int],
) -> None:
    """Write one safetensors file: the header first, then every tensor's parts as they come.

    Args:
        path: The new file.
        entries: Its tensors, in order.
        parts: Tensor name -> its rows in order, in its dtype.
        nbytes: Size of one tensor.
    """
    listed = list(entries)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in listed:
        end = at + nbytes(entry)
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in listed:
            for part in parts(entry.name):
                file.write(tensor_bytes(part))
        file.flush()
        os.fsync(file.fileno())
    written, expected = path.stat().st_size, 8 + len(text) + at
    assert written == expected, f"{path} has {written} bytes instead of {expected}"


def write_index(folder: Path, home: Mapping[str, str], total: int) -> None:
    """Write the index of a sharded folder."""
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(home.items()))}
    (folder / _INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_other_files(source: Path, target: Path) -> None:
    """Copy what is neither weights nor `config.json`: tokenizer, generation config, licence, code."""
    for file in sorted(source.iterdir()):
        weights = any(file.name.endswith(suffix) for suffix in _WEIGHTS)
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copyfile(file, target / file.name)


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BaseModelError(
            f"the base {folder} has no {path.name}", remedy="give a folder that save_pretrained wrote"
        ) from error
    except ValueError as error:
        raise BaseModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BaseModelError(f"{path} holds {type(content).__name__}, an object was expected")
    return content
