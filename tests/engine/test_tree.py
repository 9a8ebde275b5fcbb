"""Both tree builders against full enumeration, and what verification kernels rely on."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from ddtree_engine.reference.span import Span
from ddtree_engine.tree import NO_NODE, Tree, build, build_batch, chain

Case = tuple[list[list[float]], list[list[int]], int]


def enumerate_all(log_probabilities: list[list[float]], tokens: list[list[int]], budget: int) -> list[tuple[int, ...]]:
    """The best prefixes as rank paths, from every prefix there is. Order: score, depth, parent's place, rank."""
    levels: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)]]
    for row in log_probabilities:
        extended = [
            ((*path, rank), score + value, place, rank)
            for place, (path, score) in enumerate(levels[-1])
            for rank, value in enumerate(row)
            if value > -math.inf
        ]
        extended.sort(key=lambda entry: (-entry[1], entry[2], entry[3]))
        levels.append([(path, score) for path, score, _, _ in extended])
    everything = [
        (-score, depth, place, path)
        for depth, level in enumerate(levels)
        if depth
        for place, (path, score) in enumerate(level)
    ]
    return [path for _, _, _, path in sorted(everything)[:budget]]


def rank_paths(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(tree.ranks[step] for step in tree.path(node)[1:]) for node in range(1, len(tree))]


def random_case(seed: int) -> Case:
    """Sorted candidates. One third in steps of 1/4 nat, so that scores tie; one third with certainties (probability
    1.0) and padding; the token 0 is as likely as any other."""
    draw = random.Random(seed)
    depths, candidates = draw.randint(1, 4), draw.randint(1, 4)
    rows, tokens = [], []
    for _ in range(depths):
        row = sorted((-draw.expovariate(0.7) for _ in range(candidates)), reverse=True)
        if seed % 3:
            row = [math.ceil(value * 4) / 4 for value in row]
        if seed % 3 == 2:
            row = [draw.choice([0.0, value]) if not index else value for index, value in enumerate(row)]
            row = row[: len(row) - draw.randint(0, len(row) - 1)]
        ids = draw.sample(range(6), len(row))
        padding = candidates - len(row)
        rows.append(row + [-math.inf] * padding)
        tokens.append(ids + [0] * padding)
    return rows, tokens, draw.choice([1, 2, 3, 5, 8, 15, 40, 400])


def batch_of(case: Case, root: int = 9) -> Tree:
    rows, tokens, budget = case
    return build_batch(
        torch.tensor([root]), torch.tensor([rows], dtype=torch.float64), torch.tensor([tokens]), budget
    ).tree(0)


def test_heap_and_level_builder_equal_full_enumeration_on_1000_cases_with_ties() -> None:
    ties = 0
    for seed in range(1000):
        case = random_case(seed)
        tree, leveled = build(9, *case), batch_of(case)
        assert rank_paths(tree) == enumerate_all(*case), seed
        assert leveled == tree, seed
        ties += len(set(tree.scores[1:])) < tree.drafted
    assert ties > 300


def test_trees_are_closed_under_prefixes_with_siblings_in_rank_order() -> None:
    for seed in range(1000):
        for tree in (build(9, *random_case(seed)), batch_of(random_case(seed))):
            tree.check()
            assert all(tree.scores[node] <= tree.scores[tree.parents[node]] for node in range(1, len(tree)))
            siblings: dict[int, list[int]] = {}
            for node in range(1, len(tree)):
                siblings.setdefault(tree.parents[node], []).append(tree.ranks[node])
            # Rank r is in the tree only if all better ranks under the same parent are.
            assert all(ranks == list(range(len(ranks))) for ranks in siblings.values())


def test_trees_stay_closed_in_single_precision_with_certain_tokens() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        logits = torch.randn(3, 6, 5, generator=generator) * 20
        scores, tokens = logits.log_softmax(-1).sort(-1, descending=True)
        batch = build_batch(torch.tensor([1, 2, 3]), scores, tokens, 24)
        for row in range(3):
            batch.tree(row).check()


def test_no_closed_tree_of_the_same_size_expects_more_accepted_drafts() -> None:
    rows, tokens = [[-0.3, -1.5], [-0.2, -2.0], [-0.9, -1.0]], [[1, 2], [3, 4], [5, 6]]
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    for budget in (1, 3, 5):
        expected = build(0, rows, tokens, budget).expected_drafts()
        best = 0.0
        for chosen in itertools.combinations(paths, budget):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                best = max(best, math.fsum(math.exp(sum(rows[d][r] for d, r in enumerate(p))) for p in chosen))
        assert expected == pytest.approx(best, abs=1e-12)


# -- complaints about earlier implementations ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "tokens", "budget", "message"),
    [
        ([[]], [[]], 3, "at least 1 is needed"),  # K = 0
        ([[-1.0]], [[4]], 0, "at least 1, not 0"),
        ([[-1.0]], [[4]], -5, "at least 1, not -5"),
        ([[-1.0, -0.5]], [[4, 5]], 3, "not sorted"),
        ([[math.nan]], [[4]], 3, "NaN"),
        ([[-1.0]], [[4], [5]], 3, "1 depths"),
    ],
)
def test_k1_senseless_candidates_and_budgets_are_refused(
    rows: list[list[float]], tokens: list[list[int]], budget: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(0, rows, tokens, budget)


def test_k1_empty_candidates_are_refused_by_the_level_builder() -> None:
    for shape, budget in (((1, 2, 0), 3), ((1, 0, 2), 3), ((1, 2, 2), 0)):
        with pytest.raises(ValueError):
            build_batch(torch.tensor([1]), torch.zeros(shape), torch.zeros(shape, dtype=torch.int64), budget)


def test_k1_no_drafts_at_all_is_a_root_alone() -> None:
    assert build(7, [], [], 15) == chain(7, [])


def test_k1_a_budget_beyond_the_vocabulary_ends_when_every_prefix_is_in() -> None:
    rows, tokens = [[-0.5, -1.0]] * 2, [[0, 1]] * 2
    tree = build(1, rows, tokens, 64)
    assert tree.drafted == 2 + 4
    batch = build_batch(torch.tensor([1]), torch.tensor([rows], dtype=torch.float64), torch.tensor([tokens]), 64)
    assert batch.tokens.shape == (1, 65)
    assert batch.counts.tolist() == [7]
    assert batch.tree(0) == tree


def test_k2_token_0_is_a_token_like_any_other() -> None:
    rows, tokens = [[-0.1, -2.5], [-0.2, -2.0]], [[0, 3], [0, 4]]
    tree = build(0, rows, tokens, 3)
    assert tree.tokens == [0, 0, 0, 4]
    batch = build_batch(torch.tensor([0]), torch.tensor([rows], dtype=torch.float64), torch.tensor([tokens]), 3)
    assert batch.counts.tolist() == [4]
    assert batch.tree(0) == tree


def test_k13_positions_go_by_depth_and_not_by_index() -> None:
    tree = build(5, [[-0.5, -1.0], [-0.4, -1.2]], [[1, 2], [3, 4]], 6)
    assert tree.depths != list(range(7))
    assert Span.of_tree(tree, 40).positions.tolist() == [40 + depth for depth in tree.depths]


def test_k19_requests_of_a_batch_keep_their_own_trees() -> None:
    """Unequal numbers of candidates and nodes: with equal ones a mix-up of rows would not show."""
    rows = torch.tensor(
        [[[-0.1, -3.0, -4.0]] * 3, [[-0.1, -math.inf, -math.inf]] * 3, [[-1.2, -1.3, -1.4]] * 3], dtype=torch.float64
    )
    tokens = torch.arange(27).view(3, 3, 3)
    batch = build_batch(torch.tensor([100, 101, 102]), rows, tokens, 6)
    assert batch.counts.tolist() == [7, 4, 7]
    for row in range(3):
        assert batch.tree(row) == build(100 + row, rows[row].tolist(), tokens[row].tolist(), 6)


def test_k19_links_and_masks_of_a_batch_are_those_of_each_request() -> None:
    for seed in range(60):
        cases = [random_case(3 * seed + row) for row in range(3)]
        depths = max(len(case[0]) for case in cases)
        candidates = max(len(row) for case in cases for row in case[0])
        rows = torch.full((3, depths, candidates), -math.inf, dtype=torch.float64)
        tokens = torch.zeros(3, depths, candidates, dtype=torch.int64)
        for number, (values, ids, _) in enumerate(cases):
            rows[number, : len(values), : len(values[0])] = torch.tensor(values, dtype=torch.float64)
            tokens[number, : len(ids), : len(ids[0])] = torch.tensor(ids)
        batch = build_batch(torch.tensor([7, 8, 9]), rows, tokens, 12)
        first, following = batch.links()
        visible = batch.visible()
        for row in range(3):
            tree, count = batch.tree(row), int(batch.counts[row])
            assert (first[row, :count].tolist(), following[row, :count].tolist()) == tree.links
            assert torch.equal(visible[row, :count, :count], tree.visible())
            # Empty columns: linked from nowhere and to nowhere, and they see themselves and the root only.
            assert (first[row, count:] == NO_NODE).all() and (following[row, count:] == NO_NODE).all()
            assert first[row].max() < count and following[row].max() < count
            lonely = torch.zeros(13 - count, 13, dtype=torch.bool)
            lonely[:, 0] = True
            lonely[range(13 - count), range(count, 13)] = True
            assert torch.equal(visible[row, count:], lonely)


def test_k25_padding_never_becomes_a_sibling_twice() -> None:
    rows, tokens = [[-0.1, -math.inf, -math.inf], [-0.3, -1.0, -math.inf]], [[0, 0, 0], [2, 3, 0]]
    for tree in (build(0, rows, tokens, 15), batch_of((rows, tokens, 15), root=0)):
        tree.check()
        assert tree.tokens == [0, 0, 2, 3]


def test_k25_a_token_offered_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="listed twice"):
        build(0, [[-0.1, -0.2]], [[4, 4]], 3)


# -- structure -------------------------------------------------------------------------------------------------------


def test_one_candidate_per_depth_gives_the_linear_block() -> None:
    tree = build(9, [[-0.5], [-0.1], [-0.7]], [[3], [0], [5]], 15)
    assert tree.is_chain()
    assert (tree.tokens, tree.parents, tree.depths) == ([9, 3, 0, 5], [-1, 0, 1, 2], [0, 1, 2, 3])


def test_the_visible_mask_is_the_ancestor_relation() -> None:
    for seed in range(100):
        tree = build(9, *random_case(seed))
        mask = tree.visible()
        for node in range(len(tree)):
            path = set(tree.path(node))
            assert {other for other in range(len(tree)) if mask[node, other]} == path
            assert {other for other in range(len(tree)) if tree.ancestors[node] >> other & 1} == path


def test_retrieve_links_give_back_the_parents_in_one_forward_pass() -> None:
    """The way state-forking convolution kernels rebuild them: right only if parents and elder siblings come first."""
    for seed in range(300):
        tree = build(9, *random_case(seed))
        first, following = tree.links
        parents = [NO_NODE] * len(tree)
        for node in range(len(tree)):
            if first[node] != NO_NODE:
                parents[first[node]] = node
            if following[node] != NO_NODE:
                assert following[node] > node
                parents[following[node]] = parents[node]
        assert parents == tree.parents


def test_the_spine_is_the_most_probable_chain_of_the_tree() -> None:
    tree = build(9, [[-0.5, -0.6], [-0.4, -1.2], [-0.1, -3.0]], [[1, 2], [3, 4], [5, 6]], 6)
    assert tree.spine().tokens == [9, 1, 3, 5]
    assert tree.spine().is_chain()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree([1, 2], [-1, 1], [0, 1], [0, 0], [0.0, -1.0]), "does not stand before"),
        (Tree([1, 2], [-1, 0], [0, 2], [0, 0], [0.0, -1.0]), "depth 2"),
        (Tree([1, 2, 3], [-1, 0, 0], [0, 1, 1], [0, 1, 0], [0.0, -1.0, -1.0]), "rank 0 follows"),
        (Tree([1, 2, 2], [-1, 0, 0], [0, 1, 1], [0, 0, 1], [0.0, -1.0, -1.0]), "stands twice"),
        (Tree([1, 2], [0, 0], [0, 1], [0, 0], [0.0, -1.0]), "needs a root"),
    ],
)
def test_broken_trees_are_told_apart(tree: Tree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.check()
