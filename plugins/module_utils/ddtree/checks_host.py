"""Preflight checks of the host itself: system, interpreters, accounts, clock, disks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, Check, Violation, mib, version

OLDEST_SYSTEMD = 247
OLDEST_AGENT_PYTHON = (3, 11)
CLOCK_TOLERANCE_S = 120.0
LEAST_MEMORY_MIB = 1024
NO_LOGIN = ("nologin", "false", "sync")
# Where Debian and Ubuntu keep what slim images lack.
LIBRARY_PACKAGES = {
    "libnuma.so.1": "libnuma1",
    "libgomp.so.1": "libgomp1",
    "libstdc++.so.6": "libstdc++6",
    "libsndfile.so.1": "libsndfile1",
}


def system(case: Case) -> Iterator[Violation]:
    facts, stack = case.facts, case.stack
    if not facts.get("root"):
        yield case.violation("HOST-NOT-ROOT", "user", "an ordinary user", "root")
    systemd = facts.get("systemd") or {}
    if not systemd.get("running"):
        yield case.violation("HOST-SYSTEMD", "PID 1", "no systemd", "systemd as PID 1")
    elif version(systemd.get("version", "")) and version(systemd["version"]) < (OLDEST_SYSTEMD,):
        yield case.violation("HOST-SYSTEMD-OLD", "systemd", systemd["version"], f"{OLDEST_SYSTEMD} or newer")
    wanted = stack.get("arch") or "x86_64"
    if facts.get("arch") != wanted:
        yield case.violation("HOST-ARCH", "processor", str(facts.get("arch")), wanted, arch=facts.get("arch"))
    yield from _glibc(case)
    for library, present in (facts.get("libraries") or {}).items():
        if not present:
            package = LIBRARY_PACKAGES.get(library, f"apt-file search {library}")
            yield case.violation("HOST-LIBRARY", library, "not found", "installed", library=library, package=package)
    available = (facts.get("memory") or {}).get("available_mib", 0)
    least = max(LEAST_MEMORY_MIB, int(float(stack.get("min_memory_gib") or 0) * 1024))
    if available < least:
        yield case.violation("HOST-MEMORY", "memory", f"{mib(available)} available", f"{mib(least)}")


def _glibc(case: Case) -> Iterator[Violation]:
    least, found = case.stack.get("min_glibc"), case.facts.get("glibc") or ""
    if not found:
        yield case.violation("HOST-GLIBC", "C library", "another one than glibc", f"glibc {least or ''}".strip())
    elif least and version(found) < version(least):
        yield case.violation("HOST-GLIBC", "C library", found, f"{least} or newer")


def python(case: Case) -> Iterator[Violation]:
    facts, stack = case.facts, case.stack
    agent = facts.get("agent_python") or {}
    if version(agent.get("version", "")) < OLDEST_AGENT_PYTHON:
        found = agent.get("version") or agent.get("error") or "none"
        yield case.violation("HOST-AGENT-PYTHON", "/usr/bin/python3", found, "3.11 or newer")
    release = facts.get("python") or {}
    path = release.get("path", "")
    if not release.get("version"):
        yield case.violation("HOST-PYTHON-MISSING", path, release.get("error") or "no answer", "a Python interpreter")
        return
    minors = [str(item) for item in stack.get("python") or []]
    if minors and release["minor"] not in minors:
        yield case.violation("HOST-PYTHON-MINOR", path, release["minor"], " or ".join(minors))
    if stack.get("needs_compiler"):
        missing = [name for name, where in (facts.get("compilers") or {}).items() if not where]
        if missing:
            yield case.violation("HOST-COMPILER", "compiler", f"no {' and no '.join(missing)}", "gcc and g++")
        if not release.get("headers"):
            yield case.violation("HOST-PYTHON-HEADERS", path, "no Python.h", "the interpreter's headers", python=path)


def account(case: Case) -> Iterator[Violation]:
    name = str(case.desired.get("user", ""))
    user = (case.facts.get("users") or {}).get(name) or {}
    if not user.get("exists"):
        return
    if user.get("uid") == 0:
        yield case.violation("HOST-USER-CLASH", name, "user id 0", "an ordinary account")
    elif user.get("shell") and not user["shell"].endswith(NO_LOGIN):
        yield case.violation("HOST-USER-LOGIN", name, f"shell {user.get('shell')}", "an account without login")


def environment(case: Case) -> Iterator[Violation]:
    proxies: dict[str, str] = dict(case.facts.get("proxies") or {})
    exceptions = {
        part.strip() for name, value in proxies.items() if name.lower() == "no_proxy" for part in value.split(",")
    }
    used = sorted(name for name in proxies if name.lower() != "no_proxy" and proxies[name])
    if used and "*" not in exceptions and not exceptions & {"127.0.0.1", "127.0.0.0/8"}:
        where = "/etc/environment (or systemd's DefaultEnvironment)"
        yield case.violation("HOST-PROXY", "environment", ", ".join(used), "no_proxy with 127.0.0.1", where=where)


def clock(case: Case) -> Iterator[Violation]:
    t = case.facts.get("t")
    if t is None:
        return
    last = max((float(entry.get("t", 0)) for entry in case.facts.get("journal_tail") or []), default=0.0)
    if last > t + CLOCK_TOLERANCE_S:
        yield case.violation(
            "HOST-CLOCK-BACK", "clock", f"{last - t:.0f} s behind the journal", "a clock that only goes forward"
        )
    if case.now is not None and abs(case.now - t) > CLOCK_TOLERANCE_S:
        word = "behind" if t < case.now else "ahead of"
        yield case.violation(
            "HOST-CLOCK-SKEW",
            "clock",
            f"{abs(case.now - t):.0f} s {word} the control node",
            f"at most {CLOCK_TOLERANCE_S:.0f} s",
        )


def disks(case: Case) -> Iterator[Violation]:
    """What will be written is known before: wheels and venv below root, compiler caches below cache."""
    desired, stack = case.desired, case.stack
    present = case.release_id is not None and case.release_id in {
        item["id"] for item in case.facts.get("releases") or []
    }
    new = 0 if present else 1
    amounts = {
        "root": (
            new * (int(stack.get("install_bytes") or 0) + int(stack.get("wheels_bytes") or 0)),
            new * int(stack.get("install_files") or 0),
        ),
        "state": (0, 0),
        "cache": (int(stack.get("cache_bytes") or 0), 0),
    }
    needs: dict[str, dict[str, Any]] = {}
    for variable, (size, count) in amounts.items():
        disk = (case.facts.get("disk") or {}).get(str(desired.get(variable)))
        if disk is None:
            continue
        need = needs.setdefault(disk["mount"], {"disk": disk, "variable": f"fleet_{variable}", "bytes": 0, "files": 0})
        need["bytes"] += size
        need["files"] += count
    reserve = float(desired.get("disk_reserve_gib", 1.0)) * 1024**3
    for mount, need in needs.items():
        yield from _disk(case, mount, need, reserve)


def _disk(case: Case, mount: str, need: dict[str, Any], reserve: float) -> Iterator[Violation]:
    disk, words = need["disk"], {"mount": mount, "variable": need["variable"]}
    options = disk.get("options") or []
    if "ro" in options:
        yield case.violation("DISK-READ-ONLY", mount, "read-only", "read-write", **words)
        return
    if "noexec" in options and need["variable"] == "fleet_root":
        yield case.violation("DISK-NOEXEC", mount, "noexec", "exec", **words)
    wanted = need["bytes"] + reserve
    if disk["free_bytes"] < wanted:
        missing = mib((wanted - disk["free_bytes"]) / 2**20)
        found, needed = (
            f"{mib(disk['free_bytes'] / 2**20)} free",
            f"{mib(need['bytes'] / 2**20)} and {mib(reserve / 2**20)} in reserve",
        )
        yield case.violation("DISK-SPACE", mount, found, needed, missing=missing, **words)
    files = int(need["files"] * 1.1) + 1000
    if disk.get("free_inodes") is not None and disk["free_inodes"] < files:
        yield case.violation("DISK-INODES", mount, f"{disk['free_inodes']} free inodes", str(files), **words)


CHECKS: tuple[Check, ...] = (system, python, account, environment, clock, disks)
