"""What a plugin or a config says of itself in one line, read without importing or composing anything."""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from multilora_store.errors import PluginError
from multilora_store.plugins import Plugin

__all__ = ["config_summary", "plugin_summary"]


def plugin_summary(plugin: Plugin) -> str:
    """Its description; out of the source where its module is not imported yet, empty where that cannot be told."""
    if isinstance(plugin.target, str):
        module, _, attribute = plugin.target.partition(":")
        if module not in sys.modules:
            return _docstring(module, attribute).partition("\n")[0]
    try:
        return plugin.description
    except PluginError:  # whoever chooses it is told what is wrong with it
        return ""


def config_summary(file: Path) -> str:
    """The comment in the first line of a YAML file."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# ") and "@package" not in first else ""


def _docstring(module: str, attribute: str) -> str:
    """Of a function or class, followed to where it is defined."""
    tree, here = _parsed(module), module
    for item in tree.body if tree is not None else ():
        if isinstance(item, (ast.FunctionDef, ast.ClassDef)) and item.name == attribute:
            return ast.get_docstring(item) or ""
        if isinstance(item, ast.ImportFrom) and item.module and not item.level:
            for name in item.names:
                if (name.asname or name.name) == attribute and item.module != here:
                    return _docstring(item.module, name.name)
    return ""


@cache
def _parsed(module: str) -> ast.Module | None:
    """A module's source; its packages are not imported either."""
    top, *below = module.split(".")
    spec = find_spec(top)
    for at in range(len(below)):
        places = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(".".join([top, *below[: at + 1]]), places) if places is not None else None
    origin = spec.origin if spec is not None else None
    if origin is None or not origin.endswith(".py"):
        return None
    return ast.parse(Path(origin).read_text(encoding="utf-8"))
