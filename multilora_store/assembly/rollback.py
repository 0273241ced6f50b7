"""A photograph of a model's structure, to put everything back where it was when an assembly fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["untouched_on_failure"]


@contextmanager
def untouched_on_failure(model: nn.Module) -> Iterator[None]:
    """If what runs inside raises, `model` is again as it was before.

    Children, parameters, buffers, hooks, flags, classes, and plain attributes with the content of their dictionaries,
    lists and sets. Values of tensors are not copied: an assembly writes into none that it did not make.
    """
    photographs = [_photograph(module) for module in model.modules()]
    config = getattr(model, "config", None)
    settings = dict(vars(config)) if hasattr(config, "__dict__") else None
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, kind, attributes, contents in photographs:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                _refill(container, content)
        if settings is not None:
            vars(config).clear()
            vars(config).update(settings)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        raise


def _photograph(module: nn.Module) -> tuple[nn.Module, type, dict[str, Any], list[tuple[Any, Any]]]:
    attributes = dict(vars(module))
    contents = [(value, value.copy()) for value in attributes.values() if isinstance(value, (dict, list, set))]
    return module, type(module), attributes, contents


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
