"""Drop-in plugins named on the command line or in the user's own config, loaded before Hydra composes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from multilora_store.cli.declared import plugin_settings
from multilora_store.cli.overrides import chosen
from multilora_store.errors import PluginError, choices
from multilora_store.plugins import Registry, default_registry

__all__ = ["dropin_folder", "load_plugins", "shipped"]


def dropin_folder() -> Path:
    """The packaged drop-ins: `<package>/dropins` in a wheel, else the checkout's `plugins/`."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "dropins"
    return inside if inside.is_dir() else package.parent / "plugins"


def shipped(kind: str, name: str) -> str | None:
    """The packaged drop-in that declares such a plugin, found without loading one."""
    named = rf'name="{re.escape(name)}"[^)]*\)|[^=)]*\)\n(?:@.*\n)*(?:def|class) {re.escape(name)}\b'
    declared = re.compile(rf'^@plugin\("{kind}"(?:, |)(?:{named})', re.MULTILINE)
    files = sorted(dropin_folder().glob("[!_]*.py"))
    return next((file.stem for file in files if declared.search(file.read_text(encoding="utf-8"))), None)


def load_plugins(overrides: Sequence[str], folders: Sequence[Path], config_name: str) -> Registry:
    """The registry with every drop-in that was named; a bare word names a packaged one (`plugins=[fuse_set]`).

    Raises:
        PluginError: with `plugins.strict=true`, a broken one; always, one that is not there.
    """
    registry = default_registry()
    paths, strict = plugin_settings(folders, config_name)
    paths += chosen(overrides, "plugins.paths")
    strict = strict or "true" in [value.lower() for value in chosen(overrides, "plugins.strict")]
    if strict and registry.faults:
        raise registry.faults[0]
    registry.load_dropins([_located(path) for path in dict.fromkeys(paths)], strict=strict)
    return registry


def _located(path: str) -> Path:
    given = Path(path).expanduser()
    if given.exists():
        return given
    packaged = dropin_folder() / f"{path}.py"
    if packaged.is_file() and packaged.parent == dropin_folder():
        return packaged
    known = [file.stem for file in dropin_folder().glob("[!_]*.py")]
    raise PluginError(
        f"the plugin {path!r} is neither a file or folder here nor one that is shipped",
        why=f"looked in {Path.cwd()} and {dropin_folder()}",
        remedy=choices(path, known, noun="shipped plugin"),
    )
