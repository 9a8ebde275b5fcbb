"""A real server process on loopback for tests, and a plain HTTP client for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import httpx

START_S = 90.0
MODEL = "demo-code"


def until(condition: Any, seconds: float = 20.0, what: str = "the expected state") -> Any:
    """Waits for a truthy result and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} was not reached within {seconds:g} s")


class ServerProcess:
    """`python -m ddtree_engine.server` on a free port. Its log is kept in `log`."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddtree_engine.server", "--port", "0", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client = httpx.Client(trust_env=False, timeout=60)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.log)

    def listening(self) -> ServerProcess:
        """Waits until the port is open; the engine may still be loading."""

        def address() -> str | None:
            assert self.process.poll() is None, self.text
            found = re.search(r"listening on (http://\S+:\d+)", self.text)
            return found.group(1) if found else None

        self.client.base_url = until(address, START_S, "a listening server")
        return self

    def ready(self) -> ServerProcess:
        self.listening()
        until(lambda: self.client.get("/health").status_code == 200, START_S, f"a ready server\n{self.text}")
        return self

    def wait(self, seconds: float = 30.0) -> int:
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.client.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # -- requests ------------------------------------------------------------------------------------------------

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json={"model": MODEL, **fields})

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """All events of a stream that must end with [DONE]."""
        with self.client.stream("POST", path, json={"model": MODEL, "stream": True, **fields}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = list(events(answer.iter_lines()))
        assert found[-1] == "[DONE]"
        return [json.loads(item) for item in found[:-1]]

    def info(self) -> dict[str, Any]:
        return self.client.get("/get_server_info").json()

    def metric(self, name: str) -> float:
        """The value of one series, 0 where it does not exist yet."""
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series == name:
                return float(value)
        return 0.0


def events(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def joined(chunks: Sequence[dict[str, Any]]) -> str:
    """The text of a completion stream."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
