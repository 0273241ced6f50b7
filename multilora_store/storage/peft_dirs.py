"""PEFT directories: plain folders of `adapter_config.json` and weights, read from anywhere and written anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multilora_store.adapter import Ref, check_name
from multilora_store.errors import ExistsError, NameNotAllowedError, UsageError
from multilora_store.storage.blobs import Blobs, open_blobs
from multilora_store.storage.changes import is_of_version
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.peft_folder import (
    CHECKPOINT,
    DEEPEST,
    PICKLE_FILE,
    Folder,
    PeftFolder,
    read_adapter,
    read_peft_dir,
    refuse_empty,
    refuse_without_config,
)
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.verify import rank_faults

if TYPE_CHECKING:
    from multilora_store.storage.state import Version
    from multilora_store.storage.store import Store

__all__ = [
    "FoundAdapter",
    "PeftFolder",
    "export_adapter",
    "import_peft",
    "plan_import",
    "read_peft_dir",
    "refuse_rank_mismatch",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAdapter:
    """An adapter that a folder holds: the name it would get, and its subfolder (empty: the folder itself)."""

    name: str
    folder: str


def import_peft(
    store: Store,
    path_or_url: str | os.PathLike[str],
    *,
    name: str | None = None,
    allow_pickle: bool = False,
    prefix: str = "",
    tags: Sequence[str] = (),
    progress: Listener | None = None,
    allow_rank_mismatch: bool = False,
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
        progress: Called on the way of each adapter that is read from elsewhere, then of each that is stored.
        allow_rank_mismatch: Also takes tensors whose rank is not the one that the configuration says.

    Returns:
        The versions, in the order of their names.

    Raises:
        UsageError, DamagedError, ConfigError: see `read_peft_dir`; nothing was imported.
        NameNotAllowedError: a folder's name cannot be an adapter's; give `name`.
    """
    folder = Folder(path_or_url)
    sizes = folder.sizes()
    found = plan_import(list(sizes), folder.where, name=name, prefix=prefix)
    read = _read_all(folder, found, sizes, allow_pickle, progress)
    if not allow_rank_mismatch:
        refuse_rank_mismatch(read)
    requests = [
        {
            "name": adapter_name, "tensors": one.tensors, "config": one.config, "files": one.files or None,
            "step": one.step, "tags": tags, "metadata": {"imported_from": one.where},
        }
        for adapter_name, one in read.items()
    ]  # fmt: skip
    staged = store.stage_many(requests, progress=progress)
    versions = store.commit(staged).versions
    return [versions[adapter.name] for adapter in found]


def refuse_rank_mismatch(read: Mapping[str, PeftFolder]) -> None:
    """Raises UsageError if a tensor's rank contradicts its adapter's configuration: no model would load it."""
    for one in read.values():
        faults = list(rank_faults(one.config, {name: tuple(tensor.shape) for name, tensor in one.tensors.items()}))
        if faults:
            raise UsageError(
                f"{one.where} contradicts itself: {faults[0]}",
                why=f"and so do {len(faults) - 1} more of its tensors" if len(faults) > 1 else "",
                remedy="give it the configuration that it was trained with; allow_rank_mismatch=true takes it as it is",
                tensors=faults,
            )


def _read_all(
    folder: Folder,
    found: Sequence[FoundAdapter],
    sizes: Mapping[str, int],
    allow_pickle: bool,
    progress: Listener | None,
) -> dict[str, PeftFolder]:
    """Every adapter by name; those of a local folder are mapped, not read, and so no progress."""
    of = {one.name: sum(n for key, n in sizes.items() if key.rpartition("/")[0] == one.folder) for one in found}
    meter = Meter(progress if folder.path is None else None, files=len(of), nbytes=sum(of.values()))
    read = {}
    for adapter in found:
        piece = meter.piece(of[adapter.name])
        read[adapter.name] = read_adapter(folder, adapter.folder, allow_pickle, sizes=sizes, told=piece.reached)
        piece.done()
    return read


def export_adapter(
    store: Store,
    ref: str | Ref,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Listener | None = None,
) -> Path | str:
    """Writes one version as a plain PEFT directory, with the bytes that are stored.

    Args:
        store: The store.
        ref: The version.
        target: A folder or any fsspec URL; files of another adapter there are not overwritten unless asked.
        overwrite: Replaces an adapter that lies there.
        progress: Called on the way of a large file; a byte that is read but not yet written counts half.

    Returns:
        The folder: a Path where it is local, else the URL without secrets.

    Raises:
        ExistsError: another adapter lies there.
    """
    version = store.resolve(ref)
    piece = Meter(progress, files=1, nbytes=version.nbytes).piece(version.nbytes)
    files = store.files.read_all(version, lambda read: piece.reached(read // 2))
    blobs = open_blobs(target)
    if not overwrite:
        _refuse_other_adapter(blobs, files)
    half = len(files[MODEL_FILE]) // 2
    blobs.write(MODEL_FILE, files[MODEL_FILE], lambda sent: piece.reached(half + sent // 2))
    blobs.write(CONFIG_FILE, files[CONFIG_FILE])  # last: a folder without it is no adapter
    piece.done()
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
        UsageError: there is none, `name` is given for several, or it is a store.
        DamagedError: weights lie there without their configuration.
        NameNotAllowedError: a folder's name cannot be an adapter's.
    """
    if any(map(is_of_version, keys)):
        raise UsageError(
            f"{where} is a store, not a folder of adapters",
            remedy=f"sync source={where} target=STORE, or import one version's folder",
        )
    folders = _adapter_folders(keys, where)
    if not folders:
        refuse_empty(keys, where)
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
        if len(folder.split("/")) <= DEEPEST and not any(CHECKPOINT.fullmatch(part) for part in folder.split("/"))
    }
    for folder in sorted(wanted - configs):
        refuse_without_config(f"{where}/{folder}".rstrip("/"))
    return sorted(wanted)


def _own_name(where: str) -> str:
    """The name of a single adapter: its folder's; of a checkpoint: its run's."""
    parts = [part for part in where.rstrip("/").partition("://")[2 if "://" in where else 0].split("/") if part]
    if len(parts) > 1 and CHECKPOINT.fullmatch(parts[-1]):
        return parts[-2]
    return parts[-1] if parts else "default"
