"""The tokens of one forward pass: where each stands and which of the others it may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..tree import Tree


@dataclass(frozen=True)
class Span:
    """`n` new tokens behind `start` tokens that are already in the cache.

    Positions go by depth, not by index: siblings share one. `visible` covers the new tokens only, since everything in
    the cache is visible to all of them.
    """

    start: int
    tokens: torch.Tensor  # [n] int64
    positions: torch.Tensor  # [n] int64
    visible: torch.Tensor  # [n, n] bool: (token, other) where `other` is the token itself or one before it on its path
    parents: list[int]  # index of the token before each in this span; -1: the last token in the cache

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def chain(cls, tokens: list[int], start: int, device: torch.device | str = "cpu") -> Span:
        n = len(tokens)
        return cls(
            start=start,
            tokens=torch.tensor(tokens, device=device),
            positions=torch.arange(start, start + n, device=device),
            visible=torch.ones(n, n, dtype=torch.bool, device=device).tril(),
            parents=list(range(-1, n - 1)),
        )

    @classmethod
    def of_tree(cls, tree: Tree, start: int, device: torch.device | str = "cpu") -> Span:
        """The root stands at position `start`."""
        return cls(
            start=start,
            tokens=torch.tensor(tree.tokens, device=device),
            positions=torch.tensor(tree.depths, device=device) + start,
            visible=tree.visible(device),
            parents=tree.parents,
        )

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[n, start + n]: what to add to attention scores, 0 or -inf; None when everything is visible to all."""
        n = len(self)
        if n == 1:
            return None
        bias = torch.zeros(n, self.start + n, dtype=dtype, device=self.visible.device)
        bias[:, self.start :].masked_fill_(~self.visible, float("-inf"))
        return bias
