"""One adapter as a merge sees it: configuration, digest, tensors that are read when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from multilora_store.adapter import AdapterConfig, TensorInfo, content_digest
from multilora_store.merging.layout import Layout, parse_layout
from multilora_store.storage.codec import encode

if TYPE_CHECKING:
    from multilora_store.storage import StoredAdapter

__all__ = ["DTYPES", "MergeSource", "canonical_order", "parents_of"]

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The spelling of safetensors -> a dtype that an adapter's factors may have."""


@dataclass(frozen=True, kw_only=True)
class MergeSource:
    """An adapter to merge.

    Attributes:
        name: What messages call it: a reference, or any name.
        digest: SHA-256 (hex) of its content; orders the adapters and seeds random masks.
        config: Its configuration.
        tensors: Canonical name -> tensor; looked up module by module.
        infos: Canonical name -> dtype and shape, known without reading a value.
        version: Id of the version in its store, None for an adapter in memory.
        base: Name, revision and layout fingerprint of the base it was made for, as far as they are known.
    """

    name: str
    digest: str
    config: AdapterConfig
    tensors: Mapping[str, Tensor]
    infos: Mapping[str, TensorInfo]
    version: str | None = None
    base: Mapping[str, Any] | None = None

    @classmethod
    def in_memory(
        cls, name: str, config: AdapterConfig | Mapping[str, object], tensors: Mapping[str, Tensor]
    ) -> MergeSource:
        """An adapter that lies in memory; its digest is the one that a store would give it."""
        parsed = config if isinstance(config, AdapterConfig) else AdapterConfig.parse(config, where=name)
        infos = encode(tensors).infos
        return cls(
            name=name,
            digest=content_digest(parsed, infos.values()),
            config=parsed,
            tensors=tensors,
            infos=infos,
        )

    @classmethod
    def stored(cls, name: str, adapter: StoredAdapter) -> MergeSource:
        """An adapter of a store, known by the reference `name`."""
        version = adapter.version
        return cls(
            name=name,
            digest=version.digest,
            config=adapter.config,
            tensors=adapter.tensors,
            infos=adapter.infos,
            version=version.id,
            base=version.base,
        )

    @property
    def fingerprint(self) -> str | None:
        """Layout fingerprint of its base, None where it is not known."""
        found = (self.base or {}).get("fingerprint")
        return None if found is None else str(found)

    @property
    def layout(self) -> Layout:
        """Its tensors, sorted into pairs of factors and the rest.

        Raises:
            MergeError: the file contradicts its configuration.
        """
        shapes = {name: info.shape for name, info in self.infos.items()}
        return parse_layout(self.config, shapes, where=f"adapter {self.name!r}")


def parents_of(sources: Sequence[MergeSource]) -> tuple[str, ...]:
    """The stored versions among the sources, as the parents of what is made of them."""
    versions = {f"{source.name.partition('@')[0]}@{source.version}" for source in sources if source.version}
    return tuple(sorted(versions))


def canonical_order(sources: Sequence[MergeSource], weights: Sequence[float]) -> list[tuple[MergeSource, float]]:
    """Sources with their weights in the one order that every merge sums them in: by content, then weight."""
    return sorted(zip(sources, weights, strict=True), key=lambda pair: (pair[0].digest, pair[1], pair[0].name))
