"""Server arguments of DDTREE: defaults, what follows from them, and what is refused at start.

The verify width T = budget + 1 and the drafter's block size S are different numbers. The target's buffers, masks and
CUDA graphs are T wide (`speculative_num_draft_tokens`); the drafter keeps S (`speculative_dflash_block_size`).
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

DEFAULT_BUDGET = 15
DEFAULT_TOPK = 8
MAX_BUDGET = 255
ATTENTION_BACKENDS = ("triton", "flashinfer")
GDN_ARCHITECTURES = frozenset(
    {"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)
# Any value above one makes the attention and gated-delta-net backends take their tree path; none uses it as a width.
TREE_TOPK = 2


class UnsupportedConfiguration(ValueError):
    """A combination of server arguments that DDTREE cannot serve losslessly (or at all)."""


def _refuse(what: str, remedy: str) -> None:
    raise UnsupportedConfiguration(f"--speculative-algorithm DDTREE: {what}; {remedy}.")


def choose_backends(args: Any) -> None:
    """Runs before SGLang resolves its own defaults: fix the backends, refuse what cannot work.

    The default attention backend is resolved before the speculative arguments are, so it is chosen here.
    """
    if not args.speculative_draft_model_path:
        _refuse("no drafter", "name a DFlash drafter with --speculative-draft-model-path")
    if getattr(args, "pp_size", 1) != 1:
        _refuse(f"pipeline parallelism (pp_size={args.pp_size})", "use --pp-size 1")
    if getattr(args, "enable_dp_attention", False):
        _refuse("data-parallel attention", "remove --enable-dp-attention")
    if getattr(args, "disaggregation_mode", "null") != "null":
        _refuse("prefill/decode disaggregation", "remove --disaggregation-mode")
    if getattr(args, "enable_pdmux", False) or getattr(args, "enable_two_batch_overlap", False):
        _refuse("overlapped batches", "remove --enable-pdmux and --enable-two-batch-overlap")
    if args.speculative_num_draft_tokens is not None:
        _refuse(
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens}",
            "remove it: the verify width follows from --speculative-ddtree-budget",
        )
    if args.speculative_dflash_draft_window_size is not None:
        _refuse("a windowed drafter cache", "remove --speculative-dflash-draft-window-size")
    if args.speculative_accept_threshold_single != 1.0 or args.speculative_accept_threshold_acc != 1.0:
        _refuse("acceptance thresholds below 1 change the output", "remove --speculative-accept-threshold-*")
    if args.page_size not in (None, 1):
        _refuse(f"page size {args.page_size} would need copies of accepted KV pages", "use --page-size 1")
    _choose_attention(args)
    for name in ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend"):
        if getattr(args, name) not in (None, "triton"):
            flag = "--" + name.replace("_", "-")
            _refuse(f"{flag} {getattr(args, name)} cannot fork recurrent state", f"use {flag} triton")
    _choose_hybrid(args)
    if args.speculative_ddtree_allow_hybrid_unsafe:
        logger.warning(
            "--speculative-ddtree-allow-hybrid-unsafe is not needed and changes nothing: "
            "recurrent state follows the tree, so hybrid models are served losslessly without it."
        )


def _choose_attention(args: Any) -> None:
    named = {
        "--attention-backend": args.attention_backend,
        "--prefill-attention-backend": args.prefill_attention_backend,
        "--decode-attention-backend": args.decode_attention_backend,
    }
    for flag, backend in named.items():
        if backend is not None and backend not in ATTENTION_BACKENDS:
            _refuse(
                f"{flag} {backend} has no tree mask that was proved here",
                f"use {flag} {' or '.join(ATTENTION_BACKENDS)}",
            )
    chosen = {b for b in named.values() if b is not None}
    if len(chosen) > 1:
        _refuse(f"different attention backends ({', '.join(sorted(chosen))})", "name one with --attention-backend")
    args.attention_backend = chosen.pop() if chosen else "triton"


def _choose_hybrid(args: Any) -> None:
    try:
        architectures = args.get_model_config().hf_config.architectures or []
    except Exception as error:  # the model's own loading reports what is wrong with it, and better
        logger.warning("DDTREE cannot read the model's configuration yet: %s", error)
        return
    if not GDN_ARCHITECTURES.intersection(architectures):
        return
    if args.mamba_scheduler_strategy == "extra_buffer":
        _refuse("--mamba-scheduler-strategy extra_buffer is not covered by its tests", "use no_buffer")
    if not args.disable_radix_cache:
        args.disable_radix_cache = True
        logger.warning("DDTREE serves hybrid models without the radix cache; it was turned off.")


def resolve(args: Any) -> None:
    """Runs after SGLang's own DFLASH resolution, which left the block size in `speculative_num_draft_tokens`."""
    budget = DEFAULT_BUDGET if args.speculative_ddtree_budget is None else int(args.speculative_ddtree_budget)
    topk = DEFAULT_TOPK if args.speculative_ddtree_topk is None else int(args.speculative_ddtree_topk)
    if not 1 <= budget <= MAX_BUDGET:
        _refuse(f"--speculative-ddtree-budget {budget}", f"give a number of nodes from 1 to {MAX_BUDGET}")
    if topk < 1:
        _refuse(f"--speculative-ddtree-topk {topk}", "give at least one candidate per depth")
    block_size = int(args.speculative_num_draft_tokens)
    if block_size < 2:
        _refuse(f"the drafter's block size {block_size} leaves nothing to draft", "use a drafter with block size >= 2")
    args.speculative_ddtree_budget = budget
    # More candidates than nodes cannot change the tree.
    args.speculative_ddtree_topk = min(topk, budget)
    args.speculative_dflash_block_size = block_size
    if args.speculative_ddtree_shadow:
        logger.info("DDTREE shadow: verifying %d tokens linearly; trees are built and reported, not used.", block_size)
        return
    args.speculative_num_draft_tokens = budget + 1
    args.speculative_eagle_topk = TREE_TOPK
    # The tree is one draft step, however deep it is; a larger number would only inflate the scheduler's reserve.
    args.speculative_num_steps = 1


def validate_model(model_runner: Any) -> None:
    """Runs in the scheduler once the target is loaded: what only the loaded model can tell."""
    if getattr(model_runner, "sliding_window_size", None) not in (None, 0, -1):
        _refuse(
            "sliding-window attention counts slots, not depths, so a tree would see another window than the chain",
            "serve this model with --speculative-algorithm DFLASH",
        )
    if getattr(model_runner, "use_mla_backend", False):
        _refuse("MLA attention is not covered by its tests", "serve this model with --speculative-algorithm DFLASH")
    if getattr(model_runner, "mambaish_config", None) is None:
        return
    if getattr(model_runner, "hybrid_gdn_config", None) is None:
        _refuse(
            "this hybrid's recurrent layers are not gated delta nets and cannot fork state",
            "serve this model with --speculative-algorithm DFLASH or without speculation",
        )
    cache = model_runner.req_to_token_pool.mamba_pool.mamba_cache
    if str(cache.temporal.dtype) != "torch.float32":
        _refuse(
            f"recurrent state in {cache.temporal.dtype} rounds between nodes where a chain would not",
            "use --mamba-ssm-dtype float32",
        )
    width = int(model_runner.server_args.speculative_num_draft_tokens)
    steps = int(cache.intermediate_ssm.shape[2])
    if steps != width:
        # The verify kernel strides by the width, the buffer by its own step dimension: unequal numbers would let one
        # request write into its neighbour's states.
        _refuse(f"verify width {width} differs from the {steps} steps of the state buffer", "report this as a bug")
