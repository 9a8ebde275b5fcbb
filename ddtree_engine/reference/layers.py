"""The parts that target and drafter share: rotary positions, attention weights, gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .config import BlockConfig
from .weights import Weights


class Rope:
    """Rotary position embedding over the whole head, halves paired (the NeoX layout)."""

    def __init__(self, config: BlockConfig, positions: int, device: torch.device | str, dtype: torch.dtype) -> None:
        half = config.head_dim // 2
        inverse = config.rope_theta ** (-torch.arange(half, device=device).float() / half)
        angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
        # Turning (a, b) into (-b, a) is a roll by half a head with the first half's sign changed, kept in the sine.
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        self._half = half

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] -> two tables [n, 1, head_dim] for `turn`."""
        return self._cos[positions, None], self._sin[positions, None]

    def turn(self, heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """heads [n, any number of heads, head_dim]."""
        cos, sin = tables
        return torch.addcmul(heads * cos, heads.roll(self._half, -1), sin)


@dataclass(frozen=True)
class Block:
    """Weights of one layer. Projections that read the same input are one matrix. Matrices are stored [in, out], the
    transpose of a checkpoint's layout: for the few rows of a decoding step that is the faster one to multiply with."""

    input_norm: torch.Tensor  # [D]
    qkv: torch.Tensor  # [D, (H + 2 KV) * HD], columns: queries, keys, values
    qk_norm: torch.Tensor  # [H + KV, HD]
    output: torch.Tensor  # [H * HD, D]
    post_norm: torch.Tensor  # [D]
    gate_up: torch.Tensor  # [D, 2 I]
    down: torch.Tensor  # [I, D]

    @classmethod
    def take(cls, weights: Weights, prefix: str, config: BlockConfig, intermediate: int) -> Block:
        hidden, size = config.hidden, config.head_dim
        sizes = (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
        norms = [
            weights.take(f"{prefix}.self_attn.{name}_norm.weight", size).expand(heads, size)
            for name, heads in sizes[:2]
        ]
        return cls(
            input_norm=weights.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=columns(*(weights.take(f"{prefix}.self_attn.{n}_proj.weight", h * size, hidden) for n, h in sizes)),
            qk_norm=torch.cat(norms),
            output=columns(weights.take(f"{prefix}.self_attn.o_proj.weight", hidden, config.heads * size)),
            post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=columns(
                *(weights.take(f"{prefix}.mlp.{name}_proj.weight", intermediate, hidden) for name in ("gate", "up"))
            ),
            down=columns(weights.take(f"{prefix}.mlp.down_proj.weight", hidden, intermediate)),
        )

    def mlp(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        gate, up = (rms_norm(x, self.post_norm, eps) @ self.gate_up).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down


def columns(*matrices: torch.Tensor) -> torch.Tensor:
    """Matrices [out, in] of a checkpoint, one under the other -> [in, sum of out]."""
    return torch.cat(matrices).t().contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def project(
    x: torch.Tensor, block: Block, config: BlockConfig, rope: Rope, tables: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [n, D], normalised -> queries [n, H, HD], keys [n, KV, HD] (both normalised and turned), values [n, KV, HD]."""
    heads, groups = config.heads, config.kv_heads
    qkv = (x @ block.qkv).view(len(x), heads + 2 * groups, config.head_dim)
    qk = rope.turn(rms_norm(qkv[:, : heads + groups], block.qk_norm, config.eps), tables)
    return qk[:, :heads], qk[:, heads:], qkv[:, heads + groups :]


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
