"""The DDTREE worker: DFLASH's loop with a tree verified in place of the chain.

The surface (`create_worker`, the validators in `arguments`) is that of later SGLang releases' algorithm registry, so
that moving there is a registration instead of a patch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ddtree_engine.sglang import seams

seams.check()

from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.dflash_worker import DFlashWorker  # noqa: E402

from ddtree_engine.sglang.arguments import validate_model  # noqa: E402
from ddtree_engine.sglang.candidates import head_candidates  # noqa: E402
from ddtree_engine.sglang.metrics import TreeMetrics  # noqa: E402
from ddtree_engine.sglang.shadow import ShadowLedger  # noqa: E402
from ddtree_engine.sglang.verify_input import DDTreeVerifyInput  # noqa: E402
from ddtree_engine.tree import TreeBatch, build_batch  # noqa: E402

logger = logging.getLogger(__name__)


def create_worker(server_args: Any) -> type[DDTreeWorker]:
    """The worker class for these arguments (called by the scheduler)."""
    return ShadowWorker if server_args.speculative_ddtree_shadow else DDTreeWorker


class DDTreeWorker(DFlashWorker):  # type: ignore[misc]
    """Drafts one DFlash block per step, verifies the best `budget` prefixes of it."""

    mode = "tree"

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(server_args, *args, **kwargs)
        validate_model(self.model_runner)
        vocabulary = int(self.model_runner.model_config.vocab_size)
        self.budget = int(server_args.speculative_ddtree_budget)
        self.tree_topk = min(int(server_args.speculative_ddtree_topk), vocabulary)
        self.tree_metrics = TreeMetrics(self.budget, self.tree_topk, int(self.block_size), mode=self.mode)
        self._verify_input: DDTreeVerifyInput | None = None
        if self.tp_rank == 0:
            logger.info(
                "DDTREE ready: mode=%s budget=%d topk=%d block_size=%d verify_width=%d hybrid=%s",
                self.mode,
                self.budget,
                self.tree_topk,
                self.block_size,
                server_args.speculative_num_draft_tokens,
                self.model_runner.mambaish_config is not None,
            )

    def _configure_draft_server_args(self, draft_server_args: Any) -> None:
        """The drafter keeps its block size and its linear, non-causal attention."""
        draft_server_args.speculative_num_draft_tokens = draft_server_args.speculative_dflash_block_size
        draft_server_args.speculative_eagle_topk = 1

    def _draft_tree(self, root_tokens: torch.Tensor, draft_hidden: torch.Tensor, lm_head: Any) -> TreeBatch:
        bs = int(draft_hidden.shape[0])
        depths = int(self.block_size) - 1
        with torch.inference_mode():
            hidden = draft_hidden[:, 1:, :].reshape(bs * depths, -1)
            log_probabilities, tokens = head_candidates(hidden, lm_head, self.tree_topk)
            shape = (bs, depths, log_probabilities.shape[-1])
            return build_batch(
                root_tokens.to(torch.int64), log_probabilities.view(shape), tokens.view(shape), self.budget
            )

    def _make_verify_input(
        self,
        *,
        batch: Any,
        draft_hidden: torch.Tensor,
        root_tokens: torch.Tensor,
        positions_2d: torch.Tensor,
        lm_head: Any,
    ) -> DFlashVerifyInput:
        tree = self._draft_tree(root_tokens, draft_hidden, lm_head)
        verify_input = DDTreeVerifyInput.from_tree(
            tree, prefix_lens=batch.seq_lens, max_path=int(self.block_size), metrics=self.tree_metrics
        )
        verify_input.prepare_for_verify(batch, self.page_size)
        self._verify_input = verify_input
        return verify_input

    def _update_target_mamba_state_after_verify(
        self, *, batch: Any, seq_lens_pre_verify: torch.Tensor, commit_lens: torch.Tensor
    ) -> None:
        """Recurrent state is that of the last committed node, which in a tree is not the one at its path's length."""
        backend = self.target_worker.model_runner.attn_backend
        if not hasattr(backend, "update_mamba_state_after_mtp_verify"):
            return
        assert self._verify_input is not None and self._verify_input.commitment is not None
        if batch.mamba_track_indices is not None:
            raise RuntimeError("DDTREE keeps no recurrent states for the prefix cache; start without extra_buffer.")
        backend.update_mamba_state_after_mtp_verify(
            accepted_steps=self._verify_input.commitment.last_nodes,
            mamba_track_indices=None,
            mamba_steps_to_track=None,
            model=self.target_worker.model_runner.model,
        )

    def ddtree_state(self) -> dict[str, object]:
        """Counters for `/get_server_info`: acceptance since the start, free KV slots and recurrent states now."""
        state = self.tree_metrics.snapshot()
        state["free_kv_slots"] = int(self.model_runner.token_to_kv_pool_allocator.available_size())
        pool = getattr(self.model_runner.req_to_token_pool, "mamba_pool", None)
        if pool is not None:
            state["free_recurrent_states"] = int(pool.available_size())
        return state


class ShadowWorker(DDTreeWorker):
    """Verifies as DFLASH does, token for token, and reports what trees would have had accepted."""

    mode = "shadow"

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(server_args, *args, **kwargs)
        self._ledger = ShadowLedger(self.tree_metrics, depths=int(self.block_size) - 1)

    def _make_verify_input(
        self,
        *,
        batch: Any,
        draft_hidden: torch.Tensor,
        root_tokens: torch.Tensor,
        positions_2d: torch.Tensor,
        lm_head: Any,
    ) -> DFlashVerifyInput:
        verify_input = DFlashWorker._make_verify_input(
            self,
            batch=batch,
            draft_hidden=draft_hidden,
            root_tokens=root_tokens,
            positions_2d=positions_2d,
            lm_head=lm_head,
        )
        tree = self._draft_tree(root_tokens, draft_hidden, lm_head)
        linear = verify_input.draft_token.view(batch.batch_size(), -1)
        self._ledger.record(batch.reqs, tree, linear)
        return verify_input

    def _update_target_mamba_state_after_verify(self, **kwargs: Any) -> None:
        DFlashWorker._update_target_mamba_state_after_verify(self, **kwargs)
