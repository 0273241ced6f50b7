"""Exporters: stored adapters as folders and files of other tools, never over somebody else's."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from multilora_store.adapter import AdapterConfig, Ref, storage_name
from multilora_store.errors import ExistsError, UnsupportedError
from multilora_store.storage.blobs import Buffer, open_blobs, parts_of
from multilora_store.storage.codec import encode
from multilora_store.storage.dialects.kohya_names import flatten, restore
from multilora_store.storage.peft_dirs import export_adapter

if TYPE_CHECKING:
    import torch

    from multilora_store.storage.store import Store, StoredAdapter

__all__ = ["export_kohya", "export_peft", "kohya_tensors", "write_files"]

log = logging.getLogger(__name__)

_FACTOR: Final = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<role>[AB])\.weight")
_ROLES: Final = {"A": "lora_down.weight", "B": "lora_up.weight"}


def export_peft(store: Store, ref: str | Ref, target: str | os.PathLike[str], *, overwrite: bool = False) -> Path | str:
    """Write a plain PEFT folder with the bytes that are stored.

    Args:
        store: The store.
        ref: The version.
        target: The folder, or any fsspec URL.
        overwrite: Replaces another adapter that lies there.

    Returns:
        The folder.

    Raises:
        ExistsError: another adapter lies there.
    """
    return export_adapter(store, ref, target, overwrite=overwrite)


def export_kohya(
    store: Store,
    ref: str | Ref,
    target: str | os.PathLike[str],
    *,
    component: Literal["unet", "te", "te1", "te2", "te3", "transformer", "prior"] = "unet",
    overwrite: bool = False,
) -> Path | str:
    """Write one kohya file; the `kohya` source reads the same deltas back.

    Args:
        store: The store.
        ref: The version.
        target: The `.safetensors` file, or the folder for one of the adapter's name; a path or any fsspec URL.
        component: The model of a pipeline that it adapts.
        overwrite: Replaces another file that lies there.

    Returns:
        The file.

    Raises:
        UnsupportedError: it holds more than plain LoRA factors, or two module names that kohya cannot tell apart.
        ExistsError: another file lies there.
    """
    adapter = store.get(ref)
    text = os.fspath(target)
    folder, file = text, f"{storage_name(adapter.name)}.safetensors"
    if text.endswith(".safetensors"):
        folder, _, file = text.replace(os.sep, "/").rpartition("/")
    tensors = kohya_tensors(adapter.config, adapter.tensors, component=component, where=_where(store, adapter))
    data = b"".join(encode(tensors).parts)
    place = write_files(folder or ".", {file: data}, overwrite=overwrite)
    return place / file if isinstance(place, Path) else f"{place}/{file}"


def kohya_tensors(
    config: AdapterConfig, tensors: Mapping[str, torch.Tensor], *, component: str, where: str
) -> dict[str, torch.Tensor]:
    """The tensors of a kohya file, values as they are, with an alpha that gives every module its scale.

    Raises:
        UnsupportedError: see `export_kohya`.
    """
    import torch

    _refuse(config, tensors, where)
    found: dict[str, torch.Tensor] = {}
    owners: dict[str, str] = {}
    for name, tensor in sorted(tensors.items()):
        match = _FACTOR.fullmatch(name)
        assert match is not None, "other names have been refused"
        path, flat = match["path"], flatten(match["path"])
        if owners.setdefault(flat, path) != path:
            raise UnsupportedError(
                f"{where}: the modules {owners[flat]} and {path} are both {flat!r} to kohya", remedy="export it to PEFT"
            )
        stem = f"lora_{component}_{flat}"
        found[f"{stem}.{_ROLES[match['role']]}"] = tensor
        if match["role"] == "A":
            found[f"{stem}.alpha"] = torch.tensor(config.scaling_for(path) * tensor.shape[0], dtype=torch.float32)
    unknown = sorted(_not_told(owners))
    if unknown:
        log.warning(
            "%s: to read the file again, the names of the model's modules are needed: %s", where, ", ".join(unknown[:3])
        )
    return found


def _refuse(config: AdapterConfig, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    others = sorted(name for name in tensors if not _FACTOR.fullmatch(name))
    fields = [key for key in ("use_dora", "lora_bias", "target_parameters", "modules_to_save") if config.raw.get(key)]
    if config.peft_type != "LORA" or others or fields:
        found = [config.peft_type] if config.peft_type != "LORA" else [*fields, *others[:3]]
        raise UnsupportedError(
            f"{where} cannot be a kohya file: it has {', '.join(found)}",
            why="that layout holds the factors of plain LoRA and one alpha for each module",
            remedy="export it to PEFT",
        )


def _not_told(owners: Mapping[str, str]) -> Iterator[str]:
    """Modules whose path cannot be told again from kohya's spelling alone."""
    for flat, path in owners.items():
        try:
            told = restore(flat)
        except UnsupportedError:
            told = ""
        if told != path:
            yield path


def write_files(
    target: str | os.PathLike[str], files: Mapping[str, Buffer | Sequence[Buffer]], *, overwrite: bool = False
) -> Path | str:
    """Write files below a folder or URL, the last one last; nothing is written if another file lies there.

    Returns:
        The folder: a Path where it is local, else the URL without secrets.

    Raises:
        ExistsError: a file of that name with other bytes is there, and `overwrite` was not asked for.
    """
    blobs = open_blobs(target)
    whole = {key: b"".join(parts_of(data)) for key, data in files.items()}
    for key, data in whole.items():
        if not overwrite and blobs.stat(key) is not None and blobs.read(key) != data:
            raise ExistsError(
                f"{blobs.url} already holds another {key}",
                remedy="export into an empty folder, or overwrite it",
                path=f"{blobs.url}/{key}",
            )
    for key, data in whole.items():
        blobs.write(key, data)
    any_key = next(iter(whole))
    path = blobs.local_path(any_key)
    return blobs.url if path is None else path.parents[any_key.count("/")]


def _where(store: Store, adapter: StoredAdapter) -> str:
    return f"{store.url}: {adapter.name}@{adapter.version.id}"
