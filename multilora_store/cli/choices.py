"""Plugins as Hydra choices, each kind a group: `merge=ties`, `checks=[effect_check]`, `steps.after_load=NAME`.

A choice composes to the plugin's name and its parameters, typed from its own signature. The source is asked for a name
and only then imports that plugin: listing the choices imports nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, get_type_hints

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import MISSING, OmegaConf

from multilora_store.cli.schema import MergeChoice
from multilora_store.cli.typed import plain
from multilora_store.plugins import Parameter, Plugin, Registry, default_registry

__all__ = ["GROUPS", "Group", "PluginChoices", "bound", "chosen_plugin", "node", "parameters_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One Hydra group: what fills it, and how a choice is spelled.

    Attributes:
        kind: Of the plugins that fill it.
        choose: How one is chosen.
        params: What stands before a parameter.
        named_by: The key that holds the plugin's name; empty where the plugins are keys themselves.
        common: Fields that every choice has besides; the first and the last are the name and the parameters.
    """

    kind: str
    choose: str
    params: str
    named_by: str = "name"
    common: type | None = None

    @property
    def several(self) -> bool:
        """Whether a list is chosen, `GROUP=[a,b]`, each with its parameters under its name."""
        return not self.named_by

    def prefix(self, name: str) -> str:
        """What stands before a parameter of the plugin `name`."""
        return self.params.replace("NAME", name)


GROUPS: Final[Mapping[str, Group]] = MappingProxyType(
    {
        "merge": Group(
            kind="merge_strategy",
            choose="merge=NAME",
            params="merge.params",
            named_by="strategy",
            common=MergeChoice,
        ),
        "assembler": Group(kind="assembler", choose="assembler=NAME", params="assembler.params"),
        "steps": Group(kind="assembly_step", choose="steps.STEP=NAME", params="steps.STEP.params"),
        "base": Group(kind="base_provider", choose="base=NAME", params="base", named_by="provider"),
        "reader": Group(kind="source", choose="reader=NAME", params="reader.params"),
        "exporter": Group(kind="exporter", choose="exporter=NAME", params="exporter.params"),
        "checks": Group(kind="audit_check", choose="checks=[NAME]", params="checks.NAME", named_by=""),
        "policies": Group(kind="retention_policy", choose="policies=[NAME]", params="policies.NAME", named_by=""),
    }
)
"""Hydra group -> what fills it: one for each kind of plugin."""

_TYPES: Final[Mapping[str, Any]] = MappingProxyType({"int": int, "float": float, "bool": bool, "str": str})
_LISTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"int": list[int], "float": list[float], "bool": list[bool], "str": list[str]}
)
_LIST: Final = re.compile(r"(?:Sequence|Iterable|Collection|list|tuple)\[(int|float|bool|str)(?:, \.\.\.)?\]")


def group_of(kind: str) -> Group:
    """The group that plugins of `kind` fill."""
    return next(group for group in GROUPS.values() if group.kind == kind)


def parameters_of(plugin: Plugin) -> tuple[Parameter, ...]:
    """What a user may set of `plugin`: what the common fields of its group do not say already."""
    shared = group_of(plugin.kind).common
    common = {item.name for item in fields(shared)} if shared is not None else set()
    return tuple(item for item in plugin.parameters if item.name not in common)


def _typed(parameter: Parameter) -> tuple[str, Any, Any]:
    """One field of the generated schema; what OmegaConf has no type for stays `Any`."""
    bare, optional = re.subn(r"^Optional\[(.*)\]$|\s*\|\s*None$", r"\1", parameter.annotation.strip())
    items = _LIST.fullmatch(bare)
    kind: Any = _LISTS[items[1]] if items else _TYPES.get(bare, Any)
    value = parameter.default
    if value is None or optional:
        kind = kind if kind is Any else kind | None
    if value is Parameter.REQUIRED:
        return parameter.name, kind, field(default=MISSING)
    if isinstance(value, (list, dict, set, tuple)):
        copied = dict(value) if isinstance(value, dict) else sorted(value) if isinstance(value, set) else list(value)
        return parameter.name, kind, field(default_factory=copied.copy)
    return parameter.name, kind if _is_plain(value) else Any, field(default=value if _is_plain(value) else None)


def _is_plain(value: Any) -> bool:
    """Whether a config can hold this default; another is left to the plugin."""
    return isinstance(value, (int, float, bool, str, type(None)))


def node(plugin: Plugin) -> Any:
    """The config that choosing `plugin` gives: its group's common fields and its own parameters, typed."""
    group = group_of(plugin.kind)
    title = "".join(part.title() for part in re.split(r"[\W_]+", plugin.name))
    own = [_typed(item) for item in parameters_of(plugin)]
    if group.params == "base":  # its parameters stand beside its name
        named = [(group.named_by, str, field(default=plugin.name)), *own]
        made = OmegaConf.structured(make_dataclass(f"{title}Base", named))
        return OmegaConf.create(OmegaConf.to_container(made), flags={"struct": False}) if _takes_more(plugin) else made
    parameters = make_dataclass(f"{title}Parameters", own)
    if group.several:
        return OmegaConf.create({plugin.name: OmegaConf.structured(parameters)})
    head: list[tuple[str, Any, Any]] = [(group.named_by, str, field(default=plugin.name))]
    if group.common is not None:
        kinds = get_type_hints(group.common)
        shared = [(item.name, kinds[item.name], field(default=item.default)) for item in fields(group.common)]
        head += shared[1:-1]
    params = ("params", parameters, field(default_factory=parameters))
    return OmegaConf.structured(make_dataclass(f"{title}Choice", [*head, params]))


def _takes_more(plugin: Plugin) -> bool:
    """Whether it takes keywords beyond those it names."""
    parameters = inspect.signature(plugin.load()).parameters.values()
    return any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)


def chosen_plugin(group: str, choice: Any) -> Callable[..., Any] | None:
    """The plugin that `GROUP=NAME` chose, its parameters bound; None where nothing was chosen.

    Raises:
        UsageError: `choice` is no choice.
        PluginError: there is no such plugin, or it cannot be loaded.
    """
    found = plain(choice)
    if found is None:
        return None
    plugin = default_registry().get(GROUPS[group].kind, str(found.get(GROUPS[group].named_by)))
    return bound(plugin, found.get("params") or {})


def bound(plugin: Plugin, params: Mapping[str, Any]) -> Callable[..., Any]:
    """`plugin` with its parameters; a default that no config can hold is its own affair."""
    defaults = {item.name: item.default for item in plugin.parameters}
    given = {key: value for key, value in params.items() if value is not None or _is_plain(defaults.get(key))}
    return partial(plugin.load(), **given)


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
        home, _, name = config_path.removesuffix(".yaml").partition("/")
        group, registry = GROUPS.get(home), self._registry()
        return registry.get(group.kind, name) if group is not None and name in registry.names(group.kind) else None

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
        group = GROUPS.get(config_path.rstrip("/"))
        if group is None or results_filter not in {None, ObjectType.CONFIG}:
            return []
        return list(self._registry().names(group.kind))
