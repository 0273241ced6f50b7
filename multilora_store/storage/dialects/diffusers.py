"""Diffusers' layout (`pytorch_lora_weights.safetensors`): `unet.<path>.lora.down.weight` and its older spellings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from multilora_store.errors import DamagedError
from multilora_store.storage.dialects.foreign import open_foreign, source
from multilora_store.storage.dialects.pairs import (
    Pair,
    lora_config,
    lora_tensors,
    one_component,
    read_pairs,
    refuse_kinds,
    scalar,
)
from multilora_store.storage.peft_dirs import PeftFolder

__all__ = ["read_diffusers"]

_COMPONENTS: Final = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "prior")
_KEY: Final = re.compile(
    r"(?P<path>.+?)(?P<old>_lora|\.lora_linear_layer|\.lora)?\.(?P<role>down|up|lora_A|lora_B)(?:\.default)?\.weight"
)
_ALPHA: Final = re.compile(r"(?P<path>.+?)(?:\.lora|\.lora_linear_layer)?\.alpha")
_ROLES: Final = {"down": "down", "lora_A": "down", "up": "up", "lora_B": "up"}
# Attention processors of the first releases kept the factors beside the projections that they adapt.
_PROCESSOR: Final = {"to_q": "to_q", "to_k": "to_k", "to_v": "to_v", "to_out": "to_out.0"}
_TEXT: Final = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
_OTHERS: Final = {"lora_magnitude_vector": "DoRA", "dora_scale": "DoRA", "bias": "trained biases"}
_METADATA: Final = "lora_adapter_metadata"


@source("diffusers")
def read_diffusers(location: str, *, component: str | None = None, base: str | None = None) -> PeftFolder:
    """Read one model's adapter of a diffusers file; without an alpha or metadata the scale is 1, as diffusers reads it.

    Args:
        location: The `.safetensors` file, or its folder; a path or any fsspec URL.
        component: `unet`, `transformer`, `text_encoder`, ...; needed where the file adapts several models.
        base: Name of the base model, for the configuration.

    Raises:
        UsageError, ConfigError: nothing is there, or it adapts several models and none was chosen.
        UnsupportedError: DoRA, or trained biases.
        DamagedError: half a pair, or a file that is not whole.
    """
    file = open_foreign(location, names=("pytorch_lora_weights.safetensors",))
    roles: dict[str, dict[str, dict[str, str]]] = {}
    alphas: dict[str, dict[str, float]] = {}
    strange = []
    for name in sorted(file.tensors):
        owner, key = _component(name)
        factor, alpha = _KEY.fullmatch(key), _ALPHA.fullmatch(key)
        if factor is not None and _fits(factor):
            path = _path(factor["path"], factor["old"] == "_lora", owner)
            role = _ROLES[factor["role"]]
            if role in roles.setdefault(owner, {}).setdefault(path, {}):
                raise DamagedError(f"{file.where}: two tensors are factor {role} of module {path}", module=path)
            roles[owner][path][role] = name
        elif alpha is not None:
            alphas.setdefault(owner, {})[alpha["path"]] = scalar(file.tensors, name, file.where)
        else:
            strange.append(name)
    refuse_kinds(strange, file.where, _OTHERS)
    chosen = one_component(sorted(roles), component, file.where)
    pairs = read_pairs(roles[chosen], file.tensors, alphas.get(chosen, {}), file.where)
    pairs = _with_metadata(pairs, file.tensors.header.metadata, chosen, file.where)
    config = lora_config(pairs, where=file.where, base=base)
    return PeftFolder(config=config, tensors=lora_tensors(file.tensors, pairs), where=file.where)


def _component(name: str) -> tuple[str, str]:
    """The model that a tensor belongs to; files of the first releases adapt the U-Net and say nothing."""
    first, _, rest = name.partition(".")
    return (first, rest) if first in _COMPONENTS else ("unet", name)


def _fits(match: re.Match[str]) -> bool:
    # `down` and `up` are also names of modules: they count only behind one of the markers.
    return (match["role"] in ("down", "up")) == (match["old"] is not None)


def _path(path: str, beside: bool, owner: str) -> str:
    """The module path of a factor that is named `<path>_lora` (`beside`) or lies inside its module."""
    if not beside:
        return path.replace(".processor.", ".")
    holder, _, leaf = path.removesuffix("_lora").replace(".processor.", ".").rpartition(".")
    words = _TEXT if owner.startswith("text_encoder") else _PROCESSOR
    return f"{holder}.{words.get(leaf, leaf)}"


def _with_metadata(pairs: dict[str, Pair], metadata: Mapping[str, str], owner: str, where: str) -> dict[str, Pair]:
    """The pairs with the alphas of the configuration that newer releases keep in the file's header."""
    text = metadata.get(_METADATA)
    if text is None:
        return pairs
    try:
        stored = json.loads(text)
    except ValueError as error:
        raise DamagedError(f"{where}: its {_METADATA} is not JSON: {error}") from error
    own: dict[str, Any] = {
        key.removeprefix(f"{owner}."): value for key, value in dict(stored).items() if key.startswith(f"{owner}.")
    }
    if not own:
        return pairs
    # The one configuration is asked the same way as PEFT asks it.
    kept = {key: own.get(key) for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern") if own.get(key)}
    asked = lora_config(pairs, where=where).replace(**{"rank_pattern": {}, "alpha_pattern": {}, **kept})
    scaled = {}
    for path, pair in pairs.items():
        alpha = asked.alpha_for(path)
        if own.get("use_rslora"):
            alpha *= math.sqrt(pair.rank)
        scaled[path] = Pair(down=pair.down, up=pair.up, rank=pair.rank, alpha=alpha)
    return scaled
