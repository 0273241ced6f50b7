"""vLLM: an adapter as a folder that it takes, refused with the reasons, or made to fit where that was asked for."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multilora_store.adapter import AdapterConfig, Ref
from multilora_store.errors import UnsupportedError, UsageError
from multilora_store.storage.codec import encode
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.exporters import write_files
from multilora_store.storage.peft_dirs import export_adapter
from multilora_store.storage.profiles import ProfileFinding, lint, set_needs
from multilora_store.storage.vllm_rules import RANK_STEPS, adapted_modules, highest_rank

if TYPE_CHECKING:
    import torch

    from multilora_store.storage.store import Store, StoredAdapter

__all__ = ["Fitted", "export_vllm", "fit"]

log = logging.getLogger(__name__)

REPORT_FILE: Final = "multilora_vllm.json"
FULL_FOLDER: Final = "full_modules"
_SPLITTABLE: Final = frozenset({"modules-to-save", "base-layer", "tokens"})
_SHRINKABLE: Final = frozenset({"rank", "scale"})
_FACTOR: Final = re.compile(r".+\.(lora_[AB]\.(weight|bias)|lora_embedding_[AB]|lora_magnitude_vector)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """An adapter made to fit.

    Attributes:
        config, tensors: What vLLM gets.
        full: The tensors that were split off.
        error: `|fitted - adapter| / |adapter|` of the deltas, 0 where nothing was truncated or rounded.
        worst: The module that lost most, and its error; None where nothing was shrunk.
        rank: The highest rank of the result.
    """

    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]
    full: Mapping[str, torch.Tensor] = field(default_factory=dict)
    error: float = 0.0
    worst: tuple[str, float] | None = None
    rank: int = 0


def export_vllm(
    store: Store,
    ref: str | Ref,
    target: str | os.PathLike[str],
    *,
    max_rank: int | None = None,
    shrink: bool = False,
    split: bool = False,
    overwrite: bool = False,
) -> Path | str:
    """Write an adapter folder that vLLM takes; the stored bytes where they fit as they are.

    What was changed stands in `multilora_vllm.json` beside it: the findings, the error of shrinking, the tensors split
    off (in `full_modules/`, with the original configuration), and the rank setting that the server needs.

    Args:
        store: The store.
        ref: The version.
        target: The folder, or any fsspec URL.
        max_rank: The server's `--max-lora-rank`; None: whatever the adapter needs, up to vLLM's highest.
        shrink: Bring modules of a higher rank to it by SVD, and put all scales into the factors.
        split: Take off what vLLM has no place for: modules trained in full, trained tokens, tensors of the base.
        overwrite: Replaces another adapter that lies there.

    Returns:
        The folder.

    Raises:
        UnsupportedError: vLLM would refuse it, and neither shrinking nor splitting was asked for or would do; all
            findings stand in `facts["findings"]`.
        ExistsError: another adapter lies there.
    """
    adapter = store.get(ref)
    where = f"{store.url}: {adapter.name}@{adapter.version.id}"
    shapes = {name: info.shape for name, info in adapter.infos.items()}
    findings = lint(adapter.config, shapes, max_rank=max_rank)
    allowed = (_SPLITTABLE if split else frozenset()) | (_SHRINKABLE if shrink else frozenset())
    _refuse([finding for finding in findings if finding.code not in allowed], where)
    codes = {finding.code for finding in findings}
    for finding in findings:
        if finding.code not in allowed:
            log.warning("%s: %s (%s)", where, finding.what, finding.why)
    if not codes & allowed:
        return export_adapter(store, adapter.version.name + "@" + adapter.version.id, target, overwrite=overwrite)
    fitted = fit(
        adapter.config,
        adapter.tensors,
        rank=_rank(max_rank) if codes & allowed & _SHRINKABLE else None,
        fold=bool(codes & allowed & _SHRINKABLE),
        split=bool(codes & allowed & _SPLITTABLE),
        name=where,
    )
    left = lint(fitted.config, {name: tuple(t.shape) for name, t in fitted.tensors.items()}, max_rank=max_rank)
    _refuse(left, where)
    if fitted.worst is not None:
        log.warning("%s: shrunk to rank %d, relative error %.3g", where, fitted.rank, fitted.error)
    return write_files(target, _files(adapter, fitted, findings), overwrite=overwrite)


def fit(
    config: AdapterConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    rank: int | None = None,
    fold: bool = False,
    split: bool = False,
    name: str = "the adapter",
) -> Fitted:
    """Shrink and split an adapter in memory.

    Args:
        config, tensors: The adapter.
        rank: The highest rank of the result; None: none is truncated.
        fold: Put all scales into the factors; implied by `rank`.
        split: Take off every tensor that is no factor.
        name: What messages call it.

    Raises:
        UsageError: nothing is left.
        MergeError: it cannot be shrunk.
    """
    full: dict[str, torch.Tensor] = {}
    if split:
        full = {key: tensor for key, tensor in tensors.items() if not _FACTOR.fullmatch(key)}
        tensors = {key: tensor for key, tensor in tensors.items() if key not in full}
        config = config.replace(modules_to_save=None, trainable_token_indices=None)
        if not adapted_modules(tensors):
            raise UsageError(
                f"{name} has no LoRA factors besides {len(full)} full tensors", remedy="serve a merged base"
            )
    if rank is None and not fold:
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        return Fitted(config=config, tensors=tensors, full=full, rank=highest_rank(config, shapes))
    from multilora_store.merging.shrink import shrink_to_rank

    shrunk = shrink_to_rank(config, tensors, rank, name=name)
    worst = shrunk.report.worst
    return Fitted(
        config=shrunk.config,
        tensors=shrunk.tensors,
        full=full,
        error=shrunk.report.error,
        worst=(worst.path, worst.error),
        rank=shrunk.config.max_rank,
    )


def _rank(max_rank: int | None) -> int:
    return RANK_STEPS[-1] if max_rank is None else max_rank


def _refuse(findings: Sequence[ProfileFinding], where: str) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise UnsupportedError(
            f"{where} cannot be served by vLLM: {'; '.join(finding.what for finding in errors)}",
            why="; ".join(finding.why for finding in errors),
            remedy="; ".join(dict.fromkeys(finding.remedy for finding in errors)),
            findings=tuple(errors),
        )


def _files(adapter: StoredAdapter, fitted: Fitted, findings: Sequence[ProfileFinding]) -> dict[str, Any]:
    """The files of the folder; the configuration, without which it is no adapter, comes last."""
    shapes = {name: tuple(tensor.shape) for name, tensor in fitted.tensors.items()}
    needs = set_needs({adapter.name: (fitted.config, shapes)})
    report = {
        "adapter": adapter.name,
        "version": adapter.version.id,
        "findings": [finding.to_json() for finding in findings],
        "max_lora_rank": needs.setting,
        "rank": fitted.rank,
        "error": fitted.error,
        "worst": None if fitted.worst is None else {"module": fitted.worst[0], "error": fitted.worst[1]},
        "split": sorted(fitted.full),
    }
    files: dict[str, Any] = {}
    if fitted.full:
        files[f"{FULL_FOLDER}/tensors.safetensors"] = encode(fitted.full).parts
        files[f"{FULL_FOLDER}/original_{CONFIG_FILE}"] = adapter.config.to_json()
    files[REPORT_FILE] = json.dumps(report, indent=2, sort_keys=True).encode() + b"\n"
    files[MODEL_FILE] = encode(fitted.tensors).parts
    files[CONFIG_FILE] = fitted.config.to_json()
    return files
