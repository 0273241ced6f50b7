"""Tiny models with the module names of real ones: every value a function of the seed, no download."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["TinyDecoder", "TinyMixture", "tiny_decoder", "tiny_mixture"]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // 2, bias=False)
        self.v_proj = nn.Linear(width, width // 2, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query = self.q_proj(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = (
            projected.view(batch, length, self.heads // 2, -1).transpose(1, 2).repeat_interleave(2, dim=1)
            for projected in (self.k_proj(x), self.v_proj(x))
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Experts(nn.Module):
    """Fused experts, (experts, in, out), all of them summed with the router's weights."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, width, 4 * width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        gate, up = torch.einsum("bti,eio->ebto", x, self.gate_up_proj).chunk(2, dim=-1)
        out = torch.einsum("ebto,eoi->ebti", nn.functional.silu(gate) * up, self.down_proj)
        return torch.einsum("ebti,bte->bti", out, shares)


class _MixtureMLP(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = _Experts(width, count)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, self.gate(x).softmax(-1))
        return out


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width)
        self.self_attn = _Attention(width, heads)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Body(nn.Module):
    def __init__(self, embed_tokens: nn.Embedding, layers: nn.ModuleList, norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class TinyDecoder(nn.Module):
    """A decoder with Llama's module names: token ids (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, *, depth: int = 2, width: int = 16, heads: int = 4, vocabulary: int = 32) -> None:
        super().__init__()
        layers = [_Layer(width, heads, self.feed_forward(width)) for _ in range(depth)]
        self.model = _Body(nn.Embedding(vocabulary, width), nn.ModuleList(layers), nn.RMSNorm(width))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def feed_forward(self, width: int) -> nn.Module:
        """The MLP of one layer."""
        return _MLP(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(input_ids))
        return logits

    def example(self) -> Tensor:
        """A batch of token ids, always the same, (2, 6)."""
        return torch.arange(12).reshape(2, 6) % self.lm_head.out_features


class TinyMixture(TinyDecoder):
    """The same with fused experts in every layer (`mlp.experts.gate_up_proj`, a parameter and no module)."""

    def feed_forward(self, width: int) -> nn.Module:
        """Four experts."""
        return _MixtureMLP(width, 4)


def tiny_decoder(*, seed: int = 0, depth: int = 2, width: int = 16) -> TinyDecoder:
    """A TinyDecoder whose weights depend on `seed` alone; the global random state does not move."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyDecoder(depth=depth, width=width)


def tiny_mixture(*, seed: int = 0, depth: int = 2, width: int = 16) -> TinyMixture:
    """A TinyMixture whose weights depend on `seed` alone; the global random state does not move."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyMixture(depth=depth, width=width)
