"""Trains a pair: the target on the corpus, then the drafter on the target's own continuations.

    python -m ddtree_engine.models.training.train OUT --pair demo-code --data DATA
    python -m ddtree_engine.models.training.train OUT --pair demo-code --init-only

DATA is what `prepare` wrote. OUT/target and OUT/draft are checkpoints in Hugging Face format. Training is bounded by
wall clock, so its result depends on the machine; the defaults are those of one H200.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .checkpoint import export_draft, export_target
from .generate import generate, temperatures
from .network import DraftNetwork, TargetNetwork, rope_tables
from .shapes import MASK, PAIRS, Pair

# A block's d-th draft weighs exp(-(d - 1) / 7) in the loss: late drafts count only if the early ones hold.
DEPTH_DECAY = 7.0
SMALLEST_CONTEXT = 8  # tokens before the first drafted block


@dataclass(frozen=True)
class Options:
    pair: Pair
    data: Path
    out: Path
    target_seconds: float
    draft_seconds: float
    max_steps: int = 10**9
    batch: int = 64
    sequence: int = 1024
    rounds: int = 10  # of generation
    round_batch: int = 2048
    prompt: int = 64  # tokens of the corpus that a generated sequence starts with
    generated: int = 512  # tokens of a generated sequence, prompt included
    draft_batch: int = 96
    blocks: int = 24  # drafted per sequence
    learning_rate: float = 2e-3
    compiled: bool = True


def log(*values: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *values, flush=True)


def sample(stream: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random stretches of a token stream, [count, length] int64."""
    if len(stream) <= length:
        raise ValueError(f"the corpus has {len(stream)} tokens, stretches of {length} are wanted: give more sources")
    starts = torch.randint(0, len(stream) - length, (count,), generator=generator, device=stream.device)
    return stream[starts[:, None] + torch.arange(length, device=stream.device)].long()


def optimise(module: nn.Module, options: Options, seconds: float, loss: Callable[[], torch.Tensor]) -> Iterator[float]:
    """Steps until the time is up, and yields the loss now and then. The clock starts after three steps
    (compilation)."""
    decayed = [p for name, p in module.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in module.named_parameters() if p.dim() != 2 or "embed" in name]
    device = others[0].device.type
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    began = time.monotonic()
    for step in range(options.max_steps):
        if step == 3:
            began = time.monotonic()
        share = (time.monotonic() - began) / seconds if step >= 3 else 0.0
        if share >= 1:
            return
        warm_up = min(1.0, (step + 1) / 100)
        for group in optimiser.param_groups:
            group["lr"] = options.learning_rate * warm_up * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))
        with torch.autocast(device, dtype=torch.bfloat16):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 20 == 0 and device == "cuda":
            torch.cuda.synchronize()  # else the clock would run ahead of the work
        if step % 200 == 0:
            yield value.item()


class DraftBatch:
    """Sequences with blocks to draft: which tokens stand masked where, and what each block may see."""

    def __init__(
        self, target: TargetNetwork, ids: torch.Tensor, blocks: int, first: int, generator: torch.Generator
    ) -> None:
        """ids [batch, n]; blocks begin at position `first` or later."""
        pair, (batch, n), device = target.pair, ids.shape, ids.device
        tables = rope_tables(pair, n, device)
        with torch.no_grad():
            _, self.features = target(ids, tables, capture=pair.target_layers)
            room = n - pair.block - first
            order = torch.rand(batch, room, generator=generator, device=device)
            roots = order.topk(blocks, dim=1).indices + first  # [batch, blocks]
            positions = roots[:, :, None] + torch.arange(pair.block, device=device)
            self.labels = ids.gather(1, positions.flatten(1)).view_as(positions)
            inputs = torch.full_like(self.labels, MASK)
            inputs[:, :, 0] = self.labels[:, :, 0]
            self.embeddings = target.embed_tokens(inputs.flatten(1))
            self.context = tables
            self.block = (tables[0][positions.flatten(1)], tables[1][positions.flatten(1)])
            # A block sees the context before its root and all of itself, and no other block.
            before = torch.arange(n, device=device) < roots[:, :, None]
            owner = torch.arange(blocks, device=device).repeat_interleave(pair.block)
            own = (owner[:, None] == owner).expand(batch, -1, -1)
            seen = torch.cat([before.repeat_interleave(pair.block, 1), own], -1)[:, None]
            self.bias = torch.zeros(seen.shape, dtype=self.embeddings.dtype, device=device)
            self.bias.masked_fill_(~seen, float("-inf"))

    def logits(self, target: TargetNetwork, draft: Callable[..., torch.Tensor]) -> torch.Tensor:
        """[batch, blocks, block - 1, V]: the drafts, the root's own output left out."""
        hidden = draft(self.features, self.context, self.embeddings, self.block, self.bias)
        return target.logits(hidden.unflatten(1, self.labels.shape[1:])[:, :, 1:])


def acceptance(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Tokens that a greedy chain would decide per block, the bonus included."""
    right = logits.argmax(-1) == labels[:, :, 1:]
    return 1.0 + right.int().cumprod(-1).sum(-1).float().mean().item()


def train_target(
    options: Options, tokens: torch.Tensor, held: torch.Tensor, generator: torch.Generator
) -> TargetNetwork:
    device = tokens.device
    target = TargetNetwork(options.pair).to(device)
    tables = rope_tables(options.pair, options.sequence, device)
    loss = torch.compile(target.loss) if options.compiled else target.loss

    def batch_loss() -> torch.Tensor:
        return loss(sample(tokens, options.batch, options.sequence + 1, generator), tables)

    for value in optimise(target, options, options.target_seconds, batch_loss):
        log(f"target: loss {value:.4f}")
    # The drafter reads a frozen target in the precision it is served in.
    target = target.to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad():
        for name, stream in (("training", tokens), ("held-out", held)):
            value = target.loss(sample(stream, options.batch // 2, options.sequence + 1, generator), tables).item()
            log(f"target: {name} loss {value:.4f}")
    return target


def train_draft(
    options: Options, target: TargetNetwork, tokens: torch.Tensor, held: torch.Tensor, generator: torch.Generator
) -> DraftNetwork:
    device = tokens.device
    rounds = []
    for number in range(options.rounds):
        prompts = sample(tokens, options.round_batch, options.prompt, generator)
        heat = temperatures(options.round_batch, generator)
        rounds.append(generate(target, prompts, options.generated, heat, generator).to(torch.int32))
        log(f"generated round {number + 1} of {options.rounds}")
    continuations = torch.cat(rounds)
    examples = min(128, options.round_batch)
    prompts = sample(held, examples, options.prompt, generator)
    unseen = generate(target, prompts, options.generated, torch.zeros(examples, device=device), generator)
    draft = DraftNetwork(options.pair).to(device)
    forward = torch.compile(draft) if options.compiled else draft
    weights = torch.exp(-torch.arange(options.pair.block - 1, device=device).float() / DEPTH_DECAY)
    from_corpus = options.draft_batch // 8  # the rest are continuations

    def batch_loss() -> torch.Tensor:
        rows = torch.randint(
            0, len(continuations), (options.draft_batch - from_corpus,), generator=generator, device=device
        )
        corpus = sample(tokens, from_corpus, options.generated, generator)
        ids = torch.cat([continuations[rows].long(), corpus])
        batch = DraftBatch(target, ids, options.blocks, SMALLEST_CONTEXT, generator)
        logits, labels = batch.logits(target, forward), batch.labels[:, :, 1:]
        losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view_as(labels)
        return (losses * weights).sum() / (weights.sum() * labels[..., 0].numel())

    @torch.no_grad()
    def evaluate() -> float:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            batch = DraftBatch(target, unseen, options.blocks, options.prompt, generator)
            return acceptance(batch.logits(target, draft), batch.labels)

    for value in optimise(draft, options, options.draft_seconds, batch_loss):
        log(f"drafter: loss {value:.4f}, held-out acceptance {evaluate():.3f}")
    log(f"drafter: final held-out acceptance {evaluate():.3f}")
    return draft


def write(options: Options, target: TargetNetwork, draft: DraftNetwork) -> None:
    export_target(options.out / "target", options.pair, target.state_dict())
    export_draft(options.out / "draft", options.pair, draft.state_dict())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (options.data / name).is_file():
            for part in ("target", "draft"):
                shutil.copyfile(options.data / name, options.out / part / name)


def run(options: Options) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device).manual_seed(1)
    streams = [np.fromfile(options.data / f"{name}.bin", dtype=np.uint16) for name in ("tokens", "heldout")]
    tokens, held = (torch.from_numpy(stream.astype(np.int32)).to(device) for stream in streams)
    log(f"{len(tokens)} tokens to train on, {len(held)} held out, on {device}")
    target = train_target(options, tokens, held, generator)
    write(options, target, train_draft(options, target, tokens, held, generator))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pair", choices=sorted(PAIRS), default="demo-code")
    parser.add_argument("--data", type=Path, default=Path(), help="what `prepare` wrote")
    parser.add_argument("--init-only", action="store_true", help="write random weights and stop")
    parser.add_argument("--target-seconds", type=float, help="default: the pair's own")
    parser.add_argument("--draft-seconds", type=float, help="default: the pair's own")
    parser.add_argument("--max-steps", type=int, default=10**9, help="of each part")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    given = parser.parse_args()
    pair = PAIRS[given.pair]
    options = Options(
        pair=pair,
        data=given.data,
        out=given.out,
        target_seconds=given.target_seconds or pair.target_seconds,
        draft_seconds=given.draft_seconds or pair.draft_seconds,
        max_steps=given.max_steps,
        compiled=not given.no_compile,
    )
    if given.init_only:
        torch.manual_seed(0)
        write(options, TargetNetwork(pair), DraftNetwork(pair))
        return
    if not (given.data / "tokens.bin").is_file():
        parser.error(f"--data: {given.data} holds no tokens.bin; run ddtree_engine.models.training.prepare first")
    run(options)


if __name__ == "__main__":
    main()
