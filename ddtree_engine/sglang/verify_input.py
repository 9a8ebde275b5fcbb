"""What the target verifies in one step: a tree per request, and how the accepted path is committed.

KV slots are remapped, never copied: with page size 1 a request's committed tokens may lie anywhere, so the slots of the
accepted nodes become the next slots of the request and the others are freed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func

from ddtree_engine.sglang.arguments import TREE_TOPK
from ddtree_engine.sglang.commit import Commitment, commit_paths
from ddtree_engine.sglang.mask import flat_mask
from ddtree_engine.sglang.metrics import TreeMetrics
from ddtree_engine.sglang.sampling import adjust_logits, target_tokens
from ddtree_engine.sglang.self_check import check_walk
from ddtree_engine.tree import TreeBatch

SELF_CHECK = os.environ.get("DDTREE_SELF_CHECK", "0") == "1"


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """The inherited fields describe the flat batch: `draft_token` [bs * T], `positions` [bs * T] = prefix + depth."""

    topk: int = TREE_TOPK
    max_path: int = 0  # nodes on the longest possible path, root included: the drafter's block size
    tree: TreeBatch | None = None
    metrics: TreeMetrics | None = None
    # Exactly [bs, T]: the gated-delta-net backend slices its graph buffers by the first dimension.
    retrieve_index: torch.Tensor | None = None
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None
    commitment: Commitment | None = field(default=None, repr=False)

    @property
    def tree_batch_size(self) -> int | None:
        return None if self.retrieve_next_token is None else int(self.retrieve_next_token.shape[0])

    @classmethod
    def from_tree(
        cls, tree: TreeBatch, prefix_lens: torch.Tensor, max_path: int, metrics: TreeMetrics
    ) -> DDTreeVerifyInput:
        bs, width = tree.tokens.shape
        next_token, next_sibling = tree.links()
        return cls(
            draft_token=tree.tokens.reshape(-1),
            positions=(prefix_lens.to(torch.int64)[:, None] + tree.depths).reshape(-1),
            draft_token_num=width,
            max_path=max_path,
            tree=tree,
            metrics=metrics,
            retrieve_index=torch.arange(bs * width, device=tree.tokens.device).view(bs, width),
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
        )

    def prepare_for_verify(self, batch: Any, page_size: int, *, build_custom_mask: bool = True) -> None:
        if batch.forward_mode.is_idle():
            return
        assert self.tree is not None and page_size == 1
        super().prepare_for_verify(batch, page_size, build_custom_mask=False)
        if build_custom_mask:
            self.custom_mask = flat_mask(self.tree.visible(), batch.seq_lens, batch.seq_lens_cpu)

    def verify(
        self, *, batch: Any, logits_output: Any, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """As DFLASH: new current tokens, committed lengths, hidden states of committed nodes, accepted per request."""
        if batch.forward_mode.is_idle():
            empty = torch.empty((0,), dtype=torch.int64, device=batch.device)
            return empty, empty.to(torch.int32), empty, []
        assert page_size == 1 and self.metrics is not None
        logits = logits_output.next_token_logits
        if logits_output.hidden_states is None:
            raise RuntimeError("DDTREE verify needs the target's hidden states for the drafter, but got none.")
        if batch.sampling_info is not None:
            adjust_logits(logits, batch.sampling_info, self.draft_token_num)
        predicted = target_tokens(logits, batch.sampling_info, self.draft_token_num, self.positions)
        nodes, tokens = self._walk(predicted)
        commitment = commit_paths(batch, nodes, tokens, self.draft_token_num, self.metrics)
        self.commitment = commitment
        self._remap_slots(batch, commitment)
        hidden = logits_output.hidden_states[commitment.kept]
        # Later readers would take the whole tree's states for one row per request.
        logits_output.hidden_states = None
        return commitment.current_tokens, commitment.lengths, hidden, commitment.accepted_per_request

    def _walk(self, predicted: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Per request the flat indices of the accepted nodes, root first, and the token that follows each of them."""
        from sgl_kernel import verify_tree_greedy

        assert self.tree is not None and self.retrieve_index is not None
        bs, width = self.tree.tokens.shape
        device = predicted.device
        follows = torch.empty((bs * width + 1,), dtype=torch.int32, device=device)
        path = torch.full((bs, self.max_path), -1, dtype=torch.int32, device=device)
        accepted = torch.empty((bs,), dtype=torch.int32, device=device)
        verify_tree_greedy(
            predicts=follows,
            accept_index=path,
            accept_token_num=accepted,
            candidates=self.tree.tokens,
            # the operator's schema spells it so
            retrive_index=self.retrieve_index,
            retrive_next_token=self.retrieve_next_token,
            retrive_next_sibling=self.retrieve_next_sibling,
            target_predict=predicted.view(bs, width),
        )
        after = follows[path.clamp(min=0).to(torch.int64)]
        # The step's only wait for the device.
        packed = torch.cat([path, after], dim=1).cpu().tolist()
        nodes, tokens = [], []
        for row in packed:
            length = next((i for i in range(self.max_path) if row[i] < 0), self.max_path)
            nodes.append(row[:length])
            tokens.append(row[self.max_path : self.max_path + length])
        if SELF_CHECK:
            check_walk(self.tree, predicted.view(bs, width), nodes, tokens)
        return nodes, tokens

    def _remap_slots(self, batch: Any, commitment: Commitment) -> None:
        batch.token_to_kv_pool_allocator.free(batch.out_cache_loc[commitment.freed])
        batch.out_cache_loc = batch.out_cache_loc[commitment.kept]
        lengths = commitment.lengths.to(batch.seq_lens.dtype)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            batch.seq_lens + lengths,
            batch.out_cache_loc,
            batch.batch_size(),
        )
        batch.seq_lens.add_(lengths)
        batch.seq_lens_cpu.add_(torch.tensor(commitment.lengths_cpu, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(commitment.lengths_cpu)


def capture_verify_input(model_runner: Any, *, draft_token_num: int, custom_mask: torch.Tensor | None) -> Any:
    """The shape of a verify step, for CUDA graph capture and warm-up: no tree, only widths and modes.

    In shadow mode the target verifies linearly, so its graphs are DFLASH's own.
    """
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    if model_runner.server_args.speculative_ddtree_shadow:
        _, masked = resolve_dflash_verify_mask_policy(model_runner.attn_backend)
        return DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=draft_token_num,
            custom_mask=custom_mask if masked else None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
    return DDTreeVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=draft_token_num,
        custom_mask=custom_mask,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
