"""What Hydra composed, as the command's typed options: complete, checked, without anything to instantiate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from multilora_store.cli.catalogue import Command
from multilora_store.cli.options import options_of
from multilora_store.cli.schema import Common
from multilora_store.errors import UsageError, choices

__all__ = ["plain", "typed"]


def typed(command: Command, cfg: DictConfig) -> Common:
    """The options of `command`.

    Raises:
        UsageError: a value that must be given is not, an option that there is none of, or something that asks to
            be instantiated.
    """
    for key in _targets(cfg):
        raise UsageError(
            f"{key} asks to be instantiated, and nothing in a config is",
            remedy="choose plugins by name; see: show plugins",
            key=key,
        )
    merged = OmegaConf.merge(OmegaConf.structured(command.schema), cfg)
    assert isinstance(merged, DictConfig), "two mappings merge into one"
    for key, valid in _strangers(merged, command.schema):
        raise UsageError(
            f"{command.name} has no option {key}",
            why="a '+' adds a key whether or not anything reads it",
            remedy=choices(key.rpartition(".")[2], valid, noun="option"),
            key=key,
        )
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        documented = {option.key: option.doc for option in options_of(command.schema)}
        raise UsageError(
            f"{command.name} needs {', '.join(f'{key}=...' for key in missing)}",
            why="; ".join(f"{key}: {documented[key]}" for key in missing if key in documented),
            remedy=f"e.g. {command.examples[0]}" if set(missing) <= documented.keys() else f"add {missing[0]}=...",
            missing=missing,
        )
    options = OmegaConf.to_object(merged)
    assert isinstance(options, Common), "a structured config becomes its class"
    return options


def _strangers(node: DictConfig, schema: type, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Keys below `node` that its dataclass does not have, each with those it has."""
    fields = get_type_hints(schema)
    for key in map(str, node):
        if key not in fields:
            yield f"{path}{key}", sorted(fields)
        elif is_dataclass(fields[key]) and isinstance(child := node._get_node(key), DictConfig):
            yield from _strangers(child, fields[key], f"{path}{key}.")


def plain(value: Any) -> dict[str, Any] | None:
    """A chosen plugin's config as a plain mapping, None where nothing was chosen."""
    if value is None:
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if not isinstance(value, dict):
        raise UsageError(
            f"{value!r} is not a choice",
            why="a choice is composed from its plugin, and a plain word in a config is not",
            remedy="choose on the line, e.g. base=hf, steps.after_load=NAME; or in the config's defaults list, "
            "e.g. - base: hf, - steps@steps.after_load: NAME",
        )
    return {str(key): item for key, item in value.items()}


def _targets(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
        for key in map(str, node):
            here = f"{path}.{key}" if path else key
            if key == "_target_":
                yield here
            if not OmegaConf.is_missing(node, key):
                yield from _targets(node._get_node(key), here)
    elif isinstance(node, ListConfig) and not node._is_none() and not node._is_missing():
        for at in range(len(node)):
            yield from _targets(node._get_node(at), f"{path}[{at}]")
