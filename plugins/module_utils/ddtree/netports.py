"""Listening TCP ports and the processes behind them, from /proc alone."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LISTEN = "0A"
_OURS = re.compile(r"ddtree-([a-z0-9][a-z0-9-]{0,31})\.service\Z")
_NOT_SLOTS = frozenset({"ddtree-recover.service", "ddtree-router.service"})


@dataclasses.dataclass(frozen=True)
class Listener:
    addr: str
    port: int
    inode: int


def listeners(proc: Path = Path("/proc")) -> list[Listener]:
    """Every listening TCP socket of this network namespace."""
    found = []
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN:
                address, port = fields[1].split(":")
                found.append(Listener(_address(address), int(port, 16), int(fields[9])))
    return found


def _address(text: str) -> str:
    """The kernel prints addresses as 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    packed = b"".join(words)
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed)
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


def ports(proc: Path = Path("/proc")) -> list[dict[str, Any]]:
    """Listening ports with the process that holds each; `pid` is None where it cannot be seen."""
    sockets = listeners(proc)
    owners = _owners({item.inode for item in sockets}, proc)
    found = []
    for item in sorted(set(sockets), key=lambda entry: (entry.port, entry.addr, entry.inode)):
        pid = owners.get(item.inode)
        found.append({"port": item.port, "addr": item.addr, **process(pid, proc)})
    return found


def _owners(inodes: set[int], proc: Path) -> dict[int, int]:
    """Socket inode to the process that holds it; ends as soon as all are known."""
    left = {f"socket:[{inode}]": inode for inode in inodes if inode}
    found: dict[int, int] = {}
    # a busy host has a hundred thousand descriptors: plain strings here, no path objects
    with os.scandir(proc) as entries:
        pids = sorted(int(entry.name) for entry in entries if entry.name.isdigit())
    for pid in pids:
        if not left:
            break
        for target in _descriptors(f"{proc}/{pid}/fd"):
            inode = left.pop(target, None)
            if inode is not None:
                found[inode] = pid
    return found


def _descriptors(directory: str) -> Iterator[str]:
    """What the open descriptors of a process point at; it may end while it is looked at."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield os.readlink(entry.path)  # noqa: PTH115
    except OSError:
        return


def process(pid: int | None, proc: Path = Path("/proc")) -> dict[str, Any]:
    """Who a process is: comm, command line, systemd unit, and whether the unit is one of our slots."""
    if pid is None:
        return {"pid": None, "comm": "", "command": "", "unit": "", "slot": None, "ours": False}
    directory = proc / str(pid)
    unit = _unit(_read(directory / "cgroup"))
    slot = our_slot(unit)
    return {
        "pid": pid,
        "comm": _read(directory / "comm").strip(),
        "command": _read(directory / "cmdline").replace("\0", " ").strip()[:200],
        "unit": unit,
        "slot": slot,
        "ours": slot is not None,
    }


def our_slot(unit: str) -> str | None:
    """Name of the slot whose engine a unit is; None for every other unit, the toolkit's own helpers included."""
    match = _OURS.match(unit)
    return match.group(1) if match and unit not in _NOT_SLOTS else None


def _unit(cgroups: str) -> str:
    """The innermost service or scope in /proc/PID/cgroup, of cgroup v2 or of v1's systemd hierarchy."""
    for line in sorted(cgroups.splitlines(), key=lambda text: not text.startswith("0::")):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy != "0" and controllers != "name=systemd":
            continue
        for part in reversed(path.split("/")):
            if part.endswith((".service", ".scope")):
                return part
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def port_ranges(text: str) -> list[tuple[int, int]]:
    """Ranges as ip_local_reserved_ports writes them: 8080,9000-9100."""
    found = []
    for part in text.replace(" ", "").strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found.append((int(low), int(high) if high.isdigit() else int(low)))
    return found
