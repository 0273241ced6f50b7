"""MLX-LM's LoRA folders, read as a source and written as an export.

    multilora-store assemble '+adapters={a: {source: "mlx:///home/me/adapters"}}' plugins=[mlx_layout] base=hf ...
    multilora-store export a@best ./for-mlx exporter=mlx plugins=[mlx_layout]

MLX-LM keeps `adapters.safetensors` with `<module>.lora_a` (inputs x rank) and `<module>.lora_b` (rank x outputs), both
transposed against PEFT, and `adapter_config.json` with `lora_parameters: {rank, scale}`, where PEFT has alpha / rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import ConfigError, DamagedError, UnsupportedError
from multilora_store.plugins import plugin

if TYPE_CHECKING:
    from multilora_store.storage import PeftFolder, Store

__all__ = ["read_mlx", "write_mlx"]

_CONFIG: Final = "adapter_config.json"
_MODEL: Final = "adapters.safetensors"
_PREFIX: Final = "base_model.model."


@plugin("source", name="mlx")
def read_mlx(source: str) -> PeftFolder:
    """Read `mlx:///folder` as a PEFT adapter.

    Raises:
        ConfigError: the folder holds no LoRA of MLX-LM (full fine-tuning and DoRA are told apart).
        DamagedError: its tensors cannot be read, or do not come in pairs.
    """
    from safetensors.torch import load_file

    from multilora_store.storage import PeftFolder

    folder = Path(source.partition("://")[2]).expanduser()
    settings = _settings(folder)
    try:
        raw = load_file(folder / _MODEL)
    except Exception as error:  # safetensors raises an exception class of its own, OSErrors, and others
        raise DamagedError(f"{folder / _MODEL} cannot be read: {error}") from error
    tensors = {}
    for key, tensor in raw.items():
        match = re.fullmatch(r"(.+)\.lora_([ab])", key)
        if match is None:
            raise DamagedError(f"{folder / _MODEL}: tensor {key!r} is neither lora_a nor lora_b")
        tensors[f"{_PREFIX}{match[1]}.lora_{match[2].upper()}.weight"] = tensor.T.contiguous()
    modules = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in tensors}
    if 2 * len(modules) != len(tensors) or not modules:
        raise DamagedError(f"{folder / _MODEL}: lora_a and lora_b do not come in pairs")
    rank, scale = int(settings["rank"]), float(settings["scale"])
    config = AdapterConfig.parse(
        {"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale, "target_modules": sorted(modules)},
        where=str(folder / _CONFIG),
    )
    return PeftFolder(config=config, tensors=tensors, where=str(folder))


def _settings(folder: Path) -> Mapping[str, Any]:
    file = folder / _CONFIG
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    kind = settings.get("fine_tune_type", "lora")
    parameters = settings.get("lora_parameters")
    if kind != "lora" or not isinstance(parameters, Mapping) or not {"rank", "scale"} <= set(parameters):
        raise ConfigError(
            f"{file} is not a LoRA of MLX-LM: fine_tune_type {kind!r}, lora_parameters {parameters!r}",
            remedy="a PEFT folder needs no mlx:// before its path",
        )
    return parameters


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
