"""The JSON of answers, whole or in chunks, for both completion endpoints."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from .generation import Delta


@dataclasses.dataclass
class Reply:
    """Builds the answer to one request from the deltas of its generation."""

    id: str
    chat: bool
    model: str
    prompt: list[int]
    return_token_ids: bool
    include_usage: bool
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    verify_steps: int = 0
    finish: str | None = None

    def count(self, delta: Delta) -> None:
        self.completion_tokens, self.verify_steps = delta.completion_tokens, delta.verify_steps
        self.finish = delta.finish

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage plus what speculation did: `acceptance_length` is tokens per verify pass."""
        length = self.completion_tokens / self.verify_steps if self.verify_steps else 0.0
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": self.completion_tokens,
            "total_tokens": len(self.prompt) + self.completion_tokens,
            "ddtree": {"verify_steps": self.verify_steps, "acceptance_length": round(length, 4)},
        }

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": self.finish}
        if self.return_token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.tokens]
            choice["prompt_token_ids"] = self.prompt
        name = "chat.completion" if self.chat else "text_completion"
        return {**self._head(name), "choices": [choice], "usage": self.usage()}

    def opening(self) -> list[bytes]:
        """A chat stream begins with the role."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)] if self.chat else []

    def chunks(self, delta: Delta) -> list[bytes]:
        """Events for one delta; the finish reason comes in an event of its own for chats, as OpenAI does it."""
        extra: dict[str, Any] = {"token_ids": delta.tokens} if self.return_token_ids else {}
        events: list[bytes] = []
        if self.chat:
            if delta.text or extra:
                events.append(self._chunk({"delta": {"content": delta.text}, **extra}, None))
            if delta.finish:
                events.append(self._chunk({"delta": {}}, delta.finish))
        elif delta.text or extra or delta.finish:
            events.append(self._chunk({"text": delta.text, **extra}, delta.finish))
        return events

    def closing(self) -> list[bytes]:
        events: list[bytes] = []
        if self.include_usage:
            events.append(event({**self._head(self._chunk_name()), "choices": [], "usage": self.usage()}))
        return [*events, b"data: [DONE]\n\n"]

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, content: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        body = {**self._head(self._chunk_name()), "choices": [choice]}
        if self.include_usage:
            body["usage"] = None
        return event(body)


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
