"""GPU faults in the kernel's log: Xid reports and the messages that come without one."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .nvidia import normal_bus
from .process import Result, run

# Faults of the hardware or the driver: no release can help, and none should be blamed.
FATAL_XIDS = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GPU system processor does not answer",
    120: "GPU system processor error",
    140: "unrecovered ECC error",
    154: "the GPU asks for a reset or reboot",
    171: "uncorrectable memory error",
}
# Worth telling, but a program's own fault (13, 31, 43), the echo of another (45) or a repair that took place (63).
NOTED_XIDS = {63: "a memory row was remapped; it takes effect at the next reset"}

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\)\s*:\s*(\d+)(.*)")
_BUS = re.compile(r"\b([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.\d)?)\b")
_OFF_BUS = re.compile(r"NVRM:.*fallen off the bus|NVRM:.*GPU is lost", re.IGNORECASE)
_STAMPED = re.compile(r"^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)\]?\s+(.*)$")
_EPOCH = re.compile(r"^\[?(\d{9,11}(?:\.\d+)?)\]?\s+(.*)$")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One line of the log. `xid` is None for a GPU that left the bus without an Xid."""

    t: float
    bus_id: str
    xid: int | None
    text: str

    @property
    def fatal(self) -> bool:
        if self.xid is None:
            return True
        if self.xid == 154:
            # "... changed from 0x1 (GPU Reset Required) to 0x0 (None)" reports that it is over
            return not re.search(r"to 0x0\b|\(None\)\s*$", self.text)
        return self.xid in FATAL_XIDS

    @property
    def meaning(self) -> str:
        if self.xid is None:
            return FATAL_XIDS[79]
        return FATAL_XIDS.get(self.xid) or NOTED_XIDS.get(self.xid, "")

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "fatal": self.fatal, "meaning": self.meaning}


def fault(text: str, t: float) -> Fault | None:
    match = _XID.search(text)
    if match:
        return Fault(t, normal_bus(match.group(1)), int(match.group(2)), text.strip()[:300])
    if _OFF_BUS.search(text):
        bus = _BUS.search(text)
        return Fault(t, normal_bus(bus.group(1)) if bus else "", None, text.strip()[:300])
    return None


def faults(since: float, sandbox_log: Path | None = None, ask: Callable[..., Result] = run) -> list[Fault]:
    """GPU faults since `since`, oldest first: from the journal's kernel lines, and on sandbox hosts from a file."""
    found = [item for t, text in kernel_lines(since, ask) if (item := fault(text, t))]
    if sandbox_log is not None:
        found += [item for t, text in file_lines(sandbox_log, since) if (item := fault(text, t))]
    return sorted(found, key=lambda item: item.t)


def kernel_lines(since: float, ask: Callable[..., Result] = run) -> list[tuple[float, str]]:
    """Kernel messages of any boot. journald's own filter is not always compiled in, so lines are filtered here."""
    result = ask(
        *("journalctl", "--no-pager", "-q", "-o", "json", "--output-fields=MESSAGE", f"--since=@{since:.0f}"),
        *("-n", "20000", "_TRANSPORT=kernel"),
        check=False,
        timeout=5,
    )
    lines = []
    for raw in result.out.splitlines():
        if "NVRM" not in raw:
            continue
        try:
            value = json.loads(raw)
            lines.append((int(value["__REALTIME_TIMESTAMP"]) / 1e6, str(value["MESSAGE"])))
        except (ValueError, KeyError, TypeError):
            continue
    return lines


def file_lines(path: Path, since: float) -> list[tuple[float, str]]:
    """Lines of a log file; a line without a time of its own is as old as the file's last change."""
    try:
        text, changed = path.read_text(errors="replace"), path.stat().st_mtime
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        t, message = changed, line
        stamped, epoch = _STAMPED.match(line), _EPOCH.match(line)
        if epoch:
            t, message = float(epoch.group(1)), epoch.group(2)
        elif stamped:
            t, message = _seconds(stamped.group(1)), stamped.group(2)
        if t >= since:
            lines.append((t, message))
    return lines


def _seconds(stamp: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(stamp.replace(",", "."))
    except ValueError:
        return time.time()
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
