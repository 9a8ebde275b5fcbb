"""What the trees of a server have achieved since it started, as plain counters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TreeMetrics:
    budget: int
    topk: int
    max_path: int
    mode: str = "tree"
    verify_steps: int = 0
    committed_tokens: int = 0
    accepted_drafts: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    shadow_tree_tokens: int = 0
    shadow_linear_tokens: int = 0
    shadow_steps: int = 0
    shadow_histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_histogram = [0] * self.max_path
        self.shadow_histogram = [0] * self.max_path

    def observe(self, *, accepted: int, committed: int) -> None:
        """One request's verify step: drafted tokens on the accepted path, tokens kept after stop conditions."""
        self.verify_steps += 1
        self.committed_tokens += committed
        self.accepted_drafts += accepted
        self.accepted_histogram[accepted] += 1

    def observe_shadow(self, *, tree: int, linear: int) -> None:
        """Drafted tokens that a tree and the chain would have had accepted at the same position."""
        self.shadow_steps += 1
        self.shadow_tree_tokens += tree + 1
        self.shadow_linear_tokens += linear + 1
        self.shadow_histogram[tree] += 1

    def snapshot(self) -> dict[str, object]:
        steps, shadow = max(1, self.verify_steps), max(1, self.shadow_steps)
        state: dict[str, object] = {
            "mode": self.mode,
            "budget": self.budget,
            "topk": self.topk,
            "verify_steps_total": self.verify_steps,
            "generated_tokens_total": self.committed_tokens,
            "acceptance_length": self.committed_tokens / steps,
            "accepted_drafts_histogram": list(self.accepted_histogram),
        }
        if self.mode == "shadow":
            state["shadow"] = {
                "steps": self.shadow_steps,
                "tree_acceptance_length": self.shadow_tree_tokens / shadow,
                "linear_acceptance_length": self.shadow_linear_tokens / shadow,
                "tree_accepted_histogram": list(self.shadow_histogram),
            }
        return state
