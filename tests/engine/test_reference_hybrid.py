"""Hybrids: convolution and recurrent state on trees go by parent, and commits by node."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_toys import HYBRID_LAYERS, edit_config, finish, hybrid_config, scripted, steps, tokens, write_toy_hybrid
from safetensors.torch import load_file, save_file

from ddtree_engine.reference import delta_rule
from ddtree_engine.reference.delta_net import convolve
from ddtree_engine.reference.delta_rule import Inputs, Packed
from ddtree_engine.reference.drafter import Drafter
from ddtree_engine.reference.engine import Decoder, SamplingParams
from ddtree_engine.reference.span import Span
from ddtree_engine.reference.state import TargetState
from ddtree_engine.reference.target import Target
from ddtree_engine.tree import Tree, build

PROMPT = [5, 17, 42, 3, 8]
EXACT = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_toy_hybrid(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["recurrent", "packed"])
def hybrid(request: pytest.FixtureRequest, folder: Path) -> Target:
    return Target.load(folder / "target", 512, "cpu", torch.float64, packed=request.param)


@pytest.fixture(scope="module")
def sequence(folder: Path) -> list[int]:
    """The prompt and its plain greedy continuation."""
    target = Target.load(folder / "target", 512, "cpu", torch.float64)
    decoder = Decoder(target, None, None, mode="ar", context_length=128)
    return PROMPT + tokens(steps(decoder, PROMPT, SamplingParams(max_tokens=48)))


def bushy(root: int, budget: int = 20) -> Tree:
    """A tree whose deep nodes have many siblings and cousins at the indices before them."""
    rows = [[-0.6, -1.0, -1.6], [-0.5, -1.2, -2.0], [-0.4, -1.3, -1.9], [-0.2, -2.0, -2.5]]
    return build(root, rows, [[4, 9, 33], [12, 7, 50], [21, 3, 60], [0, 18, 40]], budget)


def decided(target: Target, prompt: list[int]) -> TargetState:
    state = target.new_state(len(prompt) + 80)
    target.forward(Span.chain(prompt, 0), state)
    state.keep(list(range(len(prompt))))
    return state


@torch.inference_mode()
def textbook(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logits [n, V] the long way: one token, one layer, one head at a time, from the raw checkpoint."""
    config = hybrid_config()
    w = {name: tensor.double() for name, tensor in load_file(folder / "target" / "model.safetensors").items()}
    heads, size, rotary = 4, 16, 8

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * weight

    def turned(head: torch.Tensor, position: int) -> torch.Tensor:
        out = head.clone()
        for pair in range(rotary // 2):
            # Angles in single precision, like every implementation's tables.
            angle = float(
                torch.tensor(position).float() * torch.tensor(10000.0) ** (-torch.tensor(2.0 * pair) / rotary)
            )
            a, b = float(head[pair]), float(head[pair + rotary // 2])
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + rotary // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    xs = [w["model.embed_tokens.weight"][token] for token in ids]
    for number, kind in enumerate(HYBRID_LAYERS):
        layer = {
            name.split(".", 3)[3]: tensor for name, tensor in w.items() if name.startswith(f"model.layers.{number}.")
        }
        hidden = [norm(x, 1 + layer["input_layernorm.weight"]) for x in xs]
        if kind == "full_attention":
            keys: list[list[torch.Tensor]] = []
            values: list[list[torch.Tensor]] = []
            for at, h in enumerate(hidden):
                k = (layer["self_attn.k_proj.weight"] @ h).view(2, size)
                keys.append([turned(norm(k[g], 1 + layer["self_attn.k_norm.weight"]), at) for g in range(2)])
                values.append(list((layer["self_attn.v_proj.weight"] @ h).view(2, size)))
                both = (layer["self_attn.q_proj.weight"] @ h).view(heads, 2 * size)
                mixed = []
                for head in range(heads):
                    q = turned(norm(both[head, :size], 1 + layer["self_attn.q_norm.weight"]), at)
                    scores = torch.stack([q @ key[head // 2] for key in keys]) / math.sqrt(size)
                    weights = scores.softmax(0)
                    out = sum(weight * value[head // 2] for weight, value in zip(weights, values, strict=True))
                    mixed.append(out * both[head, size:].sigmoid())
                xs[at] = xs[at] + layer["self_attn.o_proj.weight"] @ torch.cat(mixed)
        else:
            hk, hv, dk, dv = (
                config[f"linear_{name}"]
                for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
            )
            state = torch.zeros(hv, dk, dv, dtype=torch.float64)
            inputs = [layer["linear_attn.in_proj_qkv.weight"] @ h for h in hidden]
            for at, h in enumerate(hidden):
                taps = [inputs[at - 3 + j] if at - 3 + j >= 0 else torch.zeros_like(inputs[0]) for j in range(4)]
                filters = layer["linear_attn.conv1d.weight"][:, 0]
                mixed_input = F.silu((torch.stack(taps, 1) * filters).sum(1))
                q, k, v = mixed_input.split([hk * dk, hk * dk, hv * dv])
                beta = (layer["linear_attn.in_proj_b.weight"] @ h).sigmoid()
                rate = layer["linear_attn.A_log"].exp()
                g = -rate * F.softplus(layer["linear_attn.in_proj_a.weight"] @ h + layer["linear_attn.dt_bias"])
                z = (layer["linear_attn.in_proj_z.weight"] @ h).view(hv, dv)
                outs = []
                for head in range(hv):
                    source = head // (hv // hk)
                    q1, k1 = (t.view(hk, dk)[source] for t in (q, k))
                    q1, k1 = (t / (t.square().sum() + 1e-6).sqrt() for t in (q1, k1))
                    v1 = v.view(hv, dv)[head]
                    s = state[head] * g[head].exp()
                    s = s + torch.outer(k1, beta[head] * (v1 - k1 @ s))
                    state[head] = s
                    outs.append(norm((q1 / math.sqrt(dk)) @ s, layer["linear_attn.norm.weight"]) * F.silu(z[head]))
                xs[at] = xs[at] + layer["linear_attn.out_proj.weight"] @ torch.cat(outs)
        for at, x in enumerate(xs):
            h = norm(x, 1 + layer["post_attention_layernorm.weight"])
            gate, up = layer["mlp.gate_proj.weight"] @ h, layer["mlp.up_proj.weight"] @ h
            xs[at] = x + layer["mlp.down_proj.weight"] @ (F.silu(gate) * up)
    return torch.stack([w["lm_head.weight"] @ norm(x, 1 + w["model.norm.weight"]) for x in xs])


@torch.inference_mode()
def test_the_hybrid_computes_what_the_architecture_says(hybrid: Target, folder: Path) -> None:
    ids = [*PROMPT, 60, 0, 22, 22, 7, 31, 12]
    found = hybrid.logits(hybrid.forward(Span.chain(ids, 0), hybrid.new_state(64)).hidden)
    expected = textbook(folder, ids)
    assert expected.std() > 0.5
    # The tables of both are single precision sines, rounded by different routes.
    assert (found - expected).abs().max() < 1e-4


def test_the_toy_s_output_depends_on_its_context(sequence: list[int]) -> None:
    assert len(set(sequence)) > 20


# -- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [*range(1, 18), 31, 36, 47, 56, 63, 64])
def test_trees_of_every_budget_give_plain_greedy_output_on_the_hybrid(
    hybrid: Target, sequence: list[int], budget: int
) -> None:
    run = steps(scripted(hybrid, sequence, "tree", budget), PROMPT, SamplingParams(max_tokens=32))
    assert PROMPT + tokens(run) == sequence[: len(PROMPT) + 32]
    assert len(run) < 28


def test_the_linear_mode_gives_plain_greedy_output_on_the_hybrid(hybrid: Target, sequence: list[int]) -> None:
    for seed in range(4):
        run = steps(scripted(hybrid, sequence, "linear", 1, seed=seed), PROMPT, SamplingParams(max_tokens=48))
        assert PROMPT + tokens(run) == sequence


def test_a_hybrid_with_a_real_drafter_gives_plain_greedy_output(folder: Path, sequence: list[int]) -> None:
    target = Target.load(folder / "target", 512, "cpu", torch.float64)
    drafter = Drafter.load(folder / "draft", target, 512)
    for mode in ("tree", "linear"):
        decoder = Decoder(target, drafter, None, mode=mode, budget=15, context_length=128)  # type: ignore[arg-type]
        assert PROMPT + tokens(steps(decoder, PROMPT, SamplingParams(max_tokens=24))) == sequence[: len(PROMPT) + 24]


def test_hybrid_requests_side_by_side_do_not_touch_each_other(hybrid: Target, sequence: list[int]) -> None:
    decoder = scripted(hybrid, sequence, "tree", 15)
    one = decoder.start(PROMPT, SamplingParams(max_tokens=30))
    other = decoder.start(sequence[:9], SamplingParams(max_tokens=12))
    first, second = one.step().tokens, other.step().tokens
    second += tokens(finish(other))
    first += tokens(finish(one))
    assert PROMPT + first == sequence[: len(PROMPT) + 30]
    assert sequence[:9] + second == sequence[:21]


# -- K14: state by parent, commit by node ----------------------------------------------------------------------------


@torch.inference_mode()
def test_k14_every_hybrid_node_s_logits_are_those_of_its_ancestor_path_alone(hybrid: Target) -> None:
    tree = bushy(22)
    state = decided(hybrid, PROMPT)
    found = hybrid.logits(hybrid.forward(Span.of_tree(tree, len(PROMPT)), state).hidden)
    for node in range(len(tree)):
        context = PROMPT + [tree.tokens[step] for step in tree.path(node)]
        alone = hybrid.forward(Span.chain(context, 0), hybrid.new_state(64)).hidden[-1:]
        assert (found[node] - hybrid.logits(alone)[0]).abs().max() < EXACT, node


@torch.inference_mode()
def test_k14_a_tree_run_as_a_chain_of_states_would_show(hybrid: Target) -> None:
    """The leak: every sibling inherits the state of the node at the index before it."""
    tree = bushy(22)
    right = Span.of_tree(tree, len(PROMPT))
    chained = list(range(-1, len(tree) - 1))
    causal = torch.ones_like(right.visible).tril()
    wrong = Span(right.start, right.tokens, right.positions, right.visible, chained)
    if hybrid._packed:
        wrong = Span(right.start, right.tokens, right.positions, causal, chained)
    logits = [hybrid.logits(hybrid.forward(span, decided(hybrid, PROMPT)).hidden) for span in (right, wrong)]
    assert (logits[0] - logits[1]).abs().max() > 0.1


@torch.inference_mode()
def test_k14_the_state_after_a_commit_is_that_of_plain_decoding(hybrid: Target) -> None:
    tree = bushy(22)
    for node in range(len(tree)):
        path = tree.path(node)
        state = decided(hybrid, PROMPT)
        hybrid.forward(Span.of_tree(tree, len(PROMPT)), state)
        state.keep(path)
        plain = decided(hybrid, PROMPT)
        for step in path:
            hybrid.forward(Span.chain([tree.tokens[step]], plain.length), plain)
            plain.keep([0])
        assert state.length == plain.length
        for one, other in zip(state.deltas, plain.deltas, strict=True):
            assert (one.state - other.state).abs().max() < EXACT
            assert (one.window - other.window).abs().max() < EXACT


@torch.inference_mode()
def test_k14_committing_by_length_instead_of_by_node_would_show(hybrid: Target) -> None:
    tree = bushy(22)
    node = max(range(len(tree)), key=lambda node: (tree.depths[node], node))
    path = tree.path(node)
    states = []
    for nodes in (path, list(range(len(path)))):
        state = decided(hybrid, PROMPT)
        hybrid.forward(Span.of_tree(tree, len(PROMPT)), state)
        state.deltas[0].keep(nodes)
        states.append(state.deltas[0].state)
    assert (states[0] - states[1]).abs().max() > 1e-3


def test_a_commit_without_a_pass_is_an_error(hybrid: Target) -> None:
    state = decided(hybrid, PROMPT)
    with pytest.raises(ValueError, match="nothing was run"):
        state.deltas[0].keep([0])


# -- the rule itself -------------------------------------------------------------------------------------------------


def random_rule(seed: int, n: int, heads: int = 3, dk: int = 5, dv: int = 4) -> tuple[torch.Tensor, Inputs, list[int]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parents = [-1] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, n)]
    inputs = Inputs(
        queries=F.normalize(normal(n, heads, dk), dim=-1),
        keys=F.normalize(normal(n, heads, dk), dim=-1),
        values=normal(n, heads, dv),
        log_decay=-normal(n, heads).exp() * 3,  # from hardly fading to forgetting everything at once
        beta=normal(n, heads).sigmoid(),
    )
    return normal(heads, dk, dv), inputs, parents


def visibility(parents: list[int]) -> torch.Tensor:
    return Tree([0] * len(parents), parents, [0] * len(parents), [0] * len(parents), [0.0] * len(parents)).visible()


@pytest.mark.parametrize("n", [1, 2, 16, 64, 128])
def test_all_nodes_at_once_equal_node_by_node(n: int) -> None:
    for seed in range(4):
        state, inputs, parents = random_rule(seed, n)
        visible = visibility(parents)
        packed = Packed.run(state, inputs, parents, visible)
        assert (packed.outputs - delta_rule.recurrent(state, inputs, parents)).abs().max() < 1e-12
        for node in {0, n // 2, n - 1}:
            path = [other for other in range(n) if visible[node, other]]
            assert (packed.commit(state, path) - delta_rule.commit(state, inputs, path)).abs().max() < 1e-12
        assert torch.equal(packed.commit(state, []), state)


def test_convolution_windows_follow_the_path_and_not_the_index() -> None:
    parents = [-1, 0, 0, 1, 2, 4, 5, 3]
    channels = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]
    window = torch.tensor([[100.0], [200.0], [300.0]], dtype=torch.float64)
    filters = torch.tensor([[1e-3], [1e-2], [1e-1], [1.0]], dtype=torch.float64)
    expected = {
        0: (100, 200, 300, 1),
        2: (200, 300, 1, 3),
        4: (300, 1, 3, 5),
        5: (1, 3, 5, 6),
        6: (3, 5, 6, 7),
        7: (1, 2, 4, 8),
    }
    found = convolve(channels, window, filters, parents)
    for node, taps in expected.items():
        total = sum(tap * weight for tap, weight in zip(taps, (1e-3, 1e-2, 1e-1, 1.0), strict=True))
        assert float(found[node]) == pytest.approx(float(F.silu(torch.tensor(total, dtype=torch.float64))))


# -- loading ---------------------------------------------------------------------------------------------------------


def test_a_multimodal_checkpoint_s_language_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    write_toy_hybrid(tmp_path, prefix="model.language_model")
    file = tmp_path / "target" / "model.safetensors"
    save_file(load_file(file) | {"model.visual.patch.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}, file)
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": hybrid_config(),
    }
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    nested = Target.load(tmp_path / "target", 64, "cpu", torch.float64)
    flat = Target.load(folder / "target", 64, "cpu", torch.float64)
    span = Span.chain(PROMPT, 0)
    assert torch.equal(nested.forward(span, nested.new_state(8)).hidden, flat.forward(span, flat.new_state(8)).hidden)


def test_layers_can_be_named_by_interval(folder: Path, tmp_path: Path) -> None:
    write_toy_hybrid(tmp_path)
    edit_config(tmp_path / "target", layer_types=None, full_attention_interval=2)
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.3\.self_attn"):
        Target.load(tmp_path / "target", 64, "cpu", torch.float64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"linear_num_key_heads": 4}, "6 value heads cannot share 4"),
        ({"layer_types": ["full_attention"]}, "layer_types should name"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types should name"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim should be a whole number"),
    ],
)
def test_hybrid_shapes_that_cannot_be_are_refused(tmp_path: Path, values: dict[str, object], message: str) -> None:
    write_toy_hybrid(tmp_path)
    edit_config(tmp_path / "target", **values)
    with pytest.raises(ValueError, match=message):
        Target.load(tmp_path / "target", 64, "cpu", torch.float64)
