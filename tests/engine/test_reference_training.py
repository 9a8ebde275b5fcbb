"""The scripts that make the pairs, on corpora and shapes that take seconds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_toys import DEMO_PROMPTS, demo, demo_prompt, steps, tokens
from safetensors.torch import load_file

from ddtree_engine.models import EMBEDDED_PAIR
from ddtree_engine.models.training import prepare
from ddtree_engine.models.training.generate import generate
from ddtree_engine.models.training.network import DraftNetwork, TargetNetwork, rope_tables
from ddtree_engine.models.training.shapes import PAIRS
from ddtree_engine.models.training.train import DraftBatch, Options, acceptance, run
from ddtree_engine.reference.engine import Decoder, SamplingParams
from ddtree_engine.reference.span import Span

SMOKE = PAIRS["smoke"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    prepare.prepare(Path(sysconfig.get_paths()["stdlib"]) / "email", out, SMOKE.vocabulary)
    return out


def packaged(dtype: torch.dtype) -> tuple[TargetNetwork, DraftNetwork]:
    """The packaged weights in the training modules."""
    target, draft = TargetNetwork(PAIRS["demo-code"]), DraftNetwork(PAIRS["demo-code"])
    (file,) = (EMBEDDED_PAIR / "target").glob("*.safetensors")
    target.load_state_dict({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()})
    draft.load_state_dict(load_file(EMBEDDED_PAIR / "draft" / "model.safetensors"))
    return target.to(dtype), draft.to(dtype)


def test_init_only_writes_a_pair_that_decodes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddtree_engine.models.training.train", str(tmp_path), "--pair", "demo-code"]
    subprocess.run([*command, "--init-only"], check=True)
    for part in ("target", "draft"):
        (file,) = (EMBEDDED_PAIR / part).glob("*.safetensors")
        shapes = [
            {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(weights).items()}
            for weights in (tmp_path / part / "model.safetensors", file)
        ]
        assert shapes[0] == shapes[1]
        configs = [json.loads((folder / part / "config.json").read_text()) for folder in (tmp_path, EMBEDDED_PAIR)]
        assert configs[0] == configs[1]
    (tmp_path / "target" / "tokenizer.json").write_bytes((EMBEDDED_PAIR / "target" / "tokenizer.json").read_bytes())
    decoder = Decoder.load(tmp_path / "target", tmp_path / "draft")
    assert len(tokens(steps(decoder, [5, 6], SamplingParams(max_tokens=4)))) == 4


def test_training_without_data_says_what_to_run_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddtree_engine.models.training.train", str(tmp_path), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "run ddtree_engine.models.training.prepare first" in done.stderr


def test_prepared_data_decodes_back_to_the_sources(data: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    streams = [np.fromfile(data / f"{name}.bin", dtype=np.uint16).tolist() for name in ("tokens", "heldout")]
    texts: list[str] = []
    for stream in streams:
        assert stream[-1] == 0
        document: list[int] = []
        for token in stream:
            if token:
                document.append(token)
            else:
                texts.append(tokenizer.decode(document))
                document = []
    sources = prepare.documents(Path(sysconfig.get_paths()["stdlib"]) / "email")
    assert sorted(texts) == sorted(sources)
    for prompt in json.loads((data / "prompts.json").read_text()):
        assert prompt.endswith(":\n")


def test_a_vocabulary_that_the_sources_cannot_fill_is_refused(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"module_{number}.py").write_text(f"# {'ab' * 120}\n")
    with pytest.raises(ValueError, match="smaller --vocabulary"):
        prepare.prepare(tmp_path, tmp_path / "out", 4096)
    with pytest.raises(ValueError, match="at least 16"):
        prepare.prepare(tmp_path / "out", tmp_path / "out", 4096)


def test_a_short_run_learns_and_its_pair_speculates_losslessly(data: Path, tmp_path: Path) -> None:
    options = Options(
        pair=SMOKE,
        data=data,
        out=tmp_path,
        target_seconds=60,
        draft_seconds=60,
        max_steps=60,
        batch=8,
        sequence=64,
        rounds=1,
        round_batch=16,
        prompt=16,
        generated=64,
        draft_batch=8,
        blocks=4,
        learning_rate=5e-3,
        compiled=False,
    )
    run(options)
    held = np.fromfile(data / "heldout.bin", dtype=np.uint16).astype(int).tolist()[:200]
    decoder = Decoder.load(tmp_path / "target", tmp_path / "draft", dtype=torch.float64)
    plain = Decoder.load(tmp_path / "target", None, mode="ar", dtype=torch.float64)
    with torch.inference_mode():
        hidden = plain.target.forward(Span.chain(held[:-1], 0), plain.target.new_state(200)).hidden
        loss = torch.nn.functional.cross_entropy(plain.target.logits(hidden), torch.tensor(held[1:]))
    assert loss < np.log(SMOKE.vocabulary) - 0.7  # better than knowing nothing
    params = SamplingParams(max_tokens=32)
    found = steps(decoder, held[:20], params)
    assert tokens(found) == tokens(steps(plain, held[:20], params))
    assert len(found) < 32  # the drafter has learned something too


def test_training_and_serving_compute_the_same_target() -> None:
    target, _ = packaged(torch.float64)
    ids = demo_prompt(1)
    with torch.inference_mode():
        trained, features = target(torch.tensor([ids]), rope_tables(target.pair, len(ids), "cpu"), capture=(1, 2, 3, 4))
        cache = demo("tree").target.new_state(len(ids))
        served = demo("tree").target.forward(Span.chain(ids, 0), cache, (1, 2, 3, 4))
    # The training modules turn and normalise in single precision.
    assert served.features is not None
    assert (served.features - features[0]).abs().max() < 1e-3
    assert (served.hidden - trained[0]).abs().max() < 1e-3


def test_training_and_serving_draft_the_same_tokens() -> None:
    target, draft = packaged(torch.float32)
    prompt = demo_prompt(1) + tokens(steps(demo("ar"), demo_prompt(1), SamplingParams(max_tokens=40)))
    ids = torch.tensor([prompt])
    generator = torch.Generator().manual_seed(0)
    batch = DraftBatch(target, ids, 3, len(demo_prompt(1)), generator)
    with torch.inference_mode():
        drafted = batch.logits(target, draft).argmax(-1)[0]
        served_features = (
            demo("tree")
            .target.forward(Span.chain(prompt, 0), demo("tree").target.new_state(len(prompt)), (1, 2, 3, 4))
            .features
        )
        assert served_features is not None
        for block in range(3):
            root = next(at for at in range(len(prompt)) if prompt[at : at + 16] == batch.labels[0, block].tolist())
            drafter = demo("tree").drafter
            assert drafter is not None
            state = drafter.start(256)
            state.extend(served_features[:root], torch.arange(root))
            served = state.propose(prompt[root], root, 15, 1).tokens
            assert [row[0] for row in served] == drafted[block].tolist()


def test_generation_for_training_leaves_special_tokens_out() -> None:
    """An untrained target: each of the 512 tokens is about as likely as any other."""
    torch.manual_seed(0)
    prompts = torch.full((64, 1), 9)
    generator = torch.Generator().manual_seed(0)
    out = generate(TargetNetwork(SMOKE), prompts, 40, torch.ones(64), generator)
    found = set(out.flatten().tolist())
    assert len(found) > 400
    assert not found & {1, 2, 3}
    assert 0 in found  # the end of a document does occur in the corpus


def test_generation_for_training_is_greedy_decoding() -> None:
    target, _ = packaged(torch.float32)
    prompt = demo_prompt(0)
    out = generate(
        target,
        torch.tensor([prompt, prompt]),
        len(prompt) + 16,
        torch.tensor([0.0, 1.0]),
        torch.Generator().manual_seed(0),
    )
    assert out[0, len(prompt) :].tolist() == tokens(steps(demo("ar"), prompt, SamplingParams(max_tokens=16)))
    assert out[1].tolist() != out[0].tolist()
    assert DEMO_PROMPTS[0].startswith("import os")


def test_acceptance_counts_the_right_drafts_before_the_first_wrong_one() -> None:
    labels = torch.tensor([[[9, 1, 2, 3], [9, 1, 2, 3]]])
    logits = torch.zeros(1, 2, 3, 5)
    for block, drafts in enumerate(([1, 2, 4], [4, 2, 3])):
        logits[0, block, range(3), drafts] = 1.0
    assert acceptance(logits, labels) == (3 + 1) / 2


def test_presets_are_the_shapes_of_the_packaged_pair() -> None:
    config = json.loads((EMBEDDED_PAIR / "target" / "config.json").read_text())
    assert dataclasses.asdict(PAIRS["demo-code"])["layers"] == config["num_hidden_layers"]
