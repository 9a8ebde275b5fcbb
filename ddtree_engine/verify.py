"""Verification: which drafted nodes the target agrees with, and what of them a request keeps.

The target gives one token per node: its arg-max for greedy decoding, or a sample from its distribution at that node.
The walk starts at the root and goes to the child that carries the node's token for as long as there is one; the first
token without a child ends it and is the *bonus*. Every emitted token is the target's own choice after exactly the
tokens before it, so the drafter decides how many tokens a pass yields and never which: greedy output is that of plain
decoding, sampled output has its law (arXiv 2604.12989, verification).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from .tree import NO_NODE, Tree


@dataclass(frozen=True)
class Walk:
    """`nodes` are the accepted nodes in path order, the root first; `tokens[i]` is the target's token at `nodes[i]`, so
    tokens[:-1] are the drafts that were accepted and tokens[-1] is the bonus. Both have at least one entry."""

    nodes: list[int]
    tokens: list[int]


def walk(tree: Tree, choose: Callable[[int], int]) -> Walk:
    """Follows `choose(node)`, the target's token at that node, from the root. Called once for each node on the path, in
    path order, so a sampler need not draw at nodes that are never reached."""
    first, following = tree.links
    node, nodes, tokens = 0, [0], []
    while True:
        token = choose(node)
        tokens.append(token)
        node = first[node]
        while node != NO_NODE and tree.tokens[node] != token:
            node = following[node]
        if node == NO_NODE:
            return Walk(nodes, tokens)
        nodes.append(node)


def walk_greedy(tree: Tree, logits: torch.Tensor) -> Walk:
    """`walk` with the arg-max of each row of `logits` [n, V]; one transfer from the device for the whole tree."""
    return walk(tree, logits.argmax(-1).tolist().__getitem__)


def truncate(path: Walk, *, remaining: int, stop_token_ids: Collection[int] = ()) -> tuple[Walk, str | None]:
    """What a request keeps of a path: at most `remaining` tokens, and nothing behind a stop token, which itself is
    kept. Returns the kept part and why the request ends here: "stop", "length" or None.

    Belongs before the KV cache is compacted and hidden states are handed to the drafter. The kept part always has one
    node per token: the node whose context, together with the token, is decided.
    """
    if remaining < 1:
        raise ValueError(f"a finished request cannot be verified further (remaining={remaining})")
    kept = path.tokens[:remaining]
    finish = "length" if len(kept) == remaining else None
    for count, token in enumerate(kept, 1):
        if token in stop_token_ids:
            kept, finish = kept[:count], "stop"
            break
    return Walk(path.nodes[: len(kept)], kept), finish


def walk_dictionary(tree: Tree, predictions: Sequence[int]) -> Walk:
    """`walk` again, by looking (parent, token) up in a dictionary: independent of links and order, for tests and for
    checking other implementations."""
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(tree)):
        children.setdefault((tree.parents[node], tree.tokens[node]), node)
    nodes = [0]
    while (nodes[-1], predictions[nodes[-1]]) in children:
        nodes.append(children[nodes[-1], predictions[nodes[-1]]])
    return Walk(nodes, [predictions[node] for node in nodes])
