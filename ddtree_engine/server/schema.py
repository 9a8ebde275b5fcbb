"""What a request may say. Every field is checked for type and range; nothing is converted silently.

A field that would change the answer and is not supported is refused unless it holds its neutral value. A field nobody
knows is ignored, and the answer's `X-DDTree-Ignored` header names it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NoReturn

from .chat import Message
from .errors import invalid

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
# Values that ask for nothing; anything else in these fields is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"})


@dataclasses.dataclass(frozen=True)
class Request:
    """One checked request. `prompt` is text or token ids; a chat has `messages` instead."""

    chat: bool
    prompt: str | list[int]
    messages: list[Message]
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    ignored: tuple[str, ...]


def parse_json(raw: bytes) -> dict[str, Any]:
    """The request's body as an object."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: bad byte at offset {error.start}", code="invalid_json") from error
    except RecursionError as error:
        raise invalid("the body nests too deeply", code="invalid_json") from error
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {_name_of(value)}", code="invalid_json")
    return value


def _name_of(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "an array" if isinstance(value, list) else "an object")


def _check_text(text: str, param: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"`{param}` holds half a surrogate pair at character {error.start}, which no text can contain"
        raise invalid(message, param) from error
    return text


class _Fields:
    """Takes fields out of a body one by one; null means absent, as in the OpenAI API."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.left = {key: value for key, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        return self.left.pop(name, None)

    def number(self, name: str, default: float, least: float, most: float, *, above: bool = False) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"`{name}` must be a number, not {_name_of(value)}", name)
        if not (least < value if above else least <= value) or value > most or not math.isfinite(value):
            span = f"greater than {least:g}" if above else f"at least {least:g}"
            raise invalid(f"`{name}` is {value}; it must be {span} and at most {most:g}", name)
        return float(value)

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(f"`{name}` must be an integer, not {_name_of(value)}", name)
        if value < least or (most is not None and value > most):
            span = f"at least {least}" if most is None else f"from {least} to {most}"
            raise invalid(f"`{name}` is out of range; it must be {span}", name)
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise invalid(f"`{name}` must be true or false, not {_name_of(value)}", name)
        return value

    def stops(self) -> tuple[str, ...]:
        value = self.take("stop")
        if value is None:
            return ()
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise invalid("`stop` must be a string or an array of strings", "stop")
        if len(stops) > MAX_STOPS:
            raise invalid(f"`stop` holds {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
        for stop in stops:
            if not stop:
                raise invalid("`stop` holds an empty string", "stop")
            if len(stop) > MAX_STOP_LENGTH:
                raise invalid(f"`stop` holds a string longer than {MAX_STOP_LENGTH} characters", "stop")
            _check_text(stop, "stop")
        return tuple(stops)

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        value = self.take(name)
        return [] if value is None else _token_ids(value, name, vocab_size)

    def refuse_unsupported(self, chat: bool) -> None:
        """Refuses what would change the answer but cannot be done."""
        for name, neutral in NEUTRAL.items():
            value = self.take(name)
            if value is None or any(value == wanted and _same_kind(value, wanted) for wanted in neutral):
                continue
            if name == "echo" and chat:  # no field of a chat: unknown there, hence ignored
                self.left[name] = value
                continue
            hint = f"leave it out or send {json.dumps(neutral[0])}"
            raise invalid(f"`{name}` is not supported here; {hint}", name, "unsupported_parameter")

    def ignored(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.left if name not in WITHOUT_EFFECT))


def _same_kind(value: Any, wanted: Any) -> bool:
    return isinstance(value, bool) == isinstance(wanted, bool)  # True == 1 in Python, but not in JSON


def _token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise invalid(f"`{name}` must be an array of token ids", name)
    for token in value:
        if not 0 <= token < vocab_size:
            raise invalid(f"`{name}` holds a token id outside 0 to {vocab_size - 1}", name)
    return value


def _prompt(value: Any, vocab_size: int) -> str | list[int]:
    if value is None:
        raise invalid("`prompt` is missing", "prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise invalid(f"`prompt` holds {len(value)} prompts; send one per request", "prompt")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise invalid("`prompt` is empty; it needs at least one token", "prompt")
        return _check_text(value, "prompt")
    if not isinstance(value, list):
        raise invalid(f"`prompt` must be a string or an array of token ids, not {_name_of(value)}", "prompt")
    if not value:
        raise invalid("`prompt` is empty; it needs at least one token", "prompt")
    return _token_ids(value, "prompt", vocab_size)


def _content(value: Any, param: str) -> str:
    if isinstance(value, str):
        return _check_text(value, param)
    if isinstance(value, list):
        pieces: list[str] = []
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise invalid(f"`{param}` may only hold parts of type text; this model reads nothing else", param)
            pieces.append(_check_text(part["text"], param))
        return "".join(pieces)
    raise invalid(f"`{param}` must be a string or an array of text parts, not {_name_of(value)}", param)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise invalid("`messages` is missing or not an array", "messages")
    if not value:
        raise invalid("`messages` is empty; it needs at least one message", "messages")
    messages: list[Message] = []
    for index, item in enumerate(value):
        param = f"messages[{index}]"
        if not isinstance(item, dict):
            raise invalid(f"`{param}` must be an object with role and content, not {_name_of(item)}", param)
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"`{param}.role` must be one of {', '.join(ROLES)}", f"{param}.role")
        if item.get("tool_calls"):
            raise invalid(f"`{param}.tool_calls` is not supported here", f"{param}.tool_calls", "unsupported_parameter")
        messages.append(Message(role, _content(item.get("content"), f"{param}.content")))
    return messages


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise invalid("`stream_options` is only allowed with stream=true", "stream_options")
    if not isinstance(value, dict):
        raise invalid(f"`stream_options` must be an object, not {_name_of(value)}", "stream_options")
    wanted = value.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise invalid("`stream_options.include_usage` must be true or false", "stream_options.include_usage")
    return bool(wanted)


def parse(body: dict[str, Any], *, chat: bool, model: str, vocab_size: int) -> Request:
    """A checked request. `model` is the one name served. Raises ApiError."""
    fields = _Fields(body)
    wanted = fields.take("model")
    if not isinstance(wanted, str):
        raise invalid("`model` is missing or not a string", "model")
    if wanted != model:
        error = invalid(f"the model {wanted[:200]!r} does not exist; this server has {model!r}", "model")
        error.status, error.code = 404, "model_not_found"
        raise error
    messages = _messages(fields.take("messages")) if chat else []
    prompt = "" if chat else _prompt(fields.take("prompt"), vocab_size)
    max_tokens = fields.integer("max_tokens", 1)
    if chat:
        newer = fields.integer("max_completion_tokens", 1)
        max_tokens = max_tokens if newer is None else newer
    stream = fields.flag("stream")
    request = Request(
        chat=chat,
        prompt=prompt,
        messages=messages,
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=fields.number("top_p", 1.0, 0, 1, above=True),
        top_k=_top_k(fields),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stops=fields.stops(),
        stop_token_ids=frozenset(fields.token_ids("stop_token_ids", vocab_size)),
        ignore_eos=fields.flag("ignore_eos"),
        stream=stream,
        include_usage=_include_usage(fields.take("stream_options"), stream),
        return_token_ids=fields.flag("return_token_ids"),
        ignored=(),
    )
    fields.refuse_unsupported(chat)
    return dataclasses.replace(request, ignored=fields.ignored())


def _top_k(fields: _Fields) -> int:
    value = fields.integer("top_k", -1)
    return 0 if value is None or value == -1 else value  # both -1 and 0 mean: all tokens
