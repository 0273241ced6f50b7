"""A drop-in file as a module."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from multilora_store.errors import PluginError

__all__ = ["import_file"]


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
