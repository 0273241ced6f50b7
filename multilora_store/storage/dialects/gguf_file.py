"""llama.cpp's LoRA files, as `convert_lora_to_gguf.py` writes them: `blk.0.attn_q.weight.lora_a`, `.lora_b`.

The names are those of GGUF's own map for the base's architecture. Where llama.cpp orders the rows of the query and key
projections anew for its rotary embedding, the rows of their `lora_b` are put back, which needs the number of heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from multilora_store.errors import DamagedError, UnsupportedError, UsageError
from multilora_store.storage.dialects.foreign import source
from multilora_store.storage.dialects.pairs import PREFIX, Pair, lora_config
from multilora_store.storage.failures import translated
from multilora_store.storage.peft_dirs import PeftFolder

if TYPE_CHECKING:
    import torch

__all__ = ["GgufAdapter", "open_gguf", "read_gguf"]

_SPLIT: Final = (
    *(f"self_attn.{leaf}_proj" for leaf in "qkvo"),
    *(f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")),
)
_FUSED: Final = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
# Architecture -> transformers' modules of a block, and whether llama.cpp orders rows of q and k anew (its
# LlamaModel.permute).
_ARCHITECTURES: Final[Mapping[str, tuple[tuple[str, ...], bool]]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "granite"), (_SPLIT, True)),
        **dict.fromkeys(("qwen2", "qwen3", "gemma", "gemma2", "gemma3", "smollm3", "olmo2"), (_SPLIT, False)),
        "phi3": (_FUSED, False),
    }
)
_KEY: Final = re.compile(r"(?P<module>.+)\.weight\.(?P<role>lora_[ab])")
_BLOCK: Final = re.compile(r"blk\.(\d+)\.")
_ROLES: Final = {"lora_a": "down", "lora_b": "up"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufAdapter:
    """A LoRA file of llama.cpp, its tensors not yet read.

    Attributes:
        where: The file.
        architecture: Of the base, in llama.cpp's word: `llama`, `qwen2`.
        alpha: Of every module; the scale is alpha / rank.
        pairs: Module path in transformers' naming -> role (`down`, `up`) -> tensor's name in the file.
        tensors: By name in the file, as gguf's reader gives them.
    """

    where: str
    architecture: str
    alpha: float
    pairs: Mapping[str, Mapping[str, str]]
    tensors: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """As torch has it: rows first."""
        return tuple(int(length) for length in reversed(self.tensors[name].shape))

    def read(self, name: str) -> torch.Tensor:
        """A tensor in its own dtype where torch has that, else in float32.

        Raises:
            DamagedError: its bytes are not those of its type.
        """
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        found = self.tensors[name]
        try:
            if found.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64):
                return torch.from_numpy(np.array(found.data))
            plain = torch.from_numpy(np.array(dequantize(found.data, found.tensor_type), dtype=np.float32))
        except (ValueError, NotImplementedError) as error:
            raise DamagedError(f"{self.where}: tensor {name!r} cannot be read: {error}", tensor=name) from error
        return plain.to(torch.bfloat16) if found.tensor_type is GGMLQuantizationType.BF16 else plain


def open_gguf(path: str | Path) -> GgufAdapter:
    """Open a LoRA file of llama.cpp on this machine.

    Raises:
        UsageError: nothing is there, it holds a model instead, or `gguf` is not installed.
        UnsupportedError: an architecture or a module that has no name here.
        DamagedError: it is no whole GGUF file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"{file} is not a file", remedy="name a .gguf file on this machine")
    reader = _reader(file)
    kind, adapter = (_field(reader, key) for key in ("general.type", "adapter.type"))
    if (kind, adapter) != ("adapter", "lora"):
        raise UsageError(
            f"{file} holds no LoRA adapter but {kind or 'a model'}",
            why="its general.type and adapter.type are not adapter and lora",
            remedy="as a base it is named with base=hf base.path=FOLDER base.gguf_file=FILE",
        )
    architecture, alpha = str(_field(reader, "general.architecture")), _field(reader, "adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise DamagedError(f"{file} tells no alpha", why="adapter.lora.alpha is absent", remedy="convert it again")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    pairs = _modules(tensors, architecture, str(file))
    return GgufAdapter(where=str(file), architecture=architecture, alpha=float(alpha), pairs=pairs, tensors=tensors)


def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UsageError("GGUF files need the package gguf", remedy="pip install gguf (the extra gguf)") from error
    with translated("reading", str(file)):
        try:
            return GGUFReader(file)
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise DamagedError(f"{file} is no whole GGUF file: {error}", remedy="copy or convert it again") from error


def _field(reader: Any, key: str) -> Any:
    found = reader.get_field(key)
    return None if found is None else found.contents()


def _modules(tensors: Mapping[str, Any], architecture: str, where: str) -> dict[str, dict[str, str]]:
    """Paths in transformers' naming, by gguf's own map of names; what it does not know is refused."""
    names = dict(_names(architecture, tensors, where))
    pairs: dict[str, dict[str, str]] = {}
    for name in sorted(tensors):
        match = _KEY.fullmatch(name)
        module = match["module"] if match is not None else name
        if match is None or module not in names:
            raise UnsupportedError(
                f"{where}: tensor {name!r} belongs to no linear layer that is known of {architecture}",
                why="embeddings, experts and norms of GGUF adapters have no map to PEFT here",
                remedy="take the PEFT folder that it was converted from",
                tensor=name,
            )
        pairs.setdefault(names[module], {})[_ROLES[match["role"]]] = name
    return pairs


def _names(architecture: str, tensors: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """GGUF's name of each module that an adapter may have -> its path in transformers' naming."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{where} is for the architecture {architecture!r}, whose layers are not known here",
            why=f"known: {', '.join(sorted(_ARCHITECTURES))}",
            remedy="take the PEFT folder that it was converted from",
        )
    blocks = 1 + max((int(match[1]) for name in tensors if (match := _BLOCK.match(name))), default=0)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(arch, blocks)
    leaves, _ = _ARCHITECTURES[architecture]
    paths = [f"model.layers.{block}.{leaf}" for block in range(blocks) for leaf in leaves]
    for path in (*paths, "lm_head"):
        name = known.get_name(path)
        if name is not None:
            yield name, path


@source("gguf")
def read_gguf(
    location: str, *, heads: int | None = None, kv_heads: int | None = None, base: str | None = None
) -> PeftFolder:
    """Read a LoRA file of llama.cpp; the rows of q and k are put back where llama.cpp orders them anew.

    Args:
        location: The `.gguf` file, on this machine.
        heads: Attention heads of the base, needed for `llama` and its kin where q or k are adapted.
        kv_heads: Its key heads; None: by the sizes of q and k.
        base: Name of the base model, for the configuration.

    Raises:
        UsageError: nothing is there, it is no adapter, or the heads are needed and not given, or do not fit.
        UnsupportedError: an architecture or a module that has no name here.
        DamagedError: half a pair, factors that share no rank, or a file that is not whole.
    """
    found = open_gguf(location)
    pairs = {path: _pair(found, path, roles) for path, roles in found.pairs.items()}
    turned = _turned(found, heads, kv_heads) if _ARCHITECTURES[found.architecture][1] else {}
    tensors = _Tensors(found, pairs, turned)
    config = lora_config(pairs, where=found.where, base=base, task_type="CAUSAL_LM")
    return PeftFolder(config=config, tensors=tensors, where=found.where)


def _pair(found: GgufAdapter, path: str, roles: Mapping[str, str]) -> Pair:
    if set(roles) != {"down", "up"}:
        raise DamagedError(f"{found.where}: module {path} has only one factor", module=path)
    down, up = (found.shape(roles[role]) for role in ("down", "up"))
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise DamagedError(
            f"{found.where}: module {path}: factors of shapes {down} and {up} share no rank", module=path
        )
    return Pair(down=roles["down"], up=roles["up"], rank=down[0], alpha=found.alpha)


def _turned(found: GgufAdapter, heads: int | None, kv_heads: int | None) -> dict[str, int]:
    """Tensors whose rows llama.cpp has ordered anew -> the number of heads that they make up."""
    turned: dict[str, int] = {}
    rows = {path: found.shape(roles["up"])[0] for path, roles in found.pairs.items()}
    for path, roles in found.pairs.items():
        which = path.rpartition(".")[2]
        if which not in ("q_proj", "k_proj"):
            continue
        if heads is None:
            raise UsageError(
                f"{found.where}: the rows of {path} cannot be put in order without the number of attention heads",
                why=f"llama.cpp orders the rows of q and k anew for {found.architecture}, and the file tells no heads",
                remedy="give it as heads=..., behind a path as #heads=...; it is num_attention_heads in the base's "
                "config.json",
            )
        beside = rows.get(path.replace("k_proj", "q_proj"))
        count = heads if which == "q_proj" else kv_heads
        if count is None and beside is not None:
            count = rows[path] * heads // beside
        if not count or rows[path] % (2 * count):
            raise UsageError(
                f"{found.where}: {rows[path]} rows of {path} are not those of {count} heads",
                remedy="heads= and kv_heads= are num_attention_heads and num_key_value_heads in the base's config.json",
            )
        turned[roles["up"]] = count
    return turned


class _Tensors(Mapping[str, "torch.Tensor"]):
    """The factors under PEFT's names, made when they are asked for."""

    def __init__(self, found: GgufAdapter, pairs: Mapping[str, Pair], turned: Mapping[str, int]) -> None:
        self._found, self._turned = found, turned
        self._names = {f"{PREFIX}{path}.lora_A.weight": pair.down for path, pair in pairs.items()}
        self._names |= {f"{PREFIX}{path}.lora_B.weight": pair.up for path, pair in pairs.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._found.read(self._names[name])
        heads = self._turned.get(self._names[name])
        if heads is None:
            return tensor
        halves = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, tensor.shape[1])
        return halves.transpose(1, 2).reshape(tensor.shape).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)
