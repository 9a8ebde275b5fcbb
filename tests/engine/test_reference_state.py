"""What a pass computes and what stays of it: positions, caches, features, requests side by side."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_toys import demo, demo_prompt, steps, tokens

from ddtree_engine.reference import engine
from ddtree_engine.reference.attention import Attention
from ddtree_engine.reference.cache import KVCache
from ddtree_engine.reference.drafter import Drafter, DraftState, rank
from ddtree_engine.reference.engine import Decoder, SamplingParams
from ddtree_engine.reference.layers import Rope, Tables
from ddtree_engine.reference.span import Span
from ddtree_engine.reference.state import TargetState
from ddtree_engine.tree import Tree, build

EXACT = 1e-10


def prefilled(prompt: list[int]) -> tuple[TargetState, torch.Tensor]:
    """The target's state behind `prompt`, and the prompt's features."""
    target, drafter = demo("tree").target, demo("tree").drafter
    assert drafter is not None
    state = target.new_state(len(prompt) + 80)
    features = target.forward(Span.chain(prompt, 0), state, drafter.target_layers).features
    assert features is not None
    state.keep(list(range(len(prompt))))
    return state, features


def draft_state(features: torch.Tensor) -> DraftState:
    drafter = demo("tree").drafter
    assert drafter is not None
    state = drafter.start(512)
    state.extend(features, torch.arange(len(features)))
    return state


def grown(prompt: list[int], budget: int = 31) -> Tree:
    """The tree the packaged drafter grows behind `prompt`."""
    _, features = prefilled(prompt[:-1])
    drafts = draft_state(features).propose(prompt[-1], len(prompt) - 1, 15, 8)
    tree = build(prompt[-1], drafts.log_probabilities, drafts.tokens, budget)
    assert not tree.is_chain()
    return tree


@torch.inference_mode()
def node_logits(prompt: list[int], span: Span) -> torch.Tensor:
    target = demo("tree").target
    state, _ = prefilled(prompt[:-1])
    return target.logits(target.forward(span, state).hidden)


@torch.inference_mode()
def test_k13_k14_every_node_s_logits_are_those_of_its_ancestor_path_alone() -> None:
    target, prompt = demo("tree").target, demo_prompt(3)
    tree = grown(prompt)
    found = node_logits(prompt, Span.of_tree(tree, len(prompt) - 1))
    for node in range(len(tree)):
        context = prompt[:-1] + [tree.tokens[step] for step in tree.path(node)]
        alone = target.forward(Span.chain(context, 0), target.new_state(len(context))).hidden[-1:]
        assert (found[node] - target.logits(alone)[0]).abs().max() < EXACT


@torch.inference_mode()
def test_k13_positions_by_index_would_show() -> None:
    prompt = demo_prompt(3)
    right = Span.of_tree(grown(prompt), len(prompt) - 1)
    wrong = Span(right.start, right.tokens, right.start + torch.arange(len(right)), right.visible, right.parents)
    assert (node_logits(prompt, right) - node_logits(prompt, wrong)).abs().max() > 1e-3


@torch.inference_mode()
def test_k14_seeing_siblings_would_show() -> None:
    prompt = demo_prompt(3)
    right = Span.of_tree(grown(prompt), len(prompt) - 1)
    causal = torch.ones_like(right.visible).tril()
    wrong = Span(right.start, right.tokens, right.positions, causal, right.parents)
    assert (node_logits(prompt, right) - node_logits(prompt, wrong)).abs().max() > 1e-3


@torch.inference_mode()
def test_k14_the_cache_after_an_accepted_path_is_that_of_plain_decoding() -> None:
    target, prompt = demo("tree").target, demo_prompt(3)
    tree = grown(prompt)
    branching = max(range(len(tree)), key=lambda node: (tree.depths[node], node - tree.depths[node]))
    for nodes in ([0], tree.path(branching), tree.path(len(tree) - 1)):
        state, _ = prefilled(prompt[:-1])
        target.forward(Span.of_tree(tree, len(prompt) - 1), state)
        state.keep(nodes)
        plain, _ = prefilled(prompt[:-1] + [tree.tokens[node] for node in nodes])
        assert state.length == plain.length == len(prompt) - 1 + len(nodes)
        difference = state.kv._slots[..., : state.length, :] - plain.kv._slots[..., : plain.length, :]
        assert difference.abs().max() < EXACT
    assert tree.path(branching) != list(range(len(tree.path(branching))))


@torch.inference_mode()
def test_keeping_a_path_that_skips_slots_moves_exactly_its_rows() -> None:
    cache = KVCache(demo("tree").target.config.block, 6, 12, "cpu", torch.float64)
    rows = torch.arange(8.0, dtype=torch.float64).view(8, 1, 1).expand(8, 2, 64)
    for layer in range(6):
        cache.write(layer, rows[:3], rows[:3])
    cache.keep([0, 1, 2])
    for layer in range(6):
        cache.write(layer, rows, -rows)
    cache.keep([0, 3, 4, 7])
    assert cache._slots[0, 5, 1, :7, 9].tolist() == [0, 1, 2, 0, 3, 4, 7]
    assert cache._slots[1, 0, 0, :7, 9].tolist() == [0, 1, 2, 0, -3, -4, -7]
    with pytest.raises(ValueError, match="holds 12 tokens"):
        cache.write(0, rows, rows)


@torch.inference_mode()
def test_k14_the_drafter_reads_the_features_of_the_accepted_path() -> None:
    """A session's drafts are those of a drafter that was given plain decoding's features."""
    prompt = demo_prompt(0)
    proposals: list[tuple[int, int, list[list[int]]]] = []
    session = demo("tree", 31).start(prompt, SamplingParams(max_tokens=28))
    state = session._draft
    assert state is not None
    propose = state.propose

    def recording(root: int, position: int, depths: int, topk: int) -> object:
        found = propose(root, position, depths, topk)
        proposals.append((root, position, found.tokens))
        return found

    state.propose = recording  # type: ignore[method-assign, assignment]
    decided = list(prompt)
    while (step := session.step()).finish is None:
        decided += step.tokens
    decided += step.tokens
    assert len(proposals) > 3
    for root, position, drafts in proposals:
        _, features = prefilled(decided[:position])
        assert decided[position] == root
        assert draft_state(features).propose(root, position, len(drafts), 8).tokens == drafts


@torch.inference_mode()
def test_k17_the_drafter_s_block_has_its_own_width_whatever_the_tree_s(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = demo("tree").drafter
    assert isinstance(drafter, Drafter)
    own = [attention.norm.data_ptr() for attention, _ in drafter.layers]
    widths: list[tuple[int, bool]] = []
    run = Attention.run

    def recording(
        self: Attention,
        x: torch.Tensor,
        rope: Rope,
        tables: Tables,
        cache: KVCache,
        layer: int,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.norm.data_ptr() in own:
            widths.append((len(x), bias is None))
        return run(self, x, rope, tables, cache, layer, bias)

    monkeypatch.setattr(Attention, "run", recording)
    for budget in (1, 7, 15, 63):
        decoder = Decoder(demo("tree").target, drafter, None, budget=budget, context_length=512)
        steps(decoder, demo_prompt(0), SamplingParams(max_tokens=9))
    assert set(widths) == {(16, True)}  # 16 tokens, all of which see each other


@torch.inference_mode()
def test_k17_shallower_drafts_are_the_first_rows_of_the_whole_block() -> None:
    prompt = demo_prompt(1)
    _, features = prefilled(prompt[:-1])
    state = draft_state(features)
    whole = state.propose(prompt[-1], len(prompt) - 1, 15, 8)
    some = state.propose(prompt[-1], len(prompt) - 1, 4, 8)
    assert some.tokens == whole.tokens[:4]


def test_k19_requests_side_by_side_do_not_touch_each_other() -> None:
    """Unequal prompts, lengths and settings, stepped in turn."""
    decoder = demo("tree")
    requests = [
        (demo_prompt(number), SamplingParams(max_tokens=5 + 4 * number, temperature=0.8 * (number % 2), seed=number))
        for number in range(4)
    ]
    alone = [tokens(steps(decoder, *request)) for request in requests]
    sessions = {number: decoder.start(*request) for number, request in enumerate(requests)}
    together: list[list[int]] = [[] for _ in requests]
    for number in itertools.cycle(range(4)):
        if number in sessions:
            step = sessions[number].step()
            together[number] += step.tokens
            if step.finish:
                del sessions[number]
        if not sessions:
            break
    assert together == alone


def test_a_prompt_in_many_chunks_gives_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=16)
    whole = steps(demo("tree"), demo_prompt(3), params)
    for chunk in (1, 5, 16):
        monkeypatch.setattr(engine, "PREFILL_CHUNK", chunk)
        assert steps(demo("tree"), demo_prompt(3), params) == whole


def test_candidates_come_best_first_with_whole_vocabulary_probabilities_and_ties_by_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    found = rank(logits, 4)
    assert found.tokens == [[1, 3, 2, 0]]
    assert found.log_probabilities[0] == pytest.approx(logits.log_softmax(-1)[0, [1, 3, 2, 0]].tolist())
    assert rank(logits, 99).tokens == [[1, 3, 2, 0, 4]]
    with pytest.raises(ValueError, match="topk"):
        rank(logits, 0)


def test_the_drafter_is_the_one_that_the_checkpoint_describes() -> None:
    drafter = demo("tree").drafter
    assert isinstance(drafter, Drafter)
    assert (drafter.depths, drafter.target_layers, drafter.config.mask_token) == (15, (1, 2, 3, 4), 3)
