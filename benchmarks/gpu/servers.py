"""Starting and stopping the servers under test; every process group started here is ended here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from client import Server

# SGLang takes further ports beside the one it is given, so servers keep their distance.
PORT_STEP, FIRST_PORT = 2000, 21000
COMMON = [
    *("--attention-backend", "triton"),
    *("--sampling-backend", "pytorch"),
    *("--max-running-requests", "32"),
    *("--cuda-graph-bs", "1", "2", "4", "8", "16", "24", "32"),
    *("--mem-fraction-static", "0.5"),
    *("--max-total-tokens", "65536"),
    *("--context-length", "2048"),
    *("--random-seed", "1"),
    *("--decode-log-interval", "50"),
    "--disable-piecewise-cuda-graph",
    "--enable-metrics",
]
EXACT = ["--dtype", "float16", "--enable-fp32-lm-head"]


@dataclass(frozen=True)
class Arm:
    name: str
    flags: list[str]
    env: dict[str, str] = field(default_factory=dict)


def ar(extra: list[str] | None = None, name: str = "ar") -> Arm:
    return Arm(name, [*EXACT, *(extra or [])])


def dflash(draft: Path, name: str = "dflash", extra: list[str] | None = None) -> Arm:
    flags = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    return Arm(name, [*EXACT, *flags, *(extra or [])])


def ddtree(
    draft: Path, budget: int, *, topk: int = 8, name: str = "", extra: list[str] | None = None, check: bool = False
) -> Arm:
    flags = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(draft)]
    flags += ["--speculative-ddtree-budget", str(budget), "--speculative-ddtree-topk", str(topk)]
    env = {"DDTREE_SELF_CHECK": "1"} if check else {}
    return Arm(name or f"ddtree-b{budget}", [*EXACT, *flags, *(extra or [])], env)


class Running:
    """Servers in their own process groups, logs in one folder."""

    def __init__(self, logs: Path, model: Path) -> None:
        self._logs, self._model = logs, model
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._files: list[IO[bytes]] = []
        self._servers: dict[str, Server] = {}
        self._ports = 0
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, arm: Arm, common: list[str] | None = None) -> Server:
        server = Server(arm.name, FIRST_PORT + PORT_STEP * self._ports)
        self._ports += 1
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(server.port)]
        command += ["--model-path", str(self._model), *(COMMON if common is None else common), *arm.flags]
        log = (self._logs / f"{arm.name}.log").open("wb")
        self._files.append(log)
        env = {
            **os.environ,
            **{name: value.replace("{PYTHONPATH}", os.environ["PYTHONPATH"]) for name, value in arm.env.items()},
        }
        self._processes[arm.name] = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        self._servers[arm.name] = server
        return server

    def wait_ready(self, names: list[str], seconds: float) -> dict[str, str]:
        """Name -> "" when ready, else what happened. Waits for all of them together."""
        outcome: dict[str, str] = {}
        begin = time.monotonic()
        while len(outcome) < len(names) and time.monotonic() - begin < seconds:
            time.sleep(0.5)
            for name in names:
                if name in outcome:
                    continue
                if b"fired up and ready" in (self._logs / f"{name}.log").read_bytes():
                    outcome[name] = ""
                    print(f"{name}: ready after {time.monotonic() - begin:.0f} s", flush=True)
                elif self._processes[name].poll() is not None:
                    outcome[name] = f"died with status {self._processes[name].returncode}: {self.tail(name)}"
        for name in names:
            outcome.setdefault(name, f"not ready after {seconds:.0f} s: {self.tail(name)}")
        return outcome

    def tail(self, name: str, size: int = 2500) -> str:
        return (self._logs / f"{name}.log").read_bytes()[-size:].decode(errors="replace")

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_bytes().decode(errors="replace")

    def stop(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        for wanted, patience in ((signal.SIGTERM, 4.0), (signal.SIGKILL, 4.0)):
            try:
                os.killpg(process.pid, wanted)
            except ProcessLookupError:
                break
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue

    def stop_all(self) -> None:
        for name in list(self._processes):
            self.stop(name)
        for file in self._files:
            file.close()
