"""The one door for plugins: kinds, declarations, and a registry of names that are resolved on first use.

A plugin is a function or a class. Built-ins, installed packages (entry points of the group
`multilora_store.plugins`) and drop-in files come in by the same door: a declaration `(kind, name, target)`, checked
before it is registered, imported when it is first asked for. Nothing registers itself by being imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final, TypeVar

from multilora_store.errors import MultiLoRAError, PluginError, choices

__all__ = [
    "BUILTINS",
    "ENTRY_POINT_GROUP",
    "KINDS",
    "Parameter",
    "Plugin",
    "Registry",
    "default_registry",
    "import_file",
    "plugin",
]

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=Callable[..., Any])

ENTRY_POINT_GROUP: Final = "multilora_store.plugins"
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "assembler": "builds the model from a base and a lock; returns the model",
        "assembly_step": "replaces or adds one named step of the assembly",
        "merge_strategy": "merges the weight deltas of one module",
        "base_provider": "builds a base model",
        "source": "reads an adapter from somewhere that is not a store",
        "exporter": "writes stored adapters in another layout",
        "audit_check": "looks at a model and yields findings",
        "retention_policy": "says which versions and snapshots to keep",
    }
)
"""Kind of plugin -> what one of that kind does."""

_MERGE_STRATEGIES: Final = {
    "additive": "cat linear model_stock slerp svd task_arithmetic",
    "elements": "breadcrumbs dare_linear dare_ties della magnitude_prune ties",
    "spectral": "core_space iso knots tsv",
    "peft": (
        "peft_cat peft_dare_linear peft_dare_linear_svd peft_dare_ties peft_dare_ties_svd "
        "peft_linear peft_magnitude_prune peft_magnitude_prune_svd peft_svd peft_ties "
        "peft_ties_svd"
    ),
}
BUILTINS: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        **{
            ("merge_strategy", name): f"multilora_store.merging.strategies.{home}:{name}"
            for home, names in _MERGE_STRATEGIES.items()
            for name in names.split()
        },
        ("assembler", "default"): "multilora_store.assembly.assembler:default_assembler",
        **{
            ("assembly_step", name): f"multilora_store.assembly.steps:{name}"
            for name in ("resolve", "read", "check", "inject", "cover", "load", "activate")
        },
        **{
            ("source", name): f"multilora_store.storage.dialects:read_{reader}"
            for name, reader in {
                "diffusers": "diffusers",
                "hf": "hf",
                "kohya": "kohya",
                "mlx": "mlx",
                "peft": "peft",
                "peft_legacy": "legacy",
                "unsloth": "legacy",
            }.items()
        },
        ("exporter", "kohya"): "multilora_store.storage.exporters:export_kohya",
        ("exporter", "peft"): "multilora_store.storage.exporters:export_peft",
        ("exporter", "vllm"): "multilora_store.integrations.vllm:export_vllm",
        **{("base_provider", name): f"multilora_store.assembly.bases:{name}_base" for name in ("demo", "hf", "python")},
        **{
            ("retention_policy", name): f"multilora_store.storage.retention:{name}"
            for name in ("keep_best", "keep_every", "keep_last", "keep_tagged")
        },
    }
)
"""(kind, name) -> `module:attribute`, resolved on first use."""

_MARK: Final = "__multilora_plugin__"


def plugin(kind: str, name: str | None = None) -> Callable[[T], T]:
    """Declare the decorated function or class a plugin of `kind` (its own name if `name` is not given).

    The mark is read when its file or distribution is loaded through the door; the decorator registers nothing.

    Raises:
        PluginError: there is no such kind.
    """
    _check_kind(kind)

    def mark(target: T) -> T:
        setattr(target, _MARK, (kind, name or target.__name__))
        return target

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a plugin that a user may set.

    Attributes:
        name: Its name.
        annotation: Its type, as written.
        default: Its default; `Parameter.REQUIRED` where there is none.
    """

    REQUIRED = inspect.Parameter.empty

    name: str
    annotation: str
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One declared plugin, imported when `load` is first called.

    Attributes:
        kind: One of `KINDS`.
        name: The name that users choose it by.
        target: `module:attribute`, or the object itself for a drop-in.
        origin: Where it comes from: `built-in`, a file or a distribution.
    """

    kind: str
    name: str
    target: str | Callable[..., Any]
    origin: str
    _loaded: dict[str, Callable[..., Any]] = field(default_factory=dict, compare=False, repr=False)

    def load(self) -> Callable[..., Any]:
        """The function or class.

        Raises:
            PluginError: it cannot be imported, or what is found cannot be called.
        """
        if "it" not in self._loaded:
            self._loaded["it"] = self._resolve()
        return self._loaded["it"]

    def _resolve(self) -> Callable[..., Any]:
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise PluginError(
                f"{self.kind} {self.name!r} of {self.origin} cannot be loaded: {error}",
                why=f"its target is {self.target}",
                remedy="mend or uninstall it",
                plugin=self.name,
            ) from error
        if not callable(found):
            raise PluginError(f"{self.kind} {self.name!r} of {self.origin} is not callable: {self.target}")
        return found  # type: ignore[no-any-return]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What a user may set: the keyword-only parameters of its signature."""
        return tuple(
            Parameter(name=item.name, annotation=_annotation(item), default=item.default)
            for item in inspect.signature(self.load()).parameters.values()
            if item.kind is inspect.Parameter.KEYWORD_ONLY
        )

    @property
    def description(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.load()) or "").partition("\n")[0]


def _annotation(item: inspect.Parameter) -> str:
    if item.annotation is inspect.Parameter.empty:
        return "Any"
    return item.annotation if isinstance(item.annotation, str) else inspect.formatannotation(item.annotation)


class Registry:
    """Plugins by kind and name."""

    __slots__ = ("_dropins", "_plugins")

    def __init__(self, declarations: Iterable[Plugin] = ()) -> None:
        self._plugins: dict[tuple[str, str], Plugin] = {}
        self._dropins: dict[Path, tuple[Plugin, ...]] = {}
        self.add(*declarations)

    def add(self, *declarations: Plugin) -> None:
        """Register all of them, or none.

        Raises:
            PluginError: an unknown kind, or a name that another origin has taken.
        """
        taken = dict(self._plugins)
        for item in declarations:
            _check_kind(item.kind)
            other = taken.get((item.kind, item.name))
            if other is not None and other != item:
                raise PluginError(
                    f"{item.kind} {item.name!r} of {item.origin} is already declared by {other.origin}",
                    remedy="give it another name",
                    plugin=item.name,
                )
            taken[item.kind, item.name] = item
        self._plugins = taken

    def get(self, kind: str, name: str) -> Plugin:
        """The plugin of that kind and name.

        Raises:
            PluginError: there is none; the valid names are listed.
        """
        _check_kind(kind)
        found = self._plugins.get((kind, name))
        if found is None:
            raise PluginError(
                f"unknown {kind} {name!r}", remedy=choices(name, self.names(kind), noun=kind), plugin=name
            )
        return found

    @property
    def dropins(self) -> tuple[Path, ...]:
        """The drop-in files that were loaded."""
        return tuple(self._dropins)

    def names(self, kind: str) -> tuple[str, ...]:
        """The sorted names of one kind."""
        return tuple(sorted(name for its_kind, name in self._plugins if its_kind == kind))

    def all(self) -> tuple[Plugin, ...]:
        """Every plugin, by kind and name."""
        return tuple(self._plugins[key] for key in sorted(self._plugins))

    def load_entry_points(self, *, strict: bool = False) -> None:
        """Declare what installed distributions offer: entry points named `kind.name` of the group.

        A faulty one is named in a warning and the others still work; with `strict` it raises.
        """
        for point in entry_points(group=ENTRY_POINT_GROUP):
            origin = point.dist.name if point.dist is not None else point.value
            kind, _, name = point.name.partition(".")
            declaration = Plugin(kind=kind, name=name, target=point.value, origin=origin)
            self._attempt(partial(self.add, declaration), f"distribution {origin}", strict=strict)

    def load_dropins(self, paths: Iterable[str | Path], *, strict: bool = False) -> None:
        """Declare the plugins of drop-in files, and of every `*.py` file of folders.

        A faulty file is named in a warning and the others still work; with `strict` it raises.
        """
        for path in map(Path, paths):
            for file in sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]:
                self._attempt(partial(self._load_dropin, file), f"plugin file {file}", strict=strict)

    def _load_dropin(self, file: Path) -> None:
        file = file.resolve()
        if file not in self._dropins:
            module = import_file(file)
            found = tuple(
                Plugin(kind=mark[0], name=mark[1], target=value, origin=str(file))
                for value in vars(module).values()
                if (mark := getattr(value, _MARK, None)) and getattr(value, "__module__", "") == module.__name__
            )
            if not found:
                raise PluginError(
                    f"plugin file {file} declares no plugin",
                    remedy='decorate a function with @plugin("merge_strategy")',
                )
            self.add(*found)
            self._dropins[file] = found

    @staticmethod
    def _attempt(load: Callable[[], None], what: str, *, strict: bool) -> None:
        try:
            load()
        except MultiLoRAError as error:
            if strict:
                raise
            logger.warning("%s is left out: %s", what, error.what)


def import_file(file: Path) -> ModuleType:
    """The module that a file is, under a name of its own, so that no other is taken for it.

    Raises:
        PluginError: it is not there, or fails.
    """
    name = f"multilora_dropin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise PluginError(f"{file} is not a Python file that exists")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PluginError(f"unknown kind of plugin {kind!r}", remedy=choices(kind, KINDS, noun="kind"))


_DEFAULT: list[Registry] = []


def default_registry() -> Registry:
    """The registry of built-ins and installed distributions, made on first use."""
    if not _DEFAULT:
        registry = Registry(
            Plugin(kind=kind, name=name, target=target, origin="built-in") for (kind, name), target in BUILTINS.items()
        )
        registry.load_entry_points()
        _DEFAULT.append(registry)
    return _DEFAULT[0]
