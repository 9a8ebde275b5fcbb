"""Golden answers of the packaged pair: `python -m ddtree_engine.models.golden` records them anew.

They are plain greedy decoding in fp32. An answer is taken only if, at each of its tokens, the best logit leads the
next by more than `GAP`: hundreds of times what another processor's order of summation can change, so every machine
reproduces it.
"""

from __future__ import annotations

import json

import torch

from . import EMBEDDED, GOLDEN, resolve

GAP = 0.05
MAX_TOKENS = 32
PROMPTS = (
    "import os\nimport sys\n",
    "with open(",
    'class Thread:\n    """A class that represents a thread of control.',
    "def __init__(self",
)


def record() -> list[dict[str, object]]:
    """Raises ValueError for a prompt whose answer is too close a call to be golden."""
    from ..reference.engine import Decoder, SamplingParams
    from ..reference.span import Span

    decoder = Decoder.load(resolve(EMBEDDED, "target"), None, mode="ar")
    answers: list[dict[str, object]] = []
    for prompt in PROMPTS:
        ids = decoder.tokenizer.encode(prompt).ids
        session = decoder.start(ids, SamplingParams(max_tokens=MAX_TOKENS))
        tokens: list[int] = []
        while len(tokens) < MAX_TOKENS:
            tokens += session.step().tokens
        with torch.inference_mode():
            state = decoder.target.new_state(len(ids) + MAX_TOKENS)
            hidden = decoder.target.forward(Span.chain(ids + tokens[:-1], 0), state).hidden
            best = decoder.target.logits(hidden[len(ids) - 1 :]).topk(2).values
        gap = float((best[:, 0] - best[:, 1]).min())
        if gap <= GAP:
            raise ValueError(f"{prompt!r}: the two best tokens are only {gap:.3f} apart; take another prompt")
        answers.append(
            {
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "text": decoder.tokenizer.decode(tokens),
                "token_ids": tokens,
                "smallest_logit_gap": round(gap, 3),
            }
        )
    return answers


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
