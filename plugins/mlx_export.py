"""Stored adapters as MLX-LM's LoRA folders.

    multilora-store export a@best ./for-mlx exporter=mlx plugins=[mlx_export]

MLX-LM keeps `adapters.safetensors` with `<module>.lora_a` (inputs x rank) and `<module>.lora_b` (rank x outputs), both
transposed against PEFT, and `adapter_config.json` with `lora_parameters: {rank, scale}`, where PEFT has alpha / rank.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from multilora_store.errors import UnsupportedError
from multilora_store.plugins import plugin

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["write_mlx"]

_CONFIG: Final = "adapter_config.json"
_MODEL: Final = "adapters.safetensors"
_PREFIX: Final = "base_model.model."


@plugin("exporter", name="mlx")
def write_mlx(store: Store, ref: str, target: Path) -> Path:
    """Write a stored adapter as a folder that MLX-LM loads; returns the folder.

    Raises:
        UnsupportedError: it is more than plain LoRA on linear layers, or its scale differs between modules.
    """
    from safetensors.torch import save_file

    adapter = store.get(ref)
    raw = adapter.config.raw
    odd = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save") if raw.get(key)]
    if odd or adapter.config.peft_type != "LORA":
        raise UnsupportedError(
            f"{ref} cannot be written for MLX-LM: it has {', '.join(odd) or adapter.config.peft_type}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in adapter.tensors.items():
        match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", key)
        if match is None:
            raise UnsupportedError(f"{ref} cannot be written for MLX-LM: tensor {key!r}")
        tensors[f"{match[1]}.lora_{match[2].lower()}"] = tensor.T.contiguous()
    rank = adapter.config.r
    divisor = rank**0.5 if raw.get("use_rslora") else rank
    parameters = {"rank": rank, "dropout": 0.0, "scale": float(raw.get("lora_alpha", 8)) / divisor}
    settings = {"fine_tune_type": "lora", "model": raw.get("base_model_name_or_path"), "lora_parameters": parameters}
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / _MODEL)
    (target / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return target
