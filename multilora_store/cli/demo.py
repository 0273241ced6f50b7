"""The embedded demo: what runs where nothing at all is configured, kept apart from real use.

Its adapters' configs lie in a folder of their own that only the demo searches, and its store under the user's cache: a
typo, or a store that is empty, never yields a random adapter.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multilora_store.cli.argv import CommandLine
from multilora_store.cli.catalogue import Command

if TYPE_CHECKING:
    from multilora_store.storage import Store

__all__ = ["DEMO_ADAPTERS", "NOTE", "demo_overrides", "demo_store_folder", "seed_store"]

DEMO_ADAPTERS: Final = ("a", "b", "c")
NOTE: Final = "This is the embedded demo: a tiny base, random adapters a, b, c, a store in {folder}"
_OWN_WORLD: Final = ("store", "base", "lock_from")


def demo_store_folder() -> Path:
    """Where the demo keeps its store: the user's cache, or the temporary folder where that cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "multilora_store" / "demo-store"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"multilora_store-demo-{os.getuid()}" / "demo-store"
    if os.access(folder.parent, os.W_OK):
        return folder
    return Path(tempfile.gettempdir()) / f"multilora_store-demo-{os.getuid()}" / "demo-store"


def demo_overrides(line: CommandLine, command: Command, overrides: Sequence[str]) -> list[str]:
    """The overrides that select the demo, none where the user has named a store, a base, or configs of their own."""
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    own_world = any(key.partition(".")[0] in _OWN_WORLD for key in keys)
    own_entries = any(word.lstrip("+").startswith("adapters={") and "source:" in word for word in overrides)
    configured = line.config_dirs or line.config_name or os.environ.get("MULTILORA_STORE")
    if not command.demo or own_world or own_entries or configured:
        return []
    return ["store=demo", *(["base=demo"] if hasattr(command.schema, "base") else [])]


def seed_store(store: Store) -> None:
    """Put the demo's adapters into its store, once: `a`, `b`, `c` from their configs, with B drawn as well as A."""
    import torch
    from omegaconf import OmegaConf

    from multilora_store.adapter import AdapterConfig
    from multilora_store.assembly import assemble
    from multilora_store.assembly.bridge import adapter_config, adapter_parameters
    from multilora_store.cli.sources import conf_folder

    present = set(store.names()) if demo_store_folder().exists() else set()
    wanted = [name for name in DEMO_ADAPTERS if name not in present]
    if not wanted:
        return
    manifest: dict[str, Any] = {}
    for name in wanted:
        loaded = OmegaConf.load(conf_folder() / "demo" / "adapters" / f"{name}.yaml")
        entry = OmegaConf.to_container(loaded)
        assert isinstance(entry, dict), "the demo's files are mappings"
        manifest[name] = {**entry[name], "if_missing": "init", "active": False}
    from multilora_store.cli.models import build_base

    model = assemble(build_base({"provider": "demo"}), manifest)
    staged = []
    for number, name in enumerate(wanted):
        draw = torch.Generator().manual_seed(1 + number)
        tensors = {
            key: value.detach().clone()
            if "lora_B" not in key
            else torch.randn(value.shape, generator=draw) * 0.02
            for key, value in adapter_parameters(model, name).items()
        }
        config: AdapterConfig = adapter_config(model, name)
        staged.append(store.stage(name, tensors, config, metadata={"title": manifest_title(name)}))
    store.commit(staged)


def manifest_title(name: str) -> str:
    """What the demo's adapter stands for."""
    return {"a": "code style", "b": "Chinese tone", "c": "safety"}[name]
