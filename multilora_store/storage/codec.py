"""safetensors: files that are a function of content when written, and lazy when read."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multilora_store.adapter import TensorInfo
from multilora_store.errors import DamagedError, UsageError
from multilora_store.storage.blobs import Buffer
from multilora_store.storage.header import MAX_HEADER, Header, Slot, hash_slots, read_header

if TYPE_CHECKING:
    import torch

__all__ = [
    "MAX_HEADER",
    "EncodedTensors",
    "Header",
    "LazyTensors",
    "Slot",
    "encode",
    "hash_slots",
    "lazy_from_bytes",
    "lazy_from_file",
    "nonfinite",
    "read_header",
    "tensor_bytes",
]

_HASH_ALONE: Final = 32 << 20
# One key, so that no writer can reorder it; the value is what PEFT writes and transformers looks for.
METADATA: Final = {"format": "pt"}
# The order of the safetensors library: widest first, so that every tensor is aligned to its element.
_ORDER: Final = (
    "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64".split()
)  # fmt: skip
_TORCH: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip
_SPELLING: Final = {torch_name: spelling for spelling, torch_name in _TORCH.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTensors:
    """Tensors as a file to be written: `parts` are views of the tensors themselves where they can be.

    Attributes:
        infos: Name, dtype, shape and SHA-256 of every tensor, by name, in the order of the file.
        parts: The file's bytes: the header, then one buffer for each tensor.
        header_sha256: SHA-256 of the header with its length field.
        nbytes: The file's size.
    """

    infos: Mapping[str, TensorInfo]
    parts: tuple[Buffer, ...]
    header_sha256: str
    nbytes: int


def encode(tensors: Mapping[str, torch.Tensor]) -> EncodedTensors:
    """The one file for these tensors: equal content gives equal bytes. Every tensor is hashed once.

    Raises:
        UsageError: no tensors, an empty tensor, one that is not dense and local, or a dtype without a spelling.
    """
    if not tensors:
        raise UsageError("an adapter without tensors is not stored", remedy="check how its tensors were selected")
    rows = sorted(
        ((name, _spelling(name, tensor), tensor) for name, tensor in tensors.items()),
        key=lambda row: (-_ORDER.index(row[1]), row[0]),
    )
    table: dict[str, Any] = {"__metadata__": METADATA}
    at = 0
    for name, dtype, tensor in rows:
        end = at + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    parts = [tensor_bytes(tensor) for _, _, tensor in rows]
    infos = {
        name: TensorInfo(name=name, dtype=dtype, shape=tuple(tensor.shape), sha256=digest)
        for (name, dtype, tensor), digest in zip(rows, _hash_all(parts), strict=True)
    }
    return EncodedTensors(
        infos=infos, parts=(head, *parts), header_sha256=hashlib.sha256(head).hexdigest(), nbytes=len(head) + at
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major and little-endian; a view of its memory if it is contiguous and on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if sys.byteorder == "big":
        raise UsageError("tensors cannot be written on a big-endian machine", remedy="use a little-endian one")
    return _view_of(flat.view(torch.uint8))


def _view_of(flat: torch.Tensor) -> memoryview:
    """The memory of a flat tensor of bytes."""
    array: Any = flat.numpy()
    return memoryview(array)


def _spelling(name: str, tensor: torch.Tensor) -> str:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        raise UsageError(
            f"tensor {name!r} is a {type(tensor).__name__} that holds no plain data here",
            remedy="gather it first: only whole, dense tensors are stored",
            tensor=name,
        )
    if tensor.numel() == 0:
        raise UsageError(
            f"tensor {name!r} is empty: its shape is {tuple(tensor.shape)}",
            why="a sharded model shows empty tensors for what another rank holds",
            remedy="gather the whole tensor before saving; what was stored before is unchanged",
            tensor=name,
        )
    spelling = _SPELLING.get(str(tensor.dtype).removeprefix("torch."))
    if spelling is None:
        raise UsageError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot hold", tensor=name)
    return spelling


def _hash_all(parts: Sequence[Buffer]) -> list[str]:
    """SHA-256 of every part; large sets by two threads, each with one half of the bytes."""

    def digests(some: Sequence[Buffer]) -> list[str]:
        return [hashlib.sha256(part).hexdigest() for part in some]

    total, seen, middle = sum(memoryview(part).nbytes for part in parts), 0, 0
    if total < _HASH_ALONE:
        return digests(parts)
    while seen < total // 2:
        seen += memoryview(parts[middle]).nbytes
        middle += 1
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(digests, parts[middle:])
        return [*digests(parts[:middle]), *second.result()]


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of one file, made when they are asked for, over memory that is mapped or already read.

    The tensors share that memory: changing one in place changes what this mapping gives, never the file.
    """

    def __init__(
        self,
        header: Header,
        storage: torch.UntypedStorage,
        check: Mapping[str, TensorInfo] | None = None,
        where: str = "",
    ) -> None:
        self.header = header
        self._storage = storage
        self._unchecked = dict(check or {})
        self._where = where
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(self.header.slots[name])
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.slots)

    def __len__(self) -> int:
        return len(self.header.slots)

    def __repr__(self) -> str:
        return f"LazyTensors({len(self)} tensors, {self.header.nbytes} bytes)"

    def head(self) -> bytes:
        """The header's bytes, its length field included."""
        return bytes(_view_of(self._view(0, self.header.offset)))

    def piece(self, start: int, length: int) -> memoryview:
        """At most `length` bytes of the file from `start` on, not copied."""
        return _view_of(self._view(start, min(start + length, self.header.nbytes)))

    def touch(self) -> None:
        """Makes every tensor, and so compares every one that has a recorded digest."""
        for name in self:
            self[name]

    def _view(self, start: int, end: int) -> torch.Tensor:
        import torch

        return torch.empty(0, dtype=torch.uint8).set_(self._storage, start, (end - start,))  # type: ignore[call-overload, no-any-return]

    def _make(self, slot: Slot) -> torch.Tensor:
        import torch

        dtype = getattr(torch, _TORCH[slot.dtype])
        at = self.header.offset + slot.start
        info = self._unchecked.pop(slot.name, None)
        if info is not None:
            self._verify(slot, info, self._view(at, at + slot.end - slot.start))
        if slot.start == slot.end:
            return torch.empty(slot.shape, dtype=dtype)
        if at % dtype.itemsize:  # a foreign file may be unaligned
            return self._view(at, at + slot.end - slot.start).clone().view(dtype).view(slot.shape)
        made: torch.Tensor = torch.empty(0, dtype=dtype).set_(self._storage, at // dtype.itemsize, slot.shape)  # type: ignore[call-overload]
        return made

    def _verify(self, slot: Slot, info: TensorInfo, bytes_of: torch.Tensor) -> None:
        found = hashlib.sha256(_view_of(bytes_of)).hexdigest()
        if found != info.sha256:
            raise DamagedError(
                f"tensor {slot.name!r} in {self._where} is not what was stored",
                why=f"its SHA-256 is {found[:16]}..., {info.sha256[:16]}... was recorded",
                remedy="run verify; restore the version from another store or save it again",
                tensor=slot.name,
            )


def lazy_from_file(path: Path, check: Mapping[str, TensorInfo] | None = None) -> LazyTensors:
    """The tensors of a file on a local disk, mapped privately: reading costs what is touched, writing stays here.

    Args:
        path: The file.
        check: Recorded digests; a tensor named there is compared when it is first asked for.

    Raises:
        DamagedError: it is not a whole safetensors file.
    """
    import torch

    with open(path, "rb") as file:
        size = file.seek(0, 2)

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        header = read_header(read, size, str(path))
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
    return LazyTensors(header, storage, check, str(path))


def lazy_from_bytes(data: bytes | bytearray, where: str, check: Mapping[str, TensorInfo] | None = None) -> LazyTensors:
    """The tensors of a file that has been read whole, as remote files are: one request, no random access.

    Raises:
        DamagedError: it is not a whole safetensors file.
    """
    import torch

    header = read_header(lambda start, length: bytes(data[start : start + length]), len(data), where)
    writable = data if isinstance(data, bytearray) else bytearray(data)
    storage: Any = torch.frombuffer(writable, dtype=torch.uint8).untyped_storage()
    return LazyTensors(header, storage, check, where)


def nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the floating-point tensors that hold a NaN or an infinity."""
    return [name for name, tensor in tensors if tensor.dtype.is_floating_point and not _finite(tensor)]


def _finite(tensor: torch.Tensor) -> bool:
    import torch

    if tensor.dtype.itemsize == 1:  # eight-bit floats have no reductions
        tensor = tensor.to(torch.float32)
    # A NaN or an infinity never leaves a sum, which is several times faster than looking at each value; only a
    # sum that overflows has to be looked at again.
    if math.isfinite(tensor.sum(dtype=torch.float64 if tensor.dtype is torch.float64 else torch.float32).item()):
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
