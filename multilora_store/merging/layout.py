"""Which tensors of an adapter's file form which delta, with which rank and scale: from names and shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import MergeError
from multilora_store.merging.lowrank import LowRank

__all__ = ["PREFIX", "FactorPair", "Kind", "Layout", "parse_layout"]

PREFIX: Final = "base_model.model."
Kind = Literal["linear", "embedding", "conv", "grouped_conv", "experts"]
_FACTOR: Final = re.compile(r"(?P<path>.+)\.(?P<role>lora_A|lora_B)\.(?P<leaf>weight|bias)")
_EMBEDDING: Final = re.compile(r"(?P<path>.+)\.(?P<role>lora_embedding_[AB])")
_MAGNITUDE: Final = re.compile(r"(?P<path>.+)\.lora_magnitude_vector(\.weight)?")
_VARIANT: Final = re.compile(r".+\.(lora_magnitude_vector(\.weight)?|lora_E|ranknum|trainable_tokens_delta)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorPair:
    """The pair of factors of one module.

    Attributes:
        path: The module in the model, without PEFT's prefix (`model.layers.0.self_attn.q_proj`).
        kind: The layer that it adapts. `experts`: the parameters of grouped experts, one delta for each expert.
        down, up: Names of the two tensors, the one that reads the input (`lora_A`) first.
        bias: Name of the bias of `lora_B`, or None.
        down_shape, up_shape: Their shapes as stored.
        groups: Number of matrices of one shape (experts, convolution groups), 1 for the others.
        rank: Rank of each group.
        scale: What multiplies `up @ down`.
        parameters: For experts, the names of the parameters that the pair may belong to.
    """

    path: str
    kind: Kind
    down: str
    up: str
    bias: str | None
    down_shape: tuple[int, ...]
    up_shape: tuple[int, ...]
    groups: int
    rank: int
    scale: float
    parameters: tuple[str, ...] = ()

    @property
    def geometry(self) -> tuple[str, int, int, tuple[int, ...]]:
        """What two adapters of one module must share: kind, groups, rows, and the shape of an input row."""
        rows = self.up_shape[0]
        return self.kind, self.groups, rows, self.down_shape[1:]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the delta of one group."""
        rows = self.up_shape[0] // (self.groups if self.kind == "grouped_conv" else 1)
        return rows, math.prod(self.down_shape[1:])

    @property
    def stored_rank_factor(self) -> int:
        """What the rank of a group is multiplied with to give the `r` of the configuration."""
        return self.groups if self.kind == "grouped_conv" else 1

    def read(self, tensors: Mapping[str, Tensor]) -> LowRank:
        """The delta, in float64, from the adapter's tensors."""
        up, down = tensors[self.up], tensors[self.down]
        if self.kind == "experts":
            # PEFT's ParamWrapper: lora_A is (experts * r, in), lora_B is (out, r * experts) with the expert last.
            up = up.reshape(up.shape[0], self.rank, self.groups).permute(2, 0, 1)
            down = down.reshape(self.groups, self.rank, -1)
        else:
            up = up.reshape(self.groups, -1, self.rank)
            down = down.reshape(self.groups, self.rank, -1)
        return LowRank.of(up, down, self.scale)

    def restore(self, up: Tensor, down: Tensor) -> dict[str, Tensor]:
        """Two factors as matrices, rows first, under this pair's names and in its shapes."""
        return {self.down: down.reshape(self.down_shape), self.up: up.reshape(self.up_shape)}

    def write(self, delta: LowRank, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of `delta` under this pair's names, shaped as PEFT stores a pair of scale 1."""
        up, down = delta.up, delta.down
        total = delta.rank * self.groups
        if self.kind == "experts":
            up = up.permute(1, 2, 0).reshape(up.shape[1], total)
        else:
            up = up.reshape(self.up_shape[0], delta.rank, *([1] * (len(self.up_shape) - 2)))
        down = down.reshape(total, *self.down_shape[1:])
        return {self.down: down.to(dtype).contiguous(), self.up: up.to(dtype).contiguous()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An adapter's tensors, sorted into what they mean.

    Attributes:
        pairs: Module path -> its pair of factors, by path.
        full: Names of tensors that replace a tensor of the base: `modules_to_save`, trained biases.
        variants: Names of tensors of variants of LoRA (magnitudes, AdaLoRA's values, trained tokens).
    """

    pairs: Mapping[str, FactorPair]
    full: tuple[str, ...]
    variants: tuple[str, ...]

    @property
    def magnitudes(self) -> dict[str, str]:
        """Module path -> name of its DoRA magnitude."""
        found = (_MAGNITUDE.fullmatch(name) for name in self.variants)
        return {match["path"].removeprefix(PREFIX): match[0] for match in found if match is not None}


def parse_layout(config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> Layout:
    """Sort an adapter's tensors by their names and shapes; no value is read.

    Args:
        config: The adapter's configuration.
        shapes: Canonical tensor name -> shape.
        where: The adapter, for messages.

    Raises:
        MergeError: half a pair, or a shape that contradicts the configuration's rank.
    """
    found: dict[str, dict[str, str]] = {}
    full, variants = [], []
    for name in sorted(shapes):
        match = _FACTOR.fullmatch(name) or _EMBEDDING.fullmatch(name)
        if match is not None:
            role = match["role"] + ("_bias" if match.groupdict().get("leaf") == "bias" else "")
            found.setdefault(match["path"], {})[role] = name
        elif _VARIANT.fullmatch(name):
            variants.append(name)
        else:
            full.append(name)
    pairs = {}
    for stored_path, roles in sorted(found.items()):
        path = stored_path.removeprefix(PREFIX)
        pairs[path] = _pair(config, path, roles, shapes, where)
    return Layout(pairs=pairs, full=tuple(full), variants=tuple(variants))


def _pair(
    config: AdapterConfig, path: str, roles: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], where: str
) -> FactorPair:
    embedding = any(role.startswith("lora_embedding") for role in roles)
    down, up = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    missing = [role for role in (down, up) if role not in roles]
    if missing:
        raise MergeError(
            f"{where}: module {path} has no {missing[0]}",
            why=f"found only {', '.join(sorted(roles.values()))}",
            remedy="the file is incomplete: save the adapter again",
            module=path,
        )
    down_shape, up_shape = shapes[roles[down]], shapes[roles[up]]
    parameters = () if embedding else _parameters_at(config, path)
    rank, scale = _rank_and_scale(config, path, parameters, where)
    kind, groups, inner = _kind(embedding, parameters, rank, down_shape, up_shape)
    if kind is None or 0 in down_shape or 0 in up_shape:
        raise MergeError(
            f"{where}: module {path}: shapes {down_shape} and {up_shape} do not fit the configured rank {rank}",
            why="r, rank_pattern and the file disagree, and PEFT takes the scale from the configuration",
            remedy="mend adapter_config.json, or save the adapter again",
            module=path,
        )
    return FactorPair(
        path=path,
        kind=kind,
        down=roles[down],
        up=roles[up],
        bias=roles.get("lora_B_bias"),
        down_shape=tuple(down_shape),
        up_shape=tuple(up_shape),
        groups=groups,
        rank=inner,
        scale=scale,
        parameters=parameters,
    )


def _kind(
    embedding: bool, parameters: tuple[str, ...], rank: int, down: tuple[int, ...], up: tuple[int, ...]
) -> tuple[Kind | None, int, int]:
    """Kind, groups and rank per group; None where the shapes contradict the rank."""
    if len(down) != len(up) or len(down) < 2:
        return None, 0, 0
    if parameters and down[0] != rank:
        experts, rest = divmod(down[0], rank)
        return ("experts", experts, rank) if not rest and len(down) == 2 and up[1] == down[0] else (None, 0, 0)
    if down[0] != rank:
        return None, 0, 0
    if up[1] == rank:
        return ("embedding" if embedding else "conv" if len(down) > 2 else "linear"), 1, rank
    if len(down) > 2 and up[1] and rank % up[1] == 0 and up[0] % (rank // up[1]) == 0:
        return "grouped_conv", rank // up[1], up[1]
    return None, 0, 0


def _parameters_at(config: AdapterConfig, path: str) -> tuple[str, ...]:
    """The parameters of `target_parameters` that the module at `path` may hold."""
    module = path.replace(".base_layer", "")
    names = []
    for target in config.raw.get("target_parameters") or ():
        owner, _, parameter = str(target).rpartition(".")
        if not owner or module == owner or module.endswith(f".{owner}"):
            names.append(f"{module}.{parameter}")
    return tuple(sorted(names))


def _rank_and_scale(config: AdapterConfig, path: str, parameters: tuple[str, ...], where: str) -> tuple[int, float]:
    keys = parameters or (path,)
    ranks = {(config.rank_for(key), config.scaling_for(key)) for key in keys}
    if len(ranks) > 1:
        raise MergeError(
            f"{where}: module {path} holds the parameters {', '.join(keys)} with different ranks or alphas",
            why="which pair of factors belongs to which parameter does not stand in the file",
            remedy="give them one rank and alpha",
            module=path,
        )
    return ranks.pop()
