"""One target token per tree node: arg-max for greedy requests, a draw from the adjusted distribution for the others.

Walking the tree along these tokens is lossless at any temperature: every emitted token is the target's own choice at
its true context, and a child is accepted only if it is that choice. Penalties that depend on tokens inside the path are
those of the prefix for every node, as in SGLang's other tree verifiers.
"""

from __future__ import annotations

from typing import Any

import torch


def adjust_logits(logits: torch.Tensor, sampling_info: Any, width: int) -> None:
    """Custom logit processors, penalties and logit bias, in place, each request's on all of its rows."""
    if sampling_info.has_custom_logit_processor:
        from sglang.srt.layers.sampler import apply_custom_logit_processor

        apply_custom_logit_processor(logits, sampling_info, num_tokens_in_batch=width)
    if sampling_info.penalizer_orchestrator.is_required or sampling_info.logit_bias is not None:
        bias = torch.zeros((len(sampling_info), logits.shape[1]), dtype=torch.float32, device=logits.device)
        sampling_info.apply_logits_bias(bias)
        logits.add_(torch.repeat_interleave(bias, width, dim=0))


def target_tokens(logits: torch.Tensor, sampling_info: Any, width: int, positions: torch.Tensor) -> torch.Tensor:
    """[bs * T, V] adjusted logits -> [bs * T] int64 tokens, one for each node."""
    greedy = torch.argmax(logits, dim=-1)
    if sampling_info is None or sampling_info.is_all_greedy:
        return greedy
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    def rows(values: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(values, width, dim=0)

    seed = getattr(sampling_info, "sampling_seed", None)
    probabilities = torch.softmax(logits.float() / rows(sampling_info.temperatures), dim=-1)
    sampled = top_k_top_p_min_p_sampling_from_probs_torch(
        probabilities,
        rows(sampling_info.top_ks),
        rows(sampling_info.top_ps),
        rows(sampling_info.min_ps),
        sampling_info.need_min_p_sampling,
        None if seed is None else rows(seed),
        positions,
    ).to(torch.int64)
    # Greedy requests arrive as top_k = 1; the arg-max keeps their tie-breaking that of an all-greedy batch.
    tokens = torch.where(rows(sampling_info.top_ks) == 1, greedy, sampled)
    return _same_on_all_ranks(tokens)


def _same_on_all_ranks(tokens: torch.Tensor) -> torch.Tensor:
    """Ranks draw from their own generators: rank 0's draw is everyone's."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        group.broadcast(tokens, src=0)
    return tokens
