"""The parts that every layer shares: rotary positions, normalisation, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .config import BlockConfig
from .weights import Weights

Tables = tuple[torch.Tensor, torch.Tensor]


class Rope:
    """Rotary position embedding over the first `rotary_dim` values of a head, halves paired (the NeoX layout)."""

    def __init__(self, config: BlockConfig, positions: int, device: torch.device | str, dtype: torch.dtype) -> None:
        half = config.rotary_dim // 2
        inverse = config.rope_theta ** (-torch.arange(half, device=device).float() / half)
        angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
        # Turning (a, b) into (-b, a) is a roll by half a head with the first half's sign changed, kept in the sine.
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        self._half = half
        self._whole = config.rotary_dim == config.head_dim

    def at(self, positions: torch.Tensor) -> Tables:
        """[n] -> two tables [n, 1, rotary_dim] for `turn`."""
        return self._cos[positions, None], self._sin[positions, None]

    def turn(self, heads: torch.Tensor, tables: Tables) -> torch.Tensor:
        """heads [n, any number of heads, head_dim]."""
        cos, sin = tables
        turned = heads if self._whole else heads[..., : 2 * self._half]
        turned = torch.addcmul(turned * cos, turned.roll(self._half, -1), sin)
        return turned if self._whole else torch.cat([turned, heads[..., 2 * self._half :]], -1)


@dataclass(frozen=True)
class MLP:
    """Weights of a layer's second half. Matrices are stored [in, out] here and in all layers, the transpose of a
    checkpoint's layout: for the few rows of a decoding step that is the faster one to multiply with."""

    norm: torch.Tensor  # [D]
    gate_up: torch.Tensor  # [D, 2 I]
    down: torch.Tensor  # [I, D]

    @classmethod
    def take(cls, weights: Weights, prefix: str, config: BlockConfig) -> MLP:
        hidden, inner = config.hidden, config.intermediate
        return cls(
            norm=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden) + config.norm_offset,
            gate_up=columns(
                *(weights.take(f"{prefix}.mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
            ),
            down=columns(weights.take(f"{prefix}.mlp.down_proj.weight", hidden, inner)),
        )

    def run(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        gate, up = (rms_norm(x, self.norm, eps) @ self.gate_up).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down


def columns(*matrices: torch.Tensor) -> torch.Tensor:
    """Matrices [out, in] of a checkpoint, one under the other -> [in, sum of out]."""
    return torch.cat(matrices).t().contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight
