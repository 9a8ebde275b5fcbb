"""Turning accepted paths into committed tokens: stop conditions first, then everything else follows the kept part.

A request may end inside its path (stop token, stop string, max_tokens). The path is cut there before slots are freed,
hidden states gathered, recurrent state chosen and acceptance counted, so that nothing after the end leaves a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddtree_engine.sglang.metrics import TreeMetrics


@dataclass(frozen=True)
class Commitment:
    current_tokens: torch.Tensor  # [bs] int64, the last token of each request
    lengths: torch.Tensor  # [bs] int32, committed nodes per request
    lengths_cpu: list[int]
    kept: torch.Tensor  # [sum(lengths)] int64, flat node indices in path order
    freed: torch.Tensor  # the other flat node indices
    last_nodes: torch.Tensor  # [bs] int64, index within the request's tree of the last committed node
    path_nodes: torch.Tensor  # [bs, longest] int64, indices within the tree, the last one repeated
    accepted_per_request: list[int]  # committed tokens that were drafted


def commit_paths(
    batch: Any, nodes: list[list[int]], tokens: list[list[int]], width: int, metrics: TreeMetrics
) -> Commitment:
    """Append each request's tokens until it finishes; `nodes` are flat indices into the batch of trees."""
    think_end_id = getattr(batch.model_config, "think_end_id", None)
    kept_nodes, lengths, current, accepted = [], [], [], []
    for request, path, path_tokens in zip(batch.reqs, nodes, tokens, strict=True):
        committed = _append(request, path_tokens, think_end_id)
        kept_nodes.append(path[:committed])
        lengths.append(committed)
        current.append(path_tokens[committed - 1])
        accepted.append(committed - 1)
        request.spec_verify_ct += 1
        request.spec_accepted_drafts += committed - 1
        request.update_spec_acceptance_histogram(committed - 1)
        request.kv_committed_len += committed
        request.kv_allocated_len = request.kv_committed_len
        metrics.observe(accepted=len(path) - 1, committed=committed)
    return _to_device(kept_nodes, lengths, current, accepted, width, batch.seq_lens.device)


def _append(request: Any, tokens: list[int], think_end_id: int | None) -> int:
    for count, token in enumerate(tokens, start=1):
        request.output_ids.append(token)
        if request.require_reasoning and think_end_id is not None:
            request.update_reasoning_tokens(token, think_end_id)
        request.check_finished()
        if request.finished():
            return count
    return len(tokens)


def _to_device(
    kept_nodes: list[list[int]],
    lengths: list[int],
    current: list[int],
    accepted: list[int],
    width: int,
    device: torch.device,
) -> Commitment:
    """One transfer for all index lists."""
    bs, longest = len(lengths), max(lengths)
    kept = [node for path in kept_nodes for node in path]
    is_kept = set(kept)
    freed = [node for node in range(bs * width) if node not in is_kept]
    paths: list[int] = []
    for row, path in enumerate(kept_nodes):
        local = [node - row * width for node in path]
        paths += local + [local[-1]] * (longest - len(local))
    sizes = [bs, bs, len(kept), len(freed), bs * longest]
    packed = torch.tensor(current + lengths + kept + freed + paths, dtype=torch.int64)
    if device.type == "cuda":
        packed = packed.pin_memory()
    current_t, lengths_t, kept_t, freed_t, paths_t = torch.split(packed.to(device, non_blocking=True), sizes)
    path_nodes = paths_t.view(bs, longest)
    return Commitment(
        current_tokens=current_t,
        lengths=lengths_t.to(torch.int32),
        lengths_cpu=lengths,
        kept=kept_t,
        freed=freed_t,
        last_nodes=path_nodes[:, -1],
        path_nodes=path_nodes,
        accepted_per_request=accepted,
    )
