"""The drafter's best K tokens and their log-probabilities at every depth, from a vocabulary-parallel head.

Ranks order by (value descending, token id ascending), so that all tensor-parallel ranks build the same tree. Padding
rows of a shard are never candidates, and added vocabulary keeps its own ids.
"""

from __future__ import annotations

from typing import Any

import torch


def head_candidates(hidden: torch.Tensor, lm_head: Any, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, H] drafter states -> (log-probabilities [rows, K] fp32, token ids [rows, K] int64)."""
    from sglang.srt.distributed import get_tp_group

    shard, weight = lm_head.shard_indices, lm_head.weight
    hidden = hidden.to(weight.dtype)
    base, added = int(shard.num_org_elements), int(shard.num_added_elements)
    added_start = int(shard.num_org_elements_padded)
    parts, ids = [], []
    if base > 0:
        parts.append(torch.matmul(hidden, weight[:base].T))
        ids.append(torch.arange(base, device=hidden.device) + int(shard.org_vocab_start_index))
    if added > 0:
        parts.append(torch.matmul(hidden, weight[added_start : added_start + added].T))
        ids.append(torch.arange(added, device=hidden.device) + int(shard.added_vocab_start_index))
    if not parts:  # a rank whose shard is all padding
        parts.append(torch.full((hidden.shape[0], 1), float("-inf"), device=hidden.device))
        ids.append(torch.zeros(1, dtype=torch.int64, device=hidden.device))
    logits = torch.cat(parts, dim=-1).float() if len(parts) > 1 else parts[0].float()
    token_ids = torch.cat(ids) if len(ids) > 1 else ids[0]
    values, index = torch.topk(logits, min(topk, logits.shape[-1]), dim=-1)
    tokens, normaliser = token_ids[index], torch.logsumexp(logits, dim=-1)
    group = get_tp_group()
    if group.world_size > 1:
        values, tokens, normaliser = _gather(values, tokens, normaliser, group, topk)
    return order_candidates(values, tokens, normaliser, topk)


def order_candidates(
    values: torch.Tensor, tokens: torch.Tensor, normaliser: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best `topk` of the candidates given, ties by token id, values normalised to log-probabilities."""
    by_id = torch.argsort(tokens, dim=-1, stable=True)
    values, tokens = values.gather(-1, by_id), tokens.gather(-1, by_id)
    best = torch.argsort(values, dim=-1, descending=True, stable=True)[..., :topk]
    return values.gather(-1, best) - normaliser[..., None], tokens.gather(-1, best)


def _gather(
    values: torch.Tensor, tokens: torch.Tensor, normaliser: torch.Tensor, group: Any, topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K values and ids and one partial normaliser per row and rank cross the wire; dense logits never do."""
    if values.shape[-1] < topk:  # shards smaller than K send padding that cannot win
        pad = topk - values.shape[-1]
        values = torch.nn.functional.pad(values, (0, pad), value=float("-inf"))
        tokens = torch.nn.functional.pad(tokens, (0, pad))
    values = group.all_gather(values.contiguous(), dim=-1)
    tokens = group.all_gather(tokens.contiguous(), dim=-1)
    normaliser = torch.logsumexp(group.all_gather(normaliser[:, None].contiguous(), dim=-1), dim=-1)
    return values, tokens, normaliser
