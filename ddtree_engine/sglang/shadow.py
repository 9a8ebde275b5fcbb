"""What a tree would have gained on traffic that is verified linearly.

The tokens a request really got decide: a tree drafted before them would have been accepted as far as they form one of
its paths. That is known once the request has grown by a whole block or has finished, so trees wait here until then. For
greedy requests the result is exact; for sampled ones it is a draw of the same kind as tree verification itself makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_engine.sglang.metrics import TreeMetrics
from ddtree_engine.tree import TreeBatch


@dataclass(frozen=True)
class _Pending:
    request: Any
    start: int  # output tokens the request had when the tree was drafted
    children: dict[tuple[int, int], int]  # (node, token) -> child
    linear: list[int]


class ShadowLedger:
    """Trees in the order they were drafted, settled as soon as their outcome is known."""

    def __init__(self, metrics: TreeMetrics, depths: int) -> None:
        self._metrics = metrics
        self._depths = depths
        self._pending: deque[_Pending] = deque()

    def record(self, requests: Sequence[Any], tree: TreeBatch, linear: Any) -> None:
        """Remember one tree per request; `linear` [bs, S] is the chain that is verified instead, root first."""
        self.settle()
        parents, tokens, counts = tree.parents.tolist(), tree.tokens.tolist(), tree.counts.tolist()
        for row, (request, block) in enumerate(zip(requests, linear.tolist(), strict=True)):
            children: dict[tuple[int, int], int] = {}
            for node in range(1, counts[row]):
                children.setdefault((parents[row][node], tokens[row][node]), node)
            self._pending.append(_Pending(request, len(request.output_ids), children, block[1:]))

    def settle(self) -> None:
        waiting: deque[_Pending] = deque()
        for entry in self._pending:
            actual = list(entry.request.output_ids[entry.start : entry.start + self._depths])
            if len(actual) == self._depths or entry.request.finished():
                if actual:
                    self._metrics.observe_shadow(
                        tree=_tree_length(entry.children, actual), linear=_linear_length(entry.linear, actual)
                    )
            else:
                waiting.append(entry)
        self._pending = waiting


def _tree_length(children: dict[tuple[int, int], int], actual: list[int]) -> int:
    node = 0
    for length, token in enumerate(actual):
        following = children.get((node, token))
        if following is None:
            return length
        node = following
    return len(actual)


def _linear_length(linear: list[int], actual: list[int]) -> int:
    for length, token in enumerate(actual):
        if length >= len(linear) or linear[length] != token:
            return length
    return min(len(actual), len(linear))
