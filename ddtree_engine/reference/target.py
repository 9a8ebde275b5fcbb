"""The model whose output is wanted: a Qwen3-style decoder that runs chains and trees alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .cache import KVCache
from .config import TargetConfig, read_json, target_config
from .layers import Block, Rope, attend, columns, project, rms_norm
from .span import Span
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
        blocks: list[Block],
        positions: int,
    ) -> None:
        self.config = config
        self.embedding = embedding  # [V, D]
        self.head = head  # [D, V]
        self._norm = norm
        self._blocks = blocks
        self._rope = Rope(config.block, positions, embedding.device, embedding.dtype)

    @classmethod
    def load(cls, folder: Path, positions: int, device: torch.device | str, dtype: torch.dtype) -> Target:
        """`positions`: how many the rotary tables cover."""
        config = target_config(folder)
        block = config.block
        intermediate = int(read_json(folder / "config.json").get("intermediate_size", 0))
        weights = Weights(folder, device, dtype)
        embedding = weights.take("model.embed_tokens.weight", config.vocab, block.hidden)
        head = columns(embedding if config.tied else weights.take("lm_head.weight", config.vocab, block.hidden))
        norm = weights.take("model.norm.weight", block.hidden)
        blocks = [Block.take(weights, f"model.layers.{i}", block, intermediate) for i in range(block.layers)]
        if not config.tied or "lm_head.weight" not in weights:
            weights.finish()
        return cls(config, embedding, head, norm, blocks, positions)

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self.config.block, capacity, self.embedding.device, self.embedding.dtype)

    def forward(self, span: Span, cache: KVCache, capture: tuple[int, ...] = ()) -> Pass:
        """Runs the span behind `cache`, which must hold `span.start` decided tokens. The span's own keys and values
        lie in the cache afterwards but are not decided: `cache.keep` says which of them are.

        `capture`: layers whose outputs make up the features, in this order.
        """
        if span.start != cache.length:
            raise ValueError(f"the span starts behind {span.start} tokens, the cache holds {cache.length}")
        config = self.config.block
        tables = self._rope.at(span.positions)
        bias = span.bias(self.embedding.dtype)
        captured: dict[int, torch.Tensor] = {}
        x = self.embedding[span.tokens]
        for number, block in enumerate(self._blocks):
            queries, keys, values = project(
                rms_norm(x, block.input_norm, config.eps), block, config, self._rope, tables
            )
            keys, values = cache.write(number, keys, values)
            x = x + attend(queries, keys, values, bias) @ block.output
            x = x + block.mlp(x, config.eps)
            if number in capture:
                captured[number] = x
        features = torch.cat([captured[number] for number in capture], -1) if capture else None
        return Pass(rms_norm(x, self._norm, config.eps), features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, D] -> [n, V]"""
        return hidden @ self.head
