"""On a GPU with the engine's kernels: device trees, masks and walks against host code (run by hand, not in CI).

PYTHONPATH=<unpacked site>:. python3 -m pytest tests/gpu
"""

from __future__ import annotations

import pytest
import torch

from ddtree_engine.sglang.mask import flat_mask
from ddtree_engine.tree import build_batch
from ddtree_engine.verify import walk_dictionary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def candidates(bs: int, depths: int, topk: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, depths, 64, generator=generator) * 2
    best = torch.log_softmax(logits, -1).topk(topk, dim=-1)
    return torch.randint(0, 64, (bs,), generator=generator), best.values, best.indices


@pytest.mark.parametrize("budget", [1, 7, 15, 16, 31, 63, 255])
@pytest.mark.parametrize("bs", [1, 3, 32])
def test_trees_on_the_device_are_those_of_the_host(bs: int, budget: int) -> None:
    roots, values, tokens = candidates(bs, 15, 8, seed=budget)
    host = build_batch(roots, values, tokens, budget)
    device = build_batch(roots.cuda(), values.cuda(), tokens.cuda(), budget)
    for name in ("tokens", "parents", "depths", "ranks", "counts"):
        assert torch.equal(getattr(host, name), getattr(device, name).cpu()), name
    lengths = torch.arange(1, bs + 1)
    expected = flat_mask(host.visible(), lengths, lengths)
    assert torch.equal(flat_mask(device.visible(), lengths.cuda(), lengths).cpu(), expected)


def test_building_a_tree_never_waits_for_the_device() -> None:
    roots, values, tokens = (part.cuda() for part in candidates(8, 15, 8, seed=1))
    build_batch(roots, values, tokens, 31)  # index tables are made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        trees = build_batch(roots, values, tokens, 31)
        trees.links()
        trees.visible()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("budget", [7, 15, 31, 63])
def test_the_kernel_s_walk_is_the_dictionary_walk(budget: int) -> None:
    kernels = pytest.importorskip("sgl_kernel")
    bs, width, longest = 16, budget + 1, 16
    roots, values, tokens = candidates(bs, 15, 8, seed=budget)
    trees = build_batch(roots.cuda(), values.cuda(), tokens.cuda(), budget)
    first, following = trees.links()
    predicted = torch.randint(0, 64, (bs, width), device="cuda")
    for row in range(bs):  # let most walks go some way: a node's token becomes its parent's prediction
        for node in range(width - 1, 0, -1):
            if (node + row) % 3:
                predicted[row, trees.parents[row, node]] = trees.tokens[row, node]
    after = torch.empty(bs * width + 1, dtype=torch.int32, device="cuda")
    path = torch.full((bs, longest), -1, dtype=torch.int32, device="cuda")
    accepted = torch.empty(bs, dtype=torch.int32, device="cuda")
    kernels.verify_tree_greedy(
        predicts=after,
        accept_index=path,
        accept_token_num=accepted,
        candidates=trees.tokens,
        retrive_index=torch.arange(bs * width, device="cuda").view(bs, width),
        retrive_next_token=first,
        retrive_next_sibling=following,
        target_predict=predicted,
    )
    for row in range(bs):
        expected = walk_dictionary(trees.tree(row), predicted[row].tolist())
        found = [node - row * width for node in path[row].tolist() if node >= 0]
        assert found == expected.nodes
        assert [int(after[row * width + node]) for node in found] == expected.tokens
        assert int(accepted[row]) == len(expected.nodes) - 1
