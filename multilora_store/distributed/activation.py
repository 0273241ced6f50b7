"""Switching adapters on any model: what takes part and what receives gradients, set apart, agreed between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multilora_store.assembly.bridge import (
    active_adapters,
    adapter_names,
    adapter_parameters,
    check_active,
    record,
    set_active,
    set_trainable,
    trainable_adapters,
)
from multilora_store.distributed.internals import fixed_policies, reset_iteration, units_holding
from multilora_store.distributed.sharded import ranks_of, reshard
from multilora_store.errors import ShardedModelError
from multilora_store.storage.arguments import as_several

__all__ = ["activate", "active", "disabled"]


def activate(
    model: nn.Module, weights: Mapping[str, float] | Iterable[str], *, trainable: Iterable[str] | None = None
) -> None:
    """Lets exactly the adapters of `weights` take part, scaled by their weights; the same call on every rank.

    Works alike on plain, DDP, FSDP1, FSDP2 and compiled models. Gradients are never cleared, so a window of
    accumulation goes on; under FSDP1 keep `trainable` constant within one.

    Args:
        model: An assembled model under any wrapper; it is resharded first.
        weights: Name -> weight, or names alone for weight 1. A weight of 0 leaves the adapter out; empty: base only.
        trainable: Exactly the adapters that receive gradients from now on; None leaves every flag as it is.

    Raises:
        UsageError: an unknown adapter, a weight that is not finite, two active adapters with a copy of one module.
        UnsupportedError: adapters are merged into the base.
        DisagreementError: ranks asked for different states; nothing was changed.
        ShardedModelError: DDP does not reduce the gradients of an adapter that was to become trainable.
    """
    wanted = dict(weights) if isinstance(weights, Mapping) else dict.fromkeys(_names(weights), 1.0)
    chosen = None if trainable is None else sorted(set(_names(trainable)))
    before = ranks_of(model).together(
        "activate",
        lambda: _check(model, wanted, chosen),
        facts=lambda _: {"active": {n: float(w).hex() for n, w in wanted.items()}, "trainable": chosen},
    )
    set_active(model, wanted)
    if chosen is not None:
        set_trainable(model, chosen)
        _refresh(model, before)


@contextlib.contextmanager
def active(
    model: nn.Module, weights: Mapping[str, float] | Iterable[str], *, trainable: Iterable[str] | None = None
) -> Iterator[None]:
    """`activate` within the block; afterwards the exact earlier state, each parameter's flag included.

    The way back asks no other rank, so it is safe after an exception too.
    """
    reshard(model)
    weights_before, flags_before = active_adapters(model), _flags(model)
    activate(model, weights, trainable=trainable)
    try:
        yield
    except BaseException:
        reset_iteration(model)
        raise
    finally:
        reshard(model)
        set_active(model, weights_before)
        _restore_flags(model, flags_before)


def disabled(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The base alone within the block; afterwards the exact earlier state."""
    return active(model, {})


def _names(given: Iterable[str]) -> Iterable[str]:
    return [given] if isinstance(given, str) else as_several(given, "the adapters")  # a name alone, not its letters


def _check(model: nn.Module, weights: Mapping[str, float], trainable: list[str] | None) -> dict[int, bool]:
    """The flags before, by parameter, after everything that can be refused was looked at on this rank."""
    for name in trainable or ():
        record(model).member(name)
    check_active(model, weights)
    reshard(model)
    if trainable is not None:
        _check_ddp(model, trainable)
    return {id(p): p.requires_grad for p in _parameters(model)}


_reduced: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def _check_ddp(model: nn.Module, trainable: list[str]) -> None:
    """DDP reduces what required gradients when it wrapped the model, and waits for all of it.

    Raises:
        ShardedModelError: for an adapter outside of that, or one that it would wait for in vain.
    """
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if wrapper is None:
        return
    known = _reduced.setdefault(wrapper, frozenset(trainable_adapters(model)))
    added = sorted(set(trainable) - known)
    if added:
        raise ShardedModelError(
            f"DDP would not reduce the gradients of adapter {', '.join(added)}",
            why=f"it reduces what was trainable when it wrapped the model: {', '.join(sorted(known)) or 'nothing'}",
            remedy="make all of them trainable before DistributedDataParallel(..., find_unused_parameters=True)",
            adapters=added,
        )
    if known - set(trainable) and not wrapper.find_unused_parameters:
        raise ShardedModelError(
            f"DDP would wait for gradients of adapter {', '.join(sorted(known - set(trainable)))}",
            why="it was made without find_unused_parameters",
            remedy="wrap with DistributedDataParallel(..., find_unused_parameters=True)",
        )


def _refresh(model: nn.Module, before: Mapping[int, bool]) -> None:
    """Units whose mixed-precision dtypes were fixed by other flags fix them again (one gather each)."""
    changed = [p for p in _parameters(model) if before.get(id(p)) != p.requires_grad]
    for unit in units_holding(model, changed):
        if fixed_policies(unit):
            unit.unshard()
            unit.reshard()


def _parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for name in adapter_names(model):
        yield from adapter_parameters(model, name).values()


def _flags(model: nn.Module) -> dict[tuple[str, str], bool]:
    return {
        (name, key): p.requires_grad
        for name in adapter_names(model)
        for key, p in adapter_parameters(model, name).items()
    }


def _restore_flags(model: nn.Module, flags: Mapping[tuple[str, str], bool]) -> None:
    for name in adapter_names(model):
        for key, parameter in adapter_parameters(model, name).items():
            parameter.requires_grad_(flags.get((name, key), parameter.requires_grad))
