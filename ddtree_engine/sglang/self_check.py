"""Slow checks of every step against plain host code, for tests on a GPU (`DDTREE_SELF_CHECK=1`)."""

from __future__ import annotations

import torch

from ddtree_engine.tree import TreeBatch
from ddtree_engine.verify import walk_dictionary


class TreeInvariantBroken(RuntimeError):
    """The device's tree or walk differs from what the definition says."""


def check_walk(trees: TreeBatch, predicted: torch.Tensor, nodes: list[list[int]], tokens: list[list[int]]) -> None:
    """The device's trees are well formed, its walk is the dictionary walk, and no tree does worse than its spine.

    `predicted` [bs, T] is the target's token at each node; `nodes` are flat indices into the batch.
    """
    width = int(trees.tokens.shape[1])
    for row, (path, following) in enumerate(zip(nodes, tokens, strict=True)):
        tree = trees.tree(row)
        try:
            tree.check()
        except ValueError as error:
            raise TreeInvariantBroken(f"row {row}: {error}") from error
        choice = predicted[row].tolist()
        expected = walk_dictionary(tree, choice)
        local = [node - row * width for node in path]
        if local != expected.nodes or following != expected.tokens:
            raise TreeInvariantBroken(
                f"row {row}: device accepted {local} -> {following}, host {expected.nodes} -> {expected.tokens}"
            )
        spine = [
            node for node in range(1, len(tree)) if tree.ranks[node] == 0 and _on_spine(tree.parents, tree.ranks, node)
        ]
        accepted = 0
        for parent, node in zip([0, *spine], spine, strict=False):
            if choice[parent] != tree.tokens[node]:
                break
            accepted += 1
        if len(local) - 1 < accepted:
            raise TreeInvariantBroken(f"row {row}: {len(local) - 1} drafts accepted, {accepted} on the spine alone")


def _on_spine(parents: list[int], ranks: list[int], node: int) -> bool:
    while node > 0:
        if ranks[node] != 0:
            return False
        node = parents[node]
    return True
