"""The DFlash block drafter: one non-causal pass over a block of masked tokens, conditioned on the target's features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from .attention import Attention
from .cache import KVCache
from .config import DraftConfig, draft_config
from .layers import MLP, Rope, columns, rms_norm
from .target import Target
from .weights import Weights


@dataclass(frozen=True)
class Candidates:
    """D rows of K candidates each, most probable first: log-probabilities in nats and token ids."""

    log_probabilities: list[list[float]]
    tokens: list[list[int]]


class DraftState(Protocol):
    """What a drafter remembers of one request."""

    def extend(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Reads newly decided tokens: features [n, F] and positions [n]."""

    def propose(self, root: int, position: int, depths: int, topk: int) -> Candidates:
        """Candidates for the `depths` positions behind `root`, a decided token at `position` whose features are not
        known yet."""


class BlockDrafter(Protocol):
    """What decoding needs of a drafter."""

    @property
    def depths(self) -> int: ...

    @property
    def target_layers(self) -> tuple[int, ...]: ...

    def start(self, capacity: int) -> DraftState: ...


class Drafter:
    def __init__(
        self,
        config: DraftConfig,
        target: Target,
        features: torch.Tensor,
        features_norm: torch.Tensor,
        norm: torch.Tensor,
        layers: list[tuple[Attention, MLP]],
        positions: int,
    ) -> None:
        self.config = config
        self.target = target
        self.layers = layers
        self.norm = norm
        self.rope = Rope(config.block, positions, norm.device, norm.dtype)
        self.mask_rows = target.embedding[config.mask_token].expand(config.block_size - 1, -1)
        self._features = features  # [F, D]
        self._features_norm = features_norm
        first = config.block.heads * config.block.head_dim
        self._context_kv = torch.cat(
            [attention.qkv[:, first:] for attention, _ in layers], 1
        )  # [D, layers * 2 KV * HD]
        self._key_norms = torch.stack([attention.qk_norm[config.block.heads :] for attention, _ in layers])

    @property
    def depths(self) -> int:
        return self.config.block_size - 1

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.config.target_layers

    @classmethod
    def load(cls, folder: Path, target: Target, positions: int) -> Drafter:
        """The target lends its embedding and LM head."""
        config, block = draft_config(folder), target.config.block
        if config.block.hidden != block.hidden:
            raise ValueError(f"{folder}: made for hidden size {config.block.hidden}, the target has {block.hidden}")
        if config.target_depth not in (None, block.layers) or max(config.target_layers) >= block.layers:
            raise ValueError(
                f"{folder}: made for a target of {config.target_depth} layers, this one has {block.layers}"
            )
        if config.mask_token >= target.config.vocab:
            raise ValueError(f"{folder}: mask token {config.mask_token} lies outside the target's vocabulary")
        weights = Weights(folder, target.embedding.device, target.embedding.dtype)
        hidden = config.block.hidden
        drafter = cls(
            config,
            target,
            features=columns(weights.take("fc.weight", hidden, len(config.target_layers) * hidden)),
            features_norm=weights.take("hidden_norm.weight", hidden),
            norm=weights.take("norm.weight", hidden),
            layers=[
                (Attention.take(weights, f"layers.{i}", config.block), MLP.take(weights, f"layers.{i}", config.block))
                for i in range(config.block.layers)
            ],
            positions=positions,
        )
        weights.finish()
        return drafter

    def start(self, capacity: int) -> _State:
        return _State(self, capacity)

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """features [n, F] -> keys and values of the context in every layer, each [layers, n, KV, HD]."""
        config, n = self.config.block, len(features)
        x = rms_norm(features @ self._features, self._features_norm, config.eps)
        kv = (x @ self._context_kv).view(n, config.layers, 2, config.kv_heads, config.head_dim)
        keys = rms_norm(kv[:, :, 0], self._key_norms, config.eps).flatten(1, 2)
        keys = self.rope.turn(keys, self.rope.at(positions)).view(n, config.layers, config.kv_heads, config.head_dim)
        return keys.transpose(0, 1), kv[:, :, 1].transpose(0, 1)


class _State:
    def __init__(self, drafter: Drafter, capacity: int) -> None:
        norm, config = drafter.norm, drafter.config
        self._drafter = drafter
        self._cache = KVCache(config.block, config.block.layers, capacity + config.block_size, norm.device, norm.dtype)

    def extend(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        keys, values = self._drafter.context(features, positions)
        for layer in range(self._drafter.config.block.layers):
            self._cache.write(layer, keys[layer], values[layer])
        self._cache.keep(list(range(len(features))))

    def propose(self, root: int, position: int, depths: int, topk: int) -> Candidates:
        """The block has the width the drafter was trained with whatever the tree's budget or depth is, and sees all of
        itself: other widths or masks degrade the draft."""
        drafter = self._drafter
        positions = torch.arange(position, position + drafter.config.block_size, device=drafter.norm.device)
        tables = drafter.rope.at(positions)
        x = torch.cat([drafter.target.embedding[root : root + 1], drafter.mask_rows])
        eps = drafter.config.block.eps
        for number, (attention, mlp) in enumerate(drafter.layers):
            x = x + attention.run(x, drafter.rope, tables, self._cache, number, None)
            x = x + mlp.run(x, eps)
        x = rms_norm(x[1 : depths + 1], drafter.norm, eps)
        return rank(drafter.target.logits(x), topk)


def rank(logits: torch.Tensor, topk: int) -> Candidates:
    """[D, V] -> the `topk` best of each row by probability, equal ones by token id. The probabilities are those of the
    whole vocabulary: they are not renormalised over the candidates."""
    if topk < 1:
        raise ValueError(f"topk must be at least 1, not {topk}")
    values, tokens = logits.topk(min(topk, logits.shape[-1]), dim=-1)
    tokens, order = tokens.sort(dim=-1, stable=True)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    scores = values - logits.logsumexp(-1, keepdim=True)
    return Candidates(scores.tolist(), tokens.tolist())
