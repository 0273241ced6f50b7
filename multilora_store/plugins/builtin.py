"""The plugins that come with the library: names and where each is found."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["BUILTINS"]

_MERGE_STRATEGIES: Final = {
    "additive": "cat linear model_stock slerp svd task_arithmetic",
    "elements": "breadcrumbs dare_linear dare_ties della magnitude_prune ties",
    "spectral": "core_space iso knots tsv",
    "peft": (
        "peft_cat peft_dare_linear peft_dare_linear_svd peft_dare_ties peft_dare_ties_svd "
        "peft_linear peft_magnitude_prune peft_magnitude_prune_svd peft_svd peft_ties "
        "peft_ties_svd"
    ),
}
BUILTINS: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        **{
            ("merge_strategy", name): f"multilora_store.merging.strategies.{home}:{name}"
            for home, names in _MERGE_STRATEGIES.items()
            for name in names.split()
        },
        ("assembler", "default"): "multilora_store.assembly.assembler:default_assembler",
        **{
            ("assembly_step", name): f"multilora_store.assembly.steps:{name}"
            for name in ("resolve", "read", "check", "inject", "cover", "load", "activate")
        },
        **{
            ("source", name): f"multilora_store.storage.dialects:read_{reader}"
            for name, reader in {
                "diffusers": "diffusers",
                "gguf": "gguf",
                "hf": "hf",
                "kohya": "kohya",
                "mlx": "mlx",
                "peft": "peft",
                "peft_legacy": "legacy",
                "unsloth": "legacy",
            }.items()
        },
        ("exporter", "kohya"): "multilora_store.storage.exporters:export_kohya",
        ("exporter", "peft"): "multilora_store.storage.exporters:export_peft",
        ("exporter", "vllm"): "multilora_store.integrations.vllm:export_vllm",
        **{("base_provider", name): f"multilora_store.assembly.bases:{name}_base" for name in ("demo", "hf", "python")},
        **{
            ("retention_policy", name): f"multilora_store.storage.retention:{name}"
            for name in ("keep_best", "keep_every", "keep_last", "keep_tagged")
        },
    }
)
"""(kind, name) -> `module:attribute`, resolved on first use."""
