"""The walk, what is kept of a path, and that sampling follows the target's law."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from scipy import stats

from ddtree_engine.reference.sampling import Sampler, SamplingParams, distribution
from ddtree_engine.tree import Tree, build, chain
from ddtree_engine.verify import Walk, truncate, walk, walk_dictionary, walk_greedy


def random_tree(draw: random.Random, vocabulary: int = 5) -> Tree:
    depths, candidates = draw.randint(1, 5), draw.randint(1, vocabulary)
    rows = [sorted((-draw.expovariate(1.0) for _ in range(candidates)), reverse=True) for _ in range(depths)]
    tokens = [draw.sample(range(vocabulary), candidates) for _ in range(depths)]
    return build(draw.randrange(vocabulary), rows, tokens, draw.randint(1, 30))


def agreeable(draw: random.Random, tree: Tree) -> list[int]:
    """Predictions that mostly name a child, so that walks get deep."""
    predictions = []
    for node in range(len(tree)):
        children = [tree.tokens[other] for other in range(1, len(tree)) if tree.parents[other] == node]
        predictions.append(draw.choice(children) if children and draw.random() < 0.8 else draw.randrange(5))
    return predictions


def test_walking_the_links_equals_looking_children_up() -> None:
    draw, deep = random.Random(1), 0
    for _ in range(1000):
        tree = random_tree(draw)
        predictions = agreeable(draw, tree)
        found = walk(tree, predictions.__getitem__)
        assert found == walk_dictionary(tree, predictions)
        assert len(found.nodes) == len(found.tokens)
        assert [tree.tokens[node] for node in found.nodes[1:]] == found.tokens[:-1]
        assert tree.path(found.nodes[-1]) == found.nodes
        deep += len(found.nodes) > 2
    assert deep > 300


def test_walking_greedily_takes_each_row_s_arg_max() -> None:
    tree = build(1, [[-0.1, -0.9], [-0.2, -0.8]], [[2, 3], [4, 0]], 6)
    logits = torch.zeros(len(tree), 5)
    node = next(n for n in range(len(tree)) if tree.tokens[n] == 3 and tree.depths[n] == 1)
    below = next(n for n in range(len(tree)) if tree.parents[n] == node and tree.tokens[n] == 0)
    logits[0, 3] = logits[below, 4] = 1.0  # at `node` all are equal: the first, token 0, wins
    assert walk_greedy(tree, logits) == Walk([0, node, below], [3, 0, 4])


def test_k2_token_0_is_accepted_like_any_other() -> None:
    tree = chain(0, [0, 0])
    assert walk(tree, lambda node: 0) == Walk([0, 1, 2], [0, 0, 0])


def test_k16_a_tree_accepts_at_least_what_its_own_spine_does() -> None:
    draw = random.Random(2)
    for _ in range(500):
        tree = random_tree(draw)
        table = {tuple(tree.tokens[step] for step in tree.path(node)): draw.randrange(5) for node in range(len(tree))}

        def target(some: Tree, node: int, table: dict[tuple[int, ...], int] = table) -> int:
            return table[tuple(some.tokens[step] for step in some.path(node))]

        spine = tree.spine()
        in_tree = walk(tree, lambda node, tree=tree: target(tree, node))  # type: ignore[misc]
        in_spine = walk(spine, lambda node, spine=spine: target(spine, node))  # type: ignore[misc]
        assert in_tree.tokens[: len(in_spine.tokens)] == in_spine.tokens


def test_k18_siblings_are_never_accepted_as_if_they_were_a_chain() -> None:
    """Every prediction names the node at the next index. Only the first of them is a child of the one before."""
    tree = Tree([9, 1, 2, 3], [-1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 3], [0.0, -1.0, -2.0, -3.0])
    assert walk(tree, [1, 2, 3, 4].__getitem__) == Walk([0, 1], [1, 2])


# -- the end of a request inside a path ------------------------------------------------------------------------------

PATH = Walk([0, 2, 5, 7], [11, 12, 13, 14])


def test_k20_an_unhindered_path_is_kept_whole() -> None:
    assert truncate(PATH, remaining=10, stop_token_ids={99}) == (PATH, None)


def test_k20_a_path_is_cut_at_the_tokens_that_remain() -> None:
    assert truncate(PATH, remaining=2) == (Walk([0, 2], [11, 12]), "length")
    assert truncate(PATH, remaining=4) == (PATH, "length")


def test_k20_a_path_is_cut_behind_a_stop_token_which_is_kept() -> None:
    assert truncate(PATH, remaining=10, stop_token_ids={12, 14}) == (Walk([0, 2], [11, 12]), "stop")
    assert truncate(PATH, remaining=10, stop_token_ids={11}) == (Walk([0], [11]), "stop")


def test_k20_a_stop_token_on_the_last_place_is_a_stop_and_behind_it_is_none() -> None:
    assert truncate(PATH, remaining=2, stop_token_ids={12})[1] == "stop"
    assert truncate(PATH, remaining=2, stop_token_ids={13})[1] == "length"


def test_k20_nothing_can_be_kept_of_a_finished_request() -> None:
    with pytest.raises(ValueError, match="finished"):
        truncate(PATH, remaining=0)


# -- sampling --------------------------------------------------------------------------------------------------------

VOCABULARY, LENGTH, DRAWS = 4, 3, 4000
SETTINGS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature in (0.3, 1.0)
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.8), (3, 0.9))
]


def toy_logits(context: tuple[int, ...]) -> torch.Tensor:
    """A toy target: arbitrary logits that depend on everything before."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(hash((17, *context)) % 2**31)) * 1.3


def naive_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The textbook's way, in plain Python."""
    weights = [math.exp(value / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))[: params.top_k or None]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if mass >= params.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_probabilities_are_those_of_temperature_then_top_k_then_top_p(params: SamplingParams) -> None:
    for seed in range(50):
        logits = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
        probabilities, tokens = distribution(logits, params)
        found = torch.zeros(12, dtype=torch.float64)
        found[tokens if tokens is not None else slice(None)] = probabilities
        assert found.tolist() == pytest.approx(naive_distribution(logits.tolist(), params), abs=1e-12)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_sampled_walks_have_the_law_of_sampling_token_by_token(params: SamplingParams) -> None:
    """Chi-square over whole sequences, decoded with random trees from drafts that know nothing of the target."""
    draw = random.Random(3)
    laws = {
        context: naive_distribution(toy_logits(context).tolist(), params)
        for depth in range(LENGTH)
        for context in itertools.product(range(VOCABULARY), repeat=depth)
    }
    logits = {context: toy_logits(context) for context in laws}
    counts = dict.fromkeys(itertools.product(range(VOCABULARY), repeat=LENGTH), 0)
    accepted = 0
    for number in range(DRAWS):
        sampler = Sampler(
            SamplingParams(params.max_tokens, params.temperature, params.top_p, params.top_k, seed=number)
        )
        done: tuple[int, ...] = ()
        while len(done) < LENGTH:
            tree = random_tree(draw, VOCABULARY)

            def choose(node: int, tree: Tree = tree, done: tuple[int, ...] = done) -> int:
                context = done + tuple(tree.tokens[step] for step in tree.path(node)[1:])
                at = len(context)
                return sampler(logits[context], at) if at < LENGTH else 0  # noqa: B023

            path, _ = truncate(walk(tree, choose), remaining=LENGTH - len(done))
            accepted += len(path.tokens) - 1
            done += tuple(path.tokens)
        counts[done] += 1
    assert accepted > DRAWS / 4  # the trees did take part
    expected = {
        sequence: DRAWS * math.prod(laws[sequence[:depth]][sequence[depth]] for depth in range(LENGTH))
        for sequence in counts
    }
    assert all(expected[sequence] for sequence, count in counts.items() if count), "a token that was filtered out"
    # Rare sequences are pooled, as the test demands.
    common = [sequence for sequence in counts if expected[sequence] >= 8]
    observed = [counts[sequence] for sequence in common]
    predicted = [expected[sequence] for sequence in common]
    rest = DRAWS - sum(predicted)
    if rest > 1:
        observed.append(DRAWS - sum(observed))
        predicted.append(rest)
    else:
        predicted = [value * sum(observed) / sum(predicted) for value in predicted]
    assert len(observed) > 2
    assert stats.chisquare(observed, predicted).pvalue > 1e-3


def test_a_seed_gives_each_position_its_token_however_often_and_in_what_order_it_is_asked() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    logits = [torch.randn(50, generator=torch.Generator().manual_seed(at)) for at in range(20)]
    forward = Sampler(params)
    tokens = [forward(logits[at], at) for at in range(20)]
    backward = Sampler(params)
    assert [backward(logits[at], at) for at in reversed(range(20))] == tokens[::-1]
    assert len(set(tokens)) > 10


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((6,), -math.inf)
    logits[2] = logits[4] = 0.0
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1))
    assert {sampler(logits, at) for at in range(200)} == {2, 4}
    for uniform, token in ((0.0, 2), (1.0 - 2.0**-53, 4)):
        sampler._uniforms[:] = [uniform]
        assert sampler(logits, 0) == token


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_senseless_sampling_parameters_are_refused_by_name(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)  # type: ignore[arg-type]
