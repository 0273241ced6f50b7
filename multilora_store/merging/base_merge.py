"""Base and adapters as one plain Hugging Face folder, streamed shard by shard, without loading the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

import multilora_store
from multilora_store.adapter.digest import DTYPE_BITS
from multilora_store.errors import ExistsError, MergeError, UnsupportedError, choices
from multilora_store.merging.base_edits import Edit, add_bias, add_pair, replace_tensor
from multilora_store.merging.base_folder import BaseFolder, ShardEntry, copy_other_files, write_index, write_shard
from multilora_store.merging.capability import kinds_of
from multilora_store.merging.full_modules import merge_full, owners_of, resolve_rule
from multilora_store.merging.layout import Layout
from multilora_store.merging.source import MergeSource, canonical_order
from multilora_store.storage.locations import check_new_folder, new_folder
from multilora_store.storage.progress import Listener, Meter

__all__ = ["BaseMergeReport", "export_merged"]

_EMBEDDINGS: Final = frozenset("embed_tokens wte word_embeddings embed_in tok_embeddings".split())
_HEADS: Final = frozenset("lm_head embed_out".split())
_MERGEABLE: Final = frozenset(
    {"linear", "embedding", "conv", "grouped_conv", "experts", "rslora", "rank_pattern", "lora_bias", "dora"}
)
_RECORD: Final = "multilora_merge.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseMergeReport:
    """A merge into a base.

    Attributes:
        target: The new folder.
        changed: Names of the tensors that differ from the base's.
        untied: Whether embedding and head, tied in the base, were written apart.
        nbytes: Bytes of weights written.
        record: What was merged, as it stands in `multilora_merge.json` of the folder.
    """

    target: Path
    changed: tuple[str, ...]
    untied: bool
    nbytes: int
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Tie:
    """Embedding and head of a base that ties them."""

    embedding: str
    head: str


def export_merged(
    base: str | os.PathLike[str],
    sources: Sequence[MergeSource],
    weights: Sequence[float],
    target: str | os.PathLike[str],
    *,
    modules_to_save: str | Mapping[str, str] = "refuse",
    tied: Literal["untie", "refuse"] = "untie",
    progress: Listener | None = None,
) -> BaseMergeReport:
    """Write `base + sum of weight * delta` as a new folder that `from_pretrained` opens; the base is not touched.

    The sum is computed in float32 and rounded once to the base's dtype. At most one tensor's factors and one block of
    rows are in memory at a time.

    Args:
        base: A folder with `config.json` and safetensors.
        sources, weights: The adapters.
        target: The new folder; it appears whole or not at all.
        modules_to_save: Rule for tensors trained in full, see `resolve_rule`; one adapter of weight 1 needs none.
        tied: When the base ties its embedding to its head and an adapter changes one of them: `untie` writes both and
            says so in `config.json`; `refuse` raises.
        progress: Called after each tensor that is written.

    Raises:
        ExistsError: the target exists.
        UnsupportedError: a quantised base, no delta to this base (PiSSA and others), or DoRA beside others.
        CoverageError: an adapter changes a tensor that the base does not have.
        MergeError: weights or rules that cannot be.
    """
    if tied not in ("untie", "refuse"):
        raise MergeError(f"tied = {tied!r}", remedy=choices(str(tied), ["untie", "refuse"]))
    out = Path(target)
    if len(sources) != len(weights) or not sources:
        raise MergeError(
            f"{len(weights)} weights for {len(sources)} adapters", remedy="give one for each, at least one"
        )
    folder = BaseFolder.open(base)
    _check_target(out, folder.path)
    _check_base(folder)
    ordered = canonical_order(sources, [float(weight) for weight in weights])
    layouts = _layouts(sources)
    _check_dora(sources, weights, layouts)
    tie = _tie_of(folder, layouts)
    if tie is not None and tied == "refuse":
        raise UnsupportedError(
            f"the base ties {tie.head} to {tie.embedding} and an adapter changes one of them",
            why="kept tied, the change of one would act on both",
            remedy="tied=untie writes them apart",
        )
    edits = _plan_edits(folder, ordered, layouts, tie, modules_to_save, list(zip(sources, weights, strict=True)))
    record = _record(folder, ordered, tie)
    nbytes = _write(folder, out, edits, tie, record, progress)
    return BaseMergeReport(
        target=out, changed=tuple(sorted(edits)), untied=tie is not None, nbytes=nbytes, record=record
    )


def _check_target(out: Path, base: Path) -> None:
    check_new_folder(out)
    resolved = out.resolve()
    if resolved == base.resolve() or base.resolve() in resolved.parents:
        raise ExistsError(
            f"the target {out} lies in the base's folder {base}",
            remedy="choose a folder outside: the base stays as it is",
        )


def _check_base(folder: BaseFolder) -> None:
    scheme = folder.config.get("quantization_config")
    if scheme:
        method = scheme.get("quant_method", "unknown") if isinstance(scheme, dict) else scheme
        raise UnsupportedError(
            f"the base {folder.path} is quantised ({method}): merging into quantised weights is refused",
            why="rounding the sum to the quantised grid loses much of the delta",
            remedy="merge into the unquantised base, then quantise; or serve the adapter beside the quantised base",
        )


def _layouts(sources: Sequence[MergeSource]) -> dict[str, Layout]:
    layouts = {}
    for source in sources:
        kinds = kinds_of(source.config)
        if not kinds - _MERGEABLE:
            layouts[source.name] = source.layout
            kinds = kinds_of(source.config, layouts[source.name])
        odd = sorted(kinds - _MERGEABLE)
        if odd:
            raise UnsupportedError(
                f"adapter {source.name!r} cannot be merged from files: it is of the kind {odd[0]}",
                why="its change of the base does not follow from its factors alone, or its base is not this one",
                remedy="convert it to plain LoRA, or use PEFT's merge_and_unload on the loaded model",
                kind=odd[0],
            )
    return layouts


def _check_dora(sources: Sequence[MergeSource], weights: Sequence[float], layouts: Mapping[str, Layout]) -> None:
    """DoRA sets the length of what one adapter gives: beside others, or in part, no one length is right."""
    for source in sources:
        layout = layouts[source.name]
        if not layout.magnitudes and not source.config.raw.get("use_dora"):
            continue
        if len(sources) > 1 or weights[0] != 1.0:
            raise UnsupportedError(
                f"adapter {source.name!r} is of the kind dora: it is merged alone and with weight 1 only",
                why="its magnitudes are the lengths of its own sum with the base",
                remedy="merge it first, and the others into the folder that gives",
                kind="dora",
            )
        lacking = sorted(set(layout.pairs) ^ set(layout.magnitudes))
        if lacking:
            raise MergeError(
                f"adapter {source.name!r}: module {lacking[0]} has only one of magnitude and factors, DoRA needs both",
                remedy="the file is incomplete: save the adapter again",
                module=lacking[0],
            )


def _tie_of(folder: BaseFolder, layouts: Mapping[str, Layout]) -> _Tie | None:
    """Embedding and head, if the base ties them and an adapter changes one."""
    changed = {path for layout in layouts.values() for path in layout.pairs}
    changed |= {
        name.rpartition(".")[0].replace(".base_layer", "") for layout in layouts.values() for name in layout.full
    }
    if not any(path.rpartition(".")[2] in _EMBEDDINGS | _HEADS for path in changed):
        return None
    heads = [name for name in folder.home if _module(name) in _HEADS and name.endswith(".weight")]
    flags = [
        part["tie_word_embeddings"]
        for part in (folder.config, folder.config.get("text_config") or {})
        if "tie_word_embeddings" in part
    ]
    if not (flags[0] if flags else not heads):
        return None
    embeddings = [name for name in folder.home if _module(name) in _EMBEDDINGS and name.endswith(".weight")]
    causal = any(str(name).endswith("ForCausalLM") for name in folder.config.get("architectures") or ())
    if len(embeddings) != 1 or len(heads) > 1 or not (heads or causal):
        raise UnsupportedError(
            f"the base {folder.path} ties its embeddings, and which tensors they are is not clear",
            why=f"embeddings: {', '.join(embeddings) or 'none'}; heads: {', '.join(heads) or 'none'}",
            remedy="save the base with untied embeddings first, or merge with PEFT on the loaded model",
        )
    default = "embed_out.weight" if _module(embeddings[0]) == "embed_in" else "lm_head.weight"
    return _Tie(embedding=embeddings[0], head=heads[0] if heads else default)


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _plan_edits(
    folder: BaseFolder,
    ordered: Sequence[tuple[MergeSource, float]],
    layouts: Mapping[str, Layout],
    tie: _Tie | None,
    rule: str | Mapping[str, str],
    given: Sequence[tuple[MergeSource, float]],
) -> dict[str, Edit]:
    tied_to = {tie.head: tie.embedding} if tie is not None else {}
    edits: dict[str, Edit] = {}
    owners = owners_of(given, layouts)
    alone = len(given) == 1 and given[0][1] == 1.0
    decided = resolve_rule("first" if alone and rule == "refuse" else rule, owners)
    for stored, value in merge_full(decided, owners).items():
        replace_tensor(edits, folder, owners[stored][0][0], stored, value, tied_to)
    for source, weight in ordered:
        layout = layouts[source.name]
        _check_tying(source, layout, tie)
        magnitudes = layout.magnitudes
        for path, pair in layout.pairs.items():
            add_pair(edits, folder, source, pair, weight, tied_to, magnitudes.get(path))
            add_bias(edits, folder, source, pair, weight)
    return edits


def _check_tying(source: MergeSource, layout: Layout, tie: _Tie | None) -> None:
    if tie is None or not source.config.raw.get("ensure_weight_tying"):
        return
    ends = {tie.embedding.removesuffix(".weight"), tie.head.removesuffix(".weight")}
    if len(ends & set(layout.pairs)) == 1:
        raise UnsupportedError(
            f"adapter {source.name!r} was trained with ensure_weight_tying, but its file holds one end alone",
            why=f"it holds {', '.join(sorted(ends & set(layout.pairs)))} of {', '.join(sorted(ends))}",
            remedy="merge it with PEFT's merge_and_unload on the loaded model",
        )


def _shards(folder: BaseFolder, tie: _Tie | None) -> Iterator[tuple[str, list[ShardEntry]]]:
    """File -> its tensors, with a head of its own where the base has none."""
    for file, shard in folder.shards.items():
        entries = [folder.entry(name) for name in shard]
        if tie is not None and tie.embedding in shard and tie.head not in folder.home:
            source = folder.entry(tie.embedding)
            entries.append(ShardEntry(name=tie.head, dtype=source.dtype, shape=source.shape))
        yield file, entries


def _write(
    folder: BaseFolder,
    out: Path,
    edits: Mapping[str, Edit],
    tie: _Tie | None,
    record: Mapping[str, Any],
    progress: Listener | None,
) -> int:
    """Write the whole folder beside the target, then move it there."""
    shards = dict(_shards(folder, tie))
    home = {entry.name: file for file, entries in shards.items() for entry in entries}
    total = sum(_nbytes(entry) for entries in shards.values() for entry in entries)
    meter = Meter(progress, files=len(home), nbytes=total)

    def parts(name: str) -> Iterator[Tensor]:
        size = 0
        for part in _parts(folder, edits, tie, name):
            yield part
            size += part.nbytes
        meter.add(size)

    with new_folder(out) as partial:
        for file, entries in shards.items():
            write_shard(partial / file, entries, parts, _nbytes)
        if folder.indexed:
            write_index(partial, home, total)
        copy_other_files(folder.path, partial)
        _write_json(partial / "config.json", _config(folder, tie))
        _write_json(partial / _RECORD, record)
    return total


def _parts(folder: BaseFolder, edits: Mapping[str, Edit], tie: _Tie | None, name: str) -> Iterator[Tensor]:
    real = tie.embedding if tie is not None and name == tie.head else name
    base = folder.tensor(real)
    if name in edits:
        yield from edits[name].parts(base)
    else:
        yield base


def _nbytes(entry: ShardEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count * DTYPE_BITS[entry.dtype] // 8


def _config(folder: BaseFolder, tie: _Tie | None) -> dict[str, Any]:
    config = dict(folder.config)
    if tie is not None:
        config["tie_word_embeddings"] = False
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return config


def _record(folder: BaseFolder, ordered: Sequence[tuple[MergeSource, float]], tie: _Tie | None) -> dict[str, Any]:
    return {
        "base": folder.path.name,
        "adapters": [
            {"name": source.name, "version": source.version, "digest": source.digest, "weight": weight}
            for source, weight in ordered
        ],
        "untied": tie is not None,
        "multilora_store": multilora_store.__version__,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
