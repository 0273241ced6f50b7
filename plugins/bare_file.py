"""A lone safetensors file as a source: weights that came without their adapter_config.json.

    multilora-store assemble '+adapters={a: {source: "bare:///data/lora.safetensors?alpha=16"}}' plugins=[bare_file] ...

Rank and targets are read off the tensors. Alpha cannot be: give it, else it is the rank, which scales by one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from multilora_store.adapter import AdapterConfig, canonical_tensor_name
from multilora_store.errors import DamagedError, UsageError
from multilora_store.plugins import plugin

if TYPE_CHECKING:
    from multilora_store.storage import PeftFolder

__all__ = ["read_bare"]


@plugin("source", name="bare")
def read_bare(source: str) -> PeftFolder:
    """Read `bare:///file.safetensors?alpha=16` as a PEFT adapter; ranks may differ between modules.

    Raises:
        UsageError: a parameter other than alpha, or an alpha that is no number.
        DamagedError: the file cannot be read, or its tensors are not pairs of LoRA factors.
    """
    from safetensors.torch import load_file

    from multilora_store.storage import PeftFolder

    path, _, query = source.partition("://")[2].partition("?")
    given = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}
    if set(given) - {"alpha"} or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", given.get("alpha", "1")):
        raise UsageError(
            f"{source!r}: the one parameter is alpha, a number", remedy="bare:///file.safetensors?alpha=16"
        )
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
    alpha = float(given.get("alpha", largest))
    config = {"peft_type": "LORA", "r": largest, "lora_alpha": alpha, "target_modules": sorted(ranks)}
    if smaller:  # one alpha for the file: scaled by alpha / largest everywhere
        scaled = {module: alpha * rank / largest for module, rank in smaller.items()}
        config.update({"rank_pattern": smaller, "alpha_pattern": scaled})
    return PeftFolder(config=AdapterConfig.parse(config, where=path), tensors=tensors, where=path)
