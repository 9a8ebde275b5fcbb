"""One request while it is decoded: its session, its text so far and why it ended."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .text import StopScanner, TextDecoder

if TYPE_CHECKING:  # importing the engine loads torch, and this package must answer /health before that is done
    from ddtree_engine.reference.engine import Decoder, SamplingParams


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one verify pass added. `finish` is set on the last one: "stop" or "length"."""

    text: str
    tokens: list[int]
    finish: str | None
    completion_tokens: int
    verify_steps: int


class Generation:
    """Advances one session step by step. Tokens behind the end of a stop string are dropped, also within a step."""

    def __init__(
        self,
        decoder: Decoder,
        texts: TextDecoder,
        prompt: list[int],
        params: SamplingParams,
        stops: tuple[str, ...],
    ) -> None:
        self._session = decoder.start(prompt, params)
        self._end_tokens = params.stop_token_ids
        self._text = texts.stream()
        self._scanner = StopScanner(stops)
        self.completion_tokens = 0
        self.verify_steps = 0
        self.nodes = 0

    def advance(self) -> Delta:
        step = self._session.step()
        self.verify_steps += 1
        self.nodes = step.nodes
        finish = step.finish
        kept: list[int] = []
        shown: list[str] = []
        stopped = False
        for token in step.tokens:
            kept.append(token)
            if token in self._end_tokens:
                finish = "stop"
                break
            ready, stopped = self._scanner.push(self._text.push(token))
            shown.append(ready)
            if stopped:
                finish = "stop"
                break
        if finish and not stopped:
            ready, stopped = self._scanner.push(self._text.flush())
            shown.append(ready)
            if not stopped:
                shown.append(self._scanner.flush())
        self.completion_tokens += len(kept)
        return Delta("".join(shown), kept, finish, self.completion_tokens, self.verify_steps)

    def close(self) -> None:
        self._session.close()
