"""The supervisor's environment and its words to the service manager."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_engine.supervisor.environment import EnvironmentProblem, read
from ddtree_engine.supervisor.notify import Notifier

GOOD = {
    "DDTREE_SLOT": "gpu1",
    "DDTREE_ENGINE": "standalone",
    "DDTREE_PORT": "30001",
    "DDTREE_SERVED_MODEL": "demo-code",
    "DDTREE_ARGV": '["--port", "30001", "--model", "a b; rm"]',
}


def _problems(**changes: str) -> list[str]:
    with pytest.raises(EnvironmentProblem) as caught:
        read({**GOOD, **changes})
    return caught.value.problems


def test_arguments_reach_the_engine_one_by_one() -> None:
    settings = read(GOOD)
    assert settings.command == [
        *(sys.executable, "-m", "ddtree_engine.server"),
        *("--port", "30001", "--model", "a b; rm"),
    ]
    assert read({**GOOD, "DDTREE_ENGINE": "sglang"}).command[2] == "sglang.launch_server"


def test_everything_missing_is_named_at_once() -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        read({})
    assert {problem.split()[0] for problem in caught.value.problems} == set(GOOD)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DDTREE_ENGINE", "vllm", "must be one of standalone, sglang"),
        ("DDTREE_PORT", "http", "port number"),
        ("DDTREE_PORT", "0", "port number"),
        ("DDTREE_PORT", "70000", "port number"),
        ("DDTREE_PORT", "30002", "--port 30001, but DDTREE_PORT is 30002"),
        ("DDTREE_ARGV", "--port 30001", "not valid JSON"),
        ("DDTREE_ARGV", '{"port": 1}', "JSON list of strings"),
        ("DDTREE_ARGV", '["--port", 30001]', "JSON list of strings"),
        ("DDTREE_ARGV", '["--port=30002"]', "--port 30002"),
        ("DDTREE_ARGV", '["--api-key", "secret"]', "use DDTREE_API_KEY_FILE"),
        ("DDTREE_NO_PROGRESS_S", "soon", "number of seconds"),
        ("DDTREE_NO_PROGRESS_S", "0", "number of seconds"),
        ("DDTREE_NO_PROGRESS_S", "nan", "number of seconds"),
        ("DDTREE_LOAD_NO_PROGRESS_S", "-1", "number of seconds"),
        ("DDTREE_API_KEY_FILE", "/nowhere/key", "cannot read the API key from /nowhere/key"),
    ],
)
def test_each_wrong_value_is_one_line(name: str, value: str, says: str) -> None:
    problems = _problems(**{name: value})
    assert len(problems) == 1
    assert says in problems[0]
    assert "secret" not in problems[0]


def test_the_key_comes_from_its_file_or_from_the_units_credential(tmp_path: Path) -> None:
    key = tmp_path / "api_key"
    key.write_text("secret\n")
    for extra in (
        {"DDTREE_API_KEY_FILE": str(key)},
        {"CREDENTIALS_DIRECTORY": str(tmp_path)},
        {"CREDENTIALS_DIRECTORY": str(tmp_path), "DDTREE_API_KEY_FILE": "api_key"},
    ):
        settings = read({**GOOD, **extra})
        assert (settings.api_key, settings.api_key_file) == ("secret", key)
        assert settings.command[-2:] == ["--api-key-file", str(key)]
        assert "secret" not in repr(settings)
    key.write_text("\n")
    assert read({**GOOD, "CREDENTIALS_DIRECTORY": str(tmp_path)}).api_key_file is None
    assert "is empty" in _problems(DDTREE_API_KEY_FILE=str(key))[0]


def test_an_engine_on_all_addresses_is_probed_on_loopback() -> None:
    assert read({**GOOD, "DDTREE_HOST": "0.0.0.0"}).probe_host == "127.0.0.1"
    assert read({**GOOD, "DDTREE_HOST": "::"}).probe_host == "::1"
    assert read({**GOOD, "DDTREE_HOST": "10.1.2.3"}).probe_host == "10.1.2.3"


def test_loading_is_never_given_less_time_than_serving() -> None:
    assert read({**GOOD, "DDTREE_NO_PROGRESS_S": "300"}).load_no_progress_s == 300
    assert read({**GOOD, "DDTREE_NO_PROGRESS_S": "5"}).load_no_progress_s == 120


def test_the_process_lists_problems_and_ends_with_78() -> None:
    command = [sys.executable, "-m", "ddtree_engine.launch"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DDTREE_")}
    done = subprocess.run(command, env=environ | {"DDTREE_PORT": "x"}, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "DDTREE_SLOT is not set" in done.stderr
    assert "DDTREE_PORT is 'x'" in done.stderr
    shown = subprocess.run([*command, "--help"], env=environ, capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in (*GOOD, "DDTREE_NO_PROGRESS_S", "DDTREE_API_KEY_FILE"))


def test_only_the_standard_library_is_loaded() -> None:
    code = (
        "import sys; before = set(sys.modules); import ddtree_engine.launch; "
        "print([n for n in set(sys.modules) - before"
        " if n.split('.')[0] not in sys.stdlib_module_names | {'ddtree_engine'}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_reach_the_managers_socket(tmp_path: Path, abstract: bool) -> None:
    name = f"ddtree-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name if abstract else name, "WATCHDOG_USEC": "20000000"})
        assert notifier.watchdog_s == 20
        notifier.ready("two\nlines")
        assert manager.recv(999) == b"READY=1\nSTATUS=two lines"
        notifier.extend_timeout(1.5)
        assert manager.recv(999) == b"EXTEND_TIMEOUT_USEC=1500000"


def test_a_watchdog_meant_for_another_process_is_not_ours(tmp_path: Path) -> None:
    base = {"NOTIFY_SOCKET": str(tmp_path / "x"), "WATCHDOG_USEC": "5000000"}
    assert Notifier({**base, "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier({**base, "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 5
    assert Notifier({**base, "WATCHDOG_USEC": "often"}).watchdog_s is None


def test_without_a_manager_messages_go_nowhere(tmp_path: Path) -> None:
    assert not Notifier({"WATCHDOG_USEC": "5000000"}).connected
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("still alive")


def test_the_argv_that_is_checked_is_json() -> None:
    assert read({**GOOD, "DDTREE_ARGV": json.dumps(["--port", "30001"])}).arguments == ("--port", "30001")
