"""Everything the target remembers of one request."""

from __future__ import annotations

from .cache import KVCache
from .delta_net import DeltaState


class TargetState:
    """A KV cache for the attention layers and, in hybrids, one state per linear layer. They advance together."""

    def __init__(self, kv: KVCache, deltas: list[DeltaState]) -> None:
        self.kv = kv
        self.deltas = deltas

    @property
    def length(self) -> int:
        """Decided tokens."""
        return self.kv.length

    def keep(self, nodes: list[int]) -> None:
        """Makes the last pass's tokens `nodes`, a path in path order from its first token on, the next decided ones."""
        self.kv.keep(nodes)
        for delta in self.deltas:
            delta.keep(nodes)
