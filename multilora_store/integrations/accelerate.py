"""accelerate: a set sharded by `shard` and driven by an Accelerator, or wrapped by its own plugin and checked."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from multilora_store.assembly.bridge import peft_model
from multilora_store.distributed import AuditReport, audit, shard
from multilora_store.distributed.sharded import backend_of
from multilora_store.errors import ShardedModelError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["adopt", "check_prepared", "mark_prepared", "plain_optimizer", "prepare_model"]

logger = logging.getLogger(__name__)

# What Accelerator.prepare reads to leave a model as it is; the same attribute that it sets itself.
_PREPARED: Final = "_is_accelerate_prepared"


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What an Accelerator's FSDP plugin asks for, in the words of `shard`."""

    mp_policy: Any = None
    reshard_after_forward: bool | int | None = None
    offload_policy: Any = None


def prepare_model(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    mesh: DeviceMesh | tuple[int, ...] | None = None,
    granularity: str = "adapter",
    **options: Any,
) -> nn.Module:
    """Shards an assembled model over the Accelerator's processes and tells the Accelerator to leave it so.

    The rest is accelerate's: build the optimizer over the returned model, then `accelerator.prepare_optimizer`,
    `prepare_scheduler` and `prepare_data_loader`; `backward`, `accumulate` and `clip_grad_norm_` work as ever. Without
    an FSDP plugin `accelerator.prepare(model, optimizer, loader)` works too.

    Args:
        accelerator: Of any launch; one process alone keeps the model whole.
        model: What `assemble` returned.
        mesh, granularity, options: As in `shard`; an FSDP2 plugin's mixed precision, resharding and offload are taken
            over where they are not given.

    Returns:
        The model, sharded in place.

    Raises:
        UnsupportedError: an FSDP1, DeepSpeed, Megatron or tensor-parallel set-up.
        ShardedModelError: it is wrapped already.
        UsageError, DisagreementError, AuditError: see `shard`.
    """
    peft_model(model)
    wanted = _wanted(accelerator)
    if accelerator.num_processes == 1:
        return _single(accelerator, model)
    if backend_of(model) != "plain":
        raise ShardedModelError(
            f"the model is wrapped by {backend_of(model)} already",
            why="prepare_model() shards what assemble() returned",
            remedy="give it the assembled model, or check_prepared() what accelerator.prepare() has wrapped",
        )
    arguments: dict[str, Any] = {
        "mp_policy": wanted.mp_policy,
        "reshard_after_forward": wanted.reshard_after_forward,
        "offload_policy": wanted.offload_policy,
        **options,
    }
    model.to(accelerator.device)
    return adopt(accelerator, shard(model, mesh, granularity=granularity, **arguments))


def adopt(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Makes the Accelerator count a model that `shard` has wrapped among its own, without wrapping it again.

    Raises:
        UsageError: `shard` has not wrapped it.
    """
    if backend_of(model) not in ("fsdp1", "fsdp2"):
        raise UsageError(
            "adopt() takes a sharded model, this one is " + backend_of(model),
            remedy="call prepare_model(accelerator, model), which shards it",
        )
    mark_prepared(model)
    if not any(known is model for known in accelerator._models):
        accelerator._models.append(model)
    return model


def mark_prepared(model: nn.Module) -> None:
    """Keeps `Accelerator.prepare`, and so a Trainer, from wrapping a sharded model a second time."""
    setattr(model, _PREPARED, True)


def check_prepared(model: nn.Module, optimizer: Any = None) -> AuditReport:
    """Audits a set that `Accelerator.prepare` has wrapped by its own FSDP2 plugin, DDP, or not at all.

    Such a model takes `activate`, `save` and `restore` as one of `shard` does. What it does not have is units of
    single adapters: every adapter of a block travels with it, active or not.

    Args:
        model: What `accelerator.prepare` returned; every adapter was on it before.
        optimizer: What it returned for the optimizer.

    Returns:
        The audit's report, without faults.

    Raises:
        AuditError: a parameter is uncovered, or the optimizer holds stale ones.
    """
    report = audit(model, plain_optimizer(optimizer)).raise_if_failed()
    if report.backend == "fsdp2" and not report.granularity:
        logger.info("accelerate wrapped this model: inactive adapters are gathered along with their block")
    return report


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer inside what `Accelerator.prepare` returned: what `save` and `restore` take.

    Raises:
        UsageError: there is none inside.
    """
    inside = optimizer
    while inside is not None and hasattr(inside, "optimizer"):
        inside = inside.optimizer
    if inside is not None and not isinstance(inside, torch.optim.Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer: it holds a {type(inside).__name__}",
            remedy="give the optimizer, or what accelerator.prepare() returned for it",
        )
    return inside


def _single(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def _wanted(accelerator: Accelerator) -> _Wanted:
    """What the Accelerator's own plugins ask for.

    Raises:
        UnsupportedError: what `shard` is no substitute for.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    parallelism = getattr(accelerator, "parallelism_config", None)
    if kind in ("DEEPSPEED", "MEGATRON_LM", "TP", "XLA") or (
        parallelism is not None and (parallelism.tp_enabled or parallelism.cp_enabled)
    ):
        raise UnsupportedError(
            f"an Accelerator set up for {kind} cannot drive a sharded set",
            why="it owns the parameters itself, or cuts them along other dimensions",
            remedy="launch with plain multi-process or with an FSDP2 plugin",
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return _Wanted()
    if plugin.fsdp_version != 2:
        raise UnsupportedError(
            "an Accelerator with an FSDP1 plugin would wrap the model a second time",
            why="its FSDP1 needs its own wrapper as the outermost module",
            remedy="set fsdp_version: 2, or leave the plugin out and call shard(backend='fsdp1') yourself",
        )
    offload = plugin.cpu_offload
    return _Wanted(
        mp_policy=plugin.mixed_precision_policy,
        reshard_after_forward=plugin.reshard_after_forward,
        offload_policy=offload if offload not in (None, False) else None,
    )
