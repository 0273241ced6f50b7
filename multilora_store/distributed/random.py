"""The random state of each rank, which dropout draws from: in and out of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["RANDOM_FILE", "decode_random", "encode_random", "random_state", "set_random_state"]

RANDOM_FILE: Final = "extra/random.safetensors"


def random_state() -> dict[str, bytes]:
    """This rank's generators: `cpu`, and the current accelerator's where there is one."""
    found = {"cpu": torch.get_rng_state().numpy().tobytes()}
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        found["accelerator"] = module.get_rng_state().cpu().numpy().tobytes()
    return found


def set_random_state(state: dict[str, bytes]) -> None:
    """The inverse of `random_state`; a generator that this machine lacks is left out."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["cpu"]), dtype=torch.uint8))
    if "accelerator" in state and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        module.set_rng_state(torch.frombuffer(bytearray(state["accelerator"]), dtype=torch.uint8))


def encode_random(states: Sequence[dict[str, bytes]]) -> bytes:
    """One file for all ranks, `<rank>.cpu` and so on."""
    from safetensors.torch import save

    tensors = {
        f"{rank}.{kind}": torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for rank, state in enumerate(states)
        for kind, data in state.items()
    }
    return bytes(save(tensors))


def decode_random(data: bytes) -> list[dict[str, bytes]]:
    """The inverse of `encode_random`."""
    from safetensors.torch import load

    found: dict[int, dict[str, bytes]] = {}
    for key, tensor in load(data).items():
        rank, kind = key.split(".")
        found.setdefault(int(rank), {})[kind] = tensor.numpy().tobytes()
    return [found[rank] for rank in sorted(found)]
