"""May a user read or write a path? Asked by becoming that user, so that ACLs and network file systems count too."""

from __future__ import annotations

import errno
import json
import os
import pwd
from collections.abc import Iterable
from pathlib import Path

NOBODY = 65534
BLOCKED = "may not be entered"


def user_ids(name: str) -> tuple[int, int, list[int]] | None:
    """(uid, gid, all groups) of a user, None where it does not exist."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return entry.pw_uid, entry.pw_gid, os.getgrouplist(name, entry.pw_gid)


def denied(ids: tuple[int, int, list[int]] | None, paths: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Paths that a user may not use in the wanted way (os.R_OK, os.W_OK, os.X_OK), each with the reason.

    `ids` None is a user that is still to be made: it will have what everybody has. Needs root; a caller that is
    not root learns what it may itself.
    """
    wanted = list(paths)
    if not wanted:
        return {}
    uid, gid, groups = ids or (NOBODY, NOBODY, [NOBODY])
    if os.geteuid() != 0:
        return _denied_here(wanted)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            data = json.dumps(_denied_here(wanted)).encode()
            while data:
                data = data[os.write(writer, data) :]
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        return {path: "could not be examined as the service user" for path, _ in wanted}
    found: dict[str, str] = json.loads(answer)
    return found


def _denied_here(wanted: list[tuple[str, int]]) -> dict[str, str]:
    found = {}
    for path, mode in wanted:
        if os.access(path, mode):
            continue
        blocked = next((str(parent) for parent in reversed(Path(path).parents) if not os.access(parent, os.X_OK)), None)
        if blocked:
            found[path] = f"{blocked} {BLOCKED}"
        else:
            found[path] = os.strerror(errno.EACCES if os.path.lexists(path) else errno.ENOENT)
    return found
