"""The keys and values of one request, in one block of memory that never moves."""

from __future__ import annotations

import torch

from .config import BlockConfig


class KVCache:
    """Slots 0..length-1 hold the decided tokens. A pass writes behind them; `keep` then decides which of those stay."""

    def __init__(
        self, config: BlockConfig, layers: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (2, layers, config.kv_heads, capacity, config.head_dim)
        self._slots = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self._slots.shape[3]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """keys and values [n, KV, HD] go behind the decided tokens -> both with everything before, [KV, length + n,
        HD]. Until `keep` is called the next pass overwrites them."""
        end = self.length + len(keys)
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} are needed")
        slots = self._slots[:, layer]
        slots[0, :, self.length : end] = keys.transpose(0, 1)
        slots[1, :, self.length : end] = values.transpose(0, 1)
        return slots[0, :, :end], slots[1, :, :end]

    def keep(self, nodes: list[int]) -> None:
        """Makes the pass's tokens `nodes`, a path in path order, the next decided ones."""
        if nodes != list(range(len(nodes))):  # a path that is a prefix of the pass already lies where it belongs
            index = torch.tensor(nodes, device=self._slots.device) + self.length
            self._slots[:, :, :, self.length : self.length + len(nodes)] = self._slots.index_select(3, index)
        self.length += len(nodes)
