"""The base model of a command: chosen by name, built by its provider."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multilora_store.errors import UsageError

__all__ = ["build_base"]


def build_base(choice: Mapping[str, Any] | None, *, meta: bool = False) -> Any:
    """The base model that `base=...` chooses: `{provider: hf, path: ...}`.

    Args:
        choice: What was chosen, with the provider's own parameters.
        meta: Its structure alone, from a provider that takes a `device`.

    Raises:
        UsageError: none was chosen.
        PluginError: there is no such provider.
        BaseModelError: it cannot be built from what was given.
    """
    if choice is None:
        raise UsageError(
            "no base model is configured",
            remedy="choose one: base=hf base.path=/models/llama, or base=python base.target=./mine.py:build, "
            "or base=demo, the tiny one of the demo",
        )
    from multilora_store.assembly import build_base as build

    parameters = {key: value for key, value in choice.items() if key != "provider"}
    if isinstance(parameters.get("path"), str):
        parameters["path"] = str(Path(parameters["path"]).expanduser())
    if meta and "device" in parameters:
        parameters["device"] = "meta"
    with _no_foreign_bars():
        return build(str(choice.get("provider", "")), **parameters)


@contextmanager
def _no_foreign_bars() -> Iterator[None]:
    """Keeps transformers from drawing bars of its own where nobody watches."""
    if sys.stderr.isatty() or importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
