"""Files of other tools: where they lie, what a source is called with, and safetensors only."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec
from urllib.parse import parse_qsl

from multilora_store.errors import UsageError, choices
from multilora_store.storage.blobs import open_blobs, redact
from multilora_store.storage.codec import LazyTensors, lazy_from_bytes, lazy_from_file
from multilora_store.storage.failures import translated
from multilora_store.storage.peft_dirs import PeftFolder

__all__ = ["Foreign", "open_foreign", "source"]

P = ParamSpec("P")

_FRAGMENT: Final = re.compile(r"([^#]*(?:#(?!\w+=)[^#]*)*)#(\w+=[^#]*)")
_TRUE: Final = {"true": True, "false": False, "1": True, "0": False}
_CONVERT: Final[Mapping[str, Callable[[str], Any]]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _TRUE.__getitem__,
}


def source(name: str) -> Callable[[Callable[Concatenate[str, P], PeftFolder]], Callable[..., PeftFolder]]:
    """A reader that may be called with a plain path or URL, or with `name://` before it and parameters behind `#`.

    `kohya://s3://bucket/style.safetensors#component=te1` reads `s3://bucket/style.safetensors`: a fragment never
    belongs to the storage, so that the parameters of a reader can stand in the `source:` of a manifest.
    """

    def mark(read: Callable[Concatenate[str, P], PeftFolder]) -> Callable[..., PeftFolder]:
        @functools.wraps(read)
        def reader(source: str | os.PathLike[str], *args: Any, **params: Any) -> PeftFolder:
            text = os.fspath(source).removeprefix(f"{name}://")
            behind = _FRAGMENT.fullmatch(text)
            location, fragment = (behind[1], behind[2]) if behind is not None else (text, "")
            given = _parameters(fragment, read, name)
            return read(location, *args, **{**given, **params})

        return reader

    return mark


def _parameters(fragment: str, read: Callable[..., PeftFolder], name: str) -> dict[str, Any]:
    known = {
        item.name: str(item.annotation).partition("|")[0].strip()
        for item in inspect.signature(read).parameters.values()
        if item.kind is inspect.Parameter.KEYWORD_ONLY
    }
    found: dict[str, Any] = {}
    for key, value in parse_qsl(fragment, keep_blank_values=True):
        convert = _CONVERT.get(known.get(key, ""))
        if convert is None:
            raise UsageError(
                f"the source {name!r} has no parameter {key!r} that can stand behind '#'",
                remedy=choices(key, [key for key, kind in known.items() if kind in _CONVERT], noun="parameter"),
            )
        try:
            found[key] = convert(value)
        except (ValueError, KeyError) as error:
            raise UsageError(f"the source {name!r}: {key}={value!r} is not of type {known[key]}") from error
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One file of another tool.

    Attributes:
        tensors: Under the names of that tool, lazy.
        config: The bytes of the configuration beside it, or None.
        where: The file, free of secrets.
        folder: Its folder, free of secrets.
    """

    tensors: LazyTensors
    config: bytes | None
    where: str
    folder: str


def open_foreign(location: str, *, names: Sequence[str] = (), config: str | None = None) -> Foreign:
    """Open a safetensors file, or the one that a folder holds.

    Args:
        location: A path or any fsspec URL, of the file or of its folder.
        names: The file's usual names in a folder, the first that is there wins.
        config: The name of the configuration beside it.

    Raises:
        UsageError: nothing is there, several files are, or it is not a safetensors file.
        DamagedError: the file is not whole.
    """
    is_url = "://" in location and not location.startswith(("file://", "local://"))
    plain = (
        location.rstrip("/") if is_url else os.path.abspath(Path(location.partition("://")[2] or location).expanduser())
    )
    folder, file = plain, ""
    if re.search(r"\.[A-Za-z]{2,12}$", plain) and (is_url or not Path(plain).is_dir()):
        folder, _, file = plain.replace(os.sep, "/").rpartition("/")
    _refuse_others(file, redact(plain))
    place = _Remote(folder) if is_url else _Local(Path(folder or "/"))
    file = file or _only(place, names)
    data = place.read(config) if config else None
    return Foreign(tensors=place.tensors(file), config=data, where=f"{place.where}/{file}", folder=place.where)


def _refuse_others(file: str, where: str) -> None:
    if file and not file.endswith(".safetensors"):
        raise UsageError(
            f"{where} is not a safetensors file",
            why="pickles (.bin, .pt, .ckpt) can run code when they are loaded, and are not read",
            remedy="convert it to safetensors with the tool that made it",
        )


def _only(place: _Local | _Remote, names: Sequence[str]) -> str:
    keys = place.keys()
    found = [name for name in names if name in keys][:1] or sorted(key for key in keys if key.endswith(".safetensors"))
    if len(found) != 1:
        listed = ", ".join(found[:10]) or ", ".join(sorted(keys)[:10]) or "nothing"
        raise UsageError(
            f"{place.where} holds {'several' if found else 'no'} safetensors files",
            why=f"it holds {listed}",
            remedy="name the file itself",
        )
    return found[0]


class _Local:
    """A folder on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)

    def keys(self) -> list[str]:
        with translated("listing", self.where):
            return [item.name for item in self.path.iterdir() if item.is_file()] if self.path.is_dir() else []

    def read(self, file: str) -> bytes | None:
        path = self.path / file
        with translated("reading", str(path)):
            return path.read_bytes() if path.is_file() else None

    def tensors(self, file: str) -> LazyTensors:
        path = self.path / file
        if not path.is_file():
            raise UsageError(f"{path} is not there", remedy="check the path")
        with translated("reading", str(path)):
            return lazy_from_file(path)


class _Remote:
    """A folder at a URL."""

    def __init__(self, url: str) -> None:
        self.blobs = open_blobs(url)
        self.where = self.blobs.url

    def keys(self) -> list[str]:
        return [info.key for info in self.blobs.list() if "/" not in info.key]

    def read(self, file: str) -> bytes | None:
        return self.blobs.read(file)

    def tensors(self, file: str) -> LazyTensors:
        data = self.blobs.read(file)
        if data is None:
            raise UsageError(f"{self.where}/{file} is not there", remedy="check the URL")
        return lazy_from_bytes(data, f"{self.where}/{file}")
