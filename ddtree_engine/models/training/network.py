"""Target and drafter as trainable modules. Their parameters carry the names of the checkpoint formats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from .shapes import Pair

Tables = tuple[torch.Tensor, torch.Tensor]  # cosine and sine, [positions, head_dim] or [batch, positions, head_dim]


def rope_tables(pair: Pair, positions: int, device: torch.device | str) -> Tables:
    half = pair.head_dim // 2
    inverse = pair.rope_theta ** (-torch.arange(half, device=device).float() / half)
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def turn(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """x [batch, positions, heads, head_dim]"""
    cos, sin = (table.unsqueeze(-2) for table in tables)
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * (x.float() * scale).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.q_proj = nn.Linear(pair.hidden, pair.heads * pair.head_dim, bias=False)
        self.k_proj = nn.Linear(pair.hidden, pair.kv_heads * pair.head_dim, bias=False)
        self.v_proj = nn.Linear(pair.hidden, pair.kv_heads * pair.head_dim, bias=False)
        self.o_proj = nn.Linear(pair.heads * pair.head_dim, pair.hidden, bias=False)
        self.q_norm = Norm(pair.head_dim, pair.eps)
        self.k_norm = Norm(pair.head_dim, pair.eps)

    def queries(self, x: torch.Tensor, tables: Tables) -> torch.Tensor:
        heads = self.q_proj(x).unflatten(-1, (self.pair.heads, self.pair.head_dim))
        return turn(self.q_norm(heads), tables)

    def keys_values(self, x: torch.Tensor, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.k_proj(x).unflatten(-1, (self.pair.kv_heads, self.pair.head_dim))
        values = self.v_proj(x).unflatten(-1, (self.pair.kv_heads, self.pair.head_dim))
        return turn(self.k_norm(keys), tables), values

    def mix(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=bias,
            is_causal=causal,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(pair.hidden, pair.intermediate, bias=False)
        self.up_proj = nn.Linear(pair.hidden, pair.intermediate, bias=False)
        self.down_proj = nn.Linear(pair.intermediate, pair.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.input_layernorm = Norm(pair.hidden, pair.eps)
        self.self_attn = Attention(pair)
        self.post_attention_layernorm = Norm(pair.hidden, pair.eps)
        self.mlp = MLP(pair)


def stack(layers: nn.ModuleList) -> Iterable[Layer]:
    return cast(Iterable[Layer], layers)


class TargetNetwork(nn.Module):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.embed_tokens = nn.Embedding(pair.vocabulary, pair.hidden)
        self.layers = nn.ModuleList(Layer(pair) for _ in range(pair.layers))
        self.norm = Norm(pair.hidden, pair.eps)
        initialise(self, pair.layers)

    def forward(
        self, ids: torch.Tensor, tables: Tables, capture: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [batch, n] -> (normalised output [batch, n, D], features [batch, n, len(capture) * D])."""
        x = self.embed_tokens(ids)
        captured = [x[..., :0]]
        for number, layer in enumerate(stack(self.layers)):
            hidden, attention = layer.input_layernorm(x), layer.self_attn
            keys, values = attention.keys_values(hidden, tables)
            x = x + attention.mix(attention.queries(hidden, tables), keys, values, None, causal=True)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if number in capture:
                captured.append(x)
        return self.norm(x), torch.cat(captured, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.embed_tokens.weight)

    def loss(self, ids: torch.Tensor, tables: Tables) -> torch.Tensor:
        hidden, _ = self(ids[:, :-1], tables)
        return F.cross_entropy(self.logits(hidden).flatten(0, 1).float(), ids[:, 1:].flatten())


class DraftNetwork(nn.Module):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(pair) for _ in range(pair.draft_layers))
        self.norm = Norm(pair.hidden, pair.eps)
        self.fc = nn.Linear(len(pair.target_layers) * pair.hidden, pair.hidden, bias=False)
        self.hidden_norm = Norm(pair.hidden, pair.eps)
        initialise(self, pair.draft_layers)

    def forward(
        self, features: torch.Tensor, context: Tables, blocks: torch.Tensor, block: Tables, bias: torch.Tensor
    ) -> torch.Tensor:
        """features [batch, n, F] of the context; embeddings `blocks` [batch, m, D]; bias [batch, 1, m, n + m]."""
        known, x = self.hidden_norm(self.fc(features)), blocks
        for layer in stack(self.layers):
            attention, hidden = layer.self_attn, layer.input_layernorm(x)
            own, before = attention.keys_values(hidden, block), attention.keys_values(known, context)
            keys, values = torch.cat([before[0], own[0]], 1), torch.cat([before[1], own[1]], 1)
            x = x + attention.mix(attention.queries(hidden, block), keys, values, bias, causal=False)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def initialise(module: nn.Module, layers: int) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            residual = "o_proj" in name or "down_proj" in name
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
