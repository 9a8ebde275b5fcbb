"""`python -m ddtree_engine.launch` as a real process, with a real notify socket, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from server_process import until

HERE = Path(__file__).parent
START_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Manager:
    """Plays systemd: owns the notify socket and keeps every message with its time."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(0.1)
        self.messages: list[tuple[float, str, str]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                for line in self._socket.recv(65536).decode().splitlines():
                    name, _, value = line.partition("=")
                    self.messages.append((time.monotonic(), name, value))

    def values(self, name: str, since: float = 0.0) -> list[str]:
        return [value for at, key, value in list(self.messages) if key == name and at >= since]

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._socket.close()


class Launched:
    """One supervisor with its engine. `engine` scripted: tests/engine/scripted in SGLang's place."""

    def __init__(
        self,
        *arguments: str,
        engine: str = "sglang",
        manager: Manager | None = None,
        watchdog_s: float | None = None,
        **environ: str,
    ) -> None:
        self.port = free_port()
        self.served = "scripted" if engine == "sglang" else "demo-code"
        inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        values = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE / "scripted"),
            "DDTREE_SLOT": "gpu1",
            "DDTREE_ENGINE": engine,
            "DDTREE_PORT": str(self.port),
            "DDTREE_SERVED_MODEL": self.served,
            "DDTREE_ARGV": json.dumps(["--port", str(self.port), *arguments]),
            **environ,
        }
        if manager:
            values["NOTIFY_SOCKET"] = manager.address
        if watchdog_s:
            values["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddtree_engine.launch"],
            env=values,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self.ended_at: float | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.log)

    @property
    def errors(self) -> list[str]:
        """The supervisor's own error lines."""
        prefix = "ddtree-launch: error: "
        return [line.removeprefix(prefix) for line in self.log if line.startswith(prefix)]

    def ready(self) -> Launched:
        def look() -> bool:
            assert self.process.poll() is None, self.text
            return "ddtree-launch: ready after" in self.text

        until(look, START_S, "a ready engine")
        return self

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def wait(self, seconds: float = 30.0) -> int:
        status = self.process.wait(seconds)
        self.ended_at = time.monotonic()
        self._reader.join(5)
        return status

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)  # takes the engine along
            self.process.wait()
        self._reader.join(5)


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
