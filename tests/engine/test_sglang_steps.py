"""The parts of a DDTREE step that need no GPU: candidates, mask, commit with stops, shadow ledger, seams."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree_engine.sglang import seams
from ddtree_engine.sglang.candidates import order_candidates
from ddtree_engine.sglang.commit import commit_paths
from ddtree_engine.sglang.mask import flat_mask
from ddtree_engine.sglang.metrics import TreeMetrics
from ddtree_engine.sglang.self_check import TreeInvariantBroken, check_walk
from ddtree_engine.sglang.shadow import ShadowLedger
from ddtree_engine.tree import TreeBatch, build_batch
from ddtree_engine.verify import walk_dictionary


def trees(bs: int, budget: int, depths: int = 6, candidates: int = 4, seed: int = 0) -> TreeBatch:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, depths, candidates, generator=generator).sort(-1, descending=True).values
    tokens = torch.stack([torch.randperm(9, generator=generator)[:candidates] for _ in range(bs * depths)])
    roots = torch.randint(0, 9, (bs,), generator=generator)
    return build_batch(roots, torch.log_softmax(logits, -1), tokens.view(bs, depths, candidates), budget)


class Request:
    """A request that ends at a stop token or after a number of tokens, as the scheduler's does."""

    def __init__(self, stop: int | None = None, limit: int = 1000) -> None:
        self.output_ids: list[int] = []
        self.require_reasoning = False
        self.spec_verify_ct = self.spec_accepted_drafts = self.kv_committed_len = self.kv_allocated_len = 0
        self.histogram: list[int] = []
        self._stop, self._limit, self._done = stop, limit, False

    def check_finished(self) -> None:
        self._done = self.output_ids[-1] == self._stop or len(self.output_ids) >= self._limit

    def finished(self) -> bool:
        return self._done

    def update_spec_acceptance_histogram(self, accepted: int) -> None:
        self.histogram.append(accepted)


def committed(requests: list[Request], nodes: list[list[int]], tokens: list[list[int]], width: int) -> Any:
    batch = SimpleNamespace(
        reqs=requests, model_config=SimpleNamespace(), seq_lens=torch.zeros(len(requests), dtype=torch.int64)
    )
    return commit_paths(batch, nodes, tokens, width, TreeMetrics(width - 1, 4, width))


def test_committed_slots_are_those_of_the_path_and_every_other_slot_is_freed() -> None:
    requests = [Request(), Request()]
    done = committed(requests, [[0, 2, 5], [8, 9]], [[7, 8, 9], [1, 2]], width=8)
    assert done.kept.tolist() == [0, 2, 5, 8, 9]
    assert sorted(done.kept.tolist() + done.freed.tolist()) == list(range(16))
    assert done.lengths.tolist() == [3, 2]
    assert done.current_tokens.tolist() == [9, 2]
    assert done.last_nodes.tolist() == [5, 1], "recurrent state is that of the last node, not of the path's length"
    assert [request.kv_committed_len for request in requests] == [3, 2]


@pytest.mark.parametrize(
    ("request_", "kept"),
    [
        (Request(stop=11), [0, 3]),  # stop token inside the path
        (Request(limit=1), [0]),  # max_tokens inside the path
        (Request(stop=10), [0]),  # the very first token stops
        (Request(stop=99), [0, 3, 4, 6]),
    ],
)
def test_nothing_behind_a_stop_inside_the_path_is_kept(request_: Request, kept: list[int]) -> None:
    done = committed([request_], [[0, 3, 4, 6]], [[10, 11, 12, 13]], width=8)
    assert done.kept.tolist() == kept
    assert request_.output_ids == [10, 11, 12, 13][: len(kept)]
    assert done.last_nodes.tolist() == [kept[-1]]
    assert request_.histogram == [len(kept) - 1]
    assert len(done.freed) == 8 - len(kept)


def test_slots_are_conserved_over_random_batches_with_stops() -> None:
    rng = random.Random(4)
    for round_ in range(100):
        bs, width = rng.randint(1, 5), rng.choice([2, 8, 16, 17])
        batch = trees(bs, width - 1, seed=round_)
        requests = [Request(stop=rng.choice([None, 3]), limit=rng.randint(1, 6)) for _ in range(bs)]
        walks = []
        for row in range(bs):
            walk = walk_dictionary(batch.tree(row), [rng.randrange(9) for _ in range(width)])
            walks.append(([node + row * width for node in walk.nodes], walk.tokens))
        done = committed(requests, [w[0] for w in walks], [w[1] for w in walks], width)
        assert sorted(done.kept.tolist() + done.freed.tolist()) == list(range(bs * width))
        assert [len(r.output_ids) for r in requests] == done.lengths_cpu
        assert int(done.lengths.sum()) == len(done.kept)


def test_mask_lets_a_node_see_the_prefix_and_its_ancestors_for_requests_of_unequal_length() -> None:
    lengths = [5, 1, 12]
    batch = trees(3, 7)
    visible = batch.visible()
    flat = flat_mask(visible, torch.tensor(lengths), torch.tensor(lengths))
    at = 0
    for row, length in enumerate(lengths):
        block = flat[at : at + 8 * (length + 8)].view(8, length + 8)
        assert block[:, :length].all()
        assert torch.equal(block[:, length:], visible[row])
        at += block.numel()
    assert at == flat.numel()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_candidates_merged_from_shards_are_those_of_the_whole_vocabulary(shards: int) -> None:
    generator = torch.Generator().manual_seed(shards)
    logits = torch.randint(0, 6, (20, 32), generator=generator).float()  # many ties
    values, tokens, normalisers = [], [], []
    for shard, part in enumerate(logits.chunk(shards, dim=1)):
        best = part.topk(min(8, part.shape[1]), dim=1)
        values.append(best.values)
        tokens.append(best.indices + shard * part.shape[1])
        normalisers.append(part.logsumexp(1))
    whole = torch.logsumexp(torch.stack(normalisers, 1), 1)
    found, ids = order_candidates(torch.cat(values, 1), torch.cat(tokens, 1), whole, 4)
    reference = torch.log_softmax(logits, 1)
    assert torch.allclose(found, reference.topk(4, dim=1).values, atol=1e-5)
    assert torch.allclose(reference.gather(1, ids), found, atol=1e-5)
    for row, row_ids in zip(found.tolist(), ids.tolist(), strict=True):
        for a, b in zip(range(3), range(1, 4), strict=True):
            assert row[a] > row[b] or row_ids[a] < row_ids[b], "equal values must be in the order of their ids"


def test_self_check_accepts_the_right_walk_and_refuses_any_other() -> None:
    batch = trees(2, 15, seed=3)
    predicted = torch.randint(0, 9, (2, 16), generator=torch.Generator().manual_seed(1))
    # let the first request follow its tree one node deep
    predicted[0, 0] = batch.tokens[0, 1]
    walks = [walk_dictionary(batch.tree(row), predicted[row].tolist()) for row in range(2)]
    nodes = [[node + 16 * row for node in walk.nodes] for row, walk in enumerate(walks)]
    tokens = [walk.tokens for walk in walks]
    check_walk(batch, predicted, nodes, tokens)
    with pytest.raises(TreeInvariantBroken, match="row 0"):
        check_walk(batch, predicted, [nodes[0][:1], nodes[1]], [tokens[0][:1], tokens[1]])


def test_shadow_reports_what_a_tree_would_have_had_accepted() -> None:
    metrics = TreeMetrics(budget=15, topk=4, max_path=7, mode="shadow")
    ledger = ShadowLedger(metrics, depths=6)
    batch = trees(1, 15, seed=5)
    request = Request()
    linear = torch.full((1, 7), 77)
    ledger.record([request], batch, linear)
    tree = batch.tree(0)
    deepest = max(range(len(tree)), key=lambda node: tree.depths[node])
    path = [tree.tokens[node] for node in tree.path(deepest)[1:]]
    request.output_ids += path
    ledger.settle()
    assert metrics.shadow_steps == 0, "the outcome is open until a whole block has followed"
    request.output_ids += [55] * (6 - len(path))
    ledger.settle()
    assert metrics.shadow_steps == 1
    assert metrics.shadow_histogram[len(path)] == 1
    assert (metrics.shadow_tree_tokens, metrics.shadow_linear_tokens) == (len(path) + 1, 1)


def test_shadow_settles_finished_requests_with_what_they_got() -> None:
    metrics = TreeMetrics(budget=15, topk=4, max_path=7, mode="shadow")
    ledger = ShadowLedger(metrics, depths=6)
    request = Request(limit=1)
    ledger.record([request], trees(1, 15), torch.tensor([[0, 4, 4, 4, 4, 4, 4]]))
    request.output_ids.append(4)
    request.check_finished()
    ledger.settle()
    assert (metrics.shadow_steps, metrics.shadow_linear_tokens) == (1, 2)


def test_seams_are_recognised_by_what_the_patched_code_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("patched_engine")

    def patched(self: Any) -> Any:
        return [self.make_tree() for _ in range(2)]

    def unpatched(self: Any) -> Any:
        return self.make_chain()

    module.patched, module.unpatched = patched, unpatched  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "patched_engine", module)
    good = seams.Seam("patched_engine", "patched", "make_tree", "trees")
    broken = seams.Seam("patched_engine", "unpatched", "make_tree", "trees")
    gone = seams.Seam("patched_engine", "absent", "make_tree", "trees")
    assert seams.missing((good,)) == []
    assert "make_tree" in seams.missing((broken,))[0]
    assert "absent" in seams.missing((gone,))[0]


def test_an_engine_without_the_patch_is_refused_with_the_list_of_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # importing it fails, whatever is installed
    with pytest.raises(seams.SeamMissing, match=f"lacks {len(seams.SEAMS)} of {len(seams.SEAMS)}"):
        seams.check()
