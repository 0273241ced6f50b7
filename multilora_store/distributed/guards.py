"""PEFT's own late calls on a sharded model: they would raise nothing and break it, so they raise and name ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

from torch import nn

from multilora_store.assembly.bridge import peft_model
from multilora_store.errors import ShardedModelError

__all__ = ["GUARDED", "guard", "unguarded"]

GUARDED: Final = {
    "add_adapter": ("attach(model, name, config=...)", "the new parameters would stay outside every shard"),
    "load_adapter": ("attach(model, name, source=...)", "the new parameters would stay outside every shard"),
    "inject_adapter": ("attach(model, name, config=...)", "the new parameters would stay outside every shard"),
    "delete_adapter": ("detach(model, name)", "the units would go on holding and gathering the parameters"),
    "save_pretrained": ("save(model, store, step=...)", "it would write this rank's shards, or nothing"),
    "add_weighted_adapter": ("merge(store, weights, into=...)", "it reads local shards as if they were whole"),
    "merge_and_unload": ("merge(store, weights, into=...)", "it would merge local shards"),
    "unload": ("detach(model, name)", "the units would go on holding the parameters"),
}
_MARK: Final = "_multilora_guard"


def guard(model: nn.Module) -> None:
    """Makes PEFT's late calls on this sharded model raise `ShardedModelError` with the name of our call."""
    peft = peft_model(model)
    for holder in (peft, peft.base_model):
        for name in GUARDED:
            if hasattr(holder, name) and name not in holder.__dict__:
                holder.__dict__[name] = _refusal(name)


@contextlib.contextmanager
def unguarded(model: nn.Module) -> Iterator[None]:
    """Lets our own attach and detach call what they need within the block."""
    peft = peft_model(model)
    lifted = [
        (holder, name, holder.__dict__.pop(name))
        for holder in (peft, peft.base_model)
        for name in GUARDED
        if hasattr(holder.__dict__.get(name), _MARK)
    ]
    try:
        yield
    finally:
        for holder, name, refusal in lifted:
            holder.__dict__[name] = refusal


def _refusal(name: str) -> Callable[..., NoReturn]:
    ours, why = GUARDED[name]

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ShardedModelError(
            f"PEFT's {name}() on a sharded model",
            why=why,
            remedy=f"use multilora_store.{ours}",
            call=name,
        )

    setattr(refuse, _MARK, True)
    return refuse
