"""The linear-attention layer of hybrids: a short causal convolution, then the gated delta rule, then a gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import delta_rule
from .config import BlockConfig, LinearConfig
from .delta_rule import Inputs, Packed
from .layers import columns, rms_norm
from .span import Span
from .weights import Weights


class DeltaState:
    """One layer's state of one request. Like the KV cache, a pass leaves its tokens undecided until `keep` names a
    path."""

    def __init__(self, config: LinearConfig, device: torch.device | str, dtype: torch.dtype, packed: bool) -> None:
        self._packed = packed
        # The convolution's inputs before the next token, oldest first.
        self.window = torch.zeros(config.kernel - 1, config.channels, device=device, dtype=dtype)
        # Sums over the whole context are kept in single precision at least, as all engines do.
        exact = torch.promote_types(dtype, torch.float32)
        shape = (config.value_heads, config.key_dim, config.value_dim)
        self.state = torch.zeros(shape, device=device, dtype=exact)
        self._pending: tuple[torch.Tensor, Inputs, Packed | None] | None = None

    def run(self, channels: torch.Tensor, inputs: Inputs, span: Span) -> torch.Tensor:
        """The rule's outputs [n, H, dv]; `channels` [n, C] are the convolution's inputs, kept for the window."""
        if self._packed and len(span) > 1:
            packed = Packed.run(self.state, inputs, span.parents, span.visible)
            self._pending = (channels, inputs, packed)
            return packed.outputs
        self._pending = (channels, inputs, None)
        return delta_rule.recurrent(self.state, inputs, span.parents)

    def keep(self, path: list[int]) -> None:
        """Makes the pass's tokens `path`, in path order, decided: the state becomes that behind the last of them."""
        if self._pending is None:
            raise ValueError("nothing was run since the last commit")
        channels, inputs, packed = self._pending
        self._pending = None
        if packed is None:
            self.state = delta_rule.commit(self.state, inputs, path)
        else:
            self.state = packed.commit(self.state, path)
        self.window = torch.cat([self.window, channels[path]])[-len(self.window) :]


@dataclass(frozen=True)
class DeltaNet:
    """Weights of one layer. Hk key heads serve Hv value heads; C = 2 Hk dk + Hv dv channels are convolved."""

    config: LinearConfig
    eps: float
    norm: torch.Tensor  # [D]
    inputs: torch.Tensor  # [D, C + Hv dv + 2 Hv], columns: queries, keys, values; the output's gate; beta; decay
    filters: torch.Tensor  # [kernel, C], oldest input first
    rate: torch.Tensor  # [Hv], how fast a head fades: exp(A_log)
    bias: torch.Tensor  # [Hv], added to the decay's input
    output_norm: torch.Tensor  # [dv]
    output: torch.Tensor  # [Hv dv, D]

    @classmethod
    def take(cls, weights: Weights, prefix: str, block: BlockConfig, config: LinearConfig) -> DeltaNet:
        norm, prefix = f"{prefix}.input_layernorm.weight", f"{prefix}.linear_attn"
        width = config.value_heads * config.value_dim
        sizes = (("qkv", config.channels), ("z", width), ("b", config.value_heads), ("a", config.value_heads))
        filters = weights.take(f"{prefix}.conv1d.weight", config.channels, 1, config.kernel)
        exact = torch.promote_types(filters.dtype, torch.float32)
        return cls(
            config=config,
            eps=block.eps,
            norm=weights.take(norm, block.hidden) + block.norm_offset,
            inputs=columns(
                *(weights.take(f"{prefix}.in_proj_{name}.weight", size, block.hidden) for name, size in sizes)
            ),
            filters=filters[:, 0].t().contiguous(),
            rate=weights.take(f"{prefix}.A_log", config.value_heads).to(exact).exp(),
            bias=weights.take(f"{prefix}.dt_bias", config.value_heads),
            output_norm=weights.take(f"{prefix}.norm.weight", config.value_dim),
            output=columns(weights.take(f"{prefix}.out_proj.weight", block.hidden, width)),
        )

    def run(self, x: torch.Tensor, span: Span, state: DeltaState) -> torch.Tensor:
        """x [n, D] -> [n, D]"""
        config, n = self.config, len(span)
        heads, exact = config.value_heads, state.state.dtype
        width = heads * config.value_dim
        channels, gate, beta, decay = (rms_norm(x, self.norm, self.eps) @ self.inputs).split(
            [config.channels, width, heads, heads], -1
        )
        mixed = convolve(channels, state.window, self.filters, span.parents).to(exact)
        keys_width = config.key_heads * config.key_dim
        queries, keys, values = mixed.split([keys_width, keys_width, width], -1)

        def per_value_head(flat: torch.Tensor) -> torch.Tensor:
            unit = flat.view(n, config.key_heads, config.key_dim)
            unit = unit * torch.rsqrt(unit.square().sum(-1, keepdim=True) + 1e-6)
            return unit.repeat_interleave(heads // config.key_heads, 1)

        inputs = Inputs(
            queries=per_value_head(queries) * config.key_dim**-0.5,
            keys=per_value_head(keys),
            values=values.view(n, heads, config.value_dim),
            log_decay=-self.rate * F.softplus(decay.to(exact) + self.bias.to(exact)),
            beta=beta.to(exact).sigmoid(),
        )
        out = state.run(channels, inputs, span).to(x.dtype)
        out = rms_norm(out, self.output_norm, self.eps) * F.silu(gate.view(n, heads, config.value_dim))
        return out.flatten(1) @ self.output


def convolve(channels: torch.Tensor, window: torch.Tensor, filters: torch.Tensor, parents: list[int]) -> torch.Tensor:
    """A token's own channels and those of its nearest ancestors, the last decided tokens included, weighed and summed.

    channels [n, C]; window [kernel - 1, C]; filters [kernel, C] -> [n, C]
    """
    before = len(window)
    taps: list[list[int]] = []  # rows of window and channels that each token reads, oldest first
    for node, parent in enumerate(parents):
        older = taps[parent] if parent >= 0 else list(range(-1, before))
        taps.append([*older[1:], before + node])
    rows = torch.cat([window, channels])
    return F.silu((rows[torch.tensor(taps, device=rows.device)] * filters).sum(1))
