"""The model of a command: its base, chosen by name and built by its provider, and the set on it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilora_store.cli.choices import chosen_plugin
from multilora_store.cli.settings import ManifestOptions
from multilora_store.cli.typed import plain
from multilora_store.errors import UsageError

if TYPE_CHECKING:
    from multilora_store.assembly.steps import Step
    from multilora_store.manifest import Lock
    from multilora_store.storage import Store

__all__ = ["build_base", "build_model"]


def build_model(
    options: ManifestOptions,
    lock: Lock,
    store: Store | None,
    *,
    device: str = "cpu",
    added: Mapping[str, Step] | None = None,
    **settings: Any,
) -> Any:
    """The set on its base, by the assembler and the steps that were chosen.

    Args:
        options: What chose them.
        lock, store: The set.
        device: Where the base is put; `meta`: structure without bytes.
        added: Steps of the command's own, by place.
        settings: Further keywords of `assemble`.

    Raises:
        UsageError: no base, or a chosen step stands where one of `added` belongs.
    """
    from multilora_store.assembly import assemble

    base = build_base(plain(options.base), meta=device == "meta")
    if device not in {"cpu", "meta"}:
        base = base.to(device)
    steps: dict[str, Any] = {_place(key): chosen_plugin("steps", choice) for key, choice in options.steps.items()}
    for place in added or {}:
        if place in steps:
            raise UsageError(
                f"the command has a step of its own at {place}, and steps.{place.replace(':', '_')} stands there",
                remedy="put that step elsewhere, e.g. steps.before_check",
            )
    return assemble(
        base,
        lock,
        store=store,
        device="meta" if device == "meta" else None,
        assembler=chosen_plugin("assembler", options.assembler) or "default",
        steps={**steps, **(added or {})},
        **settings,
    )


def _place(key: str) -> str:
    """`after_load` is how `after:load` is spelled where a colon cannot stand."""
    where, _, name = key.partition("_")
    return f"{where}:{name}" if where in {"before", "after"} and name else key


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
