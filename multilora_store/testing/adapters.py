"""Adapters with the names and shapes of real models, made up value by value from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import UsageError, choices

if TYPE_CHECKING:
    import torch

__all__ = ["SHAPES", "Shape", "lora_adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a decoder with Llama's module names.

    Attributes:
        base: Its name on the hub.
        hidden, intermediate: Widths.
        layers: How many.
        heads, kv_heads: Heads of attention, and of keys and values.
        head_dim: Width of one.
    """

    base: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def module(self, target: str) -> tuple[str, int, int]:
        """Where a target lies in its layer, and its rows and columns.

        Raises:
            UsageError: there is no such target.
        """
        query, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        known = {
            "q_proj": ("self_attn", query, self.hidden),
            "k_proj": ("self_attn", shared, self.hidden),
            "v_proj": ("self_attn", shared, self.hidden),
            "o_proj": ("self_attn", self.hidden, query),
            "gate_proj": ("mlp", self.intermediate, self.hidden),
            "up_proj": ("mlp", self.intermediate, self.hidden),
            "down_proj": ("mlp", self.hidden, self.intermediate),
        }
        if target not in known:
            raise UsageError(f"no target {target!r}", remedy=choices(target, known, noun="target"))
        return known[target]


def _shape(base: str, *sizes: int) -> Shape:
    hidden, intermediate, layers, heads, kv_heads, head_dim = sizes
    return Shape(
        base=base, hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim,
    )  # fmt: skip


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "tiny": _shape("tiny-decoder", 16, 32, 2, 4, 2, 4),
        "smollm2-135m": _shape("HuggingFaceTB/SmolLM2-135M-Instruct", 576, 1536, 30, 9, 3, 64),
        "qwen2.5-7b": _shape("Qwen/Qwen2.5-7B-Instruct", 3584, 18944, 28, 28, 4, 128),
        "llama-3.1-8b": _shape("meta-llama/Llama-3.1-8B-Instruct", 4096, 14336, 32, 32, 8, 128),
        "llama-3.1-70b": _shape("meta-llama/Llama-3.1-70B-Instruct", 8192, 28672, 80, 64, 8, 128),
    }
)
"""Models by short name; `tiny` is that of `tiny_decoder()`."""


def lora_adapter(
    shape: str | Shape = "tiny",
    *,
    seed: int = 0,
    r: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    layers: int | None = None,
    dtype: str = "float32",
    **fields: Any,
) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """One LoRA adapter, no factor of it zero; the same for the same arguments on every machine.

    Args:
        shape: A name of `SHAPES`, or dimensions.
        seed: Of the values; each tensor's own depend on (seed, name), not on which others there are.
        r: The rank; alpha is twice that.
        targets: Modules of each layer.
        layers: Only the first so many; None: all.
        dtype: A torch dtype's name.
        fields: More fields of the configuration.

    Raises:
        UsageError: an unknown shape or target.
    """
    import torch

    if isinstance(shape, str) and shape not in SHAPES:
        raise UsageError(f"no shape {shape!r}", remedy=choices(shape, SHAPES, noun="shape"))
    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": sizes.base,
        "r": r,
        "lora_alpha": 2 * r,
        "target_modules": sorted(targets),
        **fields,
    }
    if layers is not None and layers < sizes.layers:
        raw.setdefault("layers_to_transform", list(range(layers)))
    tensors = {}
    for layer in range(sizes.layers if layers is None else layers):
        for target in targets:
            holder, rows, columns = sizes.module(target)
            stem = f"base_model.model.model.layers.{layer}.{holder}.{target}"
            for name, size in ((f"{stem}.lora_A.weight", (r, columns)), (f"{stem}.lora_B.weight", (rows, r))):
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                drawn = torch.randn(size, generator=generator) * columns**-0.5
                tensors[name] = drawn.to(getattr(torch, dtype))
    return AdapterConfig.parse(raw, where=f"adapter {seed} of {sizes.base}"), tensors
