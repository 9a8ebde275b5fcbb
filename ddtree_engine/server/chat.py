"""Chat messages to one prompt: the model's own template where it has one, a plain transcript otherwise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(Exception):
    """The model's chat template refuses these messages, or is broken; the text says how."""


@dataclasses.dataclass(frozen=True)
class Message:
    role: str
    content: str


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _plain_text(token: Any) -> str:
    """tokenizer_config.json writes a special token as a string or as an object holding it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones: [{"name": ..., "template": ...}]
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) and source else None


class ChatTemplate:
    """Renders messages. Without a template of the model's own, each message is a line `role: content`, after which
    `assistant:` invites the answer."""

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        self.own = source is not None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template: jinja2.Template | None = None
        if source is not None:
            # Templates come with the model, so they get the sandbox: no attribute access to Python internals.
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _raise_exception
            try:
                self._template = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise TemplateError(f"the model's chat template is not valid: {error}") from error

    @classmethod
    def of_model(cls, folder: Path) -> ChatTemplate:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        bos, eos = _plain_text(config.get("bos_token")), _plain_text(config.get("eos_token"))
        return cls(_template_source(folder, config), bos, eos)

    def render(self, messages: list[Message]) -> str:
        if self._template is None:
            lines = [f"{message.role}: {message.content}" for message in messages]
            return "\n".join([*lines, "assistant:"])
        try:
            return self._template.render(
                messages=[dataclasses.asdict(message) for message in messages],
                add_generation_prompt=True,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateError(f"the model's chat template failed: {error}") from error
