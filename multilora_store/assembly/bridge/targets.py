"""Which modules of a base an adapter targets, by PEFT's own rules of matching."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from peft import LoraConfig
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _ExcludedModule,
    _find_minimal_target_modules,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from peft.utils.constants import MIN_TARGET_MODULES_FOR_OPTIMIZATION
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from torch import nn

from multilora_store.assembly.bridge.unwrap import unwrap
from multilora_store.errors import CoverageError, UnsupportedError, choices

__all__ = ["Place", "Targets", "find_targets", "places_of"]

# What the matching of modules depends on; adapters that agree in these have the same targets.
_FIELDS: Final = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")


@dataclass(frozen=True, slots=True)
class Place:
    """One module of the base, or the PEFT layer that stands in its place.

    Attributes:
        path: Its path from the innermost model, free of wrappers.
        parent: The module that holds it.
        child: Its name there.
    """

    path: str
    parent: nn.Module
    child: str

    @property
    def module(self) -> nn.Module:
        """What lies there now, without wrappers."""
        found = self.parent._modules[self.child]
        assert found is not None
        return unwrap(found)


@dataclass(frozen=True, slots=True)
class Targets:
    """What one adapter adapts.

    Attributes:
        modules: Paths of the modules that get factors.
        saved: Paths of the modules that get a whole copy.
        notes: What is odd about its patterns.
    """

    modules: frozenset[str]
    saved: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def places_of(base: nn.Module) -> list[Place]:
    """Every module of `base` but the root, in the order of the model; what PEFT has put inside is left out."""

    def descend(path: str, module: nn.Module) -> Iterator[Place]:
        for name, child in module._modules.items():
            if child is None:
                continue
            at = f"{path}.{name}" if path else name
            yield Place(at, module, name)
            inner = unwrap(child)
            if not isinstance(inner, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                yield from descend(at, inner)

    return list(descend("", unwrap(base)))


def find_targets(
    name: str, config: LoraConfig, base: nn.Module, places: list[Place], cache: dict[str, Any], *, fresh: bool
) -> Targets:
    """The targets of adapter `name` on `base`; `config.target_modules` is filled in as PEFT does (`all-linear`).

    Raises:
        CoverageError: nothing matches, or a pattern of a fresh adapter matches nothing.
        UnsupportedError: a saved module lies inside another.
    """
    key = json.dumps([_plain(getattr(config, item)) for item in _FIELDS])
    if key not in cache:
        cache[key] = _match(name, config, base, places)
    matched, saved, idle, config.target_modules = cache[key]
    if not matched and not saved and not config.target_parameters and config.trainable_token_indices is None:
        raise _no_match(name, config, places)
    notes: list[str] = []
    if idle:
        words = f"adapter {name!r}: these targets match no module of the base: {', '.join(idle)}"
        if fresh:
            raise CoverageError(words, remedy=choices(idle[0], _last_segments(places), noun="module"), patterns=idle)
        notes.append(words)
    for field_name in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, field_name) or {}
        used = {get_pattern_key(patterns.keys(), path) for path in matched} if patterns else set()
        idle_patterns = sorted(set(patterns) - used)
        if idle_patterns:
            notes.append(f"adapter {name!r}: {field_name} entries that match no target: {', '.join(idle_patterns)}")
    return Targets(frozenset(matched), saved, tuple(notes))


def _match(name: str, config: LoraConfig, base: nn.Module, places: list[Place]) -> tuple[Any, ...]:
    paths = [place.path for place in places]
    asked = config.target_modules
    if isinstance(asked, str) and asked.lower() == "all-linear":
        _maybe_include_all_linear_layers(config, base)
        asked = set()
    if isinstance(config.target_modules, (set, list)):
        _shorten(config, paths)
    excluded = False
    matched = []
    for path in paths:
        if config.target_modules is None:
            break
        verdict = check_target_module_exists(config, path)
        excluded = excluded or isinstance(verdict, _ExcludedModule)
        if verdict:
            matched.append(path)
    patterns = () if asked is None or isinstance(asked, str) else sorted(asked)
    idle = [item for item in patterns if not any(path == item or path.endswith(f".{item}") for path in paths)]
    saved = tuple(path for path in paths if any(path.endswith(item) for item in config.modules_to_save or ()))
    for path in saved:
        inside = [other for other in (*saved, *matched) if other != path and other.startswith(f"{path}.")]
        if inside:
            raise UnsupportedError(
                f"adapter {name!r} saves {path} as a whole and {inside[0]} inside it once more",
                remedy="name the outer module only",
            )
    return matched, saved, idle, config.target_modules


def _shorten(config: LoraConfig, paths: list[str]) -> None:
    """PEFT's shortening of long lists of targets, so that the configuration reads the same."""
    targets = config.target_modules
    if len(targets) < MIN_TARGET_MODULES_FOR_OPTIMIZATION:
        return
    suffixes = tuple(f".{item}" for item in targets)
    others = [path for path in paths if path not in targets and not path.endswith(suffixes)]
    shorter = _find_minimal_target_modules(targets, others)
    if len(shorter) < len(targets):
        config.target_modules = shorter


def _no_match(name: str, config: LoraConfig, places: list[Place]) -> CoverageError:
    asked = config.target_modules
    wanted = asked if isinstance(asked, str) else ", ".join(sorted(asked or ()))
    return CoverageError(
        f"adapter {name!r}: its targets match no module of the base: {wanted or '(none)'}",
        why="exclude_modules, layers_to_transform and modules_to_save were taken into account",
        remedy=choices(wanted.split(", ")[0], _last_segments(places), noun="module"),
        name=name,
    )


def _last_segments(places: list[Place]) -> set[str]:
    return {place.child for place in places if not place.child.isdigit()}


def _plain(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return dict(value) if isinstance(value, Mapping) else value
