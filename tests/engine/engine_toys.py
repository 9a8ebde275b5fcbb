"""Small models and scripted drafters for the reference engine's tests."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch

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
