"""The attention mask of a batch of trees, in the flat layout of SGLang's attention backends.

Per request `T` rows of `seq_len + T` booleans, row after row, request after request: a node sees the whole prefix and
its own ancestors. Requests differ in length, so rows have no common width; only the `T x T` tails depend on the tree.
"""

from __future__ import annotations

import torch


def flat_mask(visible: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor) -> torch.Tensor:
    """`visible` [bs, T, T] bool (query, key), prefix lengths on the device and on the host -> flat bool mask.

    The host lengths give the size, so nothing here waits for the device.
    """
    bs, width, _ = visible.shape
    total = width * (int(seq_lens_cpu.sum()) + bs * width)
    mask = torch.ones(total, dtype=torch.bool, device=visible.device)
    row_width = seq_lens.to(torch.int64) + width
    start = width * (torch.cumsum(row_width, 0) - row_width)
    steps = torch.arange(width, device=visible.device)
    tail = start[:, None, None] + steps[None, :, None] * row_width[:, None, None]
    tail = tail + seq_lens.to(torch.int64)[:, None, None] + steps[None, None, :]
    mask[tail.reshape(-1)] = visible.reshape(-1)
    return mask
