"""A PEFT directory as it is read: `adapter_config.json` and weights, from anywhere, nothing in it ever run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from multilora_store.adapter import AdapterConfig, canonical_tensor_name
from multilora_store.errors import DamagedError, UsageError
from multilora_store.storage.blobs import Blobs, Buffer, Sent, open_blobs, read_in_pieces, redact, url_text
from multilora_store.storage.codec import LazyTensors, lazy_from_bytes, lazy_from_file
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.failures import translated
from multilora_store.storage.records import parse

if TYPE_CHECKING:
    import torch

__all__ = [
    "CHECKPOINT",
    "DEEPEST",
    "PICKLE_FILE",
    "Folder",
    "PeftFolder",
    "read_adapter",
    "read_peft_dir",
    "refuse_empty",
    "refuse_without_config",
]

PICKLE_FILE: Final = "adapter_model.bin"
CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,12})")
DEEPEST: Final = 3
"""How many folders deep adapters are looked for."""
_WRAPPER: Final = re.compile(r"(^module\.)|(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFolder:
    """One adapter as it lies in a folder.

    Attributes:
        config: Its configuration.
        tensors: Lazy tensors by canonical name.
        files: The original bytes of both files; empty where they cannot be kept as they are (a pickle, or
            tensor names that carry a wrapper's prefix).
        step: The training step, if the folder is a trainer's checkpoint.
        where: The folder, free of secrets.
    """

    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]
    files: Mapping[str, Buffer] = field(default_factory=dict)
    step: int | None = None
    where: str = ""


def read_peft_dir(path_or_url: str | os.PathLike[str], *, allow_pickle: bool = False) -> PeftFolder:
    """Reads one PEFT directory, local or at any fsspec URL.

    Args:
        path_or_url: The folder that holds `adapter_config.json`.
        allow_pickle: Reads an `adapter_model.bin` where there is no safetensors file, with weights-only loading.

    Raises:
        UsageError: the folder is not there, or holds a pickle only.
        DamagedError: a file is missing or not what its name says.
        ConfigError: the configuration is broken or another tool's.
    """
    return read_adapter(Folder(path_or_url), "", allow_pickle)


def refuse_empty(keys: Sequence[str], where: str) -> NoReturn:
    """Raises the error for a folder that holds no adapter, from the keys of its files."""
    checkpoints = sorted({part for key in keys for part in key.split("/")[:-1] if CHECKPOINT.fullmatch(part)})
    if checkpoints:
        raise UsageError(
            f"{where} holds no adapter itself, only {', '.join(checkpoints[:10])}",
            remedy=f"import one of them, as in {where}/{checkpoints[-1]}",
        )
    raise UsageError(
        f"{where} holds no PEFT adapter" if keys else f"{where} is empty or not there",
        why=f"no {CONFIG_FILE} in it or in its subfolders",
        remedy="give the folder that PEFT's save_pretrained wrote",
    )


def refuse_without_config(where: str) -> NoReturn:
    """Raises the error for weights without their configuration."""
    raise DamagedError(
        f"{where} has weights but no {CONFIG_FILE}",
        why="without its configuration nobody can tell what the weights are",
        remedy=f"copy its {CONFIG_FILE} there; PEFT's save_pretrained writes both",
        path=where,
    )


class Folder:
    """A folder of somebody else's files: a local one (its symbolic links are its owner's business) or a URL.

    Args:
        path_or_url: Where it is.
        blobs: What reads it where it is a URL; None: opened without options.
    """

    def __init__(self, path_or_url: str | os.PathLike[str], blobs: Blobs | None = None) -> None:
        text = url_text(path_or_url)
        is_url = "://" in text and not text.startswith(("file://", "local://"))
        self.path = None if is_url else Path(os.path.abspath(Path(text.partition("://")[2] or text).expanduser()))
        self.blobs = (blobs or open_blobs(text)) if is_url else None
        self.where = redact(text).rstrip("/") if self.path is None else str(self.path)

    def keys(self) -> list[str]:
        """Relative paths of the files, as deep as adapters are looked for."""
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Bytes of the files by relative path, as deep as adapters are looked for; 0 for a link to nothing."""
        if self.blobs is not None:
            return {info.key: info.size for info in self.blobs.list()}
        assert self.path is not None
        found: dict[str, int] = {}
        with translated("listing", self.where):
            for folder, folders, files in os.walk(self.path, followlinks=False):
                relative = os.path.relpath(folder, self.path).replace(os.sep, "/")
                stem = "" if relative == "." else relative + "/"
                for file in files:
                    path = os.path.join(folder, file)
                    found[stem + file] = os.path.getsize(path) if os.path.exists(path) else 0
                if stem.count("/") >= DEEPEST:
                    folders.clear()
        return found

    def read(self, key: str, *, size: int = 0, told: Sent | None = None) -> bytes | None:
        """The bytes of one file, or None; where its size is known, `told` is, on the way from elsewhere."""
        if self.blobs is not None:
            return self.blobs.read(key) if told is None else read_in_pieces(self.blobs, key, size, told)
        path = self.local(key)
        with translated("reading", str(path)):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def local(self, key: str) -> Path:
        assert self.path is not None
        return self.path / key

    def tensors(self, key: str, *, size: int = 0, told: Sent | None = None) -> LazyTensors | None:
        """The tensors of one safetensors file: mapped where it is local, elsewhere read as `read` does."""
        if self.path is not None:
            path = self.local(key)
            with translated("reading", str(path)):
                return lazy_from_file(path) if path.is_file() else None
        data = self.read(key, size=size, told=told)
        return None if data is None else lazy_from_bytes(data, f"{self.where}/{key}")


def read_adapter(
    folder: Folder, sub: str, allow_pickle: bool, *, sizes: Mapping[str, int] | None = None, told: Sent | None = None
) -> PeftFolder:
    """The adapter in the subfolder `sub` of `folder` (empty: the folder itself).

    `told` is told how much of a model file was read, where its size is among the folder's `sizes`.
    """
    stem = f"{sub}/" if sub else ""
    where = f"{folder.where}/{sub}".rstrip("/")
    config_data = folder.read(stem + CONFIG_FILE)
    tensors = folder.tensors(stem + MODEL_FILE, size=(sizes or {}).get(stem + MODEL_FILE, 0), told=told)
    if config_data is None:
        if tensors is None and folder.read(stem + PICKLE_FILE) is None:
            refuse_empty([] if not folder.keys() else ["something"], where)
        refuse_without_config(where)
    config = AdapterConfig.parse(config_data, where=f"{where}/{CONFIG_FILE}")
    for note in config.notes:
        log.warning("%s/%s: %s", where, CONFIG_FILE, note)
    step = _step(folder, stem, where)
    if tensors is None:
        loaded = _read_pickle(folder, stem, where, allow_pickle)
        return PeftFolder(config=config, tensors=_canonical(loaded, where), step=step, where=where)
    if any(_WRAPPER.search(key) for key in tensors):
        log.warning("%s: tensor names carry a wrapper's prefix, which is taken off", where)
        return PeftFolder(config=config, tensors=_canonical(tensors, where), step=step, where=where)
    files: dict[str, Buffer] = {CONFIG_FILE: config_data, MODEL_FILE: tensors.piece(0, tensors.header.nbytes)}
    return PeftFolder(config=config, tensors=tensors, files=files, step=step, where=where)


def _canonical(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """The tensors by canonical name."""
    found: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name = canonical_tensor_name(key) if _WRAPPER.search(key) else key
        if name in found:
            raise DamagedError(f"{where} holds two tensors that are both {name!r}", tensor=name)
        found[name] = tensor
    return found


def _read_pickle(folder: Folder, stem: str, where: str, allow_pickle: bool) -> dict[str, torch.Tensor]:
    import io
    import warnings

    import torch

    data = folder.read(stem + PICKLE_FILE)
    if data is None:
        raise DamagedError(
            f"{where} has a configuration but no {MODEL_FILE}",
            remedy="save the adapter again where it came from",
            path=where,
        )
    if not allow_pickle:
        raise UsageError(
            f"{where} holds {PICKLE_FILE} only, a pickle, which can run code when it is loaded",
            remedy="convert it to safetensors, or allow weights-only loading of it with allow_pickle=True",
            path=where,
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the protocol of a pickle that the next line refuses anyway
            loaded: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # hostile bytes make the unpickler raise anything at all
        raise DamagedError(
            f"{where}/{PICKLE_FILE} cannot be read with weights-only loading",
            why=(str(error) or type(error).__name__).splitlines()[0][:300],
            remedy="it is damaged, or holds more than tensors and is refused; save it as safetensors",
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        raise DamagedError(f"{where}/{PICKLE_FILE} is not a mapping of tensors", remedy="save it as safetensors")
    return {key: tensor.detach().contiguous() for key, tensor in loaded.items()}


def _step(folder: Folder, stem: str, where: str) -> int | None:
    """The step of a trainer's checkpoint: from its state, else from the folder's name."""
    named = next((found for part in reversed(where.split("/")) if (found := CHECKPOINT.fullmatch(part))), None)
    data = folder.read("trainer_state.json") if named or not stem else None
    if data is not None:
        try:
            return parse(data, f"{folder.where}/trainer_state.json").whole("global_step")
        except DamagedError as error:
            log.warning("the step is taken from the folder's name: %s", error)
    return int(named[1]) if named else None
