"""Small models and scripted drafters for the reference engine's tests."""

from __future__ import annotations

import dataclasses
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ddtree_engine.models import EMBEDDED_PAIR
from ddtree_engine.models.training.checkpoint import export_draft, export_target
from ddtree_engine.models.training.network import DraftNetwork, TargetNetwork
from ddtree_engine.models.training.shapes import Pair
from ddtree_engine.reference.drafter import Candidates
from ddtree_engine.reference.engine import Decoder, SamplingParams, Session, Step
from ddtree_engine.reference.target import Target

torch.set_num_threads(1)

TOY = Pair(
    vocabulary=61,
    hidden=24,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=40,
    draft_layers=2,
    target_layers=(0, 2),
    target_seconds=0,
    draft_seconds=0,
    block=8,
)


def write_toy_pair(folder: Path, pair: Pair = TOY, seed: int = 3) -> None:
    """Random weights, large enough that the output depends on the whole context."""
    torch.manual_seed(seed)
    for network, export, name in (
        (TargetNetwork(pair), export_target, "target"),
        (DraftNetwork(pair), export_draft, "draft"),
    ):
        state = {key: value if "norm" in key else value * 20 for key, value in network.state_dict().items()}
        export(folder / name, pair, state)


HYBRID_LAYERS = ("linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention")


def hybrid_config() -> dict[str, Any]:
    """A Qwen3.5-style hybrid; every size differs from the others where the architecture lets it."""
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": TOY.vocabulary,
        "hidden_size": TOY.hidden,
        "intermediate_size": 40,
        "num_hidden_layers": len(HYBRID_LAYERS),
        "layer_types": list(HYBRID_LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }


def write_toy_hybrid(folder: Path, seed: int = 0, prefix: str = "model") -> None:
    """A random hybrid target and a random drafter for it."""
    generator = torch.Generator().manual_seed(seed)
    config = hybrid_config()
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    values, width = config["linear_num_value_heads"], config["linear_value_head_dim"] * config["linear_num_value_heads"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + width
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocabulary, hidden),
        f"{prefix}.embed_tokens.weight": (vocabulary, hidden),
        f"{prefix}.norm.weight": (hidden,),
    }
    for number, kind in enumerate(HYBRID_LAYERS):
        layer = f"{prefix}.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
        if kind == "full_attention":
            shapes |= {
                f"{layer}.self_attn.q_proj.weight": (heads * size * 2, hidden),
                f"{layer}.self_attn.k_proj.weight": (groups * size, hidden),
                f"{layer}.self_attn.v_proj.weight": (groups * size, hidden),
                f"{layer}.self_attn.o_proj.weight": (hidden, heads * size),
                f"{layer}.self_attn.q_norm.weight": (size,),
                f"{layer}.self_attn.k_norm.weight": (size,),
            }
        else:
            shapes |= {
                f"{layer}.linear_attn.in_proj_qkv.weight": (channels, hidden),
                f"{layer}.linear_attn.in_proj_z.weight": (width, hidden),
                f"{layer}.linear_attn.in_proj_b.weight": (values, hidden),
                f"{layer}.linear_attn.in_proj_a.weight": (values, hidden),
                f"{layer}.linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
                f"{layer}.linear_attn.A_log": (values,),
                f"{layer}.linear_attn.dt_bias": (values,),
                f"{layer}.linear_attn.norm.weight": (config["linear_value_head_dim"],),
                f"{layer}.linear_attn.out_proj.weight": (hidden, width),
            }
    # Heads fade at very different rates; matrices are large enough that the whole context matters.
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) < 2 else 2.0 * shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    target = folder / "target"
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    drafter = dataclasses.replace(TOY, layers=len(HYBRID_LAYERS), target_layers=(0, 1, 3))
    torch.manual_seed(seed)
    export_draft(folder / "draft", drafter, DraftNetwork(drafter).state_dict())


def edit_config(folder: Path, **values: Any) -> None:
    """Changes entries of a checkpoint's config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@cache
def demo(
    mode: str = "tree", budget: int = 15, topk: int = 8, dtype: torch.dtype = torch.float64, context: int = 512
) -> Decoder:
    """The packaged pair."""
    return Decoder.load(
        EMBEDDED_PAIR / "target",
        EMBEDDED_PAIR / "draft",
        mode=mode,  # type: ignore[arg-type]
        budget=budget,
        topk=topk,
        dtype=dtype,
        context_length=context,
    )


DEMO_PROMPTS = (
    "import os\nimport sys\n",
    "def urlparse(url, scheme='', allow_fragments=True):\n",
    "# Copyright 2001-",
    'class Thread:\n    """A class that represents a thread of control.\n\n    This class can be subclassed in a',
)


def demo_prompt(number: int) -> list[int]:
    return demo("ar").tokenizer.encode(DEMO_PROMPTS[number]).ids


def steps(decoder: Decoder, prompt: list[int], params: SamplingParams) -> list[Step]:
    """Everything a session does until it ends."""
    return finish(decoder.start(prompt, params))


def finish(session: Session) -> list[Step]:
    done = [session.step()]
    while done[-1].finish is None:
        done.append(session.step())
    return done


def tokens(run: list[Step]) -> list[int]:
    return [token for step in run for token in step.tokens]


class ScriptedDrafter:
    """Drafts from a known continuation. In each block the right token of a depth stands at some rank among the
    candidates or not at all, so walks end early, late, and on siblings."""

    target_layers: tuple[int, ...] = ()

    def __init__(self, sequence: list[int], vocabulary: int, depths: int = 7, hit: float = 0.85, seed: int = 0) -> None:
        self.sequence = sequence  # prompt and continuation
        self.vocabulary = vocabulary
        self.depths = depths
        self._hit = hit
        self._seed = seed

    def start(self, capacity: int) -> ScriptedDrafter:
        return self

    def extend(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        raise AssertionError("no features were asked for")

    def propose(self, root: int, position: int, depths: int, topk: int) -> Candidates:
        assert root == self.sequence[position], "the root is not the token decided last"
        draw = random.Random(position * 1009 + self._seed)
        rows, ids = [], []
        for depth in range(1, depths + 1):
            others = draw.sample(range(self.vocabulary), topk + 1)
            if position + depth < len(self.sequence):
                right = self.sequence[position + depth]
                others = [token for token in others if token != right]
                if draw.random() < self._hit:
                    others.insert(draw.randrange(min(3, topk)), right)
            ids.append(others[:topk])
            rows.append(sorted((-draw.expovariate(0.6) for _ in range(topk)), reverse=True))
        return Candidates(rows, ids)


def scripted(target: Target, sequence: list[int], mode: str, budget: int, topk: int = 4, seed: int = 0) -> Decoder:
    drafter = ScriptedDrafter(sequence, target.config.vocab, seed=seed)
    return Decoder(target, drafter, None, mode=mode, budget=budget, topk=topk, context_length=128)  # type: ignore[arg-type]
