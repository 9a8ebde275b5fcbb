"""The base image: a minimal Debian or Ubuntu tree that all hosts share, made once with mmdebstrap and cached.

It is made from the package sources that this machine's own apt uses, so it needs no configuration of its own and
follows whatever mirror or proxy the machine has.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .commands import run
from .errors import SandboxError
from .layout import default_cache
from .mounts import remove_tree

Say = Callable[[str], None]

PACKAGES = (
    "ca-certificates",
    "dbus",
    "iproute2",
    "libgomp1",
    "libnuma1",
    "openssh-server",
    "procps",
    "python3",
    "python3-venv",
    "sudo",
    "systemd",
    "systemd-sysv",
)
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
# Nothing of these has a purpose on a host without a route out, a disk or a console.
MASKED = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "motd-news.timer",
    "systemd-firstboot.service",
)
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Distribution:
    id: str
    codename: str


def distribution() -> Distribution:
    facts: dict[str, str] = platform.freedesktop_os_release()
    found = Distribution(facts.get("ID", ""), facts.get("VERSION_CODENAME", ""))
    if found.id not in ("debian", "ubuntu") or not found.codename:
        raise SandboxError(
            f"the sandbox is built from Debian or Ubuntu packages and this is {facts.get('PRETTY_NAME', 'neither')}",
            "use a Debian (12 or newer) or Ubuntu (24.04 or newer) machine or virtual machine",
        )
    return found


def sources(system: Distribution) -> list[str]:
    """This machine's apt sources that belong to the distribution itself, as one-line entries."""
    lines = _own_entries(system, [])
    if not lines:
        # apt tells its sources apart only once it has their lists; a fresh machine gets them in a place of their own.
        with tempfile.TemporaryDirectory(prefix="sandbox-apt-") as lists:
            Path(lists).chmod(0o755)  # apt fetches as a user of its own
            option = [f"--option=Dir::State::Lists={lists}"]
            run(["apt-get", "update", "--quiet", *option], timeout=300)
            lines = _own_entries(system, option)
    if not lines:
        raise SandboxError(
            f"apt on this machine has no source for {system.id} {system.codename} main, from which the hosts are made",
            "add it to /etc/apt/sources.list and run `apt-get update`",
        )
    return lines


def _own_entries(system: Distribution, options: list[str]) -> list[str]:
    suites = {system.codename, f"{system.codename}-updates", f"{system.codename}-security"}
    architecture = run(["dpkg", "--print-architecture"]).strip()
    lines: dict[str, None] = {}
    for paragraph in run(["apt-get", "indextargets", *options, "Created-By: Packages"]).split("\n\n"):
        target = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line)
        if target.get("Release") not in suites or target.get("Architecture") != architecture:
            continue
        if target.get("Origin", "").lower() != system.id:  # somebody else's packages for the same suite
            continue
        signed = _signed_by(target.get("Sourcesentry", ""), target["Repo-URI"])
        lines[f"deb {signed}{target['Repo-URI']} {target['Release']} {target['Component']}"] = None
    return list(lines) if any(f" {system.codename} main" in line for line in lines) else []


def _signed_by(entry: str, uri: str) -> str:
    """The key ring that the machine's source file names for this archive, as a one-line option."""
    file = Path(entry.rsplit(":", 1)[0])
    if not file.is_file():
        return ""
    blocks = re.split(r"\n\s*\n", file.read_text()) if file.suffix == ".sources" else file.read_text().splitlines()
    for block in blocks:
        ring = re.search(r"signed-by\s*[:=]\s*(/[^\s\]]+)", block, re.IGNORECASE)
        if ring and uri.rstrip("/") in block:
            return f"[signed-by={ring.group(1)}] "
    return ""


def _apt_settings() -> list[str]:
    """How this machine's apt fetches (proxy, dates, retries): the image is fetched in the same way."""
    wanted = re.compile(r'^(Acquire::(?:(?:https?|ftp)::.*|Check-Valid-Until|Check-Date|Retries|ForceIPv4)) "(.*)";$')
    matches = (wanted.match(line) for line in run(["apt-config", "dump"]).splitlines())
    return [f'{match.group(1)} "{match.group(2)}"' for match in matches if match and match.group(2)]


def recipe(system: Distribution) -> dict[str, object]:
    return {
        "format": 2,
        "system": [system.id, system.codename],
        "machine": platform.machine(),
        "packages": PACKAGES,
        "left_out": LEFT_OUT,
        "masked": MASKED,
    }


def location(cache: Path | None = None) -> Path:
    """Where the image of this machine's recipe is or will be."""
    system = distribution()
    digest = hashlib.sha256(json.dumps(recipe(system), sort_keys=True).encode()).hexdigest()[:12]
    return (cache or default_cache()) / f"sandbox-{system.id}-{system.codename}-{digest}"


def ensure(say: Say, cache: Path | None = None) -> Path:
    """The image's root tree; made first where it is not cached. Two at once make it once."""
    place = location(cache)
    if (place / "tree").is_dir():
        return place / "tree"
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making the base image; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not (place / "tree").is_dir():
            _make(place, say)
    finally:
        os.close(descriptor)
    return place / "tree"


def _make(place: Path, say: Say) -> None:
    system = distribution()
    unfinished = place.with_name(place.name + ".unfinished")
    remove_tree(unfinished)
    unfinished.mkdir()
    started = time.monotonic()
    say(f"making the base image from {system.id} {system.codename} packages (once, about a minute)")
    try:
        _mmdebstrap(system, unfinished, say)
        tree = unfinished / "tree"
        _trim(tree)
        python = _python_version(tree)
        if python < OLDEST_PYTHON:
            raise SandboxError(
                f"{system.id} {system.codename} has Python {python[0]}.{python[1]}; hosts need 3.11 or newer",
                "use Debian 12 or newer, or Ubuntu 24.04 or newer",
            )
        unfinished.rename(place)
    except BaseException:
        remove_tree(unfinished)
        raise
    _prune(place)
    say(f"base image ready after {time.monotonic() - started:.0f} s: {place}")


def _prune(current: Path) -> None:
    """Remove images of earlier recipes, except those that hosts run on."""
    mounted = Path("/proc/self/mountinfo").read_text()
    for other in current.parent.glob("sandbox-*-*"):
        if other != current and other.is_dir() and f"lowerdir={other}/" not in mounted:
            remove_tree(other)


def _mmdebstrap(system: Distribution, directory: Path, say: Say) -> None:
    entries = sources(system)
    command = [
        # In namespaces of its own that end with us: whatever ends us leaves no mount and no process behind.
        *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"),
        *("--pid", "--fork", "--kill-child"),
        *("mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
        "--dpkgopt=force-unsafe-io",
        *(f"--aptopt={setting}" for setting in _apt_settings()),
        *(system.codename, str(directory / "tree"), "-"),
    ]
    log = directory / "mmdebstrap.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
            env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
        )  # fmt: skip
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n".join(entries) + "\n")
            process.stdin.close()
            for line in process.stdout:
                output.write(line)
                if line.startswith("I: "):
                    say("  " + line[3:].rstrip().removesuffix("..."))
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if status != 0:
        lines = log.read_text().splitlines()
        errors = [line for line in lines if line.startswith("E: ") and "failed to run" not in line]
        kept = directory.parent / "sandbox-image-failure.log"
        log.replace(kept)
        reason = errors[0].removeprefix("E: ") if errors else f"mmdebstrap ended with status {status}"
        raise SandboxError(
            f"the base image could not be made: {reason}",
            f"see {kept}; check that `apt-get update` works on this machine, then run `fleet sandbox up` again",
        )


def _trim(tree: Path) -> None:
    """What an image must not carry: this machine's names, keys, proxies; and timers that have nothing to do."""
    for pattern in (
        *("etc/ssh/ssh_host_*", "etc/apt/apt.conf.d/99mmdebstrap", "etc/apt/sources.list", "etc/apt/sources.list.d/*"),
        *("etc/machine-id", "etc/hostname", "etc/resolv.conf"),
        *("var/lib/apt/lists/*_*", "var/cache/apt/archives/*.deb"),
    ):
        for file in tree.glob(pattern):
            file.unlink()
    (tree / "etc/default/locale").write_text("LANG=C.UTF-8\n")
    for unit in MASKED:
        mask = tree / "etc/systemd/system" / unit
        mask.unlink(missing_ok=True)
        mask.symlink_to("/dev/null")


def _python_version(tree: Path) -> tuple[int, int]:
    name = (tree / "usr/bin/python3").readlink().name
    major, minor = name.removeprefix("python").split(".")
    return int(major), int(minor)


def package_version(tree: Path, package: str) -> tuple[int, ...]:
    """The leading numbers of a package's upstream version in the image, e.g. (252, 39)."""
    status = (tree / "var/lib/dpkg/status").read_text()
    found = re.search(rf"^Package: {re.escape(package)}\n(?:.+\n)*?Version: (?:\d+:)?([\d.]+)", status, re.MULTILINE)
    return tuple(int(part) for part in found.group(1).split(".") if part) if found else ()


def missing_tool(cache: Path | None = None) -> bool:
    """Whether mmdebstrap will be needed, that is: no image is cached."""
    return not (location(cache) / "tree").is_dir()
