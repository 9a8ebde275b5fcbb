"""Decoding: draft a tree, verify it in one pass, keep the path the target agrees with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer

from ..tree import Tree, build, chain
from ..verify import truncate, walk, walk_greedy
from .config import draft_config
from .drafter import BlockDrafter, Drafter, DraftState
from .sampling import Sampler, SamplingParams
from .span import Span
from .target import Pass, Target

__all__ = ["Decoder", "Mode", "SamplingParams", "Session", "Step"]

Mode = Literal["tree", "linear", "ar"]

PREFILL_CHUNK = 512  # tokens of a prompt per pass: bounds the memory of masks and activations


@dataclass(frozen=True)
class Step:
    """What one verify pass decided. `tokens`: in order, at least one. `nodes`: drafted nodes verified, root excluded,
    so (len(tokens) - 1) / nodes is the rate of drafts accepted. `finish`: "stop", "length" or None."""

    tokens: list[int]
    nodes: int
    finish: str | None


class Decoder:
    """A target with its drafter. Holds no state of requests, so sessions may be stepped in any order, by one thread."""

    def __init__(
        self,
        target: Target,
        drafter: BlockDrafter | None,
        tokenizer: Tokenizer | None,
        *,
        mode: Mode = "tree",
        budget: int = 15,
        topk: int = 8,
        context_length: int = 1024,
    ) -> None:
        if mode not in ("tree", "linear", "ar"):
            raise ValueError(f"mode must be tree, linear or ar, not {mode!r}")
        if mode != "ar" and drafter is None:
            raise ValueError(f"mode {mode} needs a draft model; give one, or use mode ar")
        if budget < 1 or topk < 1:
            raise ValueError(f"budget and topk must be at least 1, not {budget} and {topk}")
        if context_length < 2:
            raise ValueError(f"context_length must be at least 2, not {context_length}")
        self.target = target
        self.drafter = drafter if mode != "ar" else None
        self.mode = mode
        self.budget = budget
        self.topk = topk
        self.context_length = context_length
        self._tokenizer = tokenizer

    @classmethod
    def load(
        cls,
        target: Path,
        draft: Path | None,
        *,
        mode: Mode = "tree",
        budget: int = 15,
        topk: int = 8,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        context_length: int = 1024,
    ) -> Decoder:
        """Loads Hugging Face format folders. Raises ValueError, naming file and reason, for what it cannot serve."""
        file = target / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{target}: holds no tokenizer.json")
        with torch.inference_mode():
            if draft is None or mode == "ar":
                model, drafter = Target.load(target, context_length, device, dtype), None
            else:
                # A block may reach past the context's end, by at most its own size.
                positions = context_length + draft_config(draft).block_size
                model = Target.load(target, positions, device, dtype)
                drafter = Drafter.load(draft, model, positions)
        return cls(
            model,
            drafter,
            Tokenizer.from_file(str(file)),
            mode=mode,
            budget=budget,
            topk=topk,
            context_length=context_length,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("this decoder was made without a tokenizer")
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab

    @property
    def block_size(self) -> int:
        """Tokens that one drafted block covers, root included; 1 when nothing is drafted."""
        return 1 + self.drafter.depths if self.drafter is not None else 1

    def start(self, prompt_ids: list[int], params: SamplingParams) -> Session:
        """Raises ValueError for prompts that cannot be decoded."""
        if not prompt_ids:
            raise ValueError("the prompt is empty; at least one token is needed")
        if len(prompt_ids) >= self.context_length:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room in a context of {self.context_length}"
            )
        outside = [token for token in prompt_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token {outside[0]} of the prompt lies outside the vocabulary (0..{self.vocab_size - 1})")
        return Session(self, list(prompt_ids), params)


class Session:
    """One request. `step` runs the target once over the root and the drafts behind it, after the prompt the first time.

    The root is the last decided token. Its keys and values are not in the cache yet: the pass that verifies what
    follows it computes them.
    """

    def __init__(self, decoder: Decoder, prompt: list[int], params: SamplingParams) -> None:
        target, drafter = decoder.target, decoder.drafter
        self._decoder = decoder
        self._params = params
        self._prompt: list[int] | None = prompt[:-1]  # what is still to be put into the cache
        self._root = prompt[-1]
        self._limit = min(params.max_tokens, decoder.context_length - len(prompt))
        self._emitted = 0
        self._finished = False
        self._sampler = None if params.greedy else Sampler(params)
        room = len(prompt) + self._limit
        widest = {"tree": decoder.budget + 1, "linear": decoder.block_size, "ar": 1}[decoder.mode]
        with torch.inference_mode():
            self._state = target.new_state(room + widest)
            self._draft: DraftState | None = drafter.start(room) if drafter is not None else None

    @torch.inference_mode()
    def step(self) -> Step:
        """One verify pass. Raises RuntimeError once the session is finished or closed."""
        if self._finished:
            raise RuntimeError("the session is finished")
        decoder, state = self._decoder, self._state
        device = decoder.target.embedding.device
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            for at in range(0, len(prompt), PREFILL_CHUNK):
                chunk = Span.chain(prompt[at : at + PREFILL_CHUNK], state.length, device)
                self._commit(chunk, self._forward(chunk).features, list(range(len(chunk))))
        remaining = self._limit - self._emitted
        tree = self._grow(remaining)
        span = Span.of_tree(tree, state.length, device)
        result = self._forward(span)
        logits = decoder.target.logits(result.hidden)
        if self._sampler is None:
            path = walk_greedy(tree, logits)
        else:
            sampler, emitted = self._sampler, self._emitted
            path = walk(tree, lambda node: sampler(logits[node], emitted + tree.depths[node]))
        kept, finish = truncate(path, remaining=remaining, stop_token_ids=self._params.stop_token_ids)
        self._commit(span, result.features, kept.nodes)
        self._root = kept.tokens[-1]
        self._emitted += len(kept.tokens)
        if finish:
            self.close()
        return Step(kept.tokens, tree.drafted, finish)

    def close(self) -> None:
        """Frees the session's memory. May be called twice."""
        self._finished = True
        self._draft = None
        if hasattr(self, "_state"):
            del self._state

    def _grow(self, remaining: int) -> Tree:
        """A draft tree behind the root, no deeper than can still be emitted: the bonus token takes one place."""
        decoder = self._decoder
        if self._draft is None or decoder.drafter is None or remaining == 1:
            return chain(self._root, [])
        depths = min(decoder.drafter.depths, remaining - 1)
        topk = decoder.topk if decoder.mode == "tree" else 1
        drafts = self._draft.propose(self._root, self._state.length, depths, topk)
        if decoder.mode == "linear":
            return chain(self._root, [row[0] for row in drafts.tokens])
        return build(self._root, drafts.log_probabilities, drafts.tokens, decoder.budget)

    def _forward(self, span: Span) -> Pass:
        drafter = self._decoder.drafter
        return self._decoder.target.forward(span, self._state, drafter.target_layers if drafter is not None else ())

    def _commit(self, span: Span, features: torch.Tensor | None, nodes: list[int]) -> None:
        """Makes `nodes` of the span decided, for target and drafter alike."""
        self._state.keep(nodes)
        if self._draft is not None and features is not None:
            self._draft.extend(features[nodes], span.positions[nodes])
