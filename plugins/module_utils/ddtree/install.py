"""What a host needs before its first release: service user, directories, the agent and its two static units.

`plan` says what differs and changes nothing; `apply` makes it so. Both look at the same things.
"""

from __future__ import annotations

import dataclasses
import grp
import hashlib
import os
import pwd
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import files, store, units
from .paths import RECOVER_UNIT, Paths
from .process import run

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.py\Z")
_UNIT = re.compile(r"ddtree-[a-z-]+@?\.service\Z")
_KEPT_AGENTS = 3
SCRIPT = """#!/usr/bin/python3 -I
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
from ddtree.agent import main

sys.exit(main())
"""


class InstallError(Exception):
    """The host cannot be prepared; the message says why."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What has to stand on the host. `agent` is the content of the agent's files by name, `units` that of its units.

    `sender` is the account that uploads arrive under, where that is not root.
    """

    user: str
    agent_version: str
    units: dict[str, str]
    agent: dict[str, str] = dataclasses.field(default_factory=dict)
    sender: str = "root"

    @classmethod
    def of(cls, value: dict[str, Any]) -> Spec:
        names = {field.name for field in dataclasses.fields(cls)}
        spec = cls(**{key: item for key, item in value.items() if key in names})
        for name in (spec.user, spec.sender):
            if not _USER.match(name):
                raise InstallError(f"not a user name: {name!r}")
        if not re.match(r"[0-9a-f]{12}\Z", spec.agent_version):
            raise InstallError(f"not an agent version: {spec.agent_version!r}")
        for name in spec.agent:
            if not _MODULE.match(name):
                raise InstallError(f"not the name of an agent's file: {name!r}")
        for name in spec.units:
            if not _UNIT.match(name):
                raise InstallError(f"not a unit of the agent: {name!r}")
        return spec


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that differs: what, in words; `before` and `after` where it is a text; `act` mends it."""

    what: str
    act: Callable[[], None]
    before: str = ""
    after: str = ""
    header: str = ""
    part: str = ""


def agent_version(content: dict[str, str]) -> str:
    """Digest of the agent's files: 12 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(f"{name}\0{content[name]}\0".encode())
    digest.update(SCRIPT.encode())
    return digest.hexdigest()[:12]


def plan(paths: Paths, spec: Spec) -> list[Change]:
    """What differs between the host and `spec`, in the order in which it has to be mended."""
    return [*_user(spec), *_directories(paths, spec), *_agent(paths, spec), *_units(paths, spec)]


def apply(paths: Paths, spec: Spec) -> list[Change]:
    """Mend what differs; returns what was changed. Raises InstallError."""
    changes = plan(paths, spec)
    for change in changes:
        change.act()
    if any(change.part == "unit" for change in changes):
        units.daemon_reload()
    return changes


# -- user and directories ---------------------------------------------------------------------------------------------


def _user(spec: Spec) -> list[Change]:
    try:
        entry = pwd.getpwnam(spec.user)
    except KeyError:
        return [Change(f"create service user {spec.user}", lambda: _add_user(spec.user), part="user")]
    if entry.pw_uid == 0:
        raise InstallError(f"{spec.user} is root: engines must not run as root, choose another fleet_user")
    return []


def _add_user(name: str) -> None:
    try:
        grp.getgrnam(name)
        group = ["--gid", name]
    except KeyError:
        group = ["--user-group"]
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if useradd is None:
        raise InstallError(f"useradd is not installed on this host: create the system user {name} by other means")
    options = ["--system", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin"]
    run(useradd, *options, *group, name)


def _directories(paths: Paths, spec: Spec) -> list[Change]:
    sender = _uid(spec.sender)
    wanted = [(path, 0o755, 0) for path in (paths.root, paths.store, paths.releases, paths.agent, paths.slots)]
    wanted += [(store.incoming(paths), 0o700, sender), (paths.state, 0o700, 0), (paths.verified, 0o700, 0)]
    wanted += [(paths.cache, 0o755, 0)]
    changes = []
    for path, mode, owner in wanted:
        try:
            info = path.lstat()
        except FileNotFoundError:
            info = None
        if info is not None and not stat.S_ISDIR(info.st_mode):
            raise InstallError(f"{path} is in the way: it is no directory")
        if info is None or stat.S_IMODE(info.st_mode) != mode or info.st_uid != owner:
            word = "create" if info is None else "correct owner and mode of"
            changes.append(
                Change(
                    f"{word} {path}",
                    lambda path=path, mode=mode, owner=owner: _make(path, mode, owner),  # type: ignore[misc]
                    part="directory",
                )
            )
    return changes


def _uid(name: str) -> int:
    try:
        return 0 if name == "root" else pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise InstallError(f"user {name}, under which uploads arrive, does not exist on this host") from error


def _make(path: Path, mode: int, owner: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(path, owner, 0)
    path.chmod(mode)


# -- the agent --------------------------------------------------------------------------------------------------------


def _installed_files(folder: Path) -> dict[str, str]:
    try:
        return {path.name: path.read_text() for path in (folder / "ddtree").glob("*.py")}
    except (OSError, UnicodeDecodeError):
        return {}


def agent_intact(paths: Paths, version: str) -> bool:
    """Is the agent of this version here, unaltered, and the current one?"""
    folder = paths.agent / version
    try:
        script = (folder / "ddtree-agent").read_text()
        current = (paths.agent / "current").readlink().name
    except OSError:
        return False
    return script == SCRIPT and current == version and agent_version(_installed_files(folder)) == version


def _agent(paths: Paths, spec: Spec) -> list[Change]:
    if agent_intact(paths, spec.agent_version):
        return []
    link = paths.agent / "current"
    before = link.readlink().name if link.is_symlink() else "none"
    return [
        Change(
            f"install agent {spec.agent_version} (now {before})",
            lambda: _install_agent(paths, spec),
            before=f"{before}\n",
            after=f"{spec.agent_version}\n",
            header=str(link),
            part="agent",
        )
    ]


def _install_agent(paths: Paths, spec: Spec) -> None:
    if agent_version(spec.agent) != spec.agent_version:
        raise InstallError("the agent's files did not arrive as they were sent: deploy again")
    building = paths.agent / f".new-{secrets.token_hex(4)}"
    package = building / "ddtree"
    try:
        package.mkdir(parents=True)
        for name, text in spec.agent.items():
            files.write_atomic(package / name, text)
        files.write_atomic(building / "ddtree-agent", SCRIPT, 0o755)
        probe = run("/usr/bin/python3", "-I", "-B", str(building / "ddtree-agent"), "--help", check=False)
        if not probe.ok:
            raise InstallError(f"the agent does not run with this host's /usr/bin/python3: {probe.explain()}")
        building.chmod(0o755)
        final = paths.agent / spec.agent_version
        if final.exists():
            aside = paths.agent / f".old-{secrets.token_hex(4)}"
            final.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        building.rename(final)
        files.fsync_dir(paths.agent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    files.replace_link(paths.agent / "current", spec.agent_version)
    _tidy_agents(paths, spec.agent_version)


def _tidy_agents(paths: Paths, current: str) -> None:
    """A run that is under way may still belong to an older agent: the last few stay."""
    for left in paths.agent.glob(".[no]*-*"):
        shutil.rmtree(left, ignore_errors=True)
    versions = [path for path in paths.agent.glob("*") if path.is_dir() and not path.is_symlink()]
    versions.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in versions[_KEPT_AGENTS:]:
        if path.name != current:
            shutil.rmtree(path, ignore_errors=True)


# -- units ------------------------------------------------------------------------------------------------------------


def _units(paths: Paths, spec: Spec) -> list[Change]:
    changes = []
    for name, text in sorted(spec.units.items()):
        path = paths.units / name
        try:
            before = path.read_text()
        except FileNotFoundError:
            before = ""
        if before != text:
            changes.append(
                Change(
                    f"{'write' if not before else 'rewrite'} {path}",
                    lambda path=path, text=text: files.write_atomic(path, text),  # type: ignore[misc]
                    before=before,
                    after=text,
                    header=str(path),
                    part="unit",
                )
            )
    if RECOVER_UNIT in spec.units and not _enabled(paths):
        changes.append(Change(f"enable {RECOVER_UNIT}", lambda: _enable(paths), part="unit"))
    return changes


def _enabled(paths: Paths) -> bool:
    return (paths.units / "multi-user.target.wants" / RECOVER_UNIT).is_symlink()


def _enable(paths: Paths) -> None:
    files.replace_link(paths.units / "multi-user.target.wants" / RECOVER_UNIT, str(paths.units / RECOVER_UNIT))
