"""The server's answers, asked over loopback HTTP from one real process with the packaged model pair."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import MODEL, ServerProcess, events, joined, until
from tokenizers import Tokenizer

from ddtree_engine.models import GOLDEN, resolve

KEY = "correct-horse-battery-staple"
GOLDENS = json.loads(GOLDEN.read_text())
PROMPT = GOLDENS[0]["prompt"]
LONG = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    key_file = tmp_path_factory.mktemp("key") / "api_key"
    key_file.write_text(KEY + "\n")
    arguments = ("--max-concurrent", "2", "--max-queue", "1", "--api-key-file", str(key_file))
    with ServerProcess(*arguments) as process:
        process.ready()
        process.client.headers["Authorization"] = f"Bearer {KEY}"
        yield process


@pytest.fixture(autouse=True)
def idle(server: ServerProcess) -> Iterator[None]:
    """No test leaves work behind for the next one."""
    yield
    until(lambda: _load(server) == 0, what="an idle server")


def _load(server: ServerProcess) -> int:
    info = server.info()
    return info["running_requests"] + info["waiting_requests"]


# -- content -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDENS, ids=range(len(GOLDENS)))
def test_greedy_text_and_tokens_equal_plain_decoding(server: ServerProcess, golden: dict[str, Any]) -> None:
    answer = server.complete(golden["prompt"], max_tokens=golden["max_tokens"], return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == golden["text"]
    assert choice["token_ids"] == golden["token_ids"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(golden["token_ids"])
    assert usage["prompt_tokens"] == len(choice["prompt_token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    speculation = usage["ddtree"]
    assert speculation["acceptance_length"] > 1
    assert speculation["acceptance_length"] == pytest.approx(
        usage["completion_tokens"] / speculation["verify_steps"], abs=1e-3
    )


def test_answers_have_openais_form_and_no_token_ids_unless_asked(server: ServerProcess) -> None:
    answer = server.complete(PROMPT, max_tokens=4)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["id"].startswith("cmpl-")
    choice = answer["choices"][0]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")


def test_a_prompt_of_token_ids_is_the_same_prompt(server: ServerProcess) -> None:
    ids = server.complete(PROMPT, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert server.complete(ids, max_tokens=16)["choices"] == server.complete(PROMPT, max_tokens=16)["choices"]


def test_without_max_tokens_a_completion_has_sixteen(server: ServerProcess) -> None:
    assert server.complete(PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_the_end_token_ends_the_answer_and_is_not_text(server: ServerProcess) -> None:
    golden = GOLDENS[0]
    end = golden["token_ids"][5]
    at = golden["token_ids"].index(end)
    answer = server.complete(PROMPT, max_tokens=32, stop_token_ids=[end], return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == golden["token_ids"][: at + 1]
    assert choice["text"] == _decode(golden["token_ids"][:at])


def _decode(tokens: list[int]) -> str:
    return Tokenizer.from_file(str(resolve("embedded", "target") / "tokenizer.json")).decode(tokens)


# -- streaming -----------------------------------------------------------------------------------------------------


def test_a_stream_carries_the_same_text_in_several_chunks(server: ServerProcess) -> None:
    golden = GOLDENS[0]
    chunks = server.stream("/v1/completions", prompt=PROMPT, max_tokens=golden["max_tokens"], temperature=0)
    assert joined(chunks) == golden["text"]
    assert len(chunks) > 3
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_a_stream_reports_usage_at_its_end_when_asked(server: ServerProcess) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    chunks = server.stream("/v1/completions", **fields, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == server.complete(PROMPT, max_tokens=12)["usage"]


def test_a_stream_carries_token_ids_when_asked(server: ServerProcess) -> None:
    golden = GOLDENS[0]
    fields = {"prompt": PROMPT, "max_tokens": golden["max_tokens"], "temperature": 0, "return_token_ids": True}
    chunks = server.stream("/v1/completions", **fields)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == golden["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_exactly_wherever_they_fall(server: ServerProcess, stream: bool) -> None:
    text = GOLDENS[0]["text"]
    for begin, length in [(1, 3), (5, 9), (13, 1), (17, 14), (30, 5), (40, 26)]:
        stop = text[begin : begin + length]
        fields = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "stop": [stop, "never \0 seen"]}
        if stream:
            chunks = server.stream("/v1/completions", **fields)
            shown, finish = joined(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = server.complete(**fields)["choices"][0]
            shown, finish = choice["text"], choice["finish_reason"]
        assert shown == text[: text.index(stop)], stop
        assert finish == "stop"


def test_tokens_behind_a_stop_string_are_neither_sent_nor_counted(server: ServerProcess) -> None:
    golden = GOLDENS[0]
    stop = golden["text"][8:12]
    answer = server.complete(PROMPT, max_tokens=32, stop=stop, return_token_ids=True)
    tokens = answer["choices"][0]["token_ids"]
    assert golden["token_ids"][: len(tokens)] == tokens
    assert stop in _decode(tokens)
    assert stop not in _decode(tokens[:-1])
    assert answer["usage"]["completion_tokens"] == len(tokens)


def test_text_that_only_began_like_a_stop_string_is_sent_after_all(server: ServerProcess) -> None:
    golden = GOLDENS[0]
    almost = [golden["text"][at : at + 6] + "\0" for at in (0, 7, 20)] + [golden["text"][-5:] + "\0"]
    fields = {"prompt": PROMPT, "max_tokens": golden["max_tokens"], "temperature": 0, "stop": almost}
    assert joined(server.stream("/v1/completions", **fields)) == golden["text"]


def test_characters_split_over_tokens_arrive_whole_in_streams(server: ServerProcess) -> None:
    """Sampling hot gives bytes of all kinds; a stream must join to what decoding all tokens at once gives."""
    replaced = 0
    for seed in range(4):
        fields = {"prompt": "é😀", "max_tokens": 24, "temperature": 2.0, "seed": seed, "ignore_eos": True}
        chunks = server.stream("/v1/completions", **fields, return_token_ids=True)
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert joined(chunks) == _decode(tokens)
        replaced += joined(chunks).count("�") + sum(ord(letter) > 127 for letter in joined(chunks))
        whole = server.complete(**fields)
        assert whole["choices"][0]["text"] == joined(chunks)
    assert replaced, "no sample held anything but ASCII: the test shows nothing"


# -- sampling ------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_and_another_differs(server: ServerProcess) -> None:
    def sample(seed: int) -> str:
        return server.complete(PROMPT, max_tokens=24, temperature=1.5, seed=seed)["choices"][0]["text"]

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_a_tiny_nucleus_is_greedy(server: ServerProcess) -> None:
    golden = GOLDENS[0]
    answer = server.complete(PROMPT, max_tokens=golden["max_tokens"], temperature=1.0, top_p=1e-9, seed=3)
    assert answer["choices"][0]["text"] == golden["text"]


def test_a_tiny_temperature_is_no_division_by_zero(server: ServerProcess) -> None:
    golden = GOLDENS[0]
    answer = server.complete(PROMPT, max_tokens=golden["max_tokens"], temperature=1e-300, seed=3)
    assert answer["choices"][0]["text"] == golden["text"]


# -- chat ----------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "code"}, {"role": "user", "content": "import os"}]


def test_chats_use_the_models_template(server: ServerProcess) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=8, temperature=0, return_token_ids=True)
    body = answer.json()
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == _decode(choice["token_ids"])
    tokenizer = Tokenizer.from_file(str(resolve("embedded", "target") / "tokenizer.json"))
    prompt = "<|im_start|>system\ncode<|im_end|>\n<|im_start|>user\nimport os<|im_end|>\n<|im_start|>assistant\n"
    assert choice["prompt_token_ids"] == tokenizer.encode(prompt).ids


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(server: ServerProcess) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", **fields).json()
    chunks = server.stream("/v1/chat/completions", **fields)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


# -- refusals ------------------------------------------------------------------------------------------------------


def _error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_too_long_prompts_name_the_numbers(server: ServerProcess) -> None:
    error = _error(server.post("/v1/completions", prompt=[5] * 1024, max_tokens=1), 400)
    assert error["code"] == "context_length_exceeded"
    assert "1024 tokens" in error["message"]
    error = _error(server.post("/v1/completions", prompt=[5] * 1000, max_tokens=100), 400)
    assert error["code"] == "context_length_exceeded"
    for number in ("1024", "1100", "1000", "100", "24"):
        assert number in error["message"]
    assert server.complete([5] * 1020, max_tokens=4, ignore_eos=True)["usage"]["total_tokens"] == 1024


def test_wrong_fields_are_400_and_name_the_field(server: ServerProcess) -> None:
    for fields, param in [({"n": 2}, "n"), ({"echo": True}, "echo"), ({"max_tokens": "9"}, "max_tokens")]:
        error = _error(server.post("/v1/completions", prompt="x", **fields), 400)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert _error(server.post("/v1/completions", prompt=""), 400)["param"] == "prompt"
    assert _error(server.post("/v1/chat/completions", messages=[]), 400)["param"] == "messages"


def test_an_unknown_model_is_404(server: ServerProcess) -> None:
    assert _error(server.post("/v1/completions", prompt="x", model="other"), 404)["code"] == "model_not_found"
    assert _error(server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_broken_bodies_are_400(server: ServerProcess) -> None:
    for raw in (b"{", b"[]", b"\xff"):
        assert _error(server.client.post("/v1/completions", content=raw), 400)["code"] == "invalid_json"


def test_huge_bodies_are_refused(server: ServerProcess) -> None:
    assert _error(server.client.post("/v1/completions", content=b" " * (17 << 20)), 413)["code"] == "body_too_large"


def test_unknown_paths_and_methods_answer_in_json(server: ServerProcess) -> None:
    assert "/v1/completions" in _error(server.client.get("/v1/nothing"), 404)["message"]
    assert "GET" in _error(server.client.get("/v1/completions"), 405)["message"]


def test_ignored_fields_are_named_in_a_header(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", prompt="x", max_tokens=1, temprature=0, **{"naïve\n": 1})
    assert answer.status_code == 200
    assert answer.headers["x-ddtree-ignored"] == "na?ve?, temprature"
    assert answer.headers["x-request-id"] == answer.json()["id"]


# -- the key -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
def test_without_the_key_nothing_but_probes_answers(server: ServerProcess, header: str) -> None:
    headers = {"Authorization": header}
    for method, path in [("GET", "/v1/models"), ("GET", "/get_server_info"), ("POST", "/v1/completions")]:
        answer = server.client.request(method, path, headers=headers)
        assert _error(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.client.get("/health", headers=headers).status_code == 200
    assert server.client.get("/metrics", headers=headers).status_code == 200


def test_the_key_stands_neither_in_the_command_line_nor_in_the_log(server: ServerProcess) -> None:
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert b"--api-key-file" in command
    assert KEY.encode() not in command
    assert KEY not in server.text
    assert PROMPT.strip() not in server.text


# -- state ---------------------------------------------------------------------------------------------------------


def test_models_lists_the_served_one(server: ServerProcess) -> None:
    listed = server.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert server.client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]


def test_counters_follow_the_work(server: ServerProcess) -> None:
    before = server.info()
    metrics = {name: server.metric(name) for name in ("ddtree_generated_tokens_total", "ddtree_accepted_length_count")}
    answered = server.metric('ddtree_requests_total{status="200"}')
    refused = server.metric('ddtree_requests_total{status="400"}')
    usage = server.complete(PROMPT, max_tokens=20)["usage"]
    server.post("/v1/completions", prompt="")
    after = server.info()
    steps = usage["ddtree"]["verify_steps"]
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == usage["completion_tokens"]
    assert after["verify_steps_total"] - before["verify_steps_total"] == steps
    assert after["finished_requests_total"] - before["finished_requests_total"] == 1
    assert after["acceptance_length"] > 1
    name = "ddtree_generated_tokens_total"
    assert server.metric(name) - metrics[name] == usage["completion_tokens"]
    name = "ddtree_accepted_length_count"
    assert server.metric(name) - metrics[name] == steps
    assert server.metric('ddtree_requests_total{status="200"}') - answered == 1
    assert server.metric('ddtree_requests_total{status="400"}') - refused == 1


def test_server_info_tells_how_it_decodes(server: ServerProcess) -> None:
    info = server.info()
    expected = {"model": "embedded", "mode": "tree", "budget": 15, "topk": 8, "max_concurrent": 2, "status": "ready"}
    assert expected.items() <= info.items()
    assert info["versions"]["torch"]
    assert KEY not in json.dumps(info)


# -- many at once --------------------------------------------------------------------------------------------------


class _Background:
    """A long streamed request that runs until closed."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()
        self.status = 0
        self.tokens = 0
        self._leave = threading.Event()
        body = {"model": MODEL, "stream": True, **LONG, **fields}
        self._thread = threading.Thread(target=self._run, args=(server, body))
        self._thread.start()

    def _run(self, server: ServerProcess, body: dict[str, Any]) -> None:
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            self.status = answer.status_code
            for _ in events(answer.iter_lines()):
                self.begun.set()
                self.tokens += 1
                if self._leave.is_set():
                    break
        self.over.set()

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(30)


def test_a_short_request_overtakes_a_long_one(server: ServerProcess) -> None:
    long = _Background(server)
    try:
        assert long.begun.wait(20)
        server.complete(PROMPT, max_tokens=8)
        assert not long.over.is_set()
        before = long.tokens
        server.complete(PROMPT, max_tokens=24)
        assert long.tokens > before, "the long one must go on beside the short one"
    finally:
        long.leave()


def test_a_client_that_leaves_a_stream_ends_its_decoding(server: ServerProcess) -> None:
    gone = server.metric('ddtree_requests_total{status="499"}')
    before = server.info()["generated_tokens_total"]
    long = _Background(server)
    assert long.begun.wait(20)
    long.leave()
    until(lambda: _load(server) == 0, 3, "the end of an abandoned request")
    assert server.info()["generated_tokens_total"] - before < LONG["max_tokens"] - 200
    assert server.metric('ddtree_requests_total{status="499"}') - gone == 1


def test_a_client_that_leaves_before_the_answer_ends_its_decoding(server: ServerProcess) -> None:
    before = server.info()["generated_tokens_total"]
    with pytest.raises(Exception, match="timed out"):
        server.client.post("/v1/completions", json={"model": MODEL, **LONG}, timeout=0.4)
    until(lambda: _load(server) == 0, 3, "the end of an abandoned request")
    assert server.info()["generated_tokens_total"] - before < LONG["max_tokens"] - 200


def test_beyond_the_queue_requests_are_refused_with_429(server: ServerProcess) -> None:
    running = [_Background(server) for _ in range(2)]
    try:
        assert all(one.begun.wait(20) for one in running)
        waiting = _Background(server)
        running.append(waiting)
        until(lambda: server.info()["waiting_requests"] == 1, what="one waiting request")
        answer = server.post("/v1/completions", prompt="x", max_tokens=1)
        error = _error(answer, 429)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        assert not waiting.begun.is_set()
        running[0].leave()
        assert waiting.begun.wait(10), "a waiting request takes the place that became free"
    finally:
        for one in running:
            one.leave()


def test_concurrent_answers_are_what_they_are_alone(server: ServerProcess) -> None:
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        golden = GOLDENS[index]
        found[index] = server.complete(golden["prompt"], max_tokens=golden["max_tokens"])["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {index: GOLDENS[index]["text"] for index in range(3)}


def test_health_answers_at_once_while_decoding(server: ServerProcess) -> None:
    long = _Background(server)
    try:
        assert long.begun.wait(20)
        began = time.monotonic()
        assert server.client.get("/health").json() == {"status": "ok"}
        assert time.monotonic() - began < 1
    finally:
        long.leave()
