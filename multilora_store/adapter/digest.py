"""Identity: a version's id is a function of the adapter's content, not of the file that carries it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from multilora_store.errors import StoreFormatError

if TYPE_CHECKING:
    from multilora_store.adapter.config import AdapterConfig

__all__ = ["DTYPE_BITS", "TensorInfo", "content_digest", "version_id"]

DTYPE_BITS: Final = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element, by the spelling of safetensors."""

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor without its data.

    Attributes:
        name: Its canonical name (`base_model.model.<path>.lora_A.weight`).
        dtype: The spelling of safetensors, e.g. `F32`, `BF16`.
        shape: Global shape.
        sha256: Hex digest of its bytes, row-major and little-endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise StoreFormatError(
                f"tensor {self.name!r} has the unknown dtype {self.dtype!r}",
                remedy=f"known: {', '.join(DTYPE_BITS)}",
            )
        for size in self.shape:
            if not isinstance(size, int) or size < 0:
                raise StoreFormatError(f"tensor {self.name!r} has the impossible shape {self.shape!r}")
        if not _SHA256.fullmatch(self.sha256):
            raise StoreFormatError(f"tensor {self.name!r} has a digest that is not SHA-256: {self.sha256[:80]!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPE_BITS[self.dtype] // 8


def content_digest(config: AdapterConfig, tensors: Iterable[TensorInfo]) -> str:
    """SHA-256 (hex) over the canonical config and, sorted by name, every tensor's name, dtype, shape and digest.

    The hashed bytes are the JSON document `{"config": ..., "tensors": [[name, dtype, [sizes], sha256], ...]}` with
    sorted keys, no white space, UTF-8. Two files that differ only in layout, metadata or writer have one digest.
    """
    table = [[t.name, t.dtype, list(t.shape), t.sha256] for t in sorted(tensors, key=lambda t: t.name)]
    document = {"config": config.canonical(), "tensors": table}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def version_id(digest: str) -> str:
    """The id of the version whose content digest is `digest`: `v` and the first 16 hex digits.

    The letter keeps YAML and Hydra from reading an id as a number.
    """
    return f"v{digest[:16]}"
