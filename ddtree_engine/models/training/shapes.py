"""The shapes of the pairs and what is common to both of their parts."""

from __future__ import annotations

from dataclasses import dataclass

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
END, MASK = 0, 3  # their ids
BLOCK = 16  # tokens of a drafted block, root included


@dataclass(frozen=True)
class Pair:
    """A Qwen3-style target and a DFlash drafter of the same width."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_layers: int
    target_layers: tuple[int, ...]  # whose outputs the drafter reads
    target_seconds: float  # wall clock on one H200
    draft_seconds: float
    eps: float = 1e-6
    rope_theta: float = 1e6
    block: int = BLOCK


PAIRS = {
    "demo-code": Pair(
        vocabulary=4096,
        hidden=256,
        layers=6,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=768,
        draft_layers=3,
        target_layers=(1, 2, 3, 4),
        target_seconds=120,
        draft_seconds=215,
    ),
    "tiny-code": Pair(
        vocabulary=8192,
        hidden=384,
        layers=8,
        heads=8,
        kv_heads=2,
        head_dim=64,
        intermediate=1152,
        draft_layers=4,
        target_layers=(1, 2, 4, 5),
        target_seconds=75,
        draft_seconds=180,
    ),
    # For tests: seconds on a CPU.
    "smoke": Pair(
        vocabulary=512,
        hidden=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=64,
        draft_layers=2,
        target_layers=(0, 1),
        target_seconds=5,
        draft_seconds=5,
    ),
}
