"""Which base a model is: its name and revision as told, and a fingerprint of its layout and of a few of its values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from multilora_store.adapter import AdapterConfig
from multilora_store.assembly.bridge.unwrap import unwrap
from multilora_store.errors import BaseMismatchError

__all__ = ["BaseIdentity", "base_fingerprint", "base_mismatch", "identify", "same_base", "sampled_values"]

_SAMPLES: Final = 4
_SHARDED: Final = "_fsdp_wrapped_module"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseIdentity:
    """What a base calls itself, and what it looks like.

    Attributes:
        name: Its name or path, None where nobody said.
        revision: Its revision, None where nobody said.
        fingerprint: See `base_fingerprint`; empty where it could not be read.
    """

    name: str | None = None
    revision: str | None = None
    fingerprint: str = ""

    def to_mapping(self) -> dict[str, str | None]:
        """As a version's record keeps it."""
        return {"name": self.name, "revision": self.revision, "fingerprint": self.fingerprint}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> BaseIdentity:
        """The inverse of `to_mapping`; what is absent stays unknown."""
        found = mapping or {}
        return cls(name=found.get("name"), revision=found.get("revision"), fingerprint=found.get("fingerprint") or "")


def base_fingerprint(model: nn.Module) -> str:
    """`<layout>-<values>`: 16 hex digits over the names and shapes of the base's parameters, 16 over samples of them.

    Adapters count for nothing, nor do wrappers: a base has the same fingerprint before and after assembly and shard.
    Values are read at a few fixed places of each parameter and rounded to bfloat16, so that a cast changes nothing;
    where they cannot be read (on meta, sharded, quantised) the second half is absent. Empty where not even the
    layout can be read (flat parameters of FSDP1).
    """
    layout = hashlib.sha256()
    parameters: list[torch.Tensor] = []
    for name, parameter in _base_parameters(model):
        if name == _SHARDED:
            return ""
        layout.update(f"{name} {list(parameter.shape)}\n".encode())
        parameters.append(parameter)
    values = sampled_values(parameters)
    return layout.hexdigest()[:16] + (f"-{values}" if values else "")


def sampled_values(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits over a few values of each tensor, as bfloat16; empty where one of them cannot be read."""
    samples = [_sample(tensor) for tensor in tensors]
    readable = [sample for sample in samples if sample is not None]
    if not samples or len(readable) < len(samples):
        return ""
    values = torch.cat([sample.to("cpu") for sample in readable])
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def same_base(one: str, other: str) -> bool:
    """Whether two fingerprints can be of one base: all that both of them tell is equal."""
    layout, _, values = one.partition("-")
    other_layout, _, other_values = other.partition("-")
    if not layout or not other_layout:
        return True
    return layout == other_layout and (not values or not other_values or values == other_values)


def base_mismatch(
    name: str, config: AdapterConfig, made_for: BaseIdentity, here: BaseIdentity
) -> BaseMismatchError | None:
    """The error that adapter `name`, made for one base, deserves on another; None if both can be one base.

    Fingerprints decide; a revision counts where none was recorded, a mere name never does.
    """
    revision = made_for.revision or config.raw.get("revision")
    if not same_base(here.fingerprint, made_for.fingerprint):
        fault = f"fingerprint {made_for.fingerprint}, this base has {here.fingerprint}"
    elif not made_for.fingerprint and revision and here.revision and revision != here.revision:
        fault = f"revision {revision}, this base is {here.revision}"
    else:
        return None
    called = made_for.name or config.base_model
    return BaseMismatchError(
        f"adapter {name!r} was made for another base: {fault}",
        why=f"made for {called or 'a base without a name'}, this is {here.name or 'a base without a name'}",
        remedy="give the right base, or pass allow_base_mismatch=true if you know better",
        name=name,
        expected=made_for,
        found=here,
    )


def identify(model: nn.Module, *, name: str | None = None, revision: str | None = None) -> BaseIdentity:
    """The identity of the base of `model`: as given, else as its Hugging Face configuration says."""
    base = unwrap(model)
    if isinstance(base, PeftModel):
        base = unwrap(base.base_model.model)
    config = getattr(base, "config", None)
    told = base.__dict__.get("name_or_path") or getattr(config, "_name_or_path", None)
    commit = getattr(config, "_commit_hash", None)
    return BaseIdentity(
        name=name or (str(told) if told else None),
        revision=revision or (str(commit) if commit else None),
        fingerprint=base_fingerprint(base),
    )


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The base's own parameters with the names that they have without PEFT, each tensor once."""
    seen: set[int] = set()

    def descend(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        if _SHARDED in module._modules:
            yield _SHARDED, nn.Parameter(torch.empty(0))
            return
        module = unwrap(module)
        if isinstance(module, PeftModel):
            module = unwrap(module.base_model.model)
        inside = _wrapped(module)
        if inside is not None:
            yield from descend(path, inside)
            return
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{key}" if path else key, parameter
        for key, child in module._modules.items():
            if child is not None:
                yield from descend(f"{path}.{key}" if path else key, child)

    yield from descend("", model)


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module of the base that a PEFT layer stands for, None if `module` is no PEFT layer."""
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter.base_layer  # type: ignore[no-any-return]
    if isinstance(module, ModulesToSaveWrapper):
        return module.original_module  # type: ignore[no-any-return]
    if isinstance(module, BaseTunerLayer):
        return module.base_layer  # type: ignore[no-any-return]
    return None


def _sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """A few values of `parameter` at fixed places, None where they cannot be read."""
    if parameter.is_meta or not parameter.is_floating_point() or type(parameter.data) is not torch.Tensor:
        return None
    count = parameter.numel()
    places = sorted({count * index // _SAMPLES for index in range(_SAMPLES)} if count else set())
    at = torch.unravel_index(torch.tensor(places, dtype=torch.int64, device=parameter.device), parameter.shape)
    return parameter.detach()[at].reshape(-1).to(torch.bfloat16)
