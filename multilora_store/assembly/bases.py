"""Base providers: the demo's tiny model, a local Hugging Face folder, any importable callable."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from multilora_store.adapter import AdapterConfig
from multilora_store.errors import BaseModelError, UsageError
from multilora_store.plugins import default_registry, import_file

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEMO_TITLES", "DemoModel", "build_base", "demo_adapters", "demo_base", "hf_base", "python_base"]

DEMO_TITLES: Final[Mapping[str, str]] = {"a": "code style", "b": "Chinese tone", "c": "safety"}
"""The demo's adapters and what each stands for."""
_DEMO_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "a": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "b": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "c": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
}


def build_base(provider: str, **parameters: Any) -> nn.Module:
    """Build a base with the base provider called `provider`.

    Raises:
        PluginError: there is no such provider.
        BaseModelError: it cannot be built from what was given.
    """
    built: nn.Module = default_registry().get("base_provider", provider).load()(**parameters)
    return built


class DemoBlock(nn.Module):
    """A pre-norm transformer block with the usual seven projections."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_norm = nn.RMSNorm(width)
        self.self_attn = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.self_attn.add_module(name, nn.Linear(width, width, bias=False))
        self.output_norm = nn.RMSNorm(width)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(width, hidden, bias=False)
        self.mlp.up_proj = nn.Linear(width, hidden, bias=False)
        self.mlp.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend and mix: (batch, tokens, width) to the same."""
        attn: Any = self.self_attn
        mlp: Any = self.mlp
        normed = self.input_norm(x)
        batch, tokens, width = normed.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (
            project(normed).view(shape).transpose(1, 2) for project in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + attn.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.output_norm(x)
        return x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))  # type: ignore[no-any-return]


class DemoModel(nn.Module):
    """A tiny causal language model in plain torch, with the module names of Llama.

    Args:
        vocabulary: Number of tokens.
        width: Width of the residual stream.
        layers: Number of blocks.
        heads: Heads of each attention.
        hidden: Width inside each MLP.
    """

    _no_split_modules = ("DemoBlock",)

    def __init__(
        self, *, vocabulary: int = 256, width: int = 64, layers: int = 4, heads: int = 4, hidden: int = 128
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DemoBlock(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch, tokens, vocabulary) of token ids (batch, tokens)."""
        x = self.embed_tokens(input_ids)
        for block in self.layers:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def demo_base(*, seed: int = 0, device: str = "cpu", **sizes: int) -> DemoModel:
    """The demo's base: the same weights for the same seed, whatever the global random state.

    Args:
        seed: Of its weights.
        device: Where it goes; `meta` for its structure alone.
        sizes: Sizes of `DemoModel` that differ from the default.
    """
    with torch.device("meta"):
        model = DemoModel(**sizes)
    model.name_or_path = f"demo-{seed}"  # type: ignore[assignment]  # a plain attribute, as Hugging Face models have
    if device == "meta":
        return model.eval()
    draw = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.ones(parameter.shape)
                if parameter.dim() > 1:
                    value = torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5
                module._parameters[name] = nn.Parameter(value.to(device))
    return model.eval()


def demo_adapters(base: nn.Module | None = None) -> dict[str, tuple[AdapterConfig, dict[str, torch.Tensor]]]:
    """The demo's adapters `a`, `b`, `c`: configuration and weights, the same on every machine.

    For the demo only: their weights are drawn, not trained, and both factors are non-zero so that each has an effect.

    Args:
        base: The demo's base; only its shapes are read.
    """
    model = demo_base(device="meta") if base is None else base
    shapes = {path: module.weight.shape for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    made: dict[str, tuple[AdapterConfig, dict[str, torch.Tensor]]] = {}
    for number, (name, fields) in enumerate(_DEMO_CONFIGS.items(), start=1):
        config = AdapterConfig.parse(
            {"peft_type": "LORA", "base_model_name_or_path": "demo-0", **fields}, where=f"the demo's adapter {name!r}"
        )
        draw = torch.Generator().manual_seed(number)
        tensors: dict[str, torch.Tensor] = {}
        for path, (outputs, inputs) in shapes.items():
            if path.rpartition(".")[2] in fields["target_modules"]:
                key = f"base_model.model.{path}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(config.r, inputs, generator=draw) / inputs**0.5
                tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, config.r, generator=draw) * 0.05
        made[name] = config, tensors
    return made


def hf_base(
    *,
    path: str,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    **options: Any,
) -> nn.Module:
    """A causal language model from a local Hugging Face folder, without the network.

    Args:
        path: The folder, with `config.json` and safetensors, or with a GGUF file.
        gguf_file: The GGUF file in the folder; found by itself if it is the only one and there are no safetensors.
        dtype: A torch dtype by name; `auto` as the folder says.
        device: Where it goes; `meta` for its structure alone.
        trust_remote_code: Whether code in the folder may run; it never does unasked.
        options: Passed to `from_pretrained`.

    Raises:
        BaseModelError: no such folder, no model in it, or transformers is absent or refuses it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise BaseModelError(f"there is no folder {folder}", remedy="give the path of a local Hugging Face model")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise BaseModelError(
            "a Hugging Face base needs transformers", remedy="pip install transformers (the extra hf)"
        ) from error
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code, **options}
    gguf = gguf_file or _only_gguf(folder)
    if gguf is not None:
        options["gguf_file"] = gguf
    try:
        if device == "meta":
            if gguf is not None:
                raise BaseModelError(f"{folder}: a GGUF file cannot be opened on meta", remedy="convert it first")
            config = AutoConfig.from_pretrained(folder, **options)
            asked = {} if dtype == "auto" else {"dtype": _dtype(dtype)}
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **asked)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype(dtype), **options).to(device)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise BaseModelError(f"{folder} cannot be opened as a Hugging Face model: {error}") from error
    built: nn.Module = model.eval()
    return built


def _only_gguf(folder: Path) -> str | None:
    files = sorted(item.name for item in folder.glob("*.gguf"))
    if any(folder.glob("*.safetensors")) or not files:
        return None
    if len(files) > 1:
        raise BaseModelError(f"{folder} holds several GGUF files: {', '.join(files)}", remedy="set gguf_file")
    return files[0]


def _dtype(name: str) -> Any:
    if name == "auto":
        return "auto"
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BaseModelError(f"unknown dtype {name!r}", remedy="float32, bfloat16, float16 or auto")
    return found


def python_base(*, target: str, **parameters: Any) -> nn.Module:
    """The base that a callable of the user returns.

    Args:
        target: `package.module:callable`, or `FILE.py:callable`.
        parameters: Passed to it.

    Raises:
        UsageError: the target is not spelled so.
        BaseModelError: it cannot be imported, it failed, or it returned something else than a module.
    """
    module, _, attribute = target.rpartition(":")
    if not module or not attribute:
        raise UsageError(
            f"base target {target!r} is not spelled package.module:callable or FILE.py:callable",
            remedy="e.g. base.target=my_package.models:build, or base.target=./mine.py:build",
        )
    try:
        home = import_file(Path(module).expanduser()) if module.endswith(".py") else importlib.import_module(module)
        found: Callable[..., Any] = getattr(home, attribute)
        built = found(**parameters)
    except Exception as error:
        unseen = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        raise BaseModelError(
            f"base {target}: {type(error).__name__}: {error}",
            why="a console script does not look into the working folder" if unseen else "",
            remedy=f"name the file, ./{module.replace('.', '/')}.py:{attribute}, or set PYTHONPATH" if unseen else "",
        ) from error
    if not isinstance(built, nn.Module):
        raise BaseModelError(f"base {target} returned a {type(built).__name__}, not a torch.nn.Module")
    return built
