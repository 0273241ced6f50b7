"""Plugins as Hydra choices: `merge=ties`, `assembler=fuse_set`, `base=hf` are typed from the plugin's own signature.

The source is asked for a name and only then imports that plugin: listing the choices imports nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from types import MappingProxyType
from typing import Any, Final, get_type_hints

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import MISSING, OmegaConf

from multilora_store.cli.schema import MergeChoice
from multilora_store.plugins import Parameter, Plugin, Registry, default_registry

__all__ = ["GROUPS", "PluginChoices", "node", "parameters_of"]

GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {"merge": "merge_strategy", "assembler": "assembler", "base": "base_provider", "exporter": "exporter"}
)
"""Hydra group -> kind of plugin that fills it."""

_TYPES: Final[Mapping[str, Any]] = MappingProxyType({"int": int, "float": float, "bool": bool, "str": str})


def parameters_of(plugin: Plugin) -> tuple[Parameter, ...]:
    """What a user may set of `plugin`: what the common fields of its group do not say already."""
    common = {item.name for item in fields(MergeChoice)} if plugin.kind == "merge_strategy" else set()
    return tuple(item for item in plugin.parameters if item.name not in common)


def _typed(parameter: Parameter) -> tuple[str, Any, Any]:
    """One field of the generated schema; what OmegaConf has no type for stays `Any`."""
    bare, optional = re.subn(r"^Optional\[(.*)\]$|\s*\|\s*None$", r"\1", parameter.annotation.strip())
    kind = _TYPES.get(bare, Any)
    value = parameter.default
    if value is Parameter.REQUIRED:
        return parameter.name, kind, field(default=MISSING)
    if value is None or optional:
        kind = kind if kind is Any else kind | None
    if isinstance(value, (list, dict, set, tuple)):
        plain = dict(value) if isinstance(value, dict) else sorted(value) if isinstance(value, set) else list(value)
        return parameter.name, Any, field(default_factory=plain.copy)
    if not isinstance(value, (int, float, bool, str, type(None))):
        return parameter.name, Any, field(default=None)
    return parameter.name, kind, field(default=value)


def node(plugin: Plugin) -> Any:
    """The config that choosing `plugin` gives: its group's common fields and its own parameters, typed."""
    title = "".join(part.title() for part in re.split(r"[\W_]+", plugin.name))
    own = [_typed(item) for item in parameters_of(plugin)]
    if plugin.kind == "base_provider" and _takes_more(plugin):
        known = {name: MISSING if value.default is MISSING else value.default for name, _, value in own}
        return OmegaConf.create({"provider": plugin.name, **known}, flags={"struct": False})  # takes any key
    if plugin.kind == "base_provider":
        return OmegaConf.structured(
            make_dataclass(f"{title}Base", [("provider", str, field(default=plugin.name)), *own])
        )
    parameters = make_dataclass(f"{title}Parameters", own)
    params = ("params", parameters, field(default_factory=parameters))
    if plugin.kind in ("assembler", "exporter"):
        head: list[tuple[str, Any, Any]] = [("name", str, field(default=plugin.name))]
    else:
        kinds = get_type_hints(MergeChoice)
        head = [(item.name, kinds[item.name], field(default=item.default)) for item in fields(MergeChoice)]
        head = [("strategy", str, field(default=plugin.name)), *head[1:-1]]
    return OmegaConf.structured(make_dataclass(f"{title}Choice", [*head, params]))


def _takes_more(plugin: Plugin) -> bool:
    """Whether it takes keywords beyond those it names."""
    parameters = inspect.signature(plugin.load()).parameters.values()
    return any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)


class PluginChoices(ConfigSource):  # type: ignore[misc]  # hydra ships no types
    """The groups of `GROUPS`, filled from the registry of plugins."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self._dropins = default_registry().dropins  # to be had again where a launcher composes in another process

    @staticmethod
    def scheme() -> str:
        return "plugins"

    def _registry(self) -> Registry:
        registry = default_registry()
        registry.load_dropins(self._dropins)
        return registry

    def _plugin(self, config_path: str) -> Plugin | None:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        kind = GROUPS.get(group)
        registry = self._registry()
        return registry.get(kind, name) if kind is not None and name in registry.names(kind) else None

    def load_config(self, config_path: str) -> ConfigResult:
        plugin = self._plugin(config_path)
        assert plugin is not None, "is_config has said yes"
        return ConfigResult(
            provider=self.provider, path=f"{self.scheme()}://", config=node(plugin), header={"package": None}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in GROUPS

    def is_config(self, config_path: str) -> bool:
        return self._plugin(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        kind = GROUPS.get(config_path.rstrip("/"))
        if kind is None or results_filter not in {None, ObjectType.CONFIG}:
            return []
        return list(self._registry().names(kind))
