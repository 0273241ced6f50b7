"""Fuse the active adapters of the set into one adapter of summed rank, before any wrap.

    multilora-store assemble '+adapters=[a,b]' plugins=[fuse_set] assembler=fuse_set assembler.params.into=ab

The result is exact: with the factors side by side, the one adapter's delta is the weighted sum of the others'. A model
served or trained with a fixed mixture then pays for one adapter: one unit per block under FSDP, one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping

from peft import PeftModel

from multilora_store.assembly.assembler import default_assembler
from multilora_store.assembly.steps import Adapter, Assembly, Step
from multilora_store.errors import ManifestError
from multilora_store.manifest import AdapterSpec
from multilora_store.merging import MergeSource, merge_adapters
from multilora_store.plugins import plugin

__all__ = ["fuse_set"]


@plugin("assembler")
def fuse_set(work: Assembly, steps: Mapping[str, Step], *, into: str = "fused", trainable: bool = False) -> PeftModel:
    """One adapter whose delta is the weighted sum of the set's active ones, exactly; its rank is the sum of theirs.

    Args:
        work: What was asked for.
        steps: The steps of the assembly; those up to `read` run before the fusing.
        into: Name of the one adapter.
        trainable: Whether it receives gradients.

    Raises:
        ManifestError: no adapter of the set is active, or one is to be created fresh.
        MergeError: a kind of adapter whose delta is no product of two factors.
    """
    names = list(steps)
    cut = names.index("read") + 1

    def fuse(work: Assembly) -> None:
        active = [adapter for adapter in work.adapters if adapter.spec.active]
        fresh = [adapter.name for adapter in active if adapter.tensors is None]
        if not active or fresh:
            raise ManifestError(
                f"fuse_set cannot fuse {', '.join(fresh)}: created fresh" if fresh else "no adapter is active to fuse",
                remedy="store it first" if fresh else "set adapters.NAME.active=true",
            )
        left_out = [adapter.name for adapter in work.adapters if not adapter.spec.active]
        if left_out:
            work.notes.append(f"not active, so not fused: {', '.join(left_out)}")
        work.adapters = [_fused(active, into, trainable=trainable)]

    before = {name: steps[name] for name in names[:cut]}
    after = {name: steps[name] for name in names[cut:]}
    return default_assembler(work, {**before, "fuse": fuse, **after})


def _fused(adapters: list[Adapter], into: str, *, trainable: bool) -> Adapter:
    sources = [MergeSource.in_memory(adapter.name, adapter.config, dict(adapter.tensors or {})) for adapter in adapters]
    merged = merge_adapters(sources, [adapter.spec.weight for adapter in adapters], strategy="cat")
    return Adapter(
        spec=AdapterSpec(name=into, trainable=trainable),
        config=merged.config,
        tensors=merged.tensors,
        shapes={key: tuple(tensor.shape) for key, tensor in merged.tensors.items()},
        base=adapters[0].base,
    )
