"""What the engine promises: the drafter decides how fast, never what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_toys import demo, demo_prompt, finish, scripted, steps, tokens, write_toy_pair

from ddtree_engine.models import GOLDEN
from ddtree_engine.reference import engine
from ddtree_engine.reference.engine import Decoder, SamplingParams
from ddtree_engine.reference.target import Target
from ddtree_engine.tree import Tree

PROMPT = [5, 17, 42, 3, 8]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("toy")
    write_toy_pair(folder)
    return Target.load(folder / "target", 512, "cpu", torch.float64)


@pytest.fixture(scope="module")
def toy_sequence(toy: Target) -> list[int]:
    """The prompt and its plain greedy continuation."""
    decoder = Decoder(toy, None, None, mode="ar", context_length=128)
    return PROMPT + tokens(steps(decoder, PROMPT, SamplingParams(max_tokens=48)))


def test_the_toy_s_output_depends_on_its_context(toy_sequence: list[int]) -> None:
    assert len(set(toy_sequence)) > 20


@pytest.mark.parametrize("budget", range(1, 65))
def test_trees_of_every_budget_give_plain_greedy_output_on_the_toy(
    toy: Target, toy_sequence: list[int], budget: int
) -> None:
    run = steps(scripted(toy, toy_sequence, "tree", budget), PROMPT, SamplingParams(max_tokens=48))
    assert PROMPT + tokens(run) == toy_sequence
    assert len(run) < 40


def test_the_linear_mode_gives_plain_greedy_output_on_the_toy(toy: Target, toy_sequence: list[int]) -> None:
    for seed in range(8):
        decoder = scripted(toy, toy_sequence, "linear", 1, seed=seed)
        run = steps(decoder, PROMPT, SamplingParams(max_tokens=48))
        assert PROMPT + tokens(run) == toy_sequence
        assert len(run) < 48


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("budget", [1, 7, 15, 16, 64])
def test_trees_give_plain_greedy_output_on_the_packaged_pair(number: int, budget: int) -> None:
    params = SamplingParams(max_tokens=16)
    plain = tokens(steps(demo("ar"), demo_prompt(number), params))
    assert tokens(steps(demo("tree", budget), demo_prompt(number), params)) == plain


def test_k21_budgets_that_once_looped_give_plain_greedy_output() -> None:
    params = SamplingParams(max_tokens=40)
    plain = tokens(steps(demo("ar"), demo_prompt(0), params))
    for budget in (36, 56, 64):
        assert tokens(steps(demo("tree", budget), demo_prompt(0), params)) == plain


@pytest.mark.parametrize("mode", ["tree", "linear"])
def test_speculation_is_token_identical_in_single_precision(mode: str) -> None:
    params = SamplingParams(max_tokens=40)
    for number in range(4):
        plain = tokens(steps(demo("ar", dtype=torch.float32), demo_prompt(number), params))
        run = steps(demo(mode, dtype=torch.float32), demo_prompt(number), params)
        assert tokens(run) == plain


def test_the_packaged_pair_accepts_more_than_one_draft_per_step() -> None:
    params = SamplingParams(max_tokens=32)
    runs = {mode: [steps(demo(mode), demo_prompt(n), params) for n in (0, 1, 3)] for mode in ("tree", "linear")}
    length = {mode: 3 * 32 / sum(map(len, run)) for mode, run in runs.items()}
    assert length["tree"] > 2
    assert length["tree"] >= length["linear"] > 1.5


@pytest.mark.parametrize("mode", ["ar", "linear", "tree"])
def test_golden_answers_are_reproduced_in_every_mode(mode: str) -> None:
    for answer in json.loads(GOLDEN.read_text()):
        decoder = demo(mode, dtype=torch.float32)
        prompt = decoder.tokenizer.encode(answer["prompt"]).ids
        found = tokens(steps(decoder, prompt, SamplingParams(max_tokens=answer["max_tokens"])))
        assert found == answer["token_ids"]
        assert decoder.tokenizer.decode(found) == answer["text"]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_gives_the_same_sampled_text_in_every_mode(temperature: float) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature, top_p=0.95, top_k=50, seed=11)
    plain = tokens(steps(demo("ar"), demo_prompt(1), params))
    assert plain != tokens(steps(demo("ar"), demo_prompt(1), SamplingParams(max_tokens=16)))
    for decoder in (demo("linear"), demo("tree"), demo("tree", 63), demo("tree", 3)):
        assert tokens(steps(decoder, demo_prompt(1), params)) == plain


def test_without_a_seed_samples_differ() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5)
    assert len({tuple(tokens(steps(demo("ar"), demo_prompt(2), params))) for _ in range(4)}) > 1


# -- trees against chains --------------------------------------------------------------------------------------------


def test_k15_a_spine_only_tree_is_the_linear_mode_step_for_step() -> None:
    params = SamplingParams(max_tokens=24)
    for number in (0, 3):
        prompt = demo_prompt(number)
        assert steps(demo("tree", 15, topk=1), prompt, params) == steps(demo("linear"), prompt, params)


def test_k16_in_every_step_a_tree_decides_at_least_what_its_own_spine_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tree is verified twice on the same state: whole, and as its spine alone."""
    grown: list[Tree] = []
    spines: list[Tree] = []
    grow = engine.Session._grow

    def recording(self: engine.Session, remaining: int) -> Tree:
        grown.append(grow(self, remaining))
        return grown[-1]

    params = SamplingParams(max_tokens=24)
    gains = 0
    for number in (0, 1):
        prompt, grown[:] = demo_prompt(number), []
        monkeypatch.setattr(engine.Session, "_grow", recording)
        run = steps(demo("tree", 31), prompt, params)
        monkeypatch.setattr(engine.Session, "_grow", lambda self, remaining: spines.pop(0))
        done = 0
        for tree, step in zip(list(grown), run, strict=True):
            spines.append(tree.spine())
            context = prompt + tokens(run)[:done]
            assert context[-1] == tree.tokens[0]
            chained = demo("tree", 31).start(context, SamplingParams(max_tokens=24 - done)).step()
            assert len(step.tokens) >= len(chained.tokens)
            assert step.tokens[: len(chained.tokens)] == chained.tokens
            gains += len(step.tokens) > len(chained.tokens)
            done += len(step.tokens)
    assert gains > 2


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ar", "linear", "tree"])
def test_k20_every_max_tokens_gives_exactly_that_many(toy: Target, toy_sequence: list[int], mode: str) -> None:
    for count in range(1, 20):
        run = steps(scripted(toy, toy_sequence, mode, 15), PROMPT, SamplingParams(max_tokens=count))
        assert PROMPT + tokens(run) == toy_sequence[: len(PROMPT) + count]
        assert run[-1].finish == "length"


@pytest.mark.parametrize("mode", ["ar", "linear", "tree"])
def test_k20_output_ends_with_the_first_stop_token_wherever_it_falls_in_a_path(
    toy: Target, toy_sequence: list[int], mode: str
) -> None:
    continuation = toy_sequence[len(PROMPT) :]
    inside = 0
    for stop in sorted(set(continuation)):
        params = SamplingParams(max_tokens=48, stop_token_ids=frozenset({stop}))
        for seed in range(3):
            run = steps(scripted(toy, toy_sequence, mode, 15, seed=seed), PROMPT, params)
            assert tokens(run) == continuation[: continuation.index(stop) + 1]
            assert run[-1].finish == "stop"
            inside += len(run[-1].tokens) > 1
    assert mode == "ar" or inside > 5


def test_generation_ends_where_the_context_does(toy: Target) -> None:
    decoder = Decoder(toy, None, None, mode="ar", context_length=12)
    run = steps(decoder, PROMPT, SamplingParams(max_tokens=1000))
    assert len(tokens(run)) == 12 - len(PROMPT)
    assert run[-1].finish == "length"


@pytest.mark.parametrize("mode", ["ar", "linear", "tree"])
def test_a_context_can_be_filled_to_its_last_token(mode: str) -> None:
    """The last blocks reach past the context's end."""
    prompt = demo_prompt(0)
    decoder = demo(mode, context=len(prompt) + 30)
    run = steps(decoder, prompt, SamplingParams(max_tokens=99))
    assert tokens(run) == tokens(steps(demo("ar"), prompt, SamplingParams(max_tokens=30)))
    assert run[-1].finish == "length"


@pytest.mark.parametrize("mode", ["linear", "tree"])
def test_half_precision_decodes(mode: str) -> None:
    """No promise of identity here: rounding decides close calls."""
    run = steps(demo(mode, dtype=torch.bfloat16), demo_prompt(0), SamplingParams(max_tokens=12))
    assert len(tokens(run)) == 12


def test_k23_nodes_are_the_drafts_really_verified(toy: Target, toy_sequence: list[int]) -> None:
    """Neither the root nor padding, nor drafts deeper than what is left to emit."""
    run = steps(scripted(toy, toy_sequence, "tree", 15), PROMPT, SamplingParams(max_tokens=48))
    assert all(step.nodes == 15 for step in run[:-2])
    assert all(step.nodes == 0 for step in steps(scripted(toy, toy_sequence, "ar", 15), PROMPT, SamplingParams(8)))
    (only,) = steps(scripted(toy, toy_sequence, "tree", 15), PROMPT, SamplingParams(max_tokens=1))
    assert only.nodes == 0
    first, *_ = steps(scripted(toy, toy_sequence, "linear", 15), PROMPT, SamplingParams(max_tokens=3))
    assert first.nodes == 2
    small = steps(scripted(toy, toy_sequence, "tree", 64, topk=1), PROMPT, SamplingParams(max_tokens=48))
    assert small[0].nodes == 7  # only so many prefixes exist


def test_a_finished_session_cannot_go_on(toy: Target) -> None:
    session = Decoder(toy, None, None, mode="ar").start(PROMPT, SamplingParams(max_tokens=2))
    finish(session)
    with pytest.raises(RuntimeError, match="finished"):
        session.step()
    session.close()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), (list(range(40)) * 4, "160 tokens"), ([5, 61], "token 61"), ([-1], "token -1")],
)
def test_prompts_that_cannot_be_decoded_are_refused(toy: Target, prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(toy, None, None, mode="ar", context_length=128).start(prompt, SamplingParams())


@pytest.mark.parametrize("mode", ["ar", "linear", "tree"])
def test_a_prompt_of_one_token_is_enough(mode: str) -> None:
    params = SamplingParams(max_tokens=12)
    assert tokens(steps(demo(mode), [300], params)) == tokens(steps(demo("ar"), [300], params))


def test_the_embedded_pair_loads_as_documented(tmp_path: Path) -> None:
    decoder = demo("tree")
    assert (decoder.vocab_size, decoder.block_size, decoder.context_length) == (4096, 16, 512)
    assert demo("ar").block_size == 1
