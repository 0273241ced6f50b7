"""Puts: content goes up first, into a folder of its own; one entry names it later."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from multilora_store.adapter import AdapterConfig, check_name, storage_name
from multilora_store.errors import ConflictError, UsageError
from multilora_store.storage.arguments import as_mapping
from multilora_store.storage.blobs import BatchingBlobs, Blobs, Buffer, Sent
from multilora_store.storage.changes import Put
from multilora_store.storage.codec import encode, lazy_from_bytes, nonfinite
from multilora_store.storage.contents import MODEL_FILE, RECORD_FILE, Contents, encoded_contents, original_contents
from multilora_store.storage.records import plain_json, sha256
from multilora_store.storage.state import State, Version

if TYPE_CHECKING:
    import torch

__all__ = [
    "Source",
    "StagedPut",
    "build_contents",
    "check_step",
    "fresh_directory",
    "is_latest",
    "make_put",
    "plan_directory",
    "restage",
    "upload",
]

_ALPHABET: Final = string.ascii_lowercase + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a put was staged from, kept in this process so that it can go up again."""

    tensors: Mapping[str, torch.Tensor]
    config: AdapterConfig
    files: Mapping[str, Buffer] | None


@dataclass(frozen=True, kw_only=True)
class StagedPut:
    """A version whose files are on storage and which no entry names yet. Picklable; its source stays behind.

    Attributes:
        put: The change that a commit will make of it.
        tags: Tags that the same commit sets on it.
        uploaded: Whether its files went up for it, or were there before.
    """

    put: Put
    tags: tuple[str, ...] = ()
    uploaded: bool = True
    source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.put.name

    @property
    def id(self) -> str:
        """The version's id."""
        return self.put.id

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.put, self.tags, self.uploaded)


def _rebuild(put: Put, tags: tuple[str, ...], uploaded: bool) -> StagedPut:
    return StagedPut(put=put, tags=tags, uploaded=uploaded)


def build_contents(source: Source, name: str, *, allow_nonfinite: bool = False) -> Contents:
    """The files of a version of `name`; every tensor is read and hashed once.

    Raises:
        UsageError: no tensors, an empty, sharded or non-finite one.
        DamagedError: original files that are not what they should be.
    """
    source = _settled(source, name)
    if source.files is None:
        tensors: Mapping[str, torch.Tensor] = source.tensors
        contents = encoded_contents(source.config, encode(tensors))
    else:
        contents = original_contents(source.config, source.files, f"{MODEL_FILE} of {name}")
        tensors = source.tensors or lazy_from_bytes(bytes(source.files[MODEL_FILE]), f"{MODEL_FILE} of {name}")
        empty = [info.name for info in contents.record.tensors.values() if 0 in info.shape]
        if empty or not contents.record.tensors:
            raise UsageError(
                f"{name} holds {f'an empty tensor {empty[0]!r}' if empty else 'no tensors'}",
                why="a sharded save that was not gathered leaves such files",
                remedy="save it again, whole, where it came from",
            )
    bad = [] if allow_nonfinite else nonfinite(tensors.items())
    if bad:
        raise UsageError(
            f"{name} holds a NaN or an infinity in {len(bad)} of {len(tensors)} tensors, the first is {bad[0]!r}",
            why="an adapter with such values makes every output NaN",
            remedy="find the step at which training diverged; allow_nonfinite=True stores it all the same",
            tensors=bad,
        )
    return contents


def _settled(source: Source, name: str) -> Source:
    """The source with a configuration whose order of patterns says nothing; files in which it does are not kept."""

    def tensors() -> Mapping[str, torch.Tensor]:
        files = source.files or {}
        return source.tensors or lazy_from_bytes(bytes(files[MODEL_FILE]), f"{MODEL_FILE} of {name}")

    config = source.config.settled(tensors)
    return source if config is source.config else Source(tensors=tensors(), config=config, files=None)


def fresh_directory(name: str, identity: str) -> str:
    """A folder for version `identity` of `name` that nobody has used: names are never written twice."""
    attempt = "".join(secrets.choice(_ALPHABET) for _ in range(6))
    return f"adapters/{storage_name(name)}/{identity}-{attempt}"


def plan_directory(state: State | None, name: str, contents: Contents) -> tuple[str, str, int, bool]:
    """Where the content of a put lies: (directory, record's SHA-256, bytes, whether it must go up).

    Content that the state holds, under whatever name, is shared. The full digest decides, and the state
    alone: files that lie on storage without an entry may vanish at any time.
    """
    found = state.holding(contents.record.digest) if state is not None else None
    if found is not None:
        return found.directory, found.record, found.nbytes, False
    return fresh_directory(name, contents.record.id), sha256(contents.record.to_bytes()), contents.nbytes, True


def upload(blobs: Blobs, directory: str, contents: Contents, sent: Sent | None = None) -> None:
    """Writes the files of a version, the record last, the others side by side; tells how far the model's file is."""
    files = contents.files()
    if isinstance(blobs, BatchingBlobs):
        blobs.write_many([(f"{directory}/{file}", parts) for file, parts in files.items()], sent)
        return
    record = files.pop(RECORD_FILE)
    with ThreadPoolExecutor(len(files)) as pool:
        each = [(f"{directory}/{file}", parts, sent if file == MODEL_FILE else None) for file, parts in files.items()]
        for done in [pool.submit(blobs.write, *one) for one in each]:
            done.result()
    blobs.write(f"{directory}/{RECORD_FILE}", record)


def is_latest(put: Put, state: State) -> bool:
    """Whether `put` would change nothing: its content is the adapter's latest, and the same is said of it."""
    latest = state.adapters[put.name].latest if put.name in state.adapters else None
    if latest is None or latest.directory in state.purged:
        return False
    return latest.digest == put.sha256 and latest.described == Version.from_put(put, 0, latest.time).described


def restage(blobs: Blobs, staged: StagedPut, state: State) -> StagedPut:
    """`staged` with files that `state` has not purged: as it is, shared, or uploaded again.

    Raises:
        ConflictError: they were purged and the tensors are not here, or have changed since.
    """
    if staged.put.directory not in state.purged:
        return staged
    shared = state.holding(staged.put.sha256)
    if shared is not None:
        put = replace(staged.put, directory=shared.directory, record=shared.record, nbytes=shared.nbytes)
        return replace(staged, put=put, uploaded=False)
    contents = None if staged.source is None else build_contents(staged.source, staged.name, allow_nonfinite=True)
    if contents is None or contents.record.digest != staged.put.sha256:
        why = "its tensors are in another process" if contents is None else "its tensors have changed since"
        raise ConflictError(
            f"the files of {staged.name}@{staged.id} were purged before the commit",
            why=f"a gc ran in between, and {why}",
            remedy="stage it again, then commit; nothing was written",
            name=staged.name,
        )
    directory = fresh_directory(staged.name, staged.id)
    upload(blobs, directory, contents)
    put = replace(staged.put, directory=directory, record=sha256(contents.record.to_bytes()), nbytes=contents.nbytes)
    return replace(staged, put=put, uploaded=True)


def make_put(
    name: str,
    contents: Contents,
    placed: tuple[str, str, int, bool],
    *,
    parents: Sequence[str],
    metadata: Mapping[str, Any] | None,
    base: Mapping[str, Any] | None,
    recipe: Mapping[str, Any] | None,
    step: int | None,
) -> Put:
    """The change that names these contents, with everything a caller wants recorded checked to be plain data."""
    directory, record, nbytes, _ = placed
    return Put(
        name=check_name(name), id=contents.record.id, sha256=contents.record.digest, directory=directory,
        record=record, nbytes=nbytes, metadata=_plain(metadata, "metadata") or {}, parents=tuple(parents),
        recipe=_plain(recipe, "recipe"), base=_plain(base, "base"), step=check_step(step),
    )  # fmt: skip


def _plain(given: Mapping[str, Any] | None, what: str) -> Any:
    return None if given is None else plain_json(dict(as_mapping(given, what)), what)


def check_step(step: int | None) -> int | None:
    """The step, a whole number from 0 on, or None."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step is {step!r}", remedy="a step is a whole number from 0 on, or None")
    return step
