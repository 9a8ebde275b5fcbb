"""Starting, stopping and breaking: one real server process per story."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from server_process import MODEL, ServerProcess, events, until

FAULTS_CODE = Path(__file__).parent / "faults"
LONG = {"prompt": "import os\n", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Faults:
    """Switches for tests/engine/faults/sitecustomize.py."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environ = {"PYTHONPATH": str(FAULTS_CODE), "DDTREE_TEST_FAULTS": str(folder)}

    def on(self, name: str) -> None:
        (self._folder / name).touch()

    def off(self, name: str) -> None:
        (self._folder / name).unlink()

    def is_on(self, name: str) -> bool:
        return (self._folder / name).exists()


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path)


def _in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def test_until_a_real_decode_succeeded_nothing_is_served(faults: Faults) -> None:
    faults.on("slow-load")
    with ServerProcess(environ=faults.environ) as server:
        server.listening()
        health = server.client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "starting"
        for answer in (server.post("/v1/completions", prompt="x"), server.client.get("/v1/models")):
            assert answer.status_code == 503
            assert "not ready" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
        assert server.metric("ddtree_ready") == 0
        faults.on("hang")  # loading ends, the first decode does not
        faults.off("slow-load")
        until(lambda: server.client.get("/health").json()["stage"] == "first decode", 60)
        assert server.client.get("/health").status_code == 503
        faults.off("hang")
        server.ready()
        assert server.metric("ddtree_ready") == 1
        assert server.info()["generated_tokens_total"] == 0, "the first decode is no traffic"


def test_a_stop_while_loading_ends_at_once_with_0(faults: Faults) -> None:
    faults.on("slow-load")
    with ServerProcess(environ=faults.environ) as server:
        server.listening()
        until(lambda: "loading weights" in server.client.get("/health").text, 60)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_a_stop_finishes_requests_in_flight_and_refuses_new_ones(faults: Faults) -> None:
    with ServerProcess("--max-concurrent", "1", environ=faults.environ) as server:
        server.ready()
        expected = server.complete(**LONG)["choices"][0]["text"]
        faults.on("slow")
        begun = threading.Event()

        def stream() -> str:
            body = {"model": MODEL, "stream": True, **LONG}
            shown = ""
            with server.client.stream("POST", "/v1/completions", json=body) as answer:
                for event in events(answer.iter_lines()):
                    begun.set()
                    shown += event if event == "[DONE]" else json.loads(event)["choices"][0]["text"]
            return shown

        running, streamed = _in_background(stream)
        assert begun.wait(20)
        queued, answered = _in_background(lambda: server.complete(**LONG))
        until(lambda: server.info()["waiting_requests"] == 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.client.get("/health").json()["status"] == "draining")
        assert server.client.get("/health").status_code == 503
        refused = server.post("/v1/completions", prompt="x")
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        assert server.process.poll() is None
        faults.off("slow")
        assert server.wait(30) == 0
        running.join(5)
        queued.join(5)
        assert streamed == [expected + "[DONE]"]
        assert answered[0]["choices"][0]["text"] == expected
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.client.base_url.host, server.client.base_url.port or 0), 2)


def test_one_failed_step_fails_one_request_and_the_server_goes_on(faults: Faults) -> None:
    with ServerProcess(environ=faults.environ) as server:
        server.ready()
        faults.on("raise-once")
        answer = server.post("/v1/completions", prompt="x", max_tokens=4)
        assert answer.status_code == 500
        assert "on purpose" not in answer.text
        request = answer.headers["x-request-id"]
        assert request in answer.json()["error"]["message"]
        assert f"request {request} failed" in server.text
        assert "one step failed on purpose" in server.text
        assert server.complete("x", max_tokens=4)["usage"]["completion_tokens"] == 4

        faults.on("slow")  # the second story: it fails when the stream has begun
        body = {"model": MODEL, "stream": True, **LONG}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            found = events(stream.iter_lines())
            next(found)
            faults.on("raise-once")
            rest = list(found)
        assert json.loads(rest[-1])["error"]["code"] == "decode_failed"
        assert "[DONE]" not in rest
        faults.off("slow")
        assert server.complete("x", max_tokens=4)["usage"]["completion_tokens"] == 4

        faults.on("raise")  # the third: nothing decodes any more, the start-up decode included
        answer = server.post("/v1/completions", prompt="x", max_tokens=4)
        assert answer.status_code == 500
        assert server.wait(20) == 1
        assert "the engine is broken" in server.text


def test_a_step_that_hangs_turns_health_503(faults: Faults) -> None:
    with ServerProcess("--stall-seconds", "1", environ=faults.environ) as server:
        server.ready()
        faults.on("hang")
        thread, _ = _in_background(lambda: server.complete("x", max_tokens=2))
        stalled = until(lambda: server.client.get("/health").status_code == 503 and server.client.get("/health"))
        assert stalled.json()["status"] == "stalled"
        assert server.info()["running_requests"] == 1
        server.process.send_signal(signal.SIGUSR1)
        until(lambda: "sitecustomize.py" in server.text, what="the stacks on SIGUSR1")
        faults.off("hang")
        thread.join(20)
        until(lambda: server.client.get("/health").status_code == 200)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--model", "/nowhere"], 1, "/nowhere"),
        (["--device", "cuda"], 1, "finds no usable GPU"),
        (["--api-key-file", "/nowhere/key"], 2, "cannot read /nowhere/key"),
    ],
)
def test_what_cannot_work_ends_the_process_and_says_why(arguments: list[str], status: int, says: str) -> None:
    if arguments == ["--device", "cuda"] and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    with ServerProcess(*arguments) as server:
        began = time.monotonic()
        assert server.wait(60) == status
        assert time.monotonic() - began < 30
        assert says in server.text
        assert "Traceback" not in server.text


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with ServerProcess("--port", str(port)) as server:
            assert server.wait(60) == 2
            assert f"port {port}: Address already in use" in server.text


def test_plain_decoding_needs_no_drafter_and_gives_the_same_text() -> None:
    with ServerProcess("--mode", "ar", "--draft", "none", "--served-model-name", "plain/model") as server:
        server.ready()
        answer = server.post("/v1/completions", model="plain/model", prompt="import os\n", max_tokens=8, temperature=0)
        assert answer.json()["usage"]["ddtree"]["acceptance_length"] == 1
        assert server.client.get("/v1/models/plain/model").status_code == 200
