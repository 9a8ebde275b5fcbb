"""The sandbox's cgroups: where its processes are found, and what systemd on each host manages its services in.

One cgroup per sandbox at the top of every hierarchy this machine shows (cgroup v1, hybrid or v2), below it one per host
and one per keeper. At the top, because a cgroup below the caller's own would end with the caller's session.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import SandboxError

CGROUP_ROOT = Path("/sys/fs/cgroup")


def keeper_of(host: str) -> str:
    """The cgroup of a host's keeper: beside the host's own, as a v2 cgroup holds either processes or cgroups."""
    return f"keeper.{host}"


def hierarchies() -> list[Path]:
    """Mount points of all cgroup hierarchies; on a v2 machine there is exactly one, /sys/fs/cgroup itself."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind = fields[fields.index("-") + 1]
        point = Path(fields[4])
        if kind in ("cgroup", "cgroup2") and (point == CGROUP_ROOT or point.parent == CGROUP_ROOT):
            found.append(point)
    if not found:
        raise SandboxError(
            "no cgroup hierarchy is mounted below /sys/fs/cgroup; systemd on the hosts needs one",
            "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
        )
    # A hierarchy mounted over another hides it: the last mount of a path counts, and v2 at the root hides all v1 below.
    last = list(dict.fromkeys(found))
    return [CGROUP_ROOT] if is_unified() else last


def is_unified() -> bool:
    return (CGROUP_ROOT / "cgroup.controllers").exists()


def create(name: str, child: str) -> list[Path]:
    """Make <name>/<child> in every hierarchy and return the directories, ready to be joined by a process."""
    made = []
    for hierarchy in hierarchies():
        parent = hierarchy / name
        leaf = parent / child
        try:
            leaf.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxError(
                f"cannot make a cgroup in {hierarchy}: {error.strerror}",
                "inside a container, start it with --privileged and a writable /sys/fs/cgroup",
            ) from None
        for group in (parent, leaf):
            _inherit_cpuset(group)
        if is_unified():
            _pass_controllers_down(hierarchy)
            _pass_controllers_down(parent)
        made.append(leaf)
    return made


def _inherit_cpuset(group: Path) -> None:
    """A fresh v1 cpuset is empty and takes no process until it names processors and memory nodes."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = group / name
        if not is_unified() and file.exists() and not file.read_text().strip():
            file.write_text((group.parent / name).read_text())


def _pass_controllers_down(group: Path) -> None:
    """On v2 a child has only the controllers its parent passes on; each one refused is one the hosts do without."""
    available = (group / "cgroup.controllers").read_text().split()
    passed = (group / "cgroup.subtree_control").read_text().split()
    for controller in available:
        if controller not in passed and not controller.startswith("cpuset"):
            try:
                (group / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError:
                continue


def processes(name: str, child: str = "") -> set[int]:
    """Every living process in the sandbox's cgroup or one child of it, in any hierarchy."""
    found: set[int] = set()
    for hierarchy in hierarchies():
        for group in _tree(hierarchy / name / child):
            try:
                found.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
            except OSError:  # removed while we looked, or a threaded cgroup
                continue
    return {pid for pid in found if is_alive(pid)}


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie that nobody has collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def remove(name: str, child: str = "", patience: float = 5.0) -> list[Path]:
    """Remove the cgroup with all below it; returns what could not be removed."""
    deadline = time.monotonic() + patience
    while True:
        left = []
        for hierarchy in hierarchies():
            for group in _tree(hierarchy / name / child):
                try:
                    group.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    left.append(group)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)  # the kernel lets go of a cgroup a moment after its last process


def _tree(top: Path) -> Iterator[Path]:
    """The cgroup and all below it, children first."""
    for directory, _, _ in os.walk(top, topdown=False):
        yield Path(directory)
