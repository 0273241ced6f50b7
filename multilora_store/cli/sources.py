"""Where Hydra finds configs: the user's folders, ours, and the store as a source of choices.

The store is the last source. It says yes to every valid adapter name and reads nothing: the store itself is asked when
the manifest becomes a lock, where its address is known whatever it came from, and where near misses can be shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from multilora_store.adapter import Ref, check_name, is_pattern
from multilora_store.cli.choices import PluginChoices
from multilora_store.errors import MultiLoRAError

__all__ = [
    "AdapterChoices",
    "SearchPath",
    "adapter_of",
    "conf_folder",
    "configured_adapters",
    "register",
]

_GROUP = "adapters"


def conf_folder() -> Path:
    """The packaged configs: `<package>/conf` in a wheel, else the checkout's `conf/`."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def adapter_of(choice: str) -> str:
    """The adapter that `+adapters=[choice]` names: `x@best` is `x`, a pattern is itself.

    Raises:
        NameNotAllowedError: the name, tag or date in it is not one.
    """
    if is_pattern(choice):
        check_name(re.sub(r"\[[^]]*\]|[*?]", "x", choice))  # with a letter for each wildcard it must be a name
        return choice
    return Ref.parse(choice).name


class AdapterChoices(ConfigSource):  # type: ignore[misc]  # hydra ships no types
    """The group `adapters/` as any name that an adapter may have; composes to `{name: {source: ref}}`."""

    @staticmethod
    def scheme() -> str:
        return "multilora"

    def load_config(self, config_path: str) -> ConfigResult:
        choice = self._choice(config_path)
        assert choice is not None, "is_config has said yes"
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=OmegaConf.create({adapter_of(choice): {"source": choice}}),
            header={"package": _GROUP},
        )

    @staticmethod
    def _choice(config_path: str) -> str | None:
        group, slash, choice = config_path.removesuffix(".yaml").partition("/")
        if group != _GROUP or not slash:
            return None
        try:
            adapter_of(choice)
        except MultiLoRAError:
            return None
        return choice

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") == _GROUP

    def is_config(self, config_path: str) -> bool:
        return self._choice(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []  # help and completion list every source, and this one never talks to a store


class SearchPath(SearchPathPlugin):  # type: ignore[misc]  # hydra ships no types
    """The user's folders before ours, the demo's and the plugins behind, the store's names last."""

    before: tuple[Path, ...] = ()
    behind: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.before:  # each goes right before ours, so the first stays ahead
            search_path.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="main"))
        for folder in self.behind:
            search_path.append("demo", f"file://{folder}")
        search_path.append("plugins", f"{PluginChoices.scheme()}://")
        search_path.append("store", f"{AdapterChoices.scheme()}://")


def configured_adapters() -> list[str]:
    """The adapters that have a config file in a folder that is searched now."""
    homes = [folder / _GROUP for folder in (*SearchPath.before, *SearchPath.behind)]
    return sorted(
        {path.relative_to(home).with_suffix("").as_posix() for home in homes for path in home.rglob("*.yaml")}
    )


def register(before: Sequence[Path], behind: Sequence[Path]) -> None:
    """Make the sources and the search path known to Hydra, for this command line."""
    SearchPath.before, SearchPath.behind = tuple(before), tuple(behind)
    for kind in (AdapterChoices, PluginChoices, SearchPath):
        Plugins.instance().register(kind)
