"""Kohya's layout (sd-scripts, ComfyUI, webui): `lora_unet_<path>.lora_down.weight`, `.lora_up.weight`, `.alpha`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from multilora_store.errors import DamagedError
from multilora_store.storage.dialects.foreign import open_foreign, source
from multilora_store.storage.dialects.kohya_names import from_sgm, restore
from multilora_store.storage.dialects.pairs import (
    lora_config,
    lora_tensors,
    one_component,
    read_pairs,
    refuse_kinds,
    scalar,
)
from multilora_store.storage.peft_dirs import PeftFolder

__all__ = ["COMPONENTS", "read_kohya"]

COMPONENTS: Final = ("unet", "te", "te1", "te2", "te3", "transformer", "prior")
"""Models of a pipeline as kohya abbreviates them."""

_KEY: Final = re.compile(
    rf"lora_(?P<component>{'|'.join(sorted(COMPONENTS, key=len, reverse=True))})_(?P<flat>[^.]+)"
    r"\.(?P<role>lora_down\.weight|lora_up\.weight|alpha)"
)
_ROLES: Final = {"lora_down.weight": "down", "lora_up.weight": "up"}
_OTHERS: Final = {
    "hada_": "LoHa (LyCORIS)",
    "lokr_": "LoKr (LyCORIS)",
    "lora_mid": "a CP decomposition of convolutions (LoCon)",
    "dora_scale": "DoRA",
    ".diff": "full differences",
    "oft_": "OFT",
    "w_norm": "trained norms",
}


@source("kohya")
def read_kohya(
    location: str, *, component: str | None = None, base: str | None = None, modules: Sequence[str] | None = None
) -> PeftFolder:
    """Read one model's adapter of a kohya file; the scale of every module is alpha / rank, as it is there.

    Args:
        location: The `.safetensors` file, or a folder with one; a path or any fsspec URL.
        component: `unet`, `te`, `te1`, `te2`, ...; needed where the file adapts several models.
        base: Name of the base model, for the configuration; a kohya file does not tell it.
        modules: Names of the model's modules; needed where its words are not those of diffusers, CLIP or Llama.

    Raises:
        UsageError, ConfigError: nothing is there, or it adapts several models and none was chosen.
        UnsupportedError: LyCORIS methods, DoRA, or module names that cannot be told.
        DamagedError: half a pair, or a file that is not whole.
    """
    file = open_foreign(location)
    matches = {name: match for name in file.tensors if (match := _KEY.fullmatch(name))}
    refuse_kinds([name for name in file.tensors if name not in matches], file.where, _OTHERS)
    present = [name for name in COMPONENTS if any(match["component"] == name for match in matches.values())]
    chosen = one_component(present, component, file.where)
    roles: dict[str, dict[str, str]] = {}
    alphas: dict[str, float] = {}
    flats: dict[str, str] = {}
    paths: dict[str, str] = {}
    for name, match in sorted(matches.items()):
        if match["component"] != chosen:
            continue
        flat = match["flat"]
        if flat not in paths:
            paths[flat] = from_sgm(restore(flat, modules)) if modules is None else restore(flat, modules)
        path = paths[flat]
        if flats.setdefault(path, flat) != flat:
            raise DamagedError(f"{file.where}: {flats[path]!r} and {flat!r} are both the module {path}", module=path)
        if match["role"] == "alpha":
            alphas[path] = scalar(file.tensors, name, file.where)
        else:
            roles.setdefault(path, {})[_ROLES[match["role"]]] = name
    pairs = read_pairs(roles, file.tensors, alphas, file.where)
    config = lora_config(pairs, where=file.where, base=base)
    return PeftFolder(config=config, tensors=lora_tensors(file.tensors, pairs), where=file.where)
