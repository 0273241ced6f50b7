"""The one door for plugins: kinds, declarations, and a registry of names that are resolved on first use.

A plugin is a function or a class. Built-ins, installed packages (entry points of the group
`multilora_store.plugins`) and drop-in files come in by the same door: a declaration `(kind, name, target)`, checked
before it is registered, imported when it is first asked for. Nothing registers itself by being imported.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from multilora_store.errors import MultiLoRAError, PluginError, choices
from multilora_store.plugins.builtin import BUILTINS
from multilora_store.plugins.files import import_file
from multilora_store.plugins.fit import check_call, check_distribution, check_requires

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

_MARK: Final = "__multilora_plugin__"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)


def plugin(kind: str, name: str | None = None, *, requires: str = "") -> Callable[[T], T]:
    """Declare the decorated function or class a plugin of `kind` (its own name if `name` is not given).

    The mark is read when its file or distribution is loaded through the door; the decorator registers nothing.

    Args:
        kind: One of `KINDS`.
        name: The name that users choose it by.
        requires: The versions of this library that it was written for, e.g. `>=0.1,<0.2`.

    Raises:
        PluginError: there is no such kind.
    """
    _check_kind(kind)

    def mark(target: T) -> T:
        setattr(target, _MARK, (kind, name or target.__name__, requires))
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
        check_call(self.kind, found, f"{self.name!r} of {self.origin}")
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
    if isinstance(item.annotation, str):
        return item.annotation
    return re.sub(r"(?:\w+\.)+(?=\w)", "", inspect.formatannotation(item.annotation))


class Registry:
    """Plugins by kind and name."""

    __slots__ = ("_dropins", "_plugins", "faults")

    faults: list[PluginError]
    """What was left out with a warning, each naming its file or distribution."""

    def __init__(self, declarations: Iterable[Plugin] = ()) -> None:
        self._plugins: dict[tuple[str, str], Plugin] = {}
        self._dropins: dict[Path, tuple[Plugin, ...]] = {}
        self.faults = []
        self.add(*declarations)

    def add(self, *declarations: Plugin) -> None:
        """Register all of them, or none.

        Raises:
            PluginError: an unknown kind, or a name that another origin has taken.
        """
        taken = dict(self._plugins)
        for item in declarations:
            _check_kind(item.kind)
            if not _NAME.fullmatch(item.name):
                raise PluginError(
                    f"{item.kind} {item.name!r} of {item.origin} could not be chosen by that name",
                    remedy="letters, digits, _ and -, the first a letter or _",
                    plugin=item.name,
                )
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
            self._attempt(partial(self._add_of, declaration, point.dist), f"distribution {origin}", strict=strict)

    def _add_of(self, declaration: Plugin, distribution: Distribution | None) -> None:
        if distribution is not None:
            check_distribution(distribution)
        self.add(declaration)

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
            marked = [
                (value, mark)
                for value in vars(module).values()
                if (mark := getattr(value, _MARK, None)) and getattr(value, "__module__", "") == module.__name__
            ]
            found = tuple(
                Plugin(kind=kind, name=name, target=value, origin=str(file)) for value, (kind, name, _) in marked
            )
            if not found:
                raise PluginError(
                    f"plugin file {file} declares no plugin",
                    remedy='decorate a function with @plugin("merge_strategy")',
                )
            for value, mark in marked:
                check_call(mark[0], value, f"{mark[1]!r} of {file}")
                check_requires(mark[2], f"{mark[1]!r} of {file}")
            self.add(*found)
            self._dropins[file] = found

    def _attempt(self, load: Callable[[], None], what: str, *, strict: bool) -> None:
        try:
            load()
        except MultiLoRAError as error:
            fault = PluginError(f"{what} is left out: {error.what}", why=error.why, remedy=error.remedy)
            if strict:
                raise fault from error
            self.faults.append(fault)
            logger.warning("%s", fault.what)


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
