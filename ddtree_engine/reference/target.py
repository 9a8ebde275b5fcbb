"""The model whose output is wanted: a plain or hybrid decoder that runs chains and trees alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .attention import Attention
from .cache import KVCache
from .config import TargetConfig, target_config
from .delta_net import DeltaNet, DeltaState
from .layers import MLP, Rope, columns, rms_norm
from .span import Span
from .state import TargetState
from .weights import Weights


@dataclass(frozen=True)
class Pass:
    """What a forward pass gives for its n tokens."""

    hidden: torch.Tensor  # [n, D], normalised: input of the LM head
    features: torch.Tensor | None  # [n, len(capture) * D], what the drafter reads; None if nothing was captured


class Target:
    def __init__(
        self,
        config: TargetConfig,
        embedding: torch.Tensor,
        head: torch.Tensor,
        norm: torch.Tensor,
        layers: list[tuple[Attention | DeltaNet, MLP]],
        positions: int,
        packed: bool = False,
    ) -> None:
        self.config = config
        self.embedding = embedding  # [V, D]
        self.head = head  # [D, V]
        self._norm = norm
        self._layers = layers
        self._rope = Rope(config.block, positions, embedding.device, embedding.dtype)
        self._packed = packed

    @classmethod
    def load(
        cls, folder: Path, positions: int, device: torch.device | str, dtype: torch.dtype, *, packed: bool = False
    ) -> Target:
        """`positions`: how many the rotary tables cover. `packed`: linear layers run all nodes at once instead of one
        after the other; the same up to rounding."""
        config = target_config(folder)
        block, prefix = config.block, config.prefix
        weights = Weights(folder, device, dtype)
        embedding = weights.take(f"{prefix}.embed_tokens.weight", config.vocab, block.hidden)
        if config.tied:
            weights.drop("lm_head.weight")  # some tied checkpoints repeat the embedding under this name
            head = columns(embedding)
        else:
            head = columns(weights.take("lm_head.weight", config.vocab, block.hidden))
        if prefix != "model":  # other modalities, and heads that predict further tokens
            weights.drop("model.visual.", "mtp.")
        norm = weights.take(f"{prefix}.norm.weight", block.hidden) + block.norm_offset
        layers: list[tuple[Attention | DeltaNet, MLP]] = []
        for number in range(block.layers):
            name = f"{prefix}.layers.{number}"
            mixer: Attention | DeltaNet
            if number in config.attention_layers or config.linear is None:
                mixer = Attention.take(weights, name, block)
            else:
                mixer = DeltaNet.take(weights, name, block, config.linear)
            layers.append((mixer, MLP.take(weights, name, block)))
        weights.finish()
        return cls(config, embedding, head, norm, layers, positions, packed)

    def new_state(self, capacity: int) -> TargetState:
        """The state of a request that may get `capacity` tokens, undecided ones included."""
        config, device, dtype = self.config, self.embedding.device, self.embedding.dtype
        kv = KVCache(config.block, len(config.attention_layers), capacity, device, dtype)
        linear = config.block.layers - len(config.attention_layers)
        deltas = [DeltaState(config.linear, device, dtype, self._packed) for _ in range(linear) if config.linear]
        return TargetState(kv, deltas)

    def forward(self, span: Span, state: TargetState, capture: tuple[int, ...] = ()) -> Pass:
        """Runs the span behind `state`, which must hold `span.start` decided tokens. The span's own tokens are in the
        state afterwards but not decided: `state.keep` says which of them are.

        `capture`: layers whose outputs make up the features, in this order.
        """
        if span.start != state.length:
            raise ValueError(f"the span starts behind {span.start} tokens, the state holds {state.length}")
        eps = self.config.block.eps
        tables = self._rope.at(span.positions)
        bias = span.bias(self.embedding.dtype)
        captured: dict[int, torch.Tensor] = {}
        attention, linear = 0, 0
        x = self.embedding[span.tokens]
        for number, (mixer, mlp) in enumerate(self._layers):
            if isinstance(mixer, Attention):
                x = x + mixer.run(x, self._rope, tables, state.kv, attention, bias)
                attention += 1
            else:
                x = x + mixer.run(x, span, state.deltas[linear])
                linear += 1
            x = x + mlp.run(x, eps)
            if number in capture:
                captured[number] = x
        features = torch.cat([captured[number] for number in capture], -1) if capture else None
        return Pass(rms_norm(x, self._norm, eps), features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, D] -> [n, V]"""
        return hidden @ self.head
