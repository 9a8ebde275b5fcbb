"""Whether a starting engine is doing something: processor time and file reads of all its processes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

# What answering a health probe once a second costs stays well below both; loading anything is far above one of them.
BUSY_CPU_SHARE = 0.02
BUSY_BYTES_PER_S = 256 * 1024
MIN_INTERVAL_S = 1.0

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Usage:
    cpu_s: float = 0.0
    io_bytes: int = 0


def _stat(pid: int) -> tuple[int, float] | None:
    """(parent, processor seconds with those of reaped children) of a process; None when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything, spaces and brackets included
    return int(fields[1]), sum(int(value) for value in fields[11:15]) / _TICKS


def _io_bytes(pid: int) -> int:
    """Bytes read, from files and from the disk. Sockets are not in it, so answering probes does not count."""
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(": ", 1) for line in lines if ": " in line)
    return int(values.get("rchar", 0)) + int(values.get("read_bytes", 0))


def _unit_cgroup() -> Path | None:
    """This process's cgroup, if it is that of a systemd service: then everything in it belongs to the engine."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        hierarchy, _, name = line.split(":", 2)
        if hierarchy == "0" and name.endswith(".service"):
            folder = Path("/sys/fs/cgroup") / name.lstrip("/")
            if (folder / "cgroup.procs").is_file():
                return folder
    return None


class Activity:
    """Remembers what each process of the engine has used, so that one that ends does not look like a step back."""

    def __init__(self, root_pid: int, *, in_unit: bool) -> None:
        self._root = root_pid
        self._cgroup = _unit_cgroup() if in_unit else None
        self._seen: dict[int, Usage] = {}
        self._last = Usage()
        self._at: float | None = None

    def pids(self) -> set[int]:
        """Processes of the engine: all of the unit's but this one, or all descendants where there is no unit."""
        if self._cgroup is not None:
            try:
                return {int(pid) for pid in (self._cgroup / "cgroup.procs").read_text().split()} - {os.getpid()}
            except OSError:
                pass
        children: dict[int, list[int]] = {}
        for entry in _PROC.iterdir():
            stat = _stat(int(entry.name)) if entry.name.isdigit() else None
            if stat:
                children.setdefault(stat[0], []).append(int(entry.name))
        found, todo = {self._root}, [self._root]
        while todo:
            fresh = [pid for pid in children.get(todo.pop(), []) if pid not in found]
            found.update(fresh)
            todo.extend(fresh)
        return found

    def usage(self) -> Usage:
        for pid in self.pids():
            stat = _stat(pid)
            if stat is None:
                continue
            before = self._seen.get(pid, Usage())
            self._seen[pid] = Usage(max(before.cpu_s, stat[1]), max(before.io_bytes, _io_bytes(pid)))
        used = self._seen.values()
        return Usage(sum(one.cpu_s for one in used), sum(one.io_bytes for one in used))

    def busy(self, now: float) -> bool | None:
        """Whether the engine worked since the last answer; None while too little time has passed to say."""
        if self._at is not None and now - self._at < MIN_INTERVAL_S:
            return None
        current, last, at = self.usage(), self._last, self._at
        self._last, self._at = current, now
        if at is None:
            return True
        span = now - at
        return (
            current.cpu_s - last.cpu_s >= BUSY_CPU_SHARE * span
            or current.io_bytes - last.io_bytes >= BUSY_BYTES_PER_S * span
        )
