"""Verify: every stored file against its record, quickly or byte by byte, and every fault in one report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from multilora_store.adapter import AdapterConfig, Ref
from multilora_store.errors import ConfigError, DamagedError, MultiLoRAError, StorageError, UntrustedError
from multilora_store.storage.blobs import Blobs
from multilora_store.storage.checks import check_config, check_header, check_identity, check_model
from multilora_store.storage.codec import lazy_from_bytes, lazy_from_file, nonfinite, read_header
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE, VersionRecord
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.records import sha256
from multilora_store.storage.signing import TrustedKeys
from multilora_store.storage.state import Snapshot, Version

if TYPE_CHECKING:
    from multilora_store.storage.view import StoreView

__all__ = ["Finding", "VerifyReport", "check_journal", "rank_faults", "verify"]

Kind = Literal[
    "journal", "missing", "record", "config", "size", "header", "hash", "shape", "empty", "nonfinite", "storage",
    "signature",
]  # fmt: skip

_LORA_A: Final = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.weight)?$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault: what kind, of which version or snapshot, in which file, in words, and what would mend it."""

    kind: Kind
    subject: str
    path: str
    message: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {
            "kind": self.kind, "subject": self.subject, "path": self.path,
            "message": self.message, "remedy": self.remedy,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was looked at, and every fault that was found.

    Attributes:
        versions: Versions checked; adapters that share one folder are checked together.
        snapshots: Snapshots whose files were checked.
        nbytes: Bytes of the files that the check covers.
        deep: Whether every byte was read.
    """

    findings: tuple[Finding, ...]
    versions: int
    snapshots: int
    nbytes: int
    deep: bool

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(
    store: StoreView,
    ref: str | Ref | None = None,
    *,
    deep: bool = True,
    threads: int = 4,
    progress: Listener | None = None,
    trusted_keys: TrustedKeys | Iterable[str | os.PathLike[str]] | None = None,
) -> VerifyReport:
    """Checks files against records: sizes, headers, shapes against the configuration's ranks; deep: every byte.

    Args:
        store: The store.
        ref: One version; None: every live version, every live snapshot's files, and the journal.
        deep: Also hashes every tensor and looks for NaN and infinities.
        threads: How many versions are checked side by side.
        progress: Called as tensors are hashed, and after each version.
        trusted_keys: Files of public keys; a version that none of them signed is a finding. By default the
            store's own, if it was opened with some.

    Raises:
        NotInStoreError: `ref` names nothing.
        StorageError: the storage fails as a whole; a failure at one file is a finding.
    """
    try:
        state = store.state()
    except DamagedError:
        findings = check_journal(store) if ref is None else []
        if not findings:
            raise
        return VerifyReport(findings=tuple(findings), versions=0, snapshots=0, nbytes=0, deep=deep)
    versions = [store.resolve(ref)] if ref is not None else list(state.live())
    snapshots = [] if ref is not None else list(state.snapshots.values())

    unique = list({version.directory: version for version in versions}.values())
    meter = Meter(progress, files=len(unique), nbytes=sum(version.nbytes for version in unique))

    def check(version: Version) -> list[Finding]:
        told = 0

        def tell(nbytes: int) -> None:
            nonlocal told
            told += nbytes
            meter.add(nbytes, files=0)

        found = list(_check_version(store, version, tell if deep else None))
        meter.add(version.nbytes - told)
        return found

    findings = [] if ref is not None else check_journal(store)
    trusted = TrustedKeys.of(trusted_keys) or store.files.trusted
    if trusted is not None:
        findings += [found for version in versions for found in _check_signature(store, version, trusted)]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for found in pool.map(check, unique):
            findings += found
        for found in pool.map(lambda snapshot: list(_check_snapshot(store, snapshot, deep)), snapshots):
            findings += found
    return VerifyReport(
        findings=tuple(findings), versions=len(unique), snapshots=len(snapshots),
        nbytes=sum(version.nbytes for version in unique), deep=deep,
    )  # fmt: skip


def check_journal(store: StoreView) -> list[Finding]:
    """What is wrong with the history: checked whole, from its first entry, and no entry lies behind a gap."""
    try:
        state = store.journal.refold()
        behind = store.journal.stray_entries(state.seq)
    except DamagedError as error:
        words = _words(error)
        return [Finding(kind="journal", subject="journal", path="journal/", message=words, remedy=error.remedy)]
    return [
        Finding(
            kind="journal", subject="journal", path=key,
            message=f"an entry behind a gap: the journal ends at entry {state.seq}",
            remedy="wait for the replication, or restore the missing entries from a copy of the store",
        )
        for key in behind
    ]  # fmt: skip


def _check_signature(store: StoreView, version: Version, trusted: TrustedKeys) -> Iterator[Finding]:
    try:
        trusted.check(version, store.url)
    except UntrustedError as error:
        yield _finding("signature", str(version), "journal/", error)


def _check_version(store: StoreView, version: Version, tell: Callable[[int], None] | None) -> Iterator[Finding]:
    """With `tell`, which is told of bytes that were hashed, every byte is read."""
    blobs, subject = store.blobs, str(version)
    try:
        record = store.files.recorded(version)
    except MultiLoRAError as error:
        yield _finding("missing" if blobs.stat(f"{version.directory}/version.json") is None else "record",
                       subject, f"{version.directory}/version.json", error)  # fmt: skip
        record = None
    key = f"{version.directory}/{CONFIG_FILE}"
    config = None
    try:
        data = blobs.read(key)
        if data is None:
            yield _missing(subject, key)
        else:
            if record is not None:
                check_config(data, record, key)
            config = AdapterConfig.parse(data, where=key)
            if record is not None:
                check_identity(config, record, key)
    except (DamagedError, ConfigError, StorageError) as error:
        yield _finding("storage" if isinstance(error, StorageError) else "config", subject, key, error)
    yield from _check_model(blobs, f"{version.directory}/{MODEL_FILE}", subject, record, config, tell)


def _check_model(
    blobs: Blobs, key: str, subject: str, record: VersionRecord | None, config: AdapterConfig | None,
    tell: Callable[[int], None] | None,
) -> Iterator[Finding]:  # fmt: skip
    deep = tell is not None
    try:
        info = blobs.stat(key)
        if info is None:
            yield _missing(subject, key)
            return
        if record is not None and info.size != record.model_size:
            message = f"{info.size} bytes, {record.model_size} were recorded"
            yield Finding(kind="size", subject=subject, path=key, message=message, remedy=_REPAIR)
        whole = blobs.read(key) if deep and blobs.local_path(key) is None else None
        header = read_header(_reader(blobs, key, whole), info.size, key)
        if record is not None and info.size == record.model_size:
            check_header(header, record, _reader(blobs, key, whole)(0, header.offset), key)
    except DamagedError as error:
        yield _finding("header", subject, key, error)
        return
    except StorageError as error:
        yield _finding("storage", subject, key, error)
        return
    for slot in header.slots.values():
        if 0 in slot.shape:
            yield Finding(
                kind="empty", subject=subject, path=key, message=f"tensor {slot.name!r} has shape {slot.shape}"
            )
    if config is not None:
        shapes = {slot.name: slot.shape for slot in header.slots.values()}
        for message in rank_faults(config, shapes):
            yield Finding(kind="shape", subject=subject, path=key, message=message)
    if tell is not None:
        yield from _check_bytes(blobs, key, subject, record, whole, tell)


def _check_bytes(
    blobs: Blobs, key: str, subject: str, record: VersionRecord | None, whole: bytes | None,
    tell: Callable[[int], None],
) -> Iterator[Finding]:  # fmt: skip
    path = blobs.local_path(key)
    try:
        tensors = lazy_from_file(path) if path is not None else lazy_from_bytes(whole or b"", key)
        if record is not None and tensors.header.nbytes == record.model_size:
            check_model(tensors.piece, tensors.header, record, key, tell)
        bad = nonfinite((name, tensor) for name, tensor in tensors.items() if tensor.numel())
    except DamagedError as error:
        yield _finding("hash", subject, key, error)
        return
    for name in bad:
        yield Finding(
            kind="nonfinite", subject=subject, path=key, message=f"tensor {name!r} holds a NaN or an infinity",
            remedy="delete this version; training had diverged when it was saved",
        )  # fmt: skip


def _check_snapshot(store: StoreView, snapshot: Snapshot, deep: bool) -> Iterator[Finding]:
    subject = f"snapshot {snapshot.id}"
    for path, record in snapshot.files.items():
        key = f"{snapshot.directory}/{path}"
        try:
            if deep:
                data = store.blobs.read(key)
                size = None if data is None else len(data)
            else:
                info, data = store.blobs.stat(key), None
                size = None if info is None else info.size
        except StorageError as error:
            yield _finding("storage", subject, key, error)
            continue
        if size is None:
            yield _missing(subject, key)
        elif size != record.size:
            message = f"{size} bytes, {record.size} were recorded"
            yield Finding(kind="size", subject=subject, path=key, message=message, remedy=_REPAIR)
        elif data is not None and record.sha256 and sha256(data) != record.sha256:
            message = f"its SHA-256 is not the recorded {record.sha256[:16]}..."
            yield Finding(kind="hash", subject=subject, path=key, message=message, remedy=_REPAIR)


def rank_faults(config: AdapterConfig, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Where a LoRA tensor's rank is not what the configuration says for its module.

    A fused expert parameter holds one block of the rank for each expert, so a multiple of it is right there.
    """
    if config.peft_type != "LORA":
        return
    fused = bool(config.raw.get("target_parameters"))
    for name, shape in shapes.items():
        found = _LORA_A.match(name)
        if found is None or len(shape) < 2:
            continue
        path, kind = found[1], found[2]
        rank = shape[0] if kind.endswith("_A") else shape[1]
        wanted = config.rank_for(path)
        if rank != wanted and not (fused and wanted and rank % wanted == 0):
            yield f"tensor {name!r} of shape {shape} has rank {rank}, the configuration says {wanted}"


def _reader(blobs: Blobs, key: str, whole: bytes | None) -> Callable[[int, int], bytes]:
    def read(start: int, length: int) -> bytes:
        if whole is not None:
            return whole[start : start + length]
        found = blobs.read_range(key, start, length)
        if found is None:
            raise DamagedError(f"{blobs.url}/{key} vanished while it was read", remedy="verify again")
        return found

    return read


_REPAIR: Final = "restore the version from another store, or save it again"


def _missing(subject: str, key: str) -> Finding:
    message = f"{key.rpartition('/')[2]} is missing"
    return Finding(kind="missing", subject=subject, path=key, message=message, remedy=_REPAIR)


def _finding(kind: Kind, subject: str, path: str, error: MultiLoRAError) -> Finding:
    return Finding(kind=kind, subject=subject, path=path, message=_words(error), remedy=error.remedy)


def _words(error: MultiLoRAError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what
