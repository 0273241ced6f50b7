"""The user's own files before Hydra reads them: adapter files that would compose into something else, plugin lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another distribution
from omegaconf._utils import get_yaml_loader

from multilora_store.cli.schema import AdapterEntry
from multilora_store.errors import ManifestError, UsageError

__all__ = ["check_adapter_files", "plugin_settings"]


def check_adapter_files(choices: Iterable[str], folders: Sequence[Path]) -> None:
    """Refuse adapter files that are not mappings keyed by name, or that overwrite one another.

    Args:
        choices: What `+adapters=[..]` names.
        folders: The user's folders of configs, the first that holds a file wins.

    Raises:
        ManifestError: naming the file, what was found and what would do.
    """
    homes: dict[str, Path] = {}
    for choice in choices:
        file = next((path for folder in folders if (path := folder / "adapters" / f"{choice}.yaml").is_file()), None)
        if file is None:
            continue
        for name in _names_in(file, choice):
            other = homes.setdefault(name, file)
            if other != file:
                raise ManifestError(
                    f"adapter {name!r} is defined in two chosen files: {other} and {file}",
                    remedy="one name in one file, or choose one of them",
                )


def _names_in(file: Path, choice: str) -> list[str]:
    content = _load(file)
    example = f"write {choice.rpartition('/')[2]}: {{source: ..., trainable: true}}"
    if not isinstance(content, Mapping):
        raise ManifestError(
            f"{file}: a mapping keyed by the adapter's name was expected, found a {type(content).__name__}",
            why="Hydra replaces lists: of several chosen files only the last would count",
            remedy=example,
        )
    names = [str(name) for name in content if name != "defaults"]
    stray = [name for name in names if name in AdapterEntry.__dataclass_fields__]
    if stray:
        raise ManifestError(
            f"{file}: the fields {', '.join(stray)} stand where adapters' names belong", remedy=example, file=str(file)
        )
    header = re.match(r"(\s*#.*\n|\s*\n)*?\s*#\s*@package\s+(\S+)", file.read_text(encoding="utf-8"))
    if "/" in choice and (header is None or header[2] not in {"adapters", "_group_root_"}):
        raise ManifestError(
            f"{file}: Hydra would put it under adapters.{choice.rpartition('/')[0]}, where no adapter is read",
            why="a config in a subfolder takes the subfolder as its package",
            remedy="make its first line: # @package adapters",
        )
    return names


def _load(file: Path) -> Any:
    """The file's content, by OmegaConf's own loader: a key that stands twice is an error."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=get_yaml_loader())  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    if _holds_itself(content, ()):
        raise UsageError(f"{file}: an anchor (&name) holds its own alias (*name)", remedy="write the value out")
    return content


def _holds_itself(value: Any, above: tuple[int, ...]) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return id(value) in above or any(_holds_itself(item, (*above, id(value))) for item in inside)


def plugin_settings(folders: Sequence[Path], config_name: str) -> tuple[list[str], bool]:
    """The `plugins` of the user's own primary config: they must be known before Hydra composes it."""
    for folder in folders:
        file = folder / f"{config_name}.yaml"
        if not file.is_file():
            continue
        content = _load(file)
        settings = content.get("plugins") if isinstance(content, Mapping) else None
        if settings is None:
            return [], False
        if not isinstance(settings, Mapping):
            raise UsageError(
                f"{file}: plugins is a mapping, found a {type(settings).__name__}",
                remedy="write plugins: {paths: [./mine.py]}",
            )
        paths = [str(Path(path).expanduser()) for path in settings.get("paths") or []]
        return paths, bool(settings.get("strict"))
    return [], False
