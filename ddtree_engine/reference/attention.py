"""Attention with grouped heads, normalised queries and keys and, in hybrids, a gate on its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .cache import KVCache
from .config import BlockConfig
from .layers import Rope, Tables, columns, rms_norm
from .weights import Weights


@dataclass(frozen=True)
class Attention:
    """Weights of one attention layer. The projections that read the same input are one matrix."""

    config: BlockConfig
    norm: torch.Tensor  # [D]
    qkv: torch.Tensor  # [D, (H + 2 KV) * HD], columns: queries, keys, values; then, if gated, H * HD for the gate
    qk_norm: torch.Tensor  # [H + KV, HD]
    output: torch.Tensor  # [H * HD, D]

    @classmethod
    def take(cls, weights: Weights, prefix: str, config: BlockConfig) -> Attention:
        hidden, heads, groups, size = config.hidden, config.heads, config.kv_heads, config.head_dim
        prefix, norm = f"{prefix}.self_attn", f"{prefix}.input_layernorm.weight"
        queries = weights.take(f"{prefix}.q_proj.weight", heads * size * (2 if config.gated else 1), hidden)
        matrices = [weights.take(f"{prefix}.{name}_proj.weight", groups * size, hidden) for name in ("k", "v")]
        if config.gated:  # each head's query rows are followed by its gate rows
            queries, gate = (half.flatten(0, 1) for half in queries.view(heads, 2, size, hidden).unbind(1))
            matrices.append(gate)
        norms = [
            (weights.take(f"{prefix}.{name}_norm.weight", size) + config.norm_offset).expand(count, size)
            for name, count in (("q", heads), ("k", groups))
        ]
        return cls(
            config=config,
            norm=weights.take(norm, hidden) + config.norm_offset,
            qkv=columns(queries, *matrices),
            qk_norm=torch.cat(norms),
            output=columns(weights.take(f"{prefix}.o_proj.weight", hidden, heads * size)),
        )

    def run(
        self, x: torch.Tensor, rope: Rope, tables: Tables, cache: KVCache, layer: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [n, D] -> [n, D]. Keys and values go into `cache` behind the decided tokens; bias [n, decided + n]."""
        config = self.config
        heads, groups, size = config.heads, config.kv_heads, config.head_dim
        all_heads = (rms_norm(x, self.norm, config.eps) @ self.qkv).view(len(x), -1, size)
        turned = rope.turn(rms_norm(all_heads[:, : heads + groups], self.qk_norm, config.eps), tables)
        keys, values = cache.write(layer, turned[:, heads:], all_heads[:, heads + groups : heads + 2 * groups])
        mixed = attend(turned[:, :heads], keys, values, bias)
        if config.gated:
            mixed = mixed * all_heads[:, heads + 2 * groups :].flatten(1).sigmoid()
        return mixed @ self.output


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """queries [n, H, HD], keys and values [KV, N, HD], bias [n, N] or None -> [n, H * HD].

    The heads of a group are laid out as further rows of their key/value head, so nothing is repeated in memory.
    """
    n, heads, size = queries.shape
    groups = len(keys)
    share = heads // groups
    rows = queries.view(n, groups, share, size).permute(1, 2, 0, 3).reshape(groups, share * n, size)
    if bias is not None:
        bias = bias.repeat(share, 1)[None, None]
    out = F.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=bias)[0]
    return out.view(groups, share, n, size).permute(2, 0, 1, 3).reshape(n, heads * size)
