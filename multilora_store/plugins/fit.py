"""Whether a plugin fits: the version of the library that it asks for, and how its kind is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from multilora_store.errors import PluginError

__all__ = ["ARGUMENTS", "check_call", "check_distribution", "check_requires"]

_US: Final = "multilora-store"
ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "assembler": ("work", "steps"),
        "assembly_step": ("work",),
        "merge_strategy": ("deltas", "weights"),
        "base_provider": (),
        "source": ("location",),
        "exporter": ("store", "ref", "target"),
        "audit_check": ("model",),
        "retention_policy": ("candidates",),
    }
)
"""Kind of plugin -> what one of that kind is called with, by position."""


def check_call(kind: str, target: Callable[..., Any], what: str) -> None:
    """Refuse what cannot be called as plugins of its kind are.

    Raises:
        PluginError: naming `what`, and how it would be called.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return  # written in C: it tells of no parameters
    given = len(ARGUMENTS[kind])
    places = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    needed = sum(item.default is item.empty for item in places)
    takes_all = any(item.kind is item.VAR_POSITIONAL for item in parameters)
    if needed > given or (len(places) < given and not takes_all):
        raise PluginError(
            f"{what} cannot be called as a plugin of the kind {kind}: it takes {inspect.signature(target)}",
            why=f"one is called as f({', '.join(ARGUMENTS[kind])}), its parameters by keyword",
            remedy="declare it as what it is, and put parameters behind a *",
        )


def check_requires(specifier: str, what: str) -> None:
    """Refuse what asks for another version of this library: `>=0.1,<0.2`.

    Raises:
        PluginError: naming `what` and both versions, or that the specifier is none.
    """
    try:
        wanted = SpecifierSet(specifier)
    except InvalidSpecifier as error:
        raise PluginError(
            f"{what}: requires={specifier!r} is no version specifier", remedy='e.g. ">=0.1,<0.2"'
        ) from error
    try:
        here = version(_US)
    except PackageNotFoundError:  # a checkout on the path: of no version
        return
    if not wanted.contains(here, prereleases=True):
        raise PluginError(f"{what} needs {_US}{wanted}, and this is {here}", remedy="install a version that fits")


def check_distribution(distribution: Distribution) -> None:
    """The same for an installed distribution, by what its metadata says of this library.

    Raises:
        PluginError: it asks for another version.
    """
    for text in distribution.requires or ():
        requirement = Requirement(text)
        asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if asked and canonicalize_name(requirement.name) == _US:
            check_requires(str(requirement.specifier), f"{distribution.name} {distribution.version}")
