"""Is a completion right? Exact text where that can be asked for, plain sense where it cannot."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any


@dataclasses.dataclass(frozen=True)
class Golden:
    """A known answer. `exact`: the whole text must agree (CPU, fp32); else its first `prefix` characters must.

    On GPUs greedy text is not reproducible over batch shapes, so only a stated prefix is compared there.
    """

    prompt: str
    max_tokens: int
    text: str | None = None
    exact: bool = True
    prefix: int = 24

    @classmethod
    def of(cls, value: dict[str, Any]) -> Golden:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: item for key, item in value.items() if key in names})


# Asked where no golden answer is known yet: the answers are recorded, and must at least make sense.
QUESTIONS = (
    Golden("def add(a, b):\n    return", 16),
    Golden("The capital of France is", 16),
    Golden("import os\nimport", 16),
)


def wrong(text: str, golden: Golden) -> str | None:
    """Why `text` is no answer to `golden`, in words; None if it is one."""
    if golden.text is not None:
        if golden.exact and text != golden.text:
            return f"wrong answer to {golden.prompt[:40]!r}: expected {golden.text[:60]!r}, got {text[:60]!r}"
        head = golden.text[: golden.prefix]
        if not golden.exact and not text.startswith(head):
            return f"wrong answer to {golden.prompt[:40]!r}: expected to begin with {head!r}, got {text[:60]!r}"
        return None
    return degenerate(text)


def degenerate(text: str) -> str | None:
    """Signs of a model that does not work: nothing, undecodable bytes, or one piece over and over."""
    if not text:
        return "the engine answered with no text"
    if text.count("\ufffd") > len(text) / 4:
        return f"the answer is not readable text: {text[:60]!r}"
    words = text.split()
    if len(words) >= 8 and Counter(words).most_common(1)[0][1] > 0.8 * len(words):
        return f"the answer repeats one word: {text[:60]!r}"
    solid = "".join(words)
    if len(solid) >= 24 and Counter(solid).most_common(1)[0][1] > 0.9 * len(solid):
        return f"the answer repeats one character: {text[:60]!r}"
    return None
