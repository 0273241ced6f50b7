"""Putting adapters on a base: PEFT makes each layer once, all adapters are added in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from peft import LoraConfig, PeftModel
from peft.mapping_func import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, _extend_unique
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import (
    AuxiliaryTrainingWrapper,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
    get_pattern_key,
    set_additional_trainable_modules,
)
from torch import nn

from multilora_store.assembly.bridge.layers import (
    add_to_layer,
    can_be_model,
    is_plain,
    like,
    save_module,
    without_bytes,
)
from multilora_store.assembly.bridge.record import rescan
from multilora_store.assembly.bridge.targets import Place, Targets, find_targets, places_of
from multilora_store.assembly.bridge.unwrap import innermost, walk
from multilora_store.errors import UnsupportedError

__all__ = ["Joining", "add_adapters", "empty_shell"]

_SHELL: Final = "%shell"  # no adapter can be called so
_HEADS: Final = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


@dataclass(slots=True, kw_only=True)
class Joining:
    """One adapter about to be put on a model.

    Attributes:
        name: Its name in the set.
        inside: Its name inside the model.
        config: PEFT's configuration of it.
        fresh: Whether it has no tensors yet.
        targets: What it adapts, filled in by `add_adapters`.
    """

    name: str
    inside: str
    config: LoraConfig
    fresh: bool
    targets: Targets | None = None


def empty_shell(base: nn.Module, first: Joining) -> PeftModel:
    """A PeftModel around `base` that carries no adapter yet: of the class that PEFT would choose for `first`.

    The base is frozen, as PEFT freezes it. A base that is no Hugging Face model gets the plain PeftModel, whose
    forward passes on whatever it is given.
    """
    task = first.config.task_type
    like_transformers = hasattr(getattr(base, "config", None), "model_type")
    kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(task, PeftModel) if like_transformers and task else PeftModel
    config = LoraConfig(target_modules=DUMMY_TARGET_MODULES, task_type=task if kind is not PeftModel else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers, nothing a caller could change
        peft = kind(base, config, adapter_name=_SHELL, autocast_adapter_dtype=False)
    for place in places_of(base):
        if isinstance(place.module, ModulesToSaveWrapper):  # a head that PEFT's class wraps on its own account
            place.parent._modules[place.child] = place.module.original_module
    del peft.peft_config[_SHELL]
    peft.base_model.active_adapter = []
    peft.active_adapter = first.inside
    peft.training = peft.base_model.training = base.training
    return peft


def add_adapters(peft: PeftModel, joining: Sequence[Joining]) -> list[str]:
    """Add every adapter of `joining`, without bytes, in one pass over the modules of the base.

    Each target module is visited once: PEFT makes the layer for the first adapter there, the others are added to it.
    No adapter becomes active or trainable, and flags of parameters that were there stay as they are.

    Returns:
        What is odd: warnings of PEFT, patterns that match nothing.

    Raises:
        CoverageError: an adapter of which no target matches.
        UnsupportedError: targets that PEFT cannot adapt, or that exclude each other.
    """
    base = innermost(peft)
    places = places_of(base)
    notes: list[str] = []
    cache: dict[str, Any] = {}
    with _kept_flags(base), _collected(notes):
        for adapter in joining:
            _prepare(peft, adapter, base)
            adapter.targets = find_targets(adapter.name, adapter.config, base, places, cache, fresh=adapter.fresh)
            notes.extend(adapter.targets.notes)
        _refuse_overlap(joining, places)
        for adapter in joining:
            peft.peft_config[adapter.inside] = adapter.config
        _add_targets(peft, joining, places)
        _add_parameters(peft, joining)
        _add_saved(joining, places)
        _add_tokens(peft, joining)
    rescan(peft)
    return list(dict.fromkeys(notes))


def _prepare(peft: PeftModel, adapter: Joining, base: nn.Module) -> None:
    """What PEFT does to a configuration before it matches modules."""
    config, tuner = adapter.config, peft.base_model
    heads = _HEADS.get(str(config.task_type), ()) if type(peft) is not PeftModel else ()
    if heads:
        config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or ()), *heads]))
    if hasattr(getattr(base, "config", None), "model_type"):
        from peft.utils.transformers_weight_conversion import (
            convert_peft_config_for_transformers,
            get_model_conversion_mapping,
        )

        convert_peft_config_for_transformers(config, model=base, conversions=get_model_conversion_mapping(base))
    try:
        tuner._prepare_adapter_config(config, tuner.get_model_config(base))
    except ValueError as error:
        raise UnsupportedError(
            f"adapter {adapter.name!r} names no target_modules, and PEFT knows none for this base",
            remedy="name them in the adapter's configuration",
        ) from error


def _refuse_overlap(joining: Sequence[Joining], places: Sequence[Place]) -> None:
    """Refuse a module that one adapter saves as a whole and another adapts inside: PEFT cannot have both."""
    savers: dict[str, str] = {}
    adapted: dict[str, str] = {}
    for place in places:
        layer = place.module
        if isinstance(layer, AuxiliaryTrainingWrapper):
            savers.setdefault(place.path, "of the model")
        elif isinstance(layer, lora.LoraLayer):
            adapted.setdefault(place.path, "of the model")
    for adapter in joining:
        assert adapter.targets is not None
        savers.update(dict.fromkeys(adapter.targets.saved, adapter.name))
        adapted.update(dict.fromkeys(adapter.targets.modules, adapter.name))
    for path, saver in savers.items():
        for target, other in adapted.items():
            if target == path or target.startswith(f"{path}."):
                raise UnsupportedError(
                    f"adapter {saver!r} saves {path} as a whole, adapter {other!r} adapts {target}",
                    why="PEFT cannot lay factors on a module that is replaced as a whole",
                    remedy="put the two adapters on two models",
                )


def _add_targets(peft: PeftModel, joining: Sequence[Joining], places: Sequence[Place]) -> None:
    reached: dict[str, list[str]] = {adapter.inside: [] for adapter in joining}
    models: dict[type, dict[str, Any]] = {}
    for place in places:
        for adapter in joining:
            assert adapter.targets is not None
            if place.path in adapter.targets.modules:
                _add_target(peft, adapter, place, models)
                reached[adapter.inside].append(place.path)
    for paths in reached.values():
        _extend_unique(peft.base_model.targeted_module_names, paths)


def _add_target(peft: PeftModel, adapter: Joining, place: Place, models: dict[type, dict[str, Any]]) -> None:
    config, path, layer = adapter.config, place.path, place.module
    try:
        if isinstance(layer, lora.LoraLayer):
            add_to_layer(layer, adapter.inside, *_rank_and_alpha(config, path), config, target=path)
            return
        model = models.get(type(layer))
        if model is not None and is_plain(config):
            made = like(model, layer, path)
            add_to_layer(made, adapter.inside, *_rank_and_alpha(config, path), config, target=path)
            place.parent._modules[place.child] = made
            return
        with without_bytes():
            peft.base_model._check_target_module_compatiblity(config, innermost(peft), place.child)
            peft.base_model._create_and_replace(
                config, adapter.inside, layer, place.child, place.parent, current_key=path
            )
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"adapter {adapter.name!r}: PEFT cannot adapt {path}, a {type(layer).__name__}: {error}",
            name=adapter.name,
            path=path,
        ) from error
    _follow_mode(place.module, layer.training)
    if is_plain(config) and can_be_model(place.module):
        models[type(layer)] = dict(vars(place.module))


def _rank_and_alpha(config: LoraConfig, key: str) -> tuple[int, float]:
    rank, alpha = config.r, config.lora_alpha
    if config.rank_pattern:
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), key), rank)
    if config.alpha_pattern:
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), key), alpha)
    return rank, alpha


def _follow_mode(layer: nn.Module, training: bool) -> None:
    layer.training = training
    for name, child in layer.named_children():
        if name != "base_layer":
            child.train(training)


def _add_parameters(peft: PeftModel, joining: Sequence[Joining]) -> None:
    """Targets that are parameters, not modules: PEFT nests a wrapper for each, all adapters share the wrappers."""
    asking = [adapter for adapter in joining if adapter.config.target_parameters]
    if not asking:
        return
    tuner, base = peft.base_model, innermost(peft)
    wanted = sorted(asking[0].config.target_parameters)
    for inside, config in peft.peft_config.items():
        if config.target_parameters and sorted(config.target_parameters) != wanted:
            raise UnsupportedError(
                f"adapter {inside!r} targets the parameters {', '.join(sorted(config.target_parameters))}, "
                f"adapter {asking[0].name!r} targets {', '.join(wanted)}",
                why="PEFT nests one wrapper for each parameter, and the names of tensors follow from the nesting",
                remedy="give all adapters of one model the same target_parameters",
            )
    wrappers = [(path, layer) for path, layer in walk(base) if isinstance(layer, ParamWrapper)]
    for adapter in asking:
        try:
            if wrappers:
                for path, layer in wrappers:
                    _update_parameter(adapter, path, layer)
            else:
                with without_bytes():
                    found = tuner._inject_parameters(adapter.config, base, adapter.inside, low_cpu_mem_usage=False)
                _extend_unique(tuner.targeted_parameter_names, found)
                wrappers = [(path, layer) for path, layer in walk(base) if isinstance(layer, ParamWrapper)]
        except ValueError as error:
            raise UnsupportedError(f"adapter {adapter.name!r}: {error}", name=adapter.name) from error
        if not wrappers:
            raise UnsupportedError(
                f"adapter {adapter.name!r}: its target_parameters match no parameter of the base: {', '.join(wanted)}",
                name=adapter.name,
            )


def _update_parameter(adapter: Joining, path: str, layer: Any) -> None:
    config = adapter.config
    key = f"{path.replace('.base_layer', '')}.{layer.parameter_name}"
    if config.lora_dropout or config.lora_bias or config.use_dora or config.fan_in_fan_out:
        raise ValueError("target_parameters work without lora_dropout, lora_bias, use_dora and fan_in_fan_out only")
    add_to_layer(layer, adapter.inside, *_rank_and_alpha(config, key), config, target=key)


def _add_saved(joining: Sequence[Joining], places: Sequence[Place]) -> None:
    by_path = {place.path: place for place in places}
    for adapter in joining:
        assert adapter.targets is not None
        for path in adapter.targets.saved:
            place = by_path[path]
            try:
                save_module(place.parent, place.child, adapter.inside)
            except TypeError as error:
                raise UnsupportedError(f"adapter {adapter.name!r}: cannot save {path}: {error}") from error


def _add_tokens(peft: PeftModel, joining: Sequence[Joining]) -> None:
    """Trainable tokens by PEFT's own call, which knows tied embeddings; it walks the model once for each adapter."""
    base = innermost(peft)
    for adapter in joining:
        config = adapter.config
        if config.trainable_token_indices is None:
            continue
        saved, config.modules_to_save = config.modules_to_save, None
        try:
            set_additional_trainable_modules(
                model=base,
                peft_config=config,
                model_config=BaseTuner.get_model_config(peft.base_model),
                adapter_name=adapter.inside,
                activate_adapter=False,
            )
        except (ValueError, TypeError) as error:
            raise UnsupportedError(f"adapter {adapter.name!r}: trainable tokens: {error}", name=adapter.name) from error
        finally:
            config.modules_to_save = saved
        for _, layer in walk(base):
            if isinstance(layer, TrainableTokensWrapper):
                tokens = layer.token_adapter
                if adapter.inside in tokens.trainable_tokens_delta:
                    tokens.trainable_tokens_delta[adapter.inside].requires_grad_(False)
                layer.training = tokens.base_layer.training
                _follow_mode(tokens, layer.training)


@contextmanager
def _kept_flags(base: nn.Module) -> Iterator[None]:
    """Parameters that are there before keep their `requires_grad`, whatever PEFT's calls do to it."""
    flags = [(parameter, parameter.requires_grad) for parameter in base.parameters()]
    yield
    for parameter, flag in flags:
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


@contextmanager
def _collected(notes: list[str]) -> Iterator[None]:
    """Warnings that PEFT gives inside become notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes.extend(str(warning.message) for warning in caught)
