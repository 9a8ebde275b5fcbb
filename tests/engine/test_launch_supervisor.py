"""The supervisor with engines that behave, die, hang, and never get ready. Real processes and a real notify socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from launched import HERE, Launched, Manager, gone
from server_process import until

SOON_S = 1.0
LOAD_S = {"DDTREE_LOAD_NO_PROGRESS_S": "2.5", "DDTREE_NO_PROGRESS_S": "2"}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    playing = Manager(tmp_path)
    yield playing
    playing.close()


# -- an engine that dies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--do", "exit", "--status", "3"), 3, "ended with exit status 3"),
        (("--do", "exit", "--status", "0"), 1, "ended by itself with exit status 0"),
        (("--do", "signal", "--status", str(int(signal.SIGSEGV))), 139, "signal 11, SIGSEGV"),
        (("--do", "signal", "--status", str(int(signal.SIGKILL))), 137, "out-of-memory killer"),
    ],
)
def test_an_engine_that_dies_before_it_is_ready_is_a_failure_at_once(
    manager: Manager, arguments: tuple[str, ...], status: int, says: str
) -> None:
    with Launched(*arguments, manager=manager) as launched:
        assert launched.wait(20) == status
        assert len(launched.errors) == 1
        assert says in launched.errors[0]
        assert "before it was ready" in launched.errors[0]
        assert not manager.values("READY")
        until(lambda: any(says in text for text in manager.values("STATUS")), 2)


def test_an_engine_that_ends_while_serving_is_a_failure_within_a_second(manager: Manager) -> None:
    with Launched("--status", "0", manager=manager) as launched:
        launched.ready()
        died = time.monotonic()
        with pytest.raises(OSError):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"http://127.0.0.1:{launched.port}/die", timeout=5
            )
        assert launched.wait(5) == 1
        assert launched.ended_at is not None and launched.ended_at - died < SOON_S
        assert "exit status 0" in launched.errors[0]
        assert "while serving" in launched.errors[0]


def test_what_the_engine_leaves_behind_is_killed_with_it(tmp_path: Path) -> None:
    with Launched("--do", "helper", "--status", "4", "--folder", str(tmp_path)) as launched:
        launched.ready()
        helper = int((tmp_path / "helper").read_text())
        assert not gone(helper)
        with pytest.raises(OSError):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"http://127.0.0.1:{launched.port}/die", timeout=5
            )
        assert launched.wait(5) == 4
        until(lambda: gone(helper), 5, "the end of the helper")


def test_the_engine_does_not_outlive_its_supervisor() -> None:
    with Launched() as launched:
        launched.ready()
        engine = launched.engine_pid()
        launched.process.kill()
        launched.wait()
        until(lambda: gone(engine), 5, "the end of the engine")


# -- an engine that never gets ready -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "stage"), [("idle", "waiting for the port to open"), ("unhealthy", "capturing graphs")]
)
def test_an_engine_that_does_nothing_is_given_up_and_its_stage_named(
    manager: Manager, behaviour: str, stage: str
) -> None:
    with Launched("--do", behaviour, manager=manager, **LOAD_S) as launched:
        assert launched.wait(30) == 1
        assert "neither computed nor read anything for 2.5 s" in launched.errors[0]
        assert f"stage: {stage}" in launched.errors[0]
        assert not manager.values("READY")
        assert any(stage in text for text in manager.values("STATUS"))


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (("--do", "empty"), {}, "the completion is empty"),
        ((), {"DDTREE_SERVED_MODEL": "other"}, "HTTP 404"),
    ],
)
def test_an_engine_whose_completions_are_no_use_never_becomes_ready(
    manager: Manager, arguments: tuple[str, ...], environ: dict[str, str], says: str
) -> None:
    with Launched(*arguments, manager=manager, **environ) as launched:
        assert launched.wait(30) == 1
        assert "serves no completion" in launched.errors[0]
        assert says in launched.errors[0]
        assert not manager.values("READY")


@pytest.mark.parametrize("work", ["compute", "read"])
def test_a_start_is_extended_as_long_as_the_engine_works(manager: Manager, work: str) -> None:
    with Launched("--do", work, "--seconds", "4.5", manager=manager, **LOAD_S) as launched:
        launched.ready()
        assert time.monotonic() - launched.began > 4.5
        extensions = manager.values("EXTEND_TIMEOUT_USEC")
        assert len(extensions) >= 2
        assert {int(value) for value in extensions} == {32_500_000}
        until(lambda: manager.values("READY") == ["1"], 2)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, manager: Manager) -> None:
    """Or the stranger's answers would pass for the engine's."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        argv = json.dumps(["--port", port, "--folder", str(tmp_path)])
        with Launched(manager=manager, DDTREE_PORT=port, DDTREE_ARGV=argv) as launched:
            assert launched.wait(20) == 1
            assert f"port {port}: Address already in use" in launched.errors[0]
    assert not (tmp_path / "facts.json").exists()
    assert not manager.values("READY")


# -- what the engine is given --------------------------------------------------------------------------------------


def test_probes_use_no_proxy_and_the_engine_cannot_speak_for_the_supervisor(tmp_path: Path, manager: Manager) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://x:9"}
    with Launched("--folder", str(tmp_path), manager=manager, **proxies) as launched:
        launched.ready()
        assert json.loads((tmp_path / "facts.json").read_text())["notify"] is None


def test_a_key_reaches_an_engine_that_wants_it_as_an_argument_unseen(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    with Launched("--folder", str(tmp_path), DDTREE_API_KEY_FILE=str(key)) as launched:
        launched.ready()  # the scripted engine refuses probes without the key
        facts = json.loads((tmp_path / "facts.json").read_text())
        assert facts["argv"][-2:] == ["--api-key", "s3cret"]
        assert "s3cret" not in facts["cmdline"]
        assert "s3cret" not in launched.text


# -- stopping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_ends_with_0(manager: Manager, number: signal.Signals) -> None:
    with Launched("--do", "killed-by-own-stop", manager=manager) as launched:
        launched.ready()
        launched.process.send_signal(number)
        assert launched.wait(10) == 0
        assert not launched.errors
        assert manager.values("STOPPING") == ["1"]


def test_an_engine_that_fails_while_stopping_is_reported() -> None:
    with Launched("--do", "bad-stop") as launched:
        launched.ready()
        launched.process.terminate()
        assert launched.wait(10) == 9
        assert "exit status 9" in launched.errors[0]
        assert "while it was being stopped" in launched.errors[0]


def test_a_second_interrupt_does_not_wait() -> None:
    with Launched("--do", "stubborn") as launched:
        launched.ready()
        engine = launched.engine_pid()
        launched.process.send_signal(signal.SIGINT)
        until(lambda: "received SIGINT" in launched.text)
        launched.process.send_signal(signal.SIGTERM)  # a manager may say it twice
        time.sleep(0.6)
        assert launched.process.poll() is None
        launched.process.send_signal(signal.SIGINT)
        assert launched.wait(5) == 1
        assert gone(engine)


# -- an engine that hangs ------------------------------------------------------------------------------------------


def test_an_engine_that_gives_no_tokens_any_more_fires_the_watchdog(manager: Manager) -> None:
    with Launched("--do", "no-tokens", manager=manager, watchdog_s=2, **LOAD_S) as launched:
        launched.ready()
        until(lambda: manager.values("WATCHDOG")[-1:] == ["trigger"] and launched.errors, 15)
        assert "has not answered for 2 s: /health_generate answers HTTP 503" in launched.errors[0]


def test_a_frozen_engine_fires_the_watchdog_or_by_hand_is_killed(manager: Manager) -> None:
    with Launched(**LOAD_S) as launched:
        launched.ready()
        engine = launched.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        assert launched.wait(45) == 1
        assert "hangs: the engine has not answered" in launched.errors[0]
        assert gone(engine)


# -- the real engine -----------------------------------------------------------------------------------------------


def _ask(port: int, tokens: int) -> httpx.Response:
    body = {"model": "demo-code", "prompt": "import os\n", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)


def _ask_in_vain(port: int) -> None:
    with pytest.raises(httpx.HTTPError):
        _ask(port, 200)


def test_the_standalone_engine_from_start_to_hang(tmp_path: Path, manager: Manager) -> None:
    """Ready after a decode; alive while idle and while tokens come slowly; hung when they stop."""
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "hang").touch()
    environ = {"PYTHONPATH": str(HERE / "faults"), "DDTREE_TEST_FAULTS": str(faults), **LOAD_S}
    environ["DDTREE_LOAD_NO_PROGRESS_S"] = "60"
    with Launched(engine="standalone", manager=manager, watchdog_s=4, **environ) as launched:
        until(lambda: any("first decode" in text for text in manager.values("STATUS")), 60)
        assert not manager.values("READY"), "the port is open and nothing has been decoded"
        (faults / "hang").unlink()
        launched.ready()
        until(lambda: manager.values("READY") == ["1"], 2)

        idle_since = time.monotonic()
        time.sleep(2.5)
        assert len(manager.values("WATCHDOG", idle_since)) >= 2, "an idle engine is alive"

        (faults / "slow").touch()
        busy_since = time.monotonic()
        assert _ask(launched.port, 200).status_code == 200
        assert time.monotonic() - busy_since > float(LOAD_S["DDTREE_NO_PROGRESS_S"]) + 1
        assert set(manager.values("WATCHDOG", busy_since)) == {"1"}, "a busy engine is alive"
        assert any("1 running" in text for text in manager.values("STATUS", busy_since))

        (faults / "hang").touch()
        hung_since = time.monotonic()
        waiting = threading.Thread(target=_ask_in_vain, args=(launched.port,))
        waiting.start()
        until(lambda: manager.values("WATCHDOG", hung_since)[-1:] == ["trigger"], 20)
        assert time.monotonic() - hung_since < 6
        until(lambda: launched.errors, 5)
        assert len(launched.errors) == 1
        assert "requests ran 2 s without a token: 1 running, 0 waiting" in launched.errors[0]
        assert launched.log[-1].endswith(launched.errors[0]), "the reason comes last"
        assert "sitecustomize.py" in launched.text, "the stacks show where it hangs"
        launched.process.kill()  # what systemd does on the trigger
        launched.wait()
        waiting.join(20)


def test_a_stop_waits_for_requests_in_flight(tmp_path: Path, manager: Manager) -> None:
    (tmp_path / "slow").touch()
    environ = {"PYTHONPATH": str(HERE / "faults"), "DDTREE_TEST_FAULTS": str(tmp_path)}
    with Launched(engine="standalone", manager=manager, **environ) as launched:
        launched.ready()
        found: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: found.append(_ask(launched.port, 90)))
        asking.start()
        client = httpx.Client(base_url=f"http://127.0.0.1:{launched.port}", trust_env=False)
        until(lambda: client.get("/get_server_info").json()["generated_tokens_total"] > 8)
        launched.process.terminate()
        assert launched.wait(30) == 0
        asking.join(10)
        assert found[0].json()["usage"]["completion_tokens"] == 90
        assert not launched.errors
