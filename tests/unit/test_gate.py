"""The gate's verdicts over a real HTTP engine and a scripted unit."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ddtree import content
from ddtree.gate import Gate, GateConfig, Verdict, acceptance_length
from ddtree.units import LogLine, UnitState

ALIVE = UnitState("ddtree-gpu1.service", "loaded", "active", "running", "success", main_pid=100, invocation="i")
FAILED = dataclasses.replace(
    ALIVE, active="failed", sub="failed", result="exit-code", main_pid=0, exit_code="exited", exit_status=1
)


class Engine:
    """A real HTTP server whose behaviour a test sets while it runs."""

    def __init__(self) -> None:
        self.health = 200
        self.text = "right"
        self.models = ["m"]
        self.acceptance: float | None = 3.0
        self.hang_after: int | None = None
        self.completions = 0
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                return

            def reply(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if self.path == "/health":
                    self.reply(outer.health, {"status": "ok" if outer.health == 200 else "starting"})
                elif self.path == "/v1/models":
                    self.reply(200, {"data": [{"id": name} for name in outer.models]})
                else:
                    self.reply(200, {"acceptance_length": outer.acceptance})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.keys.append(self.headers.get("Authorization"))
                outer.completions += 1
                if outer.hang_after is not None and outer.completions > outer.hang_after:
                    time.sleep(30)
                self.reply(200, {"choices": [{"text": outer.text}]})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Host:
    """A unit that follows a script: (seconds after the start, state)."""

    def __init__(self, *script: tuple[float, UnitState]) -> None:
        self.script = script or ((0.0, ALIVE),)
        self.began = time.monotonic()
        self.printed: list[str] = []
        self.cpu: float | None = 0.0
        self.busy = False
        self.fault: str | None = None

    def unit(self) -> UnitState:
        age = time.monotonic() - self.began
        state = [state for at, state in self.script if at <= age][-1]
        return state

    def new_log(self) -> Sequence[LogLine]:
        return []

    def log(self) -> Sequence[str]:
        return self.printed

    def cpu_seconds(self, state: UnitState) -> float | None:
        return time.monotonic() - self.began if self.busy else self.cpu

    def gpu_fault(self, look: bool = False) -> str | None:
        return self.fault


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    yield server
    server.server.shutdown()
    server.server.server_close()


GOLDEN = (content.Golden("p", 4, "right"),)


def judge(engine: Engine, host: Host, **settings: Any) -> Verdict:
    config = GateConfig(
        port=settings.pop("port", engine.port),
        served_model="m",
        **{
            "answers": GOLDEN,
            "soak_s": 0.2,
            "no_progress_s": 1.0,
            "cap_s": 20.0,
            "probe_timeout_s": 0.5,
            "speculation": True,
            **settings,
        },
    )
    return Gate(config, host).run()


def test_a_right_engine_passes_and_its_stages_are_timed(engine: Engine) -> None:
    verdict = judge(engine, Host())
    assert verdict.kind == "pass", verdict
    assert verdict.acceptance_length == 3.0
    assert list(verdict.stages) == ["alive", "port", "health", "model", "answers", "speculation", "soak"]
    assert engine.completions >= 4  # three answers and at least one in the soak


def test_readiness_needs_systemd_to_agree(engine: Engine) -> None:
    starting = dataclasses.replace(ALIVE, active="activating", sub="start")
    verdict = judge(engine, Host((0.0, starting), (1.5, ALIVE)), no_progress_s=5.0)
    assert verdict.kind == "pass" and verdict.seconds >= 1.5


def test_death_is_a_verdict_within_a_second_whatever_is_being_waited_for(engine: Engine) -> None:
    engine.hang_after = 0
    died = time.time() + 1.0
    host = Host((0.0, ALIVE), (1.0, dataclasses.replace(FAILED, exit_at=died)))
    host.printed = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: broken engine"]
    verdict = judge(engine, host, probe_timeout_s=10.0, no_progress_s=60.0)
    assert verdict.kind == "fail" and verdict.root == "ValueError: broken engine"
    assert "status 1" in verdict.cause
    assert verdict.death_to_verdict_s is not None and verdict.death_to_verdict_s < 1.0


def test_leaving_with_status_0_is_a_failure_too(engine: Engine) -> None:
    gone = dataclasses.replace(ALIVE, active="inactive", main_pid=0, exit_code="exited", exit_at=time.time())
    verdict = judge(engine, Host((0.0, ALIVE), (0.5, gone)), port=1)
    assert verdict.kind == "fail" and "exited with status 0" in verdict.cause


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"restarts": 1}, "restarted by systemd"),
        ({"main_pid": 101}, "main process was replaced"),
        ({"active": "activating", "sub": "auto-restart", "main_pid": 0, "exit_code": "exited"}, "exited with status"),
    ],
)
def test_a_crash_loop_is_not_polled_across_its_restarts(engine: Engine, change: dict[str, Any], words: str) -> None:
    verdict = judge(engine, Host((0.0, ALIVE), (0.4, dataclasses.replace(ALIVE, **change))), port=1)
    assert verdict.kind == "fail" and words in verdict.cause


def test_a_port_that_never_opens_ends_on_no_progress(engine: Engine) -> None:
    verdict = judge(engine, Host(), port=1)
    assert verdict.kind == "fail" and "nothing listens on port 1" in verdict.cause
    assert 0.9 < verdict.seconds < 4


def test_loading_extends_the_wait_and_the_cap_ends_it_without_blame(engine: Engine) -> None:
    host = Host()
    host.busy = True
    verdict = judge(engine, host, port=1, no_progress_s=1.2, cap_s=4.0)
    assert verdict.kind == "inconclusive" and verdict.seconds >= 4.0


def test_health_that_stays_503_names_the_answer(engine: Engine) -> None:
    engine.health = 503
    verdict = judge(engine, Host())
    assert verdict.kind == "fail" and "/health never answered 200" in verdict.cause and "503" in verdict.cause


def test_wrong_text_fails_at_once(engine: Engine) -> None:
    engine.text = "garbage"
    verdict = judge(engine, Host(), no_progress_s=60.0)
    assert verdict.kind == "fail" and "wrong answer" in verdict.cause and "garbage" in verdict.cause
    assert verdict.seconds < 5


def test_another_model_is_not_taken_for_ready(engine: Engine) -> None:
    engine.models = ["other"]
    verdict = judge(engine, Host())
    assert verdict.kind == "fail" and "serves other, not m" in verdict.cause


def test_speculation_that_does_nothing_fails(engine: Engine) -> None:
    engine.acceptance = 1.0
    assert "speculation is not effective" in judge(engine, Host()).cause
    engine.acceptance = None
    assert "reports no acceptance length" in judge(engine, Host()).cause


def test_a_hang_after_readiness_is_found_by_the_soak(engine: Engine) -> None:
    engine.hang_after = 4
    verdict = judge(engine, Host(), soak_s=5.0)
    assert verdict.kind == "fail" and verdict.stage == "soak" and "none came during" not in verdict.cause
    assert "no progress" in verdict.cause


def test_a_gpu_fault_is_the_hosts_and_not_the_releases(engine: Engine) -> None:
    host = Host()
    host.fault = "GPU GPU-1 is not there any more"
    assert judge(engine, host, port=1).kind == "host_fault"
    dying = Host((0.0, ALIVE), (0.3, FAILED))
    dying.printed = ["RuntimeError: CUDA error: unspecified launch failure"]
    dying.fault = "GPU GPU-1 is not there any more"
    assert judge(engine, dying, port=1).kind == "host_fault"


def test_the_api_key_is_sent_and_never_printed(engine: Engine) -> None:
    config = GateConfig(engine.port, "m", GOLDEN, soak_s=0.0, api_key="secret-key")
    assert Gate(config, Host()).run().kind == "pass"
    assert set(engine.keys) == {"Bearer secret-key"}
    assert "secret-key" not in repr(config)


def test_proxy_variables_do_not_reach_the_probe(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert judge(engine, Host()).kind == "pass"


@pytest.mark.parametrize(
    ("text", "bad"),
    [("", True), ("the " * 20, True), ("!" * 60, True), ("\ufffd" * 9 + "ab", True), (" a + b\n", False), ("x", False)],
)
def test_degenerate_answers_are_told_from_short_ones(text: str, bad: bool) -> None:
    assert (content.degenerate(text) is not None) is bad


def test_on_gpus_only_a_prefix_has_to_agree() -> None:
    golden = content.Golden("p", 32, "hello wonderful new world of trees", exact=False, prefix=12)
    assert content.wrong("hello wonderful old world", golden) is None
    assert content.wrong("hello cruel world", golden) is not None


def test_acceptance_is_read_from_both_engines() -> None:
    assert acceptance_length({"acceptance_length": 2.5}) == 2.5
    assert acceptance_length({"internal_states": [{"avg_spec_accept_length": 4.1}]}) == 4.1
    assert acceptance_length({}) is None


def test_unknown_gate_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match="unknown gate settings: timeout"):
        GateConfig.of({"port": 1, "served_model": "m", "timeout": 3})
