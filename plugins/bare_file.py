"""A lone safetensors file as a source: weights that came without their adapter_config.json.

    multilora-store assemble '+adapters={a: {source: "bare:///data/lora.safetensors#alpha=16"}}' plugins=[bare_file] ...
    multilora-store import /data/lora.safetensors plugins=[bare_file] reader=bare reader.params.alpha=16

Rank and targets are read off the tensors. Alpha cannot be: give it, else it is the rank, which scales by one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from multilora_store.adapter import AdapterConfig, canonical_tensor_name
from multilora_store.errors import DamagedError
from multilora_store.plugins import plugin
from multilora_store.storage.dialects import source

if TYPE_CHECKING:
    from multilora_store.storage import PeftFolder

__all__ = ["read_bare"]


@plugin("source", name="bare")
@source("bare")
def read_bare(location: str, *, alpha: float | None = None) -> PeftFolder:
    """Read a lone safetensors file as a PEFT adapter; ranks may differ between modules.

    Args:
        location: The file, on this machine.
        alpha: One for the whole file; None: the largest rank.

    Raises:
        UsageError: a parameter other than alpha, or an alpha that is no number.
        DamagedError: the file cannot be read, or its tensors are not pairs of LoRA factors.
    """
    from safetensors.torch import load_file

    from multilora_store.storage import PeftFolder

    path = location
    try:
        raw = load_file(Path(path).expanduser())
    except Exception as error:  # safetensors raises an exception class of its own beside OSErrors
        raise DamagedError(f"{path} cannot be read: {error}") from error
    tensors = {canonical_tensor_name(key): tensor for key, tensor in raw.items()}
    ranks: dict[str, dict[str, int]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        if match is None or tensor.dim() != 2:
            raise DamagedError(f"{path}: tensor {key!r} of shape {tuple(tensor.shape)} is no factor of a linear layer")
        ranks.setdefault(match[1], {})[match[2]] = tensor.shape[0 if match[2] == "A" else 1]
    odd = [module for module, sides in ranks.items() if len(sides) != 2 or sides["A"] != sides["B"]]
    if odd or not ranks:
        raise DamagedError(f"{path}: no pair of lora_A and lora_B of one rank for {', '.join(odd[:3]) or 'any module'}")
    largest = max(sides["A"] for sides in ranks.values())
    smaller = {module: sides["A"] for module, sides in ranks.items() if sides["A"] != largest}
    scale = largest if alpha is None else alpha
    config = {"peft_type": "LORA", "r": largest, "lora_alpha": scale, "target_modules": sorted(ranks)}
    if smaller:  # one alpha for the file: scaled by alpha / largest everywhere
        scaled = {module: scale * rank / largest for module, rank in smaller.items()}
        config.update({"rank_pattern": smaller, "alpha_pattern": scaled})
    return PeftFolder(config=AdapterConfig.parse(config, where=path), tensors=tensors, where=path)
