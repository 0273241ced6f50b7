"""MLX's layout (mlx-lm): `adapters.safetensors`, factors transposed, one scale for all in its own configuration."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from multilora_store.errors import ConfigError, DamagedError, UnsupportedError
from multilora_store.storage.dialects.foreign import Foreign, open_foreign, source
from multilora_store.storage.dialects.pairs import Pair, lora_config, lora_tensors, refuse_kinds
from multilora_store.storage.peft_dirs import PeftFolder

if TYPE_CHECKING:
    import torch

__all__ = ["read_mlx"]

_KEY: Final = re.compile(r"(?P<path>.+)\.(?P<role>lora_[ab])")
_ROLES: Final = {"lora_a": "down", "lora_b": "up"}
_OTHERS: Final = {".m": "DoRA"}


@source("mlx")
def read_mlx(location: str, *, scale: float | None = None, base: str | None = None) -> PeftFolder:
    """Read an adapter of mlx-lm: `y + scale * (x @ lora_a) @ lora_b`.

    Args:
        location: The folder, or its safetensors file; a path or any fsspec URL.
        scale: The scale, where no configuration lies beside the file.
        base: Name of the base model; None: as the configuration says.

    Raises:
        ConfigError: no scale is known.
        UnsupportedError: full fine-tuning, DoRA, or factors of experts.
        DamagedError: half a pair, or a file that is not whole.
    """
    file = open_foreign(location, names=("adapters.safetensors",), config="adapter_config.json")
    config = _config(file)
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise UnsupportedError(
            f"{file.where} was made with fine_tune_type {kind!r}",
            why="only its plain LoRA has a form in PEFT's LoRA",
            remedy="fuse it into the base with mlx_lm.fuse",
        )
    found = scale if scale is not None else (config.get("lora_parameters") or {}).get("scale")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ConfigError(
            f"{file.folder} tells no scale",
            why="mlx-lm keeps it in adapter_config.json under lora_parameters.scale",
            remedy="give it with scale=..., or #scale=... behind the path",
        )
    matches = {name: match for name in file.tensors if (match := _KEY.fullmatch(name))}
    refuse_kinds([name for name in file.tensors if name not in matches], file.where, _OTHERS)
    roles: dict[str, dict[str, str]] = {}
    for name, match in matches.items():
        roles.setdefault(match["path"], {})[_ROLES[match["role"]]] = name
    pairs = {path: _pair(path, names, file, float(found)) for path, names in sorted(roles.items())}
    model = base if base is not None else config.get("model")
    made = lora_config(pairs, where=file.where, base=model, task_type="CAUSAL_LM")
    return PeftFolder(config=made, tensors=lora_tensors(file.tensors, pairs, _transposed), where=file.where)


def _config(file: Foreign) -> dict[str, Any]:
    if file.config is None:
        return {}
    try:
        found = json.loads(file.config)
    except ValueError as error:
        raise ConfigError(f"{file.folder}/adapter_config.json is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file.folder}/adapter_config.json is not an object")
    return found


def _pair(path: str, names: dict[str, str], file: Foreign, scale: float) -> Pair:
    if set(names) != {"down", "up"}:
        raise DamagedError(f"{file.where}: module {path} has only one factor", module=path)
    down, up = (file.tensors.header.slots[names[role]].shape for role in ("down", "up"))
    if len(down) > 2:
        raise UnsupportedError(
            f"{file.where}: module {path} is a layer of experts with factors of shape {down}",
            remedy="fuse it into the base with mlx_lm.fuse",
            module=path,
        )
    if len(down) != 2 or len(up) != 2 or down[1] != up[0] or not up[0]:
        raise DamagedError(f"{file.where}: module {path}: factors of shapes {down} and {up} share no rank", module=path)
    return Pair(down=names["down"], up=names["up"], rank=down[1], alpha=scale * down[1])


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous()
