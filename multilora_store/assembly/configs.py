"""From a stored configuration to PEFT's own, with what cannot be assembled refused before anything is touched."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from peft import LoraConfig

from multilora_store.adapter import AdapterConfig
from multilora_store.adapter.fields import OBSOLETE_FIELDS
from multilora_store.errors import ConfigError, UnsupportedError, choices

__all__ = ["MUTATING_INITS", "lora_config", "mutates_base"]

MUTATING_INITS: Final = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Initialisations that subtract a part of the base's weights, so that every other adapter sees another base."""
_FRESH_INITS: Final = (True, False, "gaussian", "orthogonal")

_Refusal = tuple[Callable[[Any], bool], str]
_REFUSED: Final[Mapping[str, _Refusal]] = {
    "bias": (
        lambda value: value not in (None, "none"),
        "it trains the base's own biases, for every adapter of the set",
    ),
    "layer_replication": (bool, "it doubles layers of the base, for every adapter of the set"),
    "megatron_config": (bool, "it needs the layers of Megatron"),
    "arrow_config": (bool, "it routes among the other adapters, by their names"),
    "kasa_config": (bool, "it truncates the base's weights, for every adapter of the set"),
    "monteclora_config": (bool, "its forward is random"),
    "velora_config": (bool, "it changes how gradients are computed, which is not tested here"),
    "use_bdlora": (bool, "its block-diagonal factors are not tested here"),
    "use_qalora": (bool, "it needs a base quantised in groups"),
}


def mutates_base(config: AdapterConfig) -> bool:
    """Whether PEFT would change the base's weights when it makes this adapter."""
    return str(config.raw.get("init_lora_weights", True)).lower().startswith(MUTATING_INITS)


def lora_config(
    name: str, config: AdapterConfig, *, trainable: bool, fresh: bool
) -> tuple[LoraConfig, tuple[str, ...]]:
    """PEFT's configuration of adapter `name`, and what PEFT has to say about it.

    Args:
        name: The adapter, for messages.
        config: As stored.
        trainable: Whether it is to receive gradients.
        fresh: Whether its tensors are to be created.

    Raises:
        UnsupportedError: another method than LoRA, a variant or an initialisation that is refused, with the reason.
        ConfigError: values that PEFT itself refuses; a field that it does not know, of a fresh adapter.
    """
    if config.peft_type != "LORA":
        raise UnsupportedError(
            f"adapter {name!r} is of the type {config.peft_type}, which cannot be assembled here",
            why="only LORA is; others can be stored, moved and listed",
            remedy="load it with PEFT alone, from store.path(...)",
            name=name,
        )
    for field, (refused, why) in _REFUSED.items():
        if refused(config.raw.get(field)):
            raise UnsupportedError(
                f"adapter {name!r}: {field} = {config.raw[field]!r} cannot be assembled into a set",
                why=why,
                remedy="load it with PEFT alone, from store.path(...)",
                name=name,
                field=field,
            )
    _check_init(name, config, fresh=fresh)
    _check_tying(name, config)
    known = {field.name for field in dataclasses.fields(LoraConfig)} - {"runtime_config"}
    if fresh and (strange := sorted(set(config.raw) - known - OBSOLETE_FIELDS)):
        raise ConfigError(
            f"adapter {name!r} cannot be created: PEFT's LoraConfig has no field {strange[0]!r}",
            why="a stored adapter may come from a newer PEFT, one that is declared here would lose what was meant",
            remedy=choices(strange[0], known, noun="field"),
            name=name,
            fields=strange,
        )
    fields = {key: value for key, value in config.raw.items() if key in known}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = LoraConfig(**{**fields, "inference_mode": not trainable})
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"adapter {name!r}: PEFT refuses its configuration: {error}", name=name) from error
    notes = [f"adapter {name!r}: {note}" for note in config.notes]
    notes += [f"adapter {name!r}: {warning.message}" for warning in caught]
    return made, tuple(notes)


def _check_init(name: str, config: AdapterConfig, *, fresh: bool) -> None:
    init = config.raw.get("init_lora_weights", True)
    if mutates_base(config):
        raise UnsupportedError(
            f"adapter {name!r} was initialised with {init!r}, which changes the base's weights",
            why="every other adapter, and the base alone, would give other results with it on the model",
            remedy="make it plain LoRA: PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            name=name,
        )
    if fresh and init not in _FRESH_INITS:
        raise UnsupportedError(
            f"adapter {name!r}: a fresh adapter cannot be initialised with {init!r}",
            why="it needs data or a decomposition of the base",
            remedy=f"choose one of {', '.join(map(str, _FRESH_INITS))}, or create it with PEFT and import it",
            name=name,
        )


def _check_tying(name: str, config: AdapterConfig) -> None:
    raw = config.raw
    if raw.get("ensure_weight_tying") and (raw.get("modules_to_save") or raw.get("trainable_token_indices") is None):
        raise UnsupportedError(
            f"adapter {name!r}: ensure_weight_tying with saved or targeted embeddings cannot be assembled into a set",
            why="both ends of the tie would be one tensor under two names, which files do not express",
            remedy="load it with PEFT alone, from store.path(...)",
            name=name,
        )
