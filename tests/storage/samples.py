"""Small adapters to store."""

from __future__ import annotations

from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "tiny",
}


def tensors(seed: int, *, rank: int = 2, width: int = 8, layers: int = 2) -> dict[str, torch.Tensor]:
    """Tensors of one LoRA adapter, a function of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(layers):
        for target in ("q_proj", "v_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            found[f"{path}.lora_A.weight"] = torch.randn(rank, width, generator=generator)
            found[f"{path}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two mappings hold equal tensors of equal dtype under equal names."""
    return set(left) == set(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
