"""Reading a merged adapter back as anyone would, configuration first, and comparing it with what was computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import MergeError
from multilora_store.merging.layout import parse_layout
from multilora_store.merging.source import MergeSource

__all__ = ["check_reads_back", "check_scales"]

_TOLERANCE: Final = 1e-12


def check_scales(name: str, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors, read under `config`, form deltas of scale 1: what the merge computed them for.

    Raises:
        MergeError: naming the module that reads back otherwise.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for pair in parse_layout(config, shapes, where=name).pairs.values():
        if abs(pair.scale - 1.0) > _TOLERANCE:
            raise _otherwise(name, f"module {pair.path} has scale {pair.scale:g} instead of 1")


def check_reads_back(found: MergeSource, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check that a stored merge has the configuration, the scales and the very tensors that were computed.

    Raises:
        MergeError: naming what came back otherwise.
    """
    if found.config.canonical() != config.canonical():
        raise _otherwise(found.name, "its configuration differs")
    only = sorted(set(tensors) ^ set(found.tensors))
    if only:
        raise _otherwise(found.name, f"tensor {only[0]} is on one side only")
    check_scales(found.name, found.config, found.tensors)
    for name, tensor in tensors.items():
        if not torch.equal(found.tensors[name], tensor):
            raise _otherwise(found.name, f"tensor {name} has other values")


def _otherwise(name: str, how: str) -> MergeError:
    return MergeError(
        f"the result {name!r} did not read back as it was computed, and was not kept: {how}",
        remedy="this is a fault of the storage or of this library: please report it",
    )
