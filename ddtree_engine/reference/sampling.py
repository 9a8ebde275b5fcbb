"""How the target's token at a node is chosen from its logits."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off; both apply after the temperature, top_k first.
    `seed` None draws a fresh one. Generation ends behind a token of `stop_token_ids`, which is part of the output."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0 upwards, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 1, or 0 for all tokens, not {self.top_k}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


def distribution(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits [V] -> (probabilities [n], their token ids [n], or None when they are 0..V-1). Temperature must be > 0."""
    scaled = logits.double() / params.temperature
    if not params.top_k and params.top_p == 1.0:
        return scaled.softmax(-1), None
    values, tokens = scaled.sort(descending=True, stable=True)  # stable: equal logits by token id
    if params.top_k:
        values, tokens = values[: params.top_k], tokens[: params.top_k]
    probabilities = values.softmax(-1)
    if params.top_p < 1.0:
        # Keep a token while those before it hold less than top_p: the token that reaches it is the last one in.
        before = probabilities.cumsum(-1) - probabilities
        kept = max(1, int((before < params.top_p).sum()))
        probabilities, tokens = probabilities[:kept], tokens[:kept]
        probabilities = probabilities / probabilities.sum()
    return probabilities, tokens


class Sampler:
    """Draws tokens by inverting the distribution function at one uniform number per *position* of the output.

    A path has one node per position, so the numbers used along it are independent and every token has the target's
    law; and because a position's number does not depend on the tree, the same seed gives the same text in every mode
    and with every budget.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = random.Random(params.seed)
        self._uniforms: list[float] = []

    def __call__(self, logits: torch.Tensor, position: int) -> int:
        """logits [V] at a node -> the token at output position `position` (0 for the first generated token)."""
        while len(self._uniforms) <= position:
            self._uniforms.append(self._random.random())
        probabilities, tokens = distribution(logits, self._params)
        sums = probabilities.cumsum(-1)
        # Scaled by the last sum, which rounding keeps from being exactly 1; `right` skips tokens of probability 0.
        index = int(torch.searchsorted(sums, sums[-1:] * self._uniforms[position], right=True))
        index = min(index, int(torch.nonzero(probabilities)[-1]))
        return index if tokens is None else int(tokens[index])
