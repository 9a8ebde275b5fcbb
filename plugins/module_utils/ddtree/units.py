"""systemd, through systemctl and journalctl."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from pathlib import Path
from typing import IO, Any

from .process import run

PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "ControlPID",
    "NRestarts",
    "InvocationID",
    "StatusText",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainExitTimestampMonotonic",
    "InactiveEnterTimestampMonotonic",
    "ActiveEnterTimestampMonotonic",
    "ControlGroup",
    "UnitFileState",
)


@dataclasses.dataclass(frozen=True)
class UnitState:
    """One look at a unit. Times are seconds since the epoch, None where it never happened."""

    name: str
    load: str = ""
    active: str = ""
    sub: str = ""
    result: str = ""
    main_pid: int = 0
    restarts: int = 0
    invocation: str = ""
    status_text: str = ""
    exit_code: str = ""
    exit_status: int = 0
    exit_at: float | None = None
    inactive_at: float | None = None
    active_at: float | None = None
    cgroup: str = ""
    file_state: str = ""

    @property
    def exists(self) -> bool:
        return self.load == "loaded"

    @property
    def death(self) -> str | None:
        """How the unit is not running any more, in words; None while it runs or starts for the first time."""
        if self.active == "failed" or self.sub in ("auto-restart", "auto-restart-queued"):
            return self._exit_words()
        if self.active == "inactive":
            return "the unit is not running: " + (self._exit_words() if self.exit_code else "it was stopped")
        return None

    def _exit_words(self) -> str:
        if self.result == "watchdog":
            return "killed by the watchdog: no progress was reported in time"
        if self.result == "timeout":
            return "killed by systemd: it was not ready within the start timeout"
        if self.result == "oom-kill":
            return "killed by the kernel: out of memory"
        if self.result == "start-limit-hit":
            return "restarted too often (start limit hit)"
        if self.exit_code in ("killed", "dumped"):
            return f"the main process was killed by signal {self.exit_status}"
        if self.exit_code == "exited":
            return f"the main process exited with status {self.exit_status}"
        return f"the unit failed ({self.result or 'no result recorded'})"


def _time(text: str) -> float | None:
    """Epoch seconds of one of systemd's monotonic microsecond stamps, which a jump of the clock cannot falsify."""
    return time.time() - (time.monotonic() - int(text) / 1e6) if text.isdigit() and text != "0" else None


def parse_show(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def unit_state(values: dict[str, str]) -> UnitState:
    def number(key: str) -> int:
        return int(values.get(key) or 0)

    codes = {"1": "exited", "2": "killed", "3": "dumped"}
    code = values.get("ExecMainCode", "")
    return UnitState(
        name=values.get("Id", ""),
        load=values.get("LoadState", ""),
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        result=values.get("Result", ""),
        main_pid=number("MainPID"),
        restarts=number("NRestarts"),
        invocation=values.get("InvocationID", ""),
        status_text=values.get("StatusText", ""),
        exit_code=codes.get(code, "" if code == "0" else code),
        exit_status=number("ExecMainStatus"),
        exit_at=_time(values.get("ExecMainExitTimestampMonotonic", "")),
        inactive_at=_time(values.get("InactiveEnterTimestampMonotonic", "")),
        active_at=_time(values.get("ActiveEnterTimestampMonotonic", "")),
        cgroup=values.get("ControlGroup", ""),
        file_state=values.get("UnitFileState", ""),
    )


def show(unit: str) -> UnitState:
    result = run("systemctl", "show", "-p", ",".join(PROPERTIES), "--", unit, timeout=20)
    return unit_state(parse_show(result.out))


def start(unit: str, wait: bool = False) -> None:
    run("systemctl", "start", *([] if wait else ["--no-block"]), "--", unit, timeout=None if wait else 30)


def stop(unit: str) -> None:
    """Stop and wait; systemd's own stop timeout bounds it. A unit that does not exist is stopped already."""
    if show(unit).exists:
        run("systemctl", "stop", "--", unit, timeout=None)


def reset_failed(unit: str) -> None:
    run("systemctl", "reset-failed", "--", unit, check=False)


def daemon_reload() -> None:
    run("systemctl", "daemon-reload", timeout=120)


def enable(unit: str) -> None:
    run("systemctl", "enable", "--quiet", "--", unit)


def disable(unit: str) -> None:
    run("systemctl", "disable", "--quiet", "--", unit, check=False)


def system_state() -> str:
    """running, degraded, starting, stopping ...; empty where systemd does not answer."""
    return run("systemctl", "is-system-running", check=False, timeout=20).out.strip()


def cgroup_cpu_seconds(cgroup: str) -> float | None:
    """CPU time that a unit's control group has used, in seconds; None where it cannot be read."""
    if not cgroup:
        return None
    for path, scale in (
        (Path(f"/sys/fs/cgroup{cgroup}/cpu.stat"), 1e6),
        (Path(f"/sys/fs/cgroup/unified{cgroup}/cpu.stat"), 1e6),
    ):
        try:
            for line in path.read_text().splitlines():
                if line.startswith("usage_usec "):
                    return int(line.split()[1]) / scale
        except OSError:
            continue
    try:
        return int(Path(f"/sys/fs/cgroup/cpuacct{cgroup}/cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError):
        return _process_cpu_seconds(cgroup)


def cgroup_pids(cgroup: str) -> list[int]:
    """Processes of a unit, children included (cgroup v2, or v1's own systemd hierarchy)."""
    if not cgroup:
        return []
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"):
        try:
            return [int(pid) for pid in Path(f"{root}{cgroup}/cgroup.procs").read_text().split()]
        except OSError:
            continue
    return []


def _process_cpu_seconds(cgroup: str) -> float | None:
    ticks, found = 0, False
    for pid in cgroup_pids(cgroup):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        ticks += int(fields[11]) + int(fields[12])
        found = True
    return ticks / 100.0 if found else None


@dataclasses.dataclass(frozen=True)
class LogLine:
    t: float
    text: str
    pid: int = 0
    identifier: str = ""


def _log_line(raw: str) -> LogLine | None:
    try:
        value: dict[str, Any] = json.loads(raw)
    except ValueError:
        return None
    message = value.get("MESSAGE")
    if isinstance(message, list):  # journald gives bytes that are not UTF-8 as a list of numbers
        message = bytes(message).decode(errors="replace")
    if not isinstance(message, str):
        return None
    return LogLine(
        t=int(value.get("__REALTIME_TIMESTAMP", 0)) / 1e6,
        text=message,
        pid=int(value.get("_PID", 0) or 0),
        identifier=str(value.get("SYSLOG_IDENTIFIER", "")),
    )


def log(unit: str, since: float | None = None, lines: int | None = None) -> list[LogLine]:
    """What the unit and its processes printed, and what systemd said of it, oldest first.

    journald is asked to take in what it was sent so far: a process's last words are still under way when it dies.
    """
    run("journalctl", "--sync", check=False, timeout=10)
    argv = ["journalctl", "--no-pager", "-q", "-o", "json", "-u", unit]
    if since is not None:
        argv.append(f"--since=@{since:.6f}")
    if lines is not None:
        argv.append(f"--lines={lines}")
    result = run(*argv, check=False, timeout=30)
    return [line for line in map(_log_line, result.out.splitlines()) if line]


class LogFollower:
    """New lines of a unit's journal, without waiting."""

    def __init__(self, unit: str, since: float) -> None:
        argv = ["journalctl", "--no-pager", "-q", "-o", "json", "-f", f"--since=@{since:.6f}", "-n", "all", "-u", unit]
        self._process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        stream: IO[bytes] | None = self._process.stdout
        if stream is None:
            raise RuntimeError("journalctl gave no output stream")
        self._stream = stream
        os.set_blocking(self._stream.fileno(), False)
        self._rest = b""

    def poll(self) -> list[LogLine]:
        found: list[LogLine] = []
        while True:
            try:
                chunk = os.read(self._stream.fileno(), 65536)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._rest += chunk
        *complete, self._rest = self._rest.split(b"\n")
        for raw in complete:
            line = _log_line(raw.decode(errors="replace"))
            if line:
                found.append(line)
        return found

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream.close()


def wait_cgroup_empty(unit: str, timeout: float) -> list[int]:
    """Processes that are still in the unit's control group after up to `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        left = cgroup_pids(show(unit).cgroup)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)
