"""Draft trees: which prefixes of a drafted block are worth verifying, and how their nodes hang together.

Follows "Accelerating Speculative Decoding with Block Diffusion Draft Trees" (arXiv 2604.12989). One pass of a block
drafter gives a marginal distribution q_d for each of the D positions after the *root* (the last token already
decided). A node is a prefix (u_1..u_d) with score s(u) = sum of log q_i(u_i), in nats. Under the factorised surrogate
the expected number of accepted drafts of a prefix-closed tree is the sum of exp s(u) over its nodes (Proposition 1),
so the best tree of B nodes holds the B highest-scoring prefixes. They are closed under prefixes by themselves because
no child outscores its parent, and best-first search lists them in O(B log B) (Proposition 3).

Order of the nodes, in both builders: score descending, then depth, parent and rank ascending. It follows that a parent
stands before its children and siblings stand in rank order, which is what kernels that rebuild the parents in one
forward pass rely on.

Shapes: D drafted depths, K candidates per depth, B node budget (root excluded), T = B + 1 nodes with the root at index
0.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch

NO_NODE = -1


@dataclass(frozen=True)
class Tree:
    """The tree of one request. Every list has n = 1 + (number of drafted nodes) entries; entry 0 is the root."""

    tokens: list[int]
    parents: list[int]  # NO_NODE for the root; else smaller than the node's own index
    depths: list[int]  # 0 for the root; a node's position is the root's position plus its depth
    ranks: list[int]  # which of its depth's candidates the node is; 0 is the most probable one
    scores: list[float]  # s(u) in nats; 0 for the root

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """Nodes without the root: the number that acceptance rates are to be divided by."""
        return len(self.tokens) - 1

    @cached_property
    def links(self) -> tuple[list[int], list[int]]:
        """(first child, next sibling) per node, NO_NODE where there is none: `retrieve_next_token` and
        `retrieve_next_sibling` of the tree walk kernels. Sibling links always increase."""
        return link(self.parents)

    @cached_property
    def ancestors(self) -> list[int]:
        """Bit set per node: bit j is set when node j is the node itself or one of its ancestors."""
        sets: list[int] = []
        for node, parent in enumerate(self.parents):
            sets.append((sets[parent] if parent >= 0 else 0) | 1 << node)
        return sets

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def spine(self) -> Tree:
        """The nodes reached by most probable candidates only, as a tree of their own."""
        nodes = [0]
        for node in range(1, len(self)):
            if self.ranks[node] == 0 and self.parents[node] == nodes[-1]:
                nodes.append(node)
        return Tree(
            [self.tokens[node] for node in nodes],
            list(range(-1, len(nodes) - 1)),
            list(range(len(nodes))),
            [0] * len(nodes),
            [self.scores[node] for node in nodes],
        )

    def expected_drafts(self) -> float:
        """Accepted drafts (bonus token excluded) that the surrogate expects: Proposition 1."""
        return math.fsum(math.exp(score) for score in self.scores[1:])

    def visible(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """[n, n] bool: (node, other) is true when `other` is the node or an ancestor of it."""
        if self.is_chain():
            return torch.ones(len(self), len(self), dtype=torch.bool, device=device).tril()
        mask = torch.zeros(len(self), len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] = mask[parent]
            mask[node, node] = True
        return mask.to(device)

    def check(self) -> None:
        """Raises ValueError where an invariant that verification relies on does not hold."""
        n = len(self.tokens)
        if not n or self.parents[0] != NO_NODE or self.depths[0]:
            raise ValueError("a tree needs a root at index 0")
        if not n == len(self.parents) == len(self.depths) == len(self.ranks) == len(self.scores):
            raise ValueError("the columns of a tree differ in length")
        seen: set[tuple[int, int]] = set()
        last_rank: dict[int, int] = {}
        for node in range(1, n):
            parent, rank = self.parents[node], self.ranks[node]
            if not 0 <= parent < node:
                raise ValueError(f"node {node}: its parent {parent} does not stand before it")
            if self.depths[node] != self.depths[parent] + 1:
                raise ValueError(
                    f"node {node}: depth {self.depths[node]} under a parent of depth {self.depths[parent]}"
                )
            if rank <= last_rank.get(parent, -1):
                raise ValueError(f"node {node}: rank {rank} follows sibling rank {last_rank[parent]}")
            if (parent, self.tokens[node]) in seen:
                raise ValueError(f"node {node}: token {self.tokens[node]} stands twice under node {parent}")
            last_rank[parent] = rank
            seen.add((parent, self.tokens[node]))


def link(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """(first child, next sibling) of every node, from parents that stand before their children."""
    first, following = [NO_NODE] * len(parents), [NO_NODE] * len(parents)
    youngest: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if parent in youngest:
            following[youngest[parent]] = node
        else:
            first[parent] = node
        youngest[parent] = node
    return first, following


def chain(root: int, tokens: Sequence[int]) -> Tree:
    """The linear block as a tree: each token the only child of the one before. No scores are known (all 0)."""
    n = 1 + len(tokens)
    return Tree([root, *tokens], list(range(-1, n - 1)), list(range(n)), [0] * n, [0.0] * n)


def build(
    root: int, log_probabilities: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], budget: int
) -> Tree:
    """Best-first search with a heap (Proposition 3): the oracle, and the fast way for one request on a CPU.

    `log_probabilities` and `tokens` are D rows of K candidates each, most probable first, in nats. A candidate of log
    probability -inf is padding and never becomes a node, whatever its token; token ids have no special values.
    With K >= min(B, V) the tree is the exact optimum, with fewer candidates the optimum among them.
    """
    _check(log_probabilities, tokens, budget)
    out = Tree([root], [NO_NODE], [0], [0], [0.0])
    depth_limit = len(tokens)
    # (-score, depth, parent, rank): the frontier, every entry a node whose parent and elder siblings are in the tree.
    frontier: list[tuple[float, int, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        depth = out.depths[parent] + 1
        if depth > depth_limit or rank >= len(tokens[depth - 1]):
            return
        # Rounding can leave a log-probability a hair above zero, and a child must not outscore its parent.
        score = out.scores[parent] + min(0.0, log_probabilities[depth - 1][rank])
        if score > -math.inf:
            heapq.heappush(frontier, (-score, depth, parent, rank))

    offer(0, 0)
    while frontier and out.drafted < budget:
        negative, depth, parent, rank = heapq.heappop(frontier)
        node = len(out.tokens)
        out.tokens.append(tokens[depth - 1][rank])
        out.parents.append(parent)
        out.depths.append(depth)
        out.ranks.append(rank)
        out.scores.append(-negative)
        offer(parent, rank + 1)
        offer(node, 0)
    return out


def _check(log_probabilities: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], budget: int) -> None:
    if budget < 1:
        raise ValueError(f"the node budget must be at least 1, not {budget}; decode without speculation instead")
    if len(log_probabilities) != len(tokens):
        raise ValueError(f"{len(log_probabilities)} depths of log-probabilities but {len(tokens)} of tokens")
    for depth, (row, ids) in enumerate(zip(log_probabilities, tokens, strict=True), 1):
        if not row or len(row) != len(ids):
            raise ValueError(f"depth {depth}: {len(row)} log-probabilities for {len(ids)} tokens; at least 1 is needed")
        if any(math.isnan(value) for value in row):
            raise ValueError(f"depth {depth}: the drafter's log-probabilities hold NaN")
        if any(later > earlier for earlier, later in pairwise(row)):
            raise ValueError(f"depth {depth}: candidates are not sorted by probability")
        real = [token for value, token in zip(row, ids, strict=True) if value > -math.inf]
        if len(set(real)) != len(real):
            raise ValueError(f"depth {depth}: a token is listed twice; pad with log-probability -inf")


@dataclass(frozen=True)
class TreeBatch:
    """Trees of bs requests in T columns. Columns past a request's nodes are empty: token, rank and depth 0, parent 0,
    visible to themselves and the root only, linked from nowhere, so they can never be accepted. `counts` says how many
    columns are real; it cannot be told from token ids, 0 being a token like any other."""

    tokens: torch.Tensor  # [bs, T] int64
    parents: torch.Tensor  # [bs, T] int64; NO_NODE for the root
    depths: torch.Tensor  # [bs, T] int64
    ranks: torch.Tensor  # [bs, T] int64
    scores: torch.Tensor  # [bs, T] nats; -inf in empty columns
    counts: torch.Tensor  # [bs] int64, root included

    def tree(self, row: int) -> Tree:
        """The tree of one request, on the host."""
        n = int(self.counts[row])
        columns = (self.tokens, self.parents, self.depths, self.ranks, self.scores)
        tokens, parents, depths, ranks, scores = (column[row, :n].tolist() for column in columns)
        return Tree(tokens, parents, depths, ranks, scores)

    def links(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(first child, next sibling), each [bs, T] int64 with NO_NODE where there is none."""
        width = self.parents.shape[1]
        steps = torch.arange(width, device=self.parents.device)
        real = (steps < self.counts[:, None]) & (steps > 0)
        child = (self.parents[:, None, :] == steps[None, :, None]) & real[:, None, :]  # [bs, node, child]
        sibling = (self.parents[:, :, None] == self.parents[:, None, :]) & real[:, :, None] & real[:, None, :]
        sibling &= steps[None, None, :] > steps[None, :, None]
        return _first_true(child), _first_true(sibling)

    def visible(self) -> torch.Tensor:
        """[bs, T, T] bool: (node, other) is true when `other` is the node or an ancestor of it."""
        bs, width = self.parents.shape
        reach = torch.eye(width, dtype=torch.bool, device=self.parents.device).repeat(bs, 1, 1)
        above = self.parents.clamp(min=0)
        # A node sees what its parent sees. Each round doubles the generations that are complete: the sets of the
        # nodes 1, 2, 4, ... generations up are merged in turn.
        for _ in range(max(1, (int(self.depths.shape[1]) - 1).bit_length())):
            reach = reach | reach.gather(1, above[:, :, None].expand(-1, -1, width))
            above = above.gather(1, above)
        return reach


def _first_true(relation: torch.Tensor) -> torch.Tensor:
    """[bs, T, T] bool -> [bs, T] int64: the first column that is true in each row, NO_NODE where none is."""
    return torch.where(relation.any(2), relation.to(torch.uint8).argmax(2), NO_NODE)


@lru_cache(maxsize=256)
def _pairs(parents: int, candidates: int, budget: int) -> tuple[list[int], list[int]]:
    """(parent, rank) pairs, 0-based, that can be among the `budget` best of their level when parents are sorted: pair
    (i, r) is dominated by (i+1)(r+1) - 1 others. 45 pairs instead of 225 at B = 15, 273 instead of 3,969 at B = 63."""
    kept = [(i, r) for i in range(parents) for r in range(candidates) if (i + 1) * (r + 1) <= budget]
    return [i for i, _ in kept], [r for _, r in kept]


@lru_cache(maxsize=256)
def _pairs_on(device: torch.device, parents: int, candidates: int, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`_pairs` as index tensors, made once: a copy from the host in every step would wait for the device."""
    rows, ranks = _pairs(parents, candidates, budget)
    return torch.tensor(rows, device=device), torch.tensor(ranks, device=device)


def build_batch(roots: torch.Tensor, log_probabilities: torch.Tensor, tokens: torch.Tensor, budget: int) -> TreeBatch:
    """The same trees as `build`, level by level for a whole batch and without waiting for the device.

    roots [bs] int64; log_probabilities [bs, D, K] nats, most probable first, -inf for padding; tokens [bs, D, K]
    int64. A node of depth d extends a node of depth d - 1, so each level keeps its B best, and the B best of all
    levels are the tree. Both sorts are stable over the depth-major layout: a plain top-k would tear a child from its
    parent where log q = 0 or scores tie.
    """
    if budget < 1:
        raise ValueError(f"the node budget must be at least 1, not {budget}; decode without speculation instead")
    if log_probabilities.shape != tokens.shape or log_probabilities.dim() != 3 or 0 in tokens.shape:
        raise ValueError(f"need candidates [bs, D, K], not {tuple(log_probabilities.shape)} and {tuple(tokens.shape)}")
    device, (bs, depths, candidates) = roots.device, tokens.shape
    log_probabilities = log_probabilities.clamp(max=0.0)
    level = log_probabilities.new_zeros(bs, 1)
    above = 0  # column where the parents' level starts in the depth-major layout, the root being column 0
    columns: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    start = 1
    for d in range(depths):
        rows, ranks = _pairs_on(device, level.shape[1], candidates, budget)
        scores = level[:, rows] + log_probabilities[:, d, ranks]
        level, pick = torch.sort(scores, dim=1, descending=True, stable=True)
        level, pick = level[:, :budget], pick[:, :budget]
        columns.append((level, rows[pick] + above, ranks[pick], torch.full_like(pick, d + 1)))
        above, start = start, start + level.shape[1]
    score, parent, rank, depth = (torch.cat(parts, 1) for parts in zip(*columns, strict=True))
    score, order = torch.sort(score, dim=1, descending=True, stable=True)
    score, order = score[:, :budget], order[:, :budget]
    if order.shape[1] < budget:  # fewer prefixes exist than the budget allows
        missing = budget - order.shape[1]
        score = torch.nn.functional.pad(score, (0, missing), value=-math.inf)
        order = torch.nn.functional.pad(order, (0, missing))
    real = score > -math.inf
    # Where each column of the layout went in the final order. Column 0, the root, stays 0; empty columns write to a
    # spare one at the end.
    place = torch.zeros(bs, start + 1, dtype=torch.int64, device=device)
    numbers = torch.arange(1, budget + 1, device=device).expand(bs, -1)
    place.scatter_(1, torch.where(real, order + 1, start), numbers)

    def final(column: torch.Tensor) -> torch.Tensor:
        return torch.where(real, column.gather(1, order), 0)

    parent, rank, depth = place.gather(1, final(parent)), final(rank), final(depth)
    token = tokens.flatten(1).gather(1, (depth - 1).clamp(min=0) * candidates + rank)
    zero = torch.zeros(bs, 1, dtype=torch.int64, device=device)
    return TreeBatch(
        tokens=torch.cat([roots[:, None], torch.where(real, token, 0)], 1),
        parents=torch.cat([zero + NO_NODE, parent], 1),
        depths=torch.cat([zero, depth], 1),
        ranks=torch.cat([zero, rank], 1),
        scores=torch.cat([score.new_zeros(bs, 1), score], 1),
        counts=real.sum(1) + 1,
    )
