"""The gated delta rule over trees: node by node, and all nodes at once.

A head's state is a matrix h [dk, dv]. A token first lets it fade by exp(g), g <= 0, then replaces what the state holds
at its key by a share beta of its value, and reads it with its query:

    h' = exp(g) h;   u = beta (v - k h');   h = h' + k^T u;   o = q h

On a tree the state before a token is that after its *parent*, never that of the node at the index before: with
siblings in between, the two differ. Shapes: n nodes, H value heads; q, k [n, H, dk]; v, u, o [n, H, dv]; g, beta [n,
H].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Inputs:
    """What the tokens of one pass bring to the rule."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def recurrent(state: torch.Tensor, inputs: Inputs, parents: list[int]) -> torch.Tensor:
    """Outputs [n, H, dv], one node after the other: the definition. `state` [H, dk, dv] is that before the pass, which
    nodes with parent -1 continue. States live as long as a child still needs them."""
    last_child = {parent: node for node, parent in enumerate(parents)}
    alive = {-1: state}
    outputs = []
    for node, parent in enumerate(parents):
        after = _advance(alive[parent], inputs, node)
        outputs.append(torch.einsum("hk,hkv->hv", inputs.queries[node], after))
        if last_child[parent] == node:
            del alive[parent]
        if node in last_child:
            alive[node] = after
    return torch.stack(outputs)


def commit(state: torch.Tensor, inputs: Inputs, path: list[int]) -> torch.Tensor:
    """The state behind the nodes `path`, from the first one after `state` to the last one kept."""
    for node in path:
        state = _advance(state, inputs, node)
    return state


def _advance(state: torch.Tensor, inputs: Inputs, node: int) -> torch.Tensor:
    key = inputs.keys[node]
    faded = state * inputs.log_decay[node].exp()[:, None, None]
    change = inputs.beta[node][:, None] * (inputs.values[node] - torch.einsum("hk,hkv->hv", key, faded))
    return faded + key[:, :, None] * change[:, None, :]


@dataclass(frozen=True)
class Packed:
    """All nodes at once, without a state per node (the WY form on trees): a node keeps its change u, its key and the
    log of the fading from the root down to it. Equal to `recurrent` up to rounding."""

    outputs: torch.Tensor  # [n, H, dv]
    changes: torch.Tensor  # [n, H, dv]
    keys: torch.Tensor  # [n, H, dk]
    fading: torch.Tensor  # [n, H]

    @classmethod
    def run(cls, state: torch.Tensor, inputs: Inputs, parents: list[int], visible: torch.Tensor) -> Packed:
        """visible [n, n] bool: (node, other) where `other` is the node itself or one before it on its path."""
        rows: list[torch.Tensor] = []
        for node, parent in enumerate(parents):
            rows.append(inputs.log_decay[node] + (rows[parent] if parent >= 0 else 0.0))
        fading = torch.stack(rows)
        # Only ancestors count. The others' differences may be positive and overflow, so they are cut before exp.
        between = (fading[:, None] - fading[None]).masked_fill(~visible[:, :, None], float("-inf")).exp()
        weights = between * torch.einsum("thk,jhk->tjh", inputs.keys, inputs.keys) * inputs.beta[:, None]
        lower = weights.permute(2, 0, 1).tril(-1)  # strict: parents stand before their children
        held = fading.exp()[:, :, None] * torch.einsum("thk,hkv->thv", inputs.keys, state)
        wanted = inputs.beta[:, :, None] * (inputs.values - held)
        changes = torch.linalg.solve_triangular(lower, wanted.transpose(0, 1), upper=False, unitriangular=True)
        changes = changes.transpose(0, 1)
        reads = between * torch.einsum("thk,jhk->tjh", inputs.queries, inputs.keys)
        outputs = fading.exp()[:, :, None] * torch.einsum("thk,hkv->thv", inputs.queries, state)
        outputs = outputs + torch.einsum("tjh,jhv->thv", reads, changes)
        return cls(outputs, changes, inputs.keys, fading)

    def commit(self, state: torch.Tensor, path: list[int]) -> torch.Tensor:
        """The state behind the nodes `path`; see `commit`."""
        if not path:
            return state
        total = self.fading[path[-1]]
        left = (total - self.fading[path]).exp()[:, :, None] * self.keys[path]
        return total.exp()[:, None, None] * state + torch.einsum("jhk,jhv->hkv", left, self.changes[path])
