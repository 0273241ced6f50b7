"""The header of a safetensors file: believed only when it is right, and told apart from what is no such file.

A file is 8 bytes of little-endian header length, the header (JSON), and the tensors' bytes without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from multilora_store.adapter.digest import DTYPE_BITS
from multilora_store.errors import DamagedError
from multilora_store.storage.blobs import Buffer

__all__ = ["MAX_HEADER", "Header", "Slot", "hash_slots", "read_header", "whole_numbers"]

MAX_HEADER: Final = 100_000_000
"""The longest header that the safetensors library reads, in bytes."""
MAX_TENSORS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor of a file: `start` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header.

    Attributes:
        slots: The tensors by name, in the order of the file.
        offset: Where the tensors' bytes begin in the file.
        nbytes: The file's size, header included.
        metadata: The file's own metadata.
    """

    slots: Mapping[str, Slot]
    offset: int
    nbytes: int
    metadata: Mapping[str, str]


def read_header(read: Callable[[int, int], bytes], size: int, where: str) -> Header:
    """Reads and checks a header before anything else of the file is used.

    Args:
        read: Gives at most `length` bytes from `start` on: `read(start, length)`.
        size: The file's size in bytes.
        where: The file, for messages.

    Raises:
        DamagedError: truncated, a pickle, a Git-LFS pointer, HTML or JSON instead; a header that is absurdly
            long, not JSON, or holds duplicate names, unknown types, shapes without bytes, gaps or overlaps.
    """
    head = read(0, 8)
    if size < 8 or len(head) < 8:
        _refuse_other(head + read(len(head), 512), where)
        _damaged(where, f"it is {size} bytes long, a safetensors file has at least 8", size=size)
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER or length < 2 or 8 + length > size:
        _refuse_other(read(0, 512), where)
        limit = f"at most {MAX_HEADER} are allowed" if length > MAX_HEADER else f"the file has {size}"
        _damaged(where, f"its header claims {length} bytes, {limit}: truncated, or no safetensors file", size=size)
    text = read(8, length)
    if len(text) != length:
        _damaged(where, f"{len(text)} of the header's {length} bytes could be read", size=size)
    return _check_header(_parse_header(text, where), 8 + length, size, where)


def _parse_header(text: bytes, where: str) -> dict[str, Any]:
    if text[:1] != b"{":
        _damaged(where, f"its header begins with {text[:8]!r}, not with a brace")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _damaged(where, f"its header is not usable: {error}", cause=error)
    if not isinstance(header, dict):
        _damaged(where, "its header is not a JSON object")
    return header


def _check_header(header: dict[str, Any], offset: int, size: int, where: str) -> Header:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _damaged(where, "its metadata is not a mapping of strings")
    if len(header) > MAX_TENSORS:
        _damaged(where, f"it claims {len(header)} tensors, at most {MAX_TENSORS} are read")
    slots = sorted((_slot(name, row, where) for name, row in header.items()), key=lambda s: (s.start, s.end))
    at = 0
    for slot in slots:
        if slot.start != at:
            fault = "overlaps the tensor before it" if slot.start < at else "leaves a gap before it"
            _damaged(where, f"tensor {slot.name!r} {fault}: it begins at {slot.start}, not at {at}")
        at = slot.end
    if offset + at != size:
        fault = "truncated" if offset + at > size else "longer than its header says"
        _damaged(where, f"it is {fault}: {size} bytes, its header accounts for {offset + at}", size=size)
    return Header(slots={slot.name: slot for slot in slots}, offset=offset, nbytes=size, metadata=metadata)


def _slot(name: str, row: Any, where: str) -> Slot:
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        _damaged(where, f"tensor {name!r:.120} lacks a dtype, a shape or its offsets, or has more")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _damaged(where, f"tensor {name!r:.120} has the unknown dtype {dtype!r:.40}")
    if not whole_numbers(shape, 64) or not whole_numbers(offsets, 2) or len(offsets) != 2:
        _damaged(where, f"tensor {name!r:.120} has an impossible shape {shape!r:.80} or offsets {offsets!r:.80}")
    start, end = offsets
    claimed = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end < start or end - start != claimed:
        _damaged(
            where, f"tensor {name!r:.120} of shape {shape!r:.80} needs {claimed} bytes, its offsets give {end - start}"
        )
    return Slot(name=name, dtype=dtype, shape=tuple(shape), start=start, end=end)


def whole_numbers(values: Any, most: int) -> bool:
    """Whether `values` is a list of at most `most` numbers that are whole, not negative, and below 2^63."""
    if not isinstance(values, list) or len(values) > most:
        return False
    # Without a generator, since this runs for every tensor of a set.
    return [value for value in values if type(value) is not int or not 0 <= value < 2**63] == []


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _refuse_other(start: bytes, where: str) -> None:
    """Says what a file is that is plainly something else."""
    text = start.lstrip()[:200]
    if start.startswith(b"version https://git-lfs"):
        _damaged(where, "it is a Git-LFS pointer, not the file itself", remedy="run git lfs pull where it came from")
    if start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or start.startswith(b"PK\x03\x04"):
        _damaged(
            where, "it is a pickle or a zip of one, which can run code when it is loaded",
            remedy="save it as safetensors where it came from; a trusted .bin can be imported with allow_pickle",
        )  # fmt: skip
    if text[:1] == b"<":
        _damaged(where, "it is an HTML or XML page, as a failed download leaves", remedy="download it again")
    if text[:1] in (b"{", b"["):
        _damaged(where, "it is a JSON document, as a server's error message is", remedy="download it again")


def _damaged(where: str, why: str, *, remedy: str = "", cause: BaseException | None = None, **facts: Any) -> NoReturn:
    raise DamagedError(
        f"{where} is not a whole safetensors file",
        why=why,
        remedy=remedy or "restore it from where it came from; verify shows what else is damaged",
        where=where,
        **facts,
    ) from cause


def hash_slots(header: Header, read: Callable[[int, int], Buffer]) -> Iterator[tuple[Slot, str]]:
    """Every tensor's slot with the SHA-256 of the bytes that are there now."""
    for slot in header.slots.values():
        digest = hashlib.sha256()
        for start in range(slot.start, slot.end, 64 << 20):
            digest.update(read(header.offset + start, min(64 << 20, slot.end - start)))
        yield slot, digest.hexdigest()
