"""What vLLM takes as an adapter: its rules on configurations, tensor names and ranks, stated once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

from multilora_store.adapter import AdapterConfig

__all__ = ["RANK_STEPS", "ProfileFinding", "Shapes", "adapted_modules", "highest_rank", "lint_vllm", "rank_setting"]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

RANK_STEPS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's `--max-lora-rank` may have; its default is 16."""

_PREFIX: Final = "base_model.model."
_HEADS: Final = frozenset({"classifier", "score"})
_INITS: Final = ("pissa", "olora", "corda", "loftq")
_NEEDED: Final = ("r", "lora_alpha", "target_modules")
_FACTOR: Final = re.compile(r"(?P<path>.+)\.(?P<role>lora_[AB]\.weight|lora_embedding_[AB])")
_BIAS: Final = ".lora_B.bias"
_TOKENS: Final = ".trainable_tokens_delta"
_SPLIT: Final = (
    "export with the vllm exporter and split=true: the LoRA part, and the full tensors in a folder beside it"
)
_SHRINK: Final = "export with the vllm exporter and shrink=true: the nearest adapter of that rank, its error told"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFinding:
    """One reason for which an adapter is not served as it was trained.

    Attributes:
        severity: `error`: it is refused, or served wrongly in silence; `warning`: it depends on the server's version.
        code: A stable word for the kind.
        what, why, remedy: One line each.
    """

    severity: Literal["error", "warning"]
    code: str
    what: str
    why: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def adapted_modules(shapes: Iterable[str]) -> list[str]:
    """Paths of the modules with a pair of factors, sorted, without PEFT's prefix."""
    found = {match["path"].removeprefix(_PREFIX) for name in shapes if (match := _FACTOR.fullmatch(name))}
    return sorted(found)


def highest_rank(config: AdapterConfig, shapes: Shapes) -> int:
    """The highest rank that the configuration names or a tensor has.

    The flat factors of fused experts have the rank of every expert in one dimension, and count by the configuration.
    """
    ranks = [config.max_rank]
    if not config.raw.get("target_parameters"):
        for name, shape in shapes.items():
            match = _FACTOR.fullmatch(name)
            if match is not None and len(shape) >= 2:
                ranks.append(shape[0] if "_A" in match["role"] else shape[1])
    return max(ranks)


def rank_setting(rank: int, steps: Sequence[int] = RANK_STEPS) -> int | None:
    """The smallest allowed setting that holds `rank`, or None."""
    return next((step for step in steps if step >= rank), None)


def lint_vllm(config: AdapterConfig, shapes: Shapes, *, max_rank: int | None = None) -> Iterator[ProfileFinding]:
    """Everything that keeps vLLM 0.33 from serving this adapter as it was trained.

    Args:
        config: The adapter's configuration.
        shapes: Tensor name -> shape, as in its file.
        max_rank: The server's `--max-lora-rank`; None: it will be set to what the adapter needs.
    """
    yield from _config_faults(config)
    yield from _full_tensors(config, shapes)
    yield from _names(config, shapes)
    yield from _rank_faults(config, shapes, max_rank)
    yield from _scale_faults(config, shapes)


def _error(code: str, what: str, why: str, remedy: str) -> ProfileFinding:
    return ProfileFinding(severity="error", code=code, what=what, why=why, remedy=remedy)


def _config_faults(config: AdapterConfig) -> Iterator[ProfileFinding]:
    raw = config.raw
    if config.peft_type != "LORA":
        yield _error(
            "peft-type", f"its peft_type is {config.peft_type}", "vLLM serves plain LoRA only", "merge it into a base"
        )
    for field in _NEEDED:
        if raw.get(field) in (None, []) and not (field == "target_modules" and raw.get("target_parameters")):
            yield _error("field", f"{field} is not set", "vLLM needs it in adapter_config.json", f"set {field}")
    if raw.get("bias") not in (None, "none"):
        yield _error(
            "bias", f"bias is {raw['bias']!r}", "trained biases of the base are not served", "train it with bias='none'"
        )
    if raw.get("alora_invocation_tokens"):
        yield _error(
            "alora", "it is an activated LoRA", "vLLM would apply it to every token", "serve it with PEFT itself"
        )
    if raw.get("layer_replication"):
        yield _error(
            "layer-replication",
            f"layer_replication is {raw['layer_replication']!r}",
            "it adapts a base with repeated layers, which the server does not build",
            "save the enlarged base and train on that",
        )
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_INITS):
        yield _error(
            "init",
            f"init_lora_weights is {init!r}",
            "that start changes the base's weights, so the adapter does not fit the base as published",
            "convert it with save_pretrained(path_initial_model_for_weight_conversion=...)",
        )


def _full_tensors(config: AdapterConfig, shapes: Shapes) -> Iterator[ProfileFinding]:
    saved = [str(name) for name in config.raw.get("modules_to_save") or ()]
    if saved and not (len(saved) == 1 and saved[0] in _HEADS):
        tensors = [name for name in shapes if not _FACTOR.fullmatch(name) and set(saved) & set(name.split("."))]
        yield _error(
            "modules-to-save",
            f"modules trained in full: {', '.join(saved)}" + (f" ({_some(sorted(tensors))})" if tensors else ""),
            "vLLM takes one classifier or score head and no other full module",
            _SPLIT,
        )
    magnitudes = [name for name in shapes if "lora_magnitude_vector" in name]
    if config.raw.get("use_dora") or magnitudes:
        found = f", {len(magnitudes)} magnitude vectors" if magnitudes else ""
        yield _error(
            "dora", f"it is DoRA{found}", "vLLM has no magnitudes and refuses them", "merge it into a base, or retrain"
        )
    if config.raw.get("trainable_token_indices") or any(name.endswith(_TOKENS) for name in shapes):
        yield _error("tokens", "it trains single tokens of the embedding", "vLLM has no place for them", _SPLIT)
    biases = [name for name in shapes if name.endswith(_BIAS)]
    if config.raw.get("lora_bias") or biases:
        found = f": {_some(sorted(biases))}" if biases else ""
        yield _error(
            "lora-bias", f"it has lora_bias{found}", "vLLM's kernels add no bias", "train it without lora_bias"
        )


def _names(config: AdapterConfig, shapes: Shapes) -> Iterator[ProfileFinding]:
    if not shapes:
        yield _error("empty", "it has no tensors", "there is nothing to serve", "save it again")
    base = sorted(name for name in shapes if ".base_layer." in name and not _FACTOR.fullmatch(name))
    if base:
        yield _error(
            "base-layer",
            f"tensors of the base are in the file: {_some(base)}",
            "PEFT saves embeddings along by itself; vLLM refuses names it does not know",
            "save it with save_embedding_layers=False, or export with the vllm exporter and split=true",
        )
    experts = sorted(name for name in shapes if ".base_layer." in name and name not in base)
    if experts or config.raw.get("target_parameters"):
        yield _error(
            "expert-layout",
            f"it adapts fused expert parameters: {_some(experts or sorted(config.raw['target_parameters']))}",
            "PEFT stores all experts in one flat pair of factors, which servers do not understand or ignore",
            "storage.experts.unflatten gives the factors of each expert; or merge it into a base",
        )
    judged = {*base, *experts}
    full = {str(name) for name in config.raw.get("modules_to_save") or ()}
    odd = sorted(
        name
        for name in shapes
        if not (name in judged or _FACTOR.fullmatch(name) or name.endswith((_BIAS, _TOKENS)))
        and "lora_magnitude_vector" not in name
        and not full & set(name.split("."))
    )
    if odd:
        yield _error(
            "key",
            f"tensor names that do not end in lora_A/B.weight or lora_embedding_A/B: {_some(odd)}",
            "vLLM refuses a file with any other name",
            "import it through the peft_legacy source, which knows older names, and export that",
        )
    bare = sorted(name for name in shapes if not name.startswith(_PREFIX))
    if bare:
        yield _error(
            "prefix",
            f"tensor names without {_PREFIX!r}: {_some(bare)}",
            "module paths are read after that prefix; with another beginning none is found",
            "import it through the peft_legacy source, and export that",
        )
    yield from _halves(shapes)


def _halves(shapes: Shapes) -> Iterator[ProfileFinding]:
    roles: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        match = _FACTOR.fullmatch(name)
        if match is not None:
            roles.setdefault(match["path"], set()).add(match["role"].replace(".weight", "")[-1])
            if 0 in shape:
                yield _error("empty", f"{name} is empty: {shape}", "a sharded save lost it", "save it again")
    half = sorted(path for path, found in roles.items() if len(found) < 2)
    if half:
        yield _error("half", f"only one factor of {_some(half)}", "half a pair has no delta", "save it again")


def _rank_faults(config: AdapterConfig, shapes: Shapes, max_rank: int | None) -> Iterator[ProfileFinding]:
    rank = highest_rank(config, shapes)
    setting = rank_setting(rank)
    if setting is None:
        yield _error("rank", f"its rank is {rank}", f"vLLM's highest is {RANK_STEPS[-1]}", _SHRINK)
    elif max_rank is not None and rank > max_rank:
        yield _error(
            "rank",
            f"its rank is {rank}, the server's --max-lora-rank is {max_rank}",
            "the server allocates its buffers once, by that setting, and refuses more",
            f"start it with --max-lora-rank {setting}; or {_SHRINK}",
        )


def _scale_faults(config: AdapterConfig, shapes: Shapes) -> Iterator[ProfileFinding]:
    if not (config.raw.get("rank_pattern") or config.raw.get("alpha_pattern")) or not config.r:
        return
    usual = config.scaling_for("")
    other = [path for path in adapted_modules(shapes) if abs(config.scaling_for(path) - usual) > 1e-12 * abs(usual)]
    if other:
        yield ProfileFinding(
            severity="warning",
            code="scale",
            what=f"{len(other)} modules have another scale than lora_alpha / r = {usual:g}: {_some(other)}",
            why="a server that reads r and lora_alpha alone scales them wrongly, in silence",
            remedy="export with the vllm exporter and shrink=true, which puts every scale into the factors",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
