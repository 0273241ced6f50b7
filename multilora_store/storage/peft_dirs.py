"""PEFT directories: plain folders of `adapter_config.json` and weights, read from anywhere and written anywhere."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multilora_store.adapter import AdapterConfig, Ref, canonical_tensor_name, check_name
from multilora_store.errors import DamagedError, ExistsError, NameNotAllowedError, UsageError
from multilora_store.storage.blobs import Blobs, Buffer, open_blobs, redact
from multilora_store.storage.codec import LazyTensors, lazy_from_bytes, lazy_from_file
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.failures import translated
from multilora_store.storage.records import parse

if TYPE_CHECKING:
    import torch

    from multilora_store.storage.state import Version
    from multilora_store.storage.store import Store

__all__ = ["FoundAdapter", "PeftFolder", "export_adapter", "import_peft", "plan_import", "read_peft_dir"]

PICKLE_FILE: Final = "adapter_model.bin"
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,12})")
_WRAPPER: Final = re.compile(r"(^module\.)|(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_DEEPEST: Final = 3

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAdapter:
    """An adapter that a folder holds: the name it would get, and its subfolder (empty: the folder itself)."""

    name: str
    folder: str


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
    return _read(_Folder(path_or_url), "", allow_pickle)


def import_peft(
    store: Store,
    path_or_url: str | os.PathLike[str],
    *,
    name: str | None = None,
    allow_pickle: bool = False,
    prefix: str = "",
    tags: Sequence[str] = (),
) -> list[Version]:
    """Puts what PEFT wrote into the store, all in one entry, the original files' bytes kept.

    Args:
        store: The store.
        path_or_url: One adapter's folder, a folder of several (PEFT's `default` in the folder itself, the
            others in subfolders), or a trainer's `checkpoint-N`, whose step is recorded.
        name: The name to give, where there is one adapter; by default the folder's own name.
        allow_pickle: Also takes an `adapter_model.bin`, with weights-only loading.
        prefix: Goes before every name, as in `team/`.
        tags: Tags for every version.

    Returns:
        The versions, in the order of their names.

    Raises:
        UsageError, DamagedError, ConfigError: see `read_peft_dir`; nothing was imported.
        NameNotAllowedError: a folder's name cannot be an adapter's; give `name`.
    """
    folder = _Folder(path_or_url)
    found = plan_import(folder.keys(), folder.where, name=name, prefix=prefix)
    read = {adapter.name: _read(folder, adapter.folder, allow_pickle) for adapter in found}
    requests = [
        {
            "name": adapter_name, "tensors": one.tensors, "config": one.config, "files": one.files or None,
            "step": one.step, "tags": tags, "metadata": {"imported_from": one.where},
        }
        for adapter_name, one in read.items()
    ]  # fmt: skip
    staged = store.stage_many(requests)
    versions = store.commit(staged).versions
    return [versions[adapter.name] for adapter in found]


def export_adapter(
    store: Store, ref: str | Ref, target: str | os.PathLike[str], *, overwrite: bool = False
) -> Path | str:
    """Writes one version as a plain PEFT directory, with the bytes that are stored.

    Args:
        store: The store.
        ref: The version.
        target: A folder or any fsspec URL; files of another adapter there are not overwritten unless asked.
        overwrite: Replaces an adapter that lies there.

    Returns:
        The folder: a Path where it is local, else the URL without secrets.

    Raises:
        ExistsError: another adapter lies there.
    """
    version = store.resolve(ref)
    files = store.files.read_all(version)
    blobs = open_blobs(target)
    if not overwrite:
        _refuse_other_adapter(blobs, files)
    for file in (MODEL_FILE, CONFIG_FILE):  # the configuration, without which a folder is no adapter, comes last
        blobs.write(file, files[file])
    path = blobs.local_path(CONFIG_FILE)
    return blobs.url if path is None else path.parent


def _refuse_other_adapter(blobs: Blobs, files: Mapping[str, bytes]) -> None:
    for file in (*files, PICKLE_FILE):
        there = blobs.stat(file)
        if there is not None and (file not in files or blobs.read(file) != files[file]):
            raise ExistsError(
                f"{blobs.url} already holds another adapter: {file} differs",
                remedy="export into an empty folder, or overwrite it",
                path=f"{blobs.url}/{file}",
            )


def plan_import(keys: Sequence[str], where: str, *, name: str | None = None, prefix: str = "") -> list[FoundAdapter]:
    """Which adapters a folder holds, from the keys of its files alone, sorted by name.

    Raises:
        UsageError: there is none, or `name` is given for several.
        DamagedError: weights lie there without their configuration.
        NameNotAllowedError: a folder's name cannot be an adapter's.
    """
    folders = _adapter_folders(keys, where)
    if not folders:
        _refuse_empty(keys, where)
    if name is not None and len(folders) > 1:
        raise UsageError(
            f"{where} holds {len(folders)} adapters, so one name {name!r} does not do",
            why=f"they are {', '.join(folder or 'the folder itself' for folder in folders[:10])}",
            remedy="leave the name out, give a prefix, or import one of the subfolders",
        )
    found = []
    for folder in folders:
        own = name or folder or ("default" if len(folders) > 1 else _own_name(where))
        try:
            found.append(FoundAdapter(name=check_name(prefix + own), folder=folder))
        except NameNotAllowedError as error:
            raise NameNotAllowedError(
                f"{where}/{folder}".rstrip("/") + f" would be called {prefix + own!r}, which is not allowed",
                why=error.why,
                remedy="give it another name with name=...",
            ) from error
    return sorted(found, key=lambda adapter: adapter.name)


def _adapter_folders(keys: Sequence[str], where: str) -> list[str]:
    """Folders with an adapter; a run's own checkpoints are not taken along with its final adapter."""
    configs = {key.rpartition("/")[0] for key in keys if key.rpartition("/")[2] == CONFIG_FILE}
    weights = {key.rpartition("/")[0] for key in keys if key.rpartition("/")[2] in (MODEL_FILE, PICKLE_FILE)}
    wanted = {
        folder
        for folder in configs | weights
        if len(folder.split("/")) <= _DEEPEST and not any(_CHECKPOINT.fullmatch(part) for part in folder.split("/"))
    }
    for folder in sorted(wanted - configs):
        raise DamagedError(
            f"{where}/{folder}".rstrip("/") + f" has weights but no {CONFIG_FILE}",
            why="without its configuration nobody can tell what the weights are",
            remedy=f"copy its {CONFIG_FILE} there; PEFT's save_pretrained writes both",
            path=f"{where}/{folder}".rstrip("/"),
        )
    return sorted(wanted)


def _refuse_empty(keys: Sequence[str], where: str) -> None:
    checkpoints = sorted({part for key in keys for part in key.split("/")[:-1] if _CHECKPOINT.fullmatch(part)})
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


def _own_name(where: str) -> str:
    """The name of a single adapter: its folder's; of a checkpoint: its run's."""
    parts = [part for part in where.rstrip("/").partition("://")[2 if "://" in where else 0].split("/") if part]
    if len(parts) > 1 and _CHECKPOINT.fullmatch(parts[-1]):
        return parts[-2]
    return parts[-1] if parts else "default"


class _Folder:
    """A folder of somebody else's files: a local one (its symbolic links are its owner's business) or a URL."""

    def __init__(self, path_or_url: str | os.PathLike[str]) -> None:
        text = os.fspath(path_or_url)
        is_url = "://" in text and not text.startswith(("file://", "local://"))
        self.path = None if is_url else Path(os.path.abspath(Path(text.partition("://")[2] or text).expanduser()))
        self.blobs = open_blobs(text) if is_url else None
        self.where = redact(text).rstrip("/") if self.path is None else str(self.path)

    def keys(self) -> list[str]:
        """Relative paths of the files, as deep as adapters are looked for."""
        if self.blobs is not None:
            return [info.key for info in self.blobs.list()]
        assert self.path is not None
        found: list[str] = []
        with translated("listing", self.where):
            for folder, folders, files in os.walk(self.path, followlinks=False):
                relative = os.path.relpath(folder, self.path).replace(os.sep, "/")
                stem = "" if relative == "." else relative + "/"
                found += [stem + file for file in files]
                if stem.count("/") >= _DEEPEST:
                    folders.clear()
        return found

    def read(self, key: str) -> bytes | None:
        """The bytes of one file, or None."""
        if self.blobs is not None:
            return self.blobs.read(key)
        path = self.local(key)
        with translated("reading", str(path)):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def local(self, key: str) -> Path:
        assert self.path is not None
        return self.path / key

    def tensors(self, key: str) -> LazyTensors | None:
        """The tensors of one safetensors file: mapped where it is local, read in one go elsewhere."""
        if self.path is not None:
            path = self.local(key)
            with translated("reading", str(path)):
                return lazy_from_file(path) if path.is_file() else None
        data = self.read(key)
        return None if data is None else lazy_from_bytes(data, f"{self.where}/{key}")


def _read(folder: _Folder, sub: str, allow_pickle: bool) -> PeftFolder:
    stem = f"{sub}/" if sub else ""
    where = f"{folder.where}/{sub}".rstrip("/")
    config_data = folder.read(stem + CONFIG_FILE)
    tensors = folder.tensors(stem + MODEL_FILE)
    if config_data is None:
        if tensors is None and folder.read(stem + PICKLE_FILE) is None:
            _refuse_empty([] if not folder.keys() else ["something"], where)
        raise DamagedError(
            f"{where} has weights but no {CONFIG_FILE}",
            why="without its configuration nobody can tell what the weights are",
            remedy=f"copy its {CONFIG_FILE} there; PEFT's save_pretrained writes both",
            path=where,
        )
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


def _read_pickle(folder: _Folder, stem: str, where: str, allow_pickle: bool) -> dict[str, torch.Tensor]:
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


def _step(folder: _Folder, stem: str, where: str) -> int | None:
    """The step of a trainer's checkpoint: from its state, else from the folder's name."""
    named = next((found for part in reversed(where.split("/")) if (found := _CHECKPOINT.fullmatch(part))), None)
    data = folder.read("trainer_state.json") if named or not stem else None
    if data is not None:
        try:
            return parse(data, f"{folder.where}/trainer_state.json").whole("global_step")
        except DamagedError as error:
            log.warning("the step is taken from the folder's name: %s", error)
    return int(named[1]) if named else None
