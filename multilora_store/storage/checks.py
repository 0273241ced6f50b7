"""Checks: whether the files of one version are what its record says, quickly or byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from multilora_store.adapter import AdapterConfig, content_digest
from multilora_store.errors import DamagedError
from multilora_store.storage.blobs import Buffer
from multilora_store.storage.codec import Header, hash_slots, read_header
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE, VersionRecord
from multilora_store.storage.failures import translated
from multilora_store.storage.records import sha256

__all__ = ["check_config", "check_file_hashes", "check_header", "check_identity", "check_model", "check_sizes"]


def check_sizes(folder: Path, record: VersionRecord) -> None:
    """Raises DamagedError unless both files are in `folder` with their recorded sizes."""
    for file, size in record.sizes().items():
        path = folder / file
        with translated("looking at", str(path)):
            found = path.stat().st_size if path.is_file() else None
        if found is None:
            _damaged(str(path), "it is missing")
        if found != size:
            _damaged(str(path), f"it is {found} bytes long, {size} were recorded")


def check_file_hashes(folder: Path, record: VersionRecord) -> None:
    """Raises DamagedError unless every byte of both files in `folder` is what was recorded."""
    check_sizes(folder, record)
    path = folder / CONFIG_FILE
    with translated("reading", str(path)):
        check_config(path.read_bytes(), record, str(path))
    path = folder / MODEL_FILE
    with translated("reading", str(path)), open(path, "rb", buffering=0) as file:

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        check_model(read, read_header(read, record.model_size, str(path)), record, str(path))


def check_config(data: bytes, record: VersionRecord, where: str) -> None:
    """Raises DamagedError unless `data` is the recorded configuration."""
    if len(data) != record.config_size or sha256(data) != record.config_sha256:
        _damaged(where, f"its SHA-256 is not the recorded {record.config_sha256[:16]}...")


def check_identity(config: AdapterConfig, record: VersionRecord, where: str) -> None:
    """Raises DamagedError unless the record's digest is that of this configuration and its table of tensors."""
    if content_digest(config, record.tensors.values()) != record.digest:
        _damaged(where, f"configuration and tensors do not have the digest {record.digest[:16]}... of the version")


def check_header(header: Header, record: VersionRecord, head: bytes, where: str) -> None:
    """Raises DamagedError unless the header is the recorded one; `head` is its bytes, length field included."""
    if sha256(head) != record.header_sha256:
        _damaged(where, "its header is not the recorded one")
    described = {slot.name: (slot.dtype, slot.shape) for slot in header.slots.values()}
    recorded = {info.name: (info.dtype, info.shape) for info in record.tensors.values()}
    if described != recorded:
        different = sorted(set(described.items()) ^ set(recorded.items()))
        _damaged(where, f"its tensors are not the recorded ones, first at {different[0][0]!r}")


def check_model(
    read: Callable[[int, int], Buffer],
    header: Header,
    record: VersionRecord,
    where: str,
    tell: Callable[[int], None] | None = None,
) -> None:
    """Raises DamagedError unless header and tensors of a model file are what was recorded.

    Args:
        read: Gives at most `length` bytes from `start` on: `read(start, length)`.
        tell: Told the bytes of each tensor that was hashed.
    """
    check_header(header, record, bytes(read(0, header.offset)), where)
    for slot, digest in hash_slots(header, read):
        if digest != record.tensors[slot.name].sha256:
            _damaged(where, f"the SHA-256 of tensor {slot.name!r} is not the recorded one", tensor=slot.name)
        if tell is not None:
            tell(slot.end - slot.start)


def _damaged(where: str, why: str, **facts: object) -> NoReturn:
    raise DamagedError(
        f"{where} is not what was stored",
        why=why,
        remedy="run verify; restore the version from another store, or save it again",
        where=where,
        **facts,
    )
