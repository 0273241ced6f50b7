"""Kohya's module names: every dot an underscore, so that the way back needs a list of the words that models use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from multilora_store.errors import UnsupportedError

__all__ = ["flatten", "from_sgm", "restore"]

# Segments of module paths as diffusers, CLIP, T5, Flux and the usual language models have them, and of the original
# Stable Diffusion (sgm). An entry with a dot stands where its first half alone would make the split ambiguous.
_WORDS: Final = frozenset(
    """
    down_blocks mid_block up_blocks attentions resnets transformer_blocks single_transformer_blocks attn attn1 attn2
    to_q to_k to_v to_out add_q_proj add_k_proj add_v_proj to_add_out proj_in proj_out proj_mlp ff ff_context net
    net.0.proj
    conv1 conv2 conv conv_in conv_out conv_shortcut time_emb_proj time_embedding add_embedding linear_1 linear_2
    downsamplers upsamplers norm1.linear norm1_context.linear norm.linear norm_out.linear x_embedder context_embedder
    text_model encoder decoder layers self_attn q_proj k_proj v_proj out_proj mlp fc1 fc2 text_projection
    model language_model o_proj qkv_proj gate_proj up_proj down_proj gate_up_proj embed_tokens lm_head
    block layer SelfAttention.q SelfAttention.k SelfAttention.v SelfAttention.o DenseReluDense wi_0 wi_1 wo
    double_blocks single_blocks img_attn txt_attn
    img_attn.proj txt_attn.proj img_mlp txt_mlp img_mod txt_mod qkv lin linear1 linear2 modulation
    input_blocks middle_block output_blocks in_layers out_layers emb_layers skip_connection op time_embed label_emb
    """.split()
)
_BY_TOKENS: Final = {tuple(re.split(r"[._]", word)): word for word in _WORDS}
_LONGEST: Final = max(map(len, _BY_TOKENS))


def flatten(path: str) -> str:
    """The module path as kohya spells it."""
    return path.replace(".", "_")


def restore(flat: str, modules: Iterable[str] | None = None) -> str:
    """The module path that `flat` stands for.

    Args:
        flat: Kohya's spelling, without the component (`down_blocks_0_attentions_0_proj_in`).
        modules: Names of the model's modules, where they are known: the only way for words that are not listed here.

    Raises:
        UnsupportedError: there is no such path, or more than one.
    """
    if modules is not None:
        found = sorted({name for name in modules if flatten(name) == flat})
    else:
        found = _paths(flat.split("_"))
    if len(found) != 1:
        raise UnsupportedError(
            f"the module {flat!r} cannot be told" + (f": {' or '.join(found[:5])}" if found else ""),
            why="kohya writes '_' for '.', and "
            + ("several paths read so" if found else "no path of the words that are known here reads so"),
            remedy="give the names of the model's modules with modules=[...]",
            module=flat,
        )
    return found[0]


def _paths(tokens: list[str]) -> list[str]:
    """Every path that the tokens can be split into, shortest splits not preferred: ambiguity must show."""
    ways: list[list[str]] = [[] for _ in tokens] + [[""]]
    for start in range(len(tokens) - 1, -1, -1):
        if tokens[start].isdecimal():
            ways[start] += [f"{tokens[start]}.{rest}" for rest in ways[start + 1]]
        for length in range(1, _LONGEST + 1):
            word = _BY_TOKENS.get(tuple(tokens[start : start + length]))
            if word is not None and start + length <= len(tokens):
                ways[start] += [f"{word}.{rest}" for rest in ways[start + length]]
    return sorted({way.rstrip(".") for way in ways[0]})


_RESNET: Final = {
    "in_layers.2": "conv1",
    "out_layers.3": "conv2",
    "emb_layers.1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}
_ENDS: Final = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
}
_BLOCK: Final = re.compile(r"(input_blocks|middle_block|output_blocks)\.(.+)")


def from_sgm(path: str, *, layers: int = 2) -> str:
    """The path in diffusers' U-Net of a path in the original one (`input_blocks.4.1...`); any other is returned as is.

    Args:
        path: A module path.
        layers: Layers of a block, 2 in every published Stable Diffusion.

    Raises:
        UnsupportedError: a block that the original U-Net does not have.
    """
    found = _BLOCK.fullmatch(path)
    if path in _ENDS or found is None:
        return _ENDS.get(path, path)
    side, parts = found[1], found[2].split(".")
    if side == "middle_block":
        place = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}.get(parts[0])
        return f"mid_block.{place}.{_inside(parts[1:], path)}" if place else _unknown(path)
    if len(parts) < 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return _unknown(path)
    number, kind = int(parts[0]), parts[1]
    if side == "input_blocks":
        block, layer = divmod(number - 1, layers + 1)
        if parts[2:] == ["op"]:
            return f"down_blocks.{block}.downsamplers.0.conv"
    else:
        block, layer = divmod(number, layers + 1)
        if parts[2:] == ["conv"]:
            return f"up_blocks.{block}.upsamplers.0.conv"
    holder = {"0": "resnets", "1": "attentions"}.get(kind)
    name = "down_blocks" if side == "input_blocks" else "up_blocks"
    return f"{name}.{block}.{holder}.{layer}.{_inside(parts[2:], path)}" if holder else _unknown(path)


def _inside(parts: list[str], path: str) -> str:
    rest = ".".join(parts)
    if rest.startswith(("in_layers", "out_layers", "emb_layers", "skip_connection")):
        return _RESNET.get(rest) or _unknown(path)
    return rest


def _unknown(path: str) -> str:
    raise UnsupportedError(
        f"{path!r} is no module of the original Stable Diffusion U-Net",
        remedy="give the names of the model's modules with modules=[...]",
        module=path,
    )
