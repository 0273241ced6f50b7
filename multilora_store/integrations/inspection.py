"""A look into another tool's checkpoint: which adapters it holds, what is wrong or missing, and what would do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import MultiLoRAError
from multilora_store.integrations.checkpoint_deepspeed import deepspeed_checkpoint, model_states
from multilora_store.integrations.checkpoint_files import Checkpoint, open_checkpoint
from multilora_store.integrations.checkpoint_gguf import gguf_checkpoint
from multilora_store.integrations.checkpoints import PAIRS, adapter_in, from_root
from multilora_store.integrations.diagnosis import Diagnosis, Inspection, SeenAdapter, said, some
from multilora_store.integrations.recognising import Recognised, recognise
from multilora_store.storage.codec import nonfinite
from multilora_store.storage.contents import CONFIG_FILE, MODEL_FILE
from multilora_store.storage.peft_folder import PICKLE_FILE
from multilora_store.storage.progress import Listener, Meter
from multilora_store.storage.verify import rank_faults

if TYPE_CHECKING:
    import torch

__all__ = ["Diagnosis", "Inspection", "SeenAdapter", "inspect_checkpoint", "some"]

_WRAPPER: Final = re.compile(
    r"(?:^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.(?=.*lora_|.*base_model)"
)
_WIDTH: Final = 4
"""Bytes that an element is taken for until it is read."""
_TOGETHER: Final = "run its zero_to_fp32.py, or save with stage3_gather_16bit_weights_on_model_save; then look at that"
_RESCUE: Final = "take its adapters out: import {path} configs.NAME=/path/of/its/adapter_config.json"


def inspect_checkpoint(path: str | Path, *, allow_pickle: bool = False, progress: Listener | None = None) -> Inspection:
    """Look into a local checkpoint of PEFT, transformers, accelerate, torch or DeepSpeed; nothing is changed.

    Args:
        path: A file or folder.
        allow_pickle: Also opens pickles, by restricted loading that runs no code.
        progress: Called after each tensor that is read, and after each adapter.

    Raises:
        UsageError: nothing is there, or nothing that is known.
    """
    found = recognise(path)
    adapters: list[SeenAdapter] = []
    findings: list[Diagnosis] = []
    try:
        if found.kind == "peft":
            meter = Meter(progress, files=len(found.folders))
            adapters += [_folder(found, folder, allow_pickle, findings, meter) for folder in found.folders]
        elif found.kind == "gguf":
            adapters += _gguf(found, findings, progress)
        elif found.kind == "deepspeed":
            adapters += _deepspeed(found, allow_pickle, findings, Meter(progress))
        elif found.kind == "safetensors" or allow_pickle:
            adapters += _model(found, open_checkpoint(found.path, allow_pickle=allow_pickle), findings, Meter(progress))
        else:
            findings.append(_unread(str(found.path)))
    except MultiLoRAError as error:
        findings.append(_refused(str(found.path), error))
    findings += _missing_parts(found)
    return Inspection(recognised=found, adapters=tuple(adapters), findings=tuple(findings))


def _folder(found: Recognised, folder: str, allow_pickle: bool, findings: list[Diagnosis], meter: Meter) -> SeenAdapter:
    """One PEFT folder."""
    place = found.path / folder
    name = folder or "default"
    held = {file.rpartition("/")[2] for file in found.files if file.rpartition("/")[0] == folder}
    config, shapes = None, {}
    if CONFIG_FILE not in held:
        findings.append(
            said(name, "weights without their configuration", f"{place} has no {CONFIG_FILE}",
                  "the save was cut short, or only the weights were copied",
                  f"copy its {CONFIG_FILE} there; save_pretrained writes both")
        )  # fmt: skip
    else:
        try:
            config = AdapterConfig.parse((place / CONFIG_FILE).read_bytes(), where=str(place / CONFIG_FILE))
        except MultiLoRAError as error:
            findings.append(_refused(name, error))
    weights = next((file for file in (MODEL_FILE, PICKLE_FILE) if file in held), None)
    if weights is None:
        findings.append(
            said(name, "declared, but it has no tensors", f"{place} has {CONFIG_FILE} and no {MODEL_FILE}",
                  "only the active adapter was saved, or a rank that held nothing wrote the folder",
                  "save it again: multilora_store.save writes every adapter, active or not")
        )  # fmt: skip
    elif weights == PICKLE_FILE and not allow_pickle:
        findings.append(_unread(str(place / weights)))
    else:
        try:
            checkpoint = open_checkpoint(place / weights, allow_pickle=allow_pickle)
            shapes = dict(checkpoint.shapes)
            findings += _of_adapter(
                name, checkpoint, {from_root(key): key for key in shapes}, config, meter, alone=True
            )
        except MultiLoRAError as error:
            findings.append(_refused(name, error))
    meter.add(0)
    return SeenAdapter(
        name=name, where=str(place), declared=CONFIG_FILE in held, tensors=len(shapes), numel=_numel(shapes.values())
    )


def _gguf(found: Recognised, findings: list[Diagnosis], progress: Listener | None) -> Iterator[SeenAdapter]:
    """LoRA files of llama.cpp, under the names that PEFT gives their modules."""
    files = [found.path] if found.path.is_file() else [found.path / one for one in found.files if one.endswith(".gguf")]
    meter = Meter(progress, files=len(files))
    for file in files:
        checkpoint = gguf_checkpoint(file)
        findings += _of_adapter(file.stem, checkpoint, {key: key for key in checkpoint.shapes}, None, meter, alone=True)
        meter.add(0)
        shapes = checkpoint.shapes.values()
        yield SeenAdapter(name=file.stem, where=str(file), declared=True, tensors=len(shapes), numel=_numel(shapes))


def _deepspeed(found: Recognised, allow_pickle: bool, findings: list[Diagnosis], meter: Meter) -> list[SeenAdapter]:
    """What DeepSpeed wrote of the model in one file; what it cut into parts, only DeepSpeed puts together."""
    states = model_states(found.files)
    if states is None:
        findings.append(
            said(str(found.path), "DeepSpeed's files are not looked into",
                 some([file for file in found.files if file.endswith(".pt")]),
                 "tensors are cut into parts that only DeepSpeed puts together", _TOGETHER)
        )  # fmt: skip
        return []
    if not allow_pickle:
        findings.append(_unread(str(found.path / states)))
        return []
    return _model(found, deepspeed_checkpoint(found.path / states), findings, meter)


def _model(found: Recognised, checkpoint: Checkpoint, findings: list[Diagnosis], meter: Meter) -> list[SeenAdapter]:
    """The adapters among the tensors of a whole model, by the names that the model gave them."""
    named: dict[str, dict[str, str]] = defaultdict(dict)
    for key in checkpoint.shapes:
        inside = adapter_in(from_root(key))
        if inside is not None:
            named[inside][_canonical(from_root(key), inside)] = key
    seen = []
    meter.expect(len(named), 0)
    for inside, keys in sorted(named.items()):
        name = inside.replace("%2E", ".") or "(without a name)"
        findings += _of_adapter(name, checkpoint, keys, None, meter, alone=False)
        meter.add(0)
        shapes = [checkpoint.shapes[key] for key in keys.values()]
        seen.append(
            SeenAdapter(name=name, where=checkpoint.where, declared=False, tensors=len(keys), numel=_numel(shapes))
        )
    if not named:
        findings.append(
            said(str(found.path), "there is no adapter in it", f"{len(checkpoint.shapes)} tensors, none of LoRA",
                  "the adapters were merged before the save, or never were in the model that was saved",
                  "look for the folder that save_pretrained wrote, or an earlier checkpoint")
        )  # fmt: skip
    counts = {one.name: one.tensors for one in seen}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name}: {count}" for name, count in counts.items())
        findings.append(
            said(str(found.path), "its adapters do not have equally many tensors", told,
                  "they have other targets, or some were saved in part",
                  "compare with each adapter_config.json; rescue checks every target")
        )  # fmt: skip
    if seen and found.kind != "peft":
        findings.append(
            said(str(found.path), "its adapters lie among the base's tensors, without configurations",
                  ", ".join(counts), "a checkpoint of the whole model says nothing of rank, alpha and targets",
                  _TOGETHER if found.kind == "deepspeed" else _RESCUE.format(path=found.path))
        )  # fmt: skip
    return seen


def _canonical(key: str, inside: str) -> str:
    return key.replace(f".{inside}.", ".", 1) if inside else key


def _of_adapter(
    name: str, checkpoint: Checkpoint, keys: Mapping[str, str], config: AdapterConfig | None, meter: Meter,
    *, alone: bool,
) -> Iterator[Diagnosis]:  # fmt: skip
    """What is wrong with the tensors of one adapter: names, shapes, then values."""
    shapes = {plain: checkpoint.shapes[key] for plain, key in keys.items()}
    yield from _names(name, keys.values(), alone=alone)
    yield from _shapes(name, shapes, flat=checkpoint.flat)
    if config is not None:
        yield from _against(name, shapes, config)
    readable = [key for key in keys.values() if 0 not in checkpoint.shapes[key]]
    wanted = [key for key in readable if not alone or adapter_in(from_root(key)) is not None]
    meter.expect(0, _WIDTH * _numel(checkpoint.shapes[key] for key in wanted))
    values = {}
    for key in wanted:
        values[key] = checkpoint.read([key])[key]
        meter.expect(0, values[key].nbytes - _WIDTH * values[key].numel())
        meter.add(values[key].nbytes, files=0)
    yield from _values(name, values)


def _names(name: str, keys: Iterable[str], *, alone: bool) -> Iterator[Diagnosis]:
    listed = sorted(keys)
    wrapped = [key for key in listed if _WRAPPER.search(key)]
    if wrapped:
        yield said(
            name, f"{len(wrapped)} names carry a wrapper's prefix", some(wrapped),
            "the state dict was taken from the wrapped model; PEFT's loaders drop such names without a word",
            "import takes the prefixes off",
        )  # fmt: skip
    inside = [key for key in listed if alone and adapter_in(from_root(key))]
    if inside:
        yield said(
            name, f"{len(inside)} names carry the adapter's own name", some(inside),
            "the model's state dict was written instead of PEFT's; loading drops such names without a word",
            "import the file as a checkpoint: import FILE configs.NAME=adapter_config.json",
        )  # fmt: skip
    base = [key for key in listed if alone and adapter_in(from_root(key)) is None]
    if base:
        yield said(
            name, f"{len(base)} tensors are the base's", some(base),
            "PEFT saves embeddings along by itself, or the whole model was saved",
            "save with save_embedding_layers=False; vLLM refuses such files",
        )  # fmt: skip


def _shapes(name: str, shapes: Mapping[str, tuple[int, ...]], *, flat: bool) -> Iterator[Diagnosis]:
    empty = [f"{key} {shape}" for key, shape in sorted(shapes.items()) if 0 in shape]
    if empty:
        yield said(
            name, f"{len(empty)} of {len(shapes)} tensors are empty", some(empty),
            "one rank's share of a sharded save (FSDP), or a partitioned parameter (ZeRO-3), was written as the whole",
            "use the files of all ranks, or an earlier checkpoint; multilora_store.save stops at such tensors",
        )  # fmt: skip
    slices = [key for key, shape in sorted(shapes.items()) if len(shape) == 1 and re.search(r"\.lora_(A|B)\.", key)]
    if slices and not flat:
        yield said(
            name, f"{len(slices)} factors are flat", some(slices),
            "slices of FSDP1's flat parameter, written without their place in it",
            "load the checkpoint where it was made and save a full or sharded state dict",
        )  # fmt: skip
    half = [
        path + other
        for left, right in PAIRS
        for one, other in ((left, right), (right, left))
        for path in (key.removesuffix(one) for key in shapes if key.endswith("." + one))
        if path + other not in shapes
    ]
    if half:
        yield said(
            name, f"{len(half)} factors have no partner", some(sorted(half)),
            "one half of a pair has no effect; the file was cut, or ranks wrote different halves",
            "use the files of all ranks, or an earlier checkpoint",
        )  # fmt: skip


def _against(name: str, shapes: Mapping[str, tuple[int, ...]], config: AdapterConfig) -> Iterator[Diagnosis]:
    """The tensors against the configuration beside them."""
    whole = {key: shape for key, shape in shapes.items() if 0 not in shape}
    wrong = list(rank_faults(config, whole))
    if wrong:
        yield said(
            name, f"{len(wrong)} tensors have another rank than the configuration says", some(wrong),
            f"the {CONFIG_FILE} is another training's", "put back the one that belongs to these weights",
        )  # fmt: skip
    targets = config.target_modules
    if not isinstance(targets, str) and targets:
        adapted = {key.rpartition(".lora_")[0].rpartition(".")[2] for key in shapes if ".lora_" in key}
        bare = sorted(target for target in targets if target.rpartition(".")[2] not in adapted)
        if bare:
            yield said(
                name, f"{len(bare)} of {len(targets)} targets have no tensors", ", ".join(bare),
                "the save lost them, or the base has no such modules",
                "compare with the base's module names, or use an earlier checkpoint",
            )  # fmt: skip
    saved = [str(module) for module in config.raw.get("modules_to_save") or ()]
    gone = [module for module in saved if not any(f".{module}." in f".{key}" and "lora_" not in key for key in shapes)]
    if gone:
        yield said(
            name, "modules trained in full are not in the file", ", ".join(gone),
            "the save left modules_to_save out", "save it with PEFT's save_pretrained, or multilora_store.save",
        )  # fmt: skip


def _values(name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[Diagnosis]:
    bad = nonfinite(tensors.items())
    if bad:
        yield said(
            name, f"{len(bad)} tensors hold a NaN or an infinity", some(sorted(bad)),
            "training had diverged when it was saved", "use the last checkpoint before that",
        )  # fmt: skip
    ups = [tensor for key, tensor in tensors.items() if re.search(r"\.lora_(embedding_)?B(\.|$)", key)]
    if ups and not any(bool(tensor.any()) for tensor in ups):
        yield said(
            name, "it has no effect: every B factor is zero", f"{len(ups)} B factors",
            "it was never trained: frozen, inactive, or its gradients went to another copy",
            "train it: multilora_store.activate(model, ..., trainable=[NAME])",
        )  # fmt: skip


def _missing_parts(found: Recognised) -> Iterator[Diagnosis]:
    """A trainer's folder from which training cannot go on as it was."""
    wanted = {"transformers": ("optimizer state", "scheduler state", "random state", "trainer state")}
    lacking = [part for part in wanted.get(found.writer, ()) if part not in found.parts]
    if lacking:
        yield said(
            str(found.path), f"no {', no '.join(lacking)}", f"{len(found.files)} files, none of that",
            "save_only_model was set, or the save was cut short",
            "training starts with fresh state from here; use a whole checkpoint to resume",
        )  # fmt: skip


def _unread(path: str) -> Diagnosis:
    return said(
        path, "it is a pickle, so it was not looked into", path,
        "a pickle can name code to run when it is loaded",
        "allow_pickle=true reads it by restricted loading, which runs none",
    )  # fmt: skip


def _refused(subject: str, error: MultiLoRAError) -> Diagnosis:
    return said(subject, error.what, type(error).__name__, error.why, error.remedy)


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total
