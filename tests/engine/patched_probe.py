"""Run by test_sglang_patched.py in a process of its own: prints what the patched engine says, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patched_sglang

patched_sglang.load()

import torch  # noqa: E402

from ddtree_engine.sglang import sampling, seams  # noqa: E402

PAIR = Path(__file__).parents[2] / "ddtree_engine" / "models" / "demo-code"


def resolve(*flags: str) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    argv = ["--model-path", str(PAIR / "target"), "--device", "cpu", "--mem-fraction-static", "0.5"]
    argv += ["--attention-backend", "triton"]  # the default on a CPU is another one
    argv += ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(PAIR / "draft")]
    try:
        args = prepare_server_args([*argv, *flags])
    except ValueError as error:
        return {"refused": str(error)}
    names = ("attention_backend", "speculative_num_draft_tokens", "speculative_dflash_block_size")
    return {name: getattr(args, name) for name in (*names, "speculative_eagle_topk", "disable_overlap_schedule")}


def sample(draws: int) -> dict[str, Any]:
    """How often each token is drawn at a node, greedy beside top-k 3 and top-p 0.7 at temperature 0.8."""
    sampling._same_on_all_ranks = lambda tokens: tokens  # type: ignore[assignment]
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0])
    info = SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.tensor([[1.0], [0.8], [0.8]]),
        top_ks=torch.tensor([1, 3, 1 << 30]),
        top_ps=torch.tensor([1.0, 1.0, 0.7]),
        min_ps=torch.zeros(3),
        need_min_p_sampling=False,
        sampling_seed=None,
    )
    counts = torch.zeros(3, 6, dtype=torch.int64)
    for _ in range(draws // 8):  # eight nodes a request
        tokens = sampling.target_tokens(logits.expand(24, 6).clone(), info, 8, torch.zeros(24, dtype=torch.int64))
        for row in range(3):
            counts[row] += torch.bincount(tokens[8 * row : 8 * row + 8], minlength=6)
    return {"counts": counts.tolist(), "logits": logits.tolist()}


print(
    json.dumps(
        {
            "missing": seams.missing(),
            "worker": __import__("ddtree_engine.sglang.worker", fromlist=["x"]).DDTreeWorker.__mro__[1].__name__,
            "tree": resolve("--speculative-ddtree-budget", "7"),
            "shadow": resolve("--speculative-ddtree-shadow"),
            "paged": resolve("--page-size", "16"),
            "sampling": sample(int(sys.argv[1])),
        }
    )
)
