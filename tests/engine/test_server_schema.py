"""What a request may say, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_engine.server.errors import ApiError
from ddtree_engine.server.schema import Request, parse, parse_json

VOCABULARY = 100


def _parse(chat: bool = False, **fields: Any) -> Request:
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    return parse({"model": "m", **content, **fields}, chat=chat, model="m", vocab_size=VOCABULARY)


def _refusal(chat: bool = False, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        _parse(chat, **fields)
    return caught.value


def test_defaults_are_those_of_the_openai_api() -> None:
    request = _parse()
    assert (request.temperature, request.top_p, request.max_tokens, request.seed) == (1.0, 1.0, None, None)
    assert (request.stream, request.include_usage, request.stops, request.ignored) == (False, False, (), ())


def test_null_means_absent() -> None:
    assert _parse(max_tokens=None, stop=None, temperature=None, n=None, echo=None, stream=None) == _parse()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", "5", "integer, not a string"),
        ("max_tokens", 5.0, "integer, not a number"),
        ("max_tokens", True, "integer, not a boolean"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", 2.1, "at most 2"),
        ("temperature", "hot", "number, not a string"),
        ("temperature", False, "number, not a boolean"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "at least -1"),
        ("seed", 1.5, "integer, not a number"),
        ("seed", 2**63, "from"),
        ("stop", 7, "string or an array of strings"),
        ("stop", ["a", 1], "string or an array of strings"),
        ("stop", "", "empty string"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", "x" * 2000, "longer than"),
        ("stop", "\ud800", "surrogate"),
        ("stop_token_ids", [VOCABULARY], "outside 0 to 99"),
        ("stream", "yes", "true or false, not a string"),
        ("stream", 1, "true or false, not a number"),
        ("return_token_ids", "yes", "true or false"),
        ("stream_options", {"include_usage": True}, "only allowed with stream"),
        ("n", 2, "not supported"),
        ("n", True, "not supported"),
        ("n", "1", "not supported"),
        ("best_of", 3, "not supported"),
        ("echo", True, "not supported"),
        ("logprobs", 0, "not supported"),
        ("logprobs", 5, "not supported"),
        ("suffix", "end", "not supported"),
        ("logit_bias", {"5": 1}, "not supported"),
        ("presence_penalty", 0.5, "not supported"),
        ("frequency_penalty", 0.5, "not supported"),
        ("tools", [{"type": "function"}], "not supported"),
        ("response_format", {"type": "json_object"}, "not supported"),
        ("prompt", "", "empty"),
        ("prompt", [], "empty"),
        ("prompt", None, "missing"),
        ("prompt", 5, "string or an array"),
        ("prompt", {"a": 1}, "string or an array"),
        ("prompt", ["a", "b"], "2 prompts"),
        ("prompt", [1, "a"], "token ids"),
        ("prompt", [1, True], "token ids"),
        ("prompt", [VOCABULARY], "outside 0 to 99"),
        ("prompt", [-1], "outside 0 to 99"),
        ("prompt", "a\ud800", "surrogate"),
        ("model", None, "missing"),
        ("model", 3, "not a string"),
    ],
)
def test_wrong_values_are_refused_by_field_name(field: str, value: Any, says: str) -> None:
    error = _refusal(**{field: value})
    assert error.status == 400
    assert error.param == field
    assert f"`{field}`" in error.message
    assert says in error.message
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "hi"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": "\udc00"}], "messages[0].content"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: Any, param: str) -> None:
    assert _refusal(chat=True, messages=messages).param == param


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _parse(chat=True, messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_the_newer_name_of_max_tokens_wins_in_chats() -> None:
    assert _parse(chat=True, max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    neutral = {"n": 1, "echo": False, "logprobs": False, "logit_bias": {}, "presence_penalty": 0.0, "best_of": 1}
    assert _parse(**neutral, tools=[], response_format={"type": "text"}, suffix="") == _parse()


def test_unknown_fields_are_ignored_and_named_but_harmless_ones_are_not_worth_a_word() -> None:
    assert _parse(temprature=0, user="me", metadata={}).ignored == ("temprature",)
    assert _parse(chat=True, echo=True).ignored == ("echo",)


def test_one_prompt_in_a_list_is_one_prompt() -> None:
    assert _parse(prompt=["hi"]).prompt == "hi"
    assert _parse(prompt=[[1, 2]]).prompt == [1, 2]


def test_another_model_is_404_and_names_the_one_served() -> None:
    error = _refusal(model="gpt-4")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "'m'" in error.message


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": Infinity}', "Infinity"),
        (b"[1]", "object, not an array"),
        (b'"hi"', "object, not a string"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bodies_that_are_no_json_object_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert says in caught.value.message
