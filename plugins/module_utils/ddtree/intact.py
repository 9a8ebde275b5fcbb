"""Is a release on disk still what was built? Every file of it by hash, or only those that were written to since.

Releases share files by hard links, so that damage to one is damage to all: that is why this is asked before each
activation. <state>/verified/<id>.json remembers what each file looked like when it was last read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import files
from .paths import Paths
from .store import hash_file, stamp

LISTING = "files.json"
_CHUNK = 1 << 20
Stamps = dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Damage:
    """One file that is not as it was built."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path} ({self.what})"


def scan(root: Path) -> dict[str, os.stat_result]:
    """Every file and link below `root`, by relative path. Directories are not listed."""
    found: dict[str, os.stat_result] = {}
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(root / prefix if prefix else root) as entries:
            for entry in entries:
                name = f"{prefix}/{entry.name}" if prefix else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name)
                else:
                    found[name] = entry.stat(follow_symlinks=False)
    return found


def hash_all(root: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 of each file, empty where it cannot be read. Uses every core: hashing is what takes the time."""
    listed = list(names)
    workers = os.cpu_count() or 1
    # dealt out in turns, so that each worker gets large files and small ones
    parts = [listed[start :: workers * 4] for start in range(workers * 4)]
    found: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for part in pool.map(lambda names: _hash_some(root, names), parts):
            found.update(part)
    return found


def _hash_some(root: Path, names: list[str]) -> dict[str, str]:
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    base = os.fspath(root)
    found = {}
    for name in names:
        try:
            descriptor = os.open(f"{base}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            found[name] = ""
            continue
        digest = hashlib.sha256()
        try:
            while read := os.readv(descriptor, [buffer]):
                digest.update(view[:read])
            found[name] = digest.hexdigest()
        except OSError:
            found[name] = ""
        finally:
            os.close(descriptor)
    return found


def describe(root: Path) -> tuple[dict[str, dict[str, Any]], Stamps]:
    """Content of files.json for everything below `root`, and the stamps of its files."""
    found = scan(root)
    hashes = hash_all(root, (name for name, info in found.items() if stat.S_ISREG(info.st_mode)))
    listing: dict[str, dict[str, Any]] = {}
    for name in sorted(found):
        info = found[name]
        if stat.S_ISLNK(info.st_mode):
            listing[name] = {"link": str((root / name).readlink())}
        elif stat.S_ISREG(info.st_mode):
            listing[name] = {"sha256": hashes[name], "size": info.st_size, "mode": stat.S_IMODE(info.st_mode)}
        else:
            raise OSError(f"{root / name} is neither a file nor a link")
    return listing, {name: stamp(info) for name, info in found.items() if stat.S_ISREG(info.st_mode)}


def verify(paths: Paths, release_id: str, quick: bool = False, remember: bool = True) -> list[Damage]:
    """What is wrong with a release, by file; empty when it is intact.

    `quick` reads only files that were written to, replaced or linked since they were last read. Nothing is changed but
    the memory of what was read, and with `remember` False not even that.
    """
    root = paths.release(release_id)
    if not root.is_dir():
        return [Damage(str(root), "the release is not on this host")]
    remembered = _remembered(paths, release_id)
    try:
        listing = files.read_json(root / LISTING)
    except (OSError, ValueError):
        listing = None
    if not isinstance(listing, dict) or not listing:
        return [Damage(LISTING, "missing or unreadable")]
    listing_hash = hash_file(root / LISTING)
    if remembered.get("listing", listing_hash) != listing_hash:
        return [Damage(LISTING, "changed")]
    try:
        found = scan(root)
    except OSError as error:
        return [Damage(error.filename or str(root), error.strerror or "cannot be read")]
    damage = [Damage(name, "unexpected file") for name in found if name not in listing and name != LISTING]
    known: Stamps = remembered.get("stamps", {}) if quick else {}
    unread: list[str] = []
    for name, entry in listing.items():
        wrong = _compare(root / name, entry, found.get(name))
        if wrong:
            damage.append(Damage(name, wrong))
        elif "sha256" in entry and known.get(name) != stamp(found[name]):
            unread.append(name)
    hashes = hash_all(root, unread)
    changed = {name for name in unread if hashes[name] != listing[name]["sha256"]}
    damage += [Damage(name, "content changed" if hashes[name] else "cannot be read") for name in changed]
    if remember and (unread or not quick):
        bad = {item.path for item in damage}
        stamps = {name: stamp(found[name]) for name, entry in listing.items() if "sha256" in entry and name not in bad}
        keep_stamps(paths, release_id, listing_hash, stamps)
    return sorted(damage, key=lambda item: item.path)


def _compare(path: Path, entry: dict[str, Any], info: os.stat_result | None) -> str:
    """What can be seen without reading the file."""
    if info is None:
        return "missing"
    if "link" in entry:
        if not stat.S_ISLNK(info.st_mode):
            return "no longer a link"
        target = str(path.readlink())
        return "" if target == entry["link"] else f"points at {target} instead of {entry['link']}"
    if not stat.S_ISREG(info.st_mode):
        return "no longer a file"
    if info.st_size != entry["size"]:
        return f"content changed: {info.st_size} bytes instead of {entry['size']}"
    if stat.S_IMODE(info.st_mode) != entry["mode"]:
        return f"mode {stat.S_IMODE(info.st_mode):04o} instead of {entry['mode']:04o}"
    return ""


def memory(paths: Paths, release_id: str) -> Path:
    return paths.verified / f"{release_id}.json"


def keep_stamps(paths: Paths, release_id: str, listing_hash: str, stamps: Stamps) -> None:
    """Best effort: without it the next quick verification is a full one."""
    with contextlib.suppress(OSError):
        files.write_atomic(memory(paths, release_id), json.dumps({"listing": listing_hash, "stamps": stamps}), 0o600)


def _remembered(paths: Paths, release_id: str) -> dict[str, Any]:
    try:
        value = files.read_json(memory(paths, release_id))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def others(paths: Paths, but: str = "") -> list[str]:
    """Releases that are remembered."""
    return [file.stem for file in paths.verified.glob("*.json") if file.stem not in ("store", but)]


@contextlib.contextmanager
def links_changing(paths: Paths, releases: Iterable[str]) -> Iterator[None]:
    """Making or removing a hard link changes the inode's ctime, but no content.

    Files of `releases` that were as remembered before, and differ in nothing but that afterwards, stay remembered.
    """
    before: dict[str, tuple[dict[str, Any], Stamps]] = {}
    for release_id in releases:
        memory_of = _remembered(paths, release_id)
        root = paths.release(release_id)
        if root.is_dir() and memory_of.get("stamps"):
            same = {name: value for name, value in memory_of["stamps"].items() if _now(root / name) == value}
            before[release_id] = (memory_of, same)
    yield
    for release_id, (memory_of, same) in before.items():
        root = paths.release(release_id)
        changed = False
        for name, value in same.items():
            now = _now(root / name)
            if now is not None and now != value and [*now[:2], now[3]] == [*value[:2], value[3]]:
                memory_of["stamps"][name] = now
                changed = True
        if changed:
            keep_stamps(paths, release_id, memory_of["listing"], memory_of["stamps"])


def _now(path: Path) -> list[int] | None:
    try:
        return stamp(path.lstat())
    except OSError:
        return None
