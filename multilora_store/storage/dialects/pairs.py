"""Pairs of factors in a foreign file, and the tensors and the configuration that mean the same to PEFT."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import ConfigError, DamagedError, UnsupportedError, choices
from multilora_store.storage.codec import LazyTensors

if TYPE_CHECKING:
    import torch

__all__ = [
    "PREFIX",
    "MappedTensors",
    "Pair",
    "lora_config",
    "lora_tensors",
    "one_component",
    "read_pairs",
    "refuse_kinds",
    "scalar",
]

PREFIX: Final = "base_model.model."


class MappedTensors(Mapping[str, "torch.Tensor"]):
    """Tensors under other names, made when they are asked for.

    Args:
        tensors: The tensors.
        names: New name -> name in `tensors`.
        change: What is done to each, e.g. a transposition.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._tensors = tensors
        self._names = dict(sorted(names.items()))
        self._change = change

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[self._names[name]]
        return tensor if self._change is None else self._change(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The factors of one module in a foreign file.

    Attributes:
        down, up: Names of the tensors that PEFT calls A and B.
        rank: Their rank.
        alpha: The scale is alpha / rank.
    """

    down: str
    up: str
    rank: int
    alpha: float


def lora_tensors(
    tensors: Mapping[str, torch.Tensor],
    pairs: Mapping[str, Pair],
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> MappedTensors:
    """The factors of `pairs` (module path -> pair) under PEFT's names."""
    names = {f"{PREFIX}{path}.lora_A.weight": pair.down for path, pair in pairs.items()}
    names |= {f"{PREFIX}{path}.lora_B.weight": pair.up for path, pair in pairs.items()}
    return MappedTensors(tensors, names, change)


def lora_config(pairs: Mapping[str, Pair], *, where: str, base: str | None = None, **fields: Any) -> AdapterConfig:
    """The configuration under which PEFT gives every module the rank and the scale that it has in the file.

    The targets are whole paths: which other modules of the base end alike is not known here.

    Raises:
        DamagedError: there is no pair.
    """
    if not pairs:
        raise DamagedError(f"{where} holds no pair of LoRA factors", remedy="check which tool wrote it")
    rank, ranks = _default_and_pattern({path: pair.rank for path, pair in pairs.items()})
    alpha, alphas = _default_and_pattern({path: pair.alpha for path, pair in pairs.items()})
    raw = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": sorted(pairs),
        "inference_mode": True,
        **fields,
    }
    return AdapterConfig.parse(raw, where=where)


def _default_and_pattern(values: Mapping[str, float]) -> tuple[Any, dict[str, Any]]:
    """The commonest value, and an expression for every other: by last name where it tells, else by whole path."""
    plain = {path: int(value) if float(value).is_integer() else float(value) for path, value in values.items()}
    usual = Counter(plain.values())
    default = max(usual, key=lambda value: (usual[value], value))
    by_leaf: dict[str, set[float]] = {}
    for path, value in plain.items():
        by_leaf.setdefault(path.rpartition(".")[2], set()).add(value)
    pattern = {}
    for path, value in plain.items():
        leaf = path.rpartition(".")[2]
        if value != default:
            pattern[re.escape(leaf) if len(by_leaf[leaf]) == 1 else "^" + re.escape(path)] = value
    return default, dict(sorted(pattern.items()))


def read_pairs(
    roles: Mapping[str, Mapping[str, str]], tensors: LazyTensors, alphas: Mapping[str, float], where: str
) -> dict[str, Pair]:
    """Pairs from the names of their factors: module path -> {`down`: name, `up`: name}; without alpha, scale 1.

    Raises:
        DamagedError: half a pair, or factors that do not share a rank.
    """
    pairs = {}
    for path, found in sorted(roles.items()):
        if set(found) != {"down", "up"}:
            raise DamagedError(
                f"{where}: module {path} has only one factor: {', '.join(found.values())}",
                remedy="the file is incomplete: save it again where it came from",
                module=path,
            )
        down, up = (tensors.header.slots[found[role]].shape for role in ("down", "up"))
        if len(down) != len(up) or len(down) < 2 or down[0] != up[1] or not down[0]:
            raise DamagedError(f"{where}: module {path}: factors of shapes {down} and {up} share no rank", module=path)
        pairs[path] = Pair(down=found["down"], up=found["up"], rank=down[0], alpha=alphas.get(path, float(down[0])))
    strays = sorted(set(alphas) - set(roles))
    if strays:
        raise DamagedError(f"{where}: module {strays[0]} has an alpha but no factors", module=strays[0])
    return pairs


def scalar(tensors: Mapping[str, torch.Tensor], name: str, where: str) -> float:
    """The value of a tensor of one element.

    Raises:
        DamagedError: it has more, or its value is not finite.
    """
    tensor = tensors[name]
    value = float(tensor) if tensor.numel() == 1 else float("nan")
    if value != value or value in (float("inf"), float("-inf")):
        raise DamagedError(f"{where}: {name} is not one finite number", tensor=name)
    return value


def refuse_kinds(found: Sequence[str], where: str, kinds: Mapping[str, str]) -> None:
    """Refuse tensors whose last names tell a method that is not plain LoRA.

    Raises:
        UnsupportedError: naming the method.
        DamagedError: a name that belongs to no method known here.
    """
    if not found:
        return
    name = sorted(found)[0]
    method = next((method for mark, method in kinds.items() if mark in name), None)
    if method is None:
        raise DamagedError(
            f"{where}: the tensor {name!r} has no place in this layout",
            why=f"and {len(found) - 1} more" if len(found) > 1 else "",
            remedy="check which tool wrote the file, and choose the source of that tool",
            tensor=name,
        )
    raise UnsupportedError(
        f"{where} holds {method}: {name!r}",
        why="PEFT's LoRA has no form that means the same",
        remedy="export it as plain LoRA with the tool that made it",
        tensor=name,
    )


def one_component(found: Sequence[str], wanted: str | None, where: str) -> str:
    """The part of a pipeline that is read: the only one, or the one asked for.

    Raises:
        ConfigError: there are several and none was chosen, or the chosen one is not there.
    """
    if wanted is None and len(found) == 1:
        return found[0]
    if wanted in found:
        return str(wanted)
    raise ConfigError(
        f"{where} has no component {wanted!r}" if wanted is not None else f"{where} adapts several models",
        why=f"it holds {', '.join(found) or 'none'}; an adapter of PEFT belongs to one model",
        remedy=f"choose one with component=..., or #component=... behind the path: {choices(wanted or '', found)}",
        components=tuple(found),
    )
