"""Everything the audit wants to know of a virtual environment, whoever made it: read from its files, never imported.

The answer is plain data that is judged elsewhere. Files that have not changed since the last survey (size, times and
inode) are not read again when a cache file is given.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import platform
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import bom, distinfo, linkage, native
from .distinfo import Row
from .files import write_atomic

SCHEMA = 1
_LIBRARY = re.compile(r"\.so(\.\d+)*\Z")
# Made after the installation by interpreter and installers; nobody vouches for them.
_UNRECORDED = re.compile(
    r"(?:.*/)?(?:__pycache__/.*|[^/]+\.py[co]|_virtualenv\.(?:py|pth)|\.lock|CACHEDIR\.TAG|\.gitignore)\Z"
)
_BATCH = 64
_BIG = 4 << 20
_SYSTEM_FOLDERS = ("/lib64", "/usr/lib64", "/lib/{0}-linux-gnu", "/usr/lib/{0}-linux-gnu", "/usr/local/lib", "/usr/lib")


def survey(venv: Path, cache: Path | None = None, jobs: int = 2) -> dict[str, Any]:
    """Facts of the environment in `venv`. Raises bom.NotAVenv."""
    started = time.monotonic()
    folders = bom.site_packages(venv)
    if not folders:
        raise bom.NotAVenv(f"{venv} holds no lib/python3.*/site-packages: it is no virtual environment")
    known = _load(cache, venv)
    seen = _Seen(known.get("files", {}))
    distributions: list[dict[str, Any]] = []
    problems: list[dict[str, str]] = []
    owners: dict[str, list[tuple[str, str]]] = {}
    expected: dict[str, list[Row]] = {}
    present: dict[str, os.stat_result] = {}
    for folder in folders:
        site = _relative(folder, venv)
        for info in sorted(folder.iterdir()):
            if not info.name.endswith((".dist-info", ".egg-info")):
                continue
            facts, rows = _distribution(info)
            distributions.append(facts)
            if facts["problem"]:
                problems.append(problem("metadata", _relative(info, venv), facts["name"], facts["problem"]))
            for row in rows:
                path = _inside(site, row.path)
                if not path:
                    problems.append(problem("escapes", row.path[:300], facts["name"], "lies outside the environment"))
                elif row.hash:
                    expected.setdefault(path, []).append(row)
                    owners.setdefault(path, []).append((facts["name"], row.hash))
        present.update(_walk(folder, venv))
    problems += _verify(venv, expected, present, owners, seen, jobs)
    problems += _unowned(present, expected, {item["folder"] for item in distributions}, folders, venv)
    libraries = {path: status for path, status in present.items() if _LIBRARY.search(path)}
    stamps = {path: _stamp(status) for path, status in libraries.items()}
    reusable = known.get("libraries") == stamps and "native" in known
    compiled = known["native"] if reusable else _native(venv, libraries)
    for item in (*compiled["libraries"], *compiled["problems"]):
        item["distribution"] = owners.get(item["path"], [("", "")])[0][0]
    result = {
        "schema": SCHEMA,
        "root": str(venv),
        "python": _python(venv, folders[0]),
        "torch": _torch(folders),
        "distributions": sorted(distributions, key=lambda item: (item["name"], item["version"])),
        "shared": shared(owners),
        **{key: value for key, value in compiled.items() if key != "problems"},
        "problems": sorted([*problems, *compiled["problems"]], key=lambda item: (item["kind"], item["path"])),
        "host": host(compiled["wanted"]),
    }
    seen.drop_absent(present)
    _store(cache, venv, {"files": seen.stamps, "libraries": stamps, "native": compiled}, known)
    result["read_files"], result["files"] = seen.hashed, len(present)
    result["seconds"] = round(time.monotonic() - started, 3)
    return result


def shared(owners: dict[str, list[tuple[str, str]]]) -> list[dict[str, Any]]:
    """Files that several distributions claim with different content, by their distributions."""
    found: dict[tuple[str, ...], list[str]] = {}
    for path, claims in owners.items():
        if len({said for _, said in claims}) > 1:
            found.setdefault(tuple(sorted({name for name, _ in claims})), []).append(path)
    return [
        {"distributions": list(names), "paths": sorted(paths)[:20], "count": len(paths)}
        for names, paths in sorted(found.items())
        if len(names) > 1
    ]


def is_library(path: str) -> bool:
    return _LIBRARY.search(path) is not None


def problem(kind: str, path: str, distribution: str, detail: str) -> dict[str, str]:
    return {"kind": kind, "path": path, "distribution": distribution, "detail": detail}


# -- distributions ---------------------------------------------------------------------------------------------------


def _distribution(info: Path) -> tuple[dict[str, Any], list[Row]]:
    if not info.is_dir():
        return distinfo.distribution(info.name, _text(info, distinfo.METADATA_LIMIT) or "", "", None)
    main = "METADATA" if info.name.endswith(".dist-info") else "PKG-INFO"
    record = _text(info / "RECORD", distinfo.RECORD_LIMIT)
    facts, rows = distinfo.distribution(
        info.name,
        _text(info / main, distinfo.METADATA_LIMIT) or "",
        _text(info / "WHEEL", distinfo.METADATA_LIMIT) or "",
        record,
    )
    if record is None and info.name.endswith(".dist-info") and not facts["problem"]:
        facts["problem"] = "RECORD is missing, so nobody can say whether its files are whole"
    return facts, rows


def _text(path: Path, limit: int) -> str | None:
    try:
        descriptor = _open(path)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as stream:
        data = stream.read(limit + 1)
    return data.decode("utf-8", "replace") if len(data) <= limit else ""


def _open(path: str | Path) -> int:
    """Open a regular file; a pipe or device that lies in its place would block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is no regular file")
    return descriptor


def _python(venv: Path, folder: Path) -> dict[str, str]:
    text = _text(venv / "pyvenv.cfg", 1 << 16) or ""
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+[^\s]*)", text, re.MULTILINE | re.IGNORECASE)
    minor = re.search(r"python(3\.\d+)\Z", folder.parent.name)
    version = found.group(1) if found else ""
    return {"version": version, "minor": minor.group(1) if minor else ".".join(version.split(".")[:2])}


def _torch(folders: Iterable[Path]) -> dict[str, str]:
    for folder in folders:
        text = _text(folder / "torch" / "version.py", 1 << 16)
        if text is not None:
            return distinfo.torch_build(text)
    return {}


# -- files -----------------------------------------------------------------------------------------------------------


class _Seen:
    """Hashes of files by their stamps, from the last survey and this one."""

    def __init__(self, before: dict[str, list[Any]]) -> None:
        self.stamps = dict(before)
        self.hashed = 0

    def known(self, path: str, stamp: list[int]) -> str:
        entry = self.stamps.get(path)
        return str(entry[4]) if entry and entry[:4] == stamp else ""

    def note(self, path: str, stamp: list[int], digest: str) -> None:
        self.stamps[path] = [*stamp, digest]
        self.hashed += 1

    def drop_absent(self, present: dict[str, os.stat_result]) -> None:
        self.stamps = {path: entry for path, entry in self.stamps.items() if path in present}


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _relative(path: Path, venv: Path) -> str:
    return os.path.relpath(path, venv)


def _inside(site: str, path: str) -> str:
    """A path of RECORD, from the environment; empty where it leads out of it."""
    if not path.startswith("/") and "//" not in path and "./" not in path:
        return f"{site}/{path}"
    path = os.path.normpath(os.path.join(site, path))  # noqa: PTH118  (nothing is asked of the file system)
    return "" if path.startswith(("/", "../")) or path == ".." else path


def _walk(folder: Path, venv: Path) -> dict[str, os.stat_result]:
    """Every file below `folder`, by path from the environment. Links to folders are not followed."""
    found: dict[str, os.stat_result] = {}
    todo = [str(folder)]
    prefix = len(os.path.normpath(venv)) + 1
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        todo.append(entry.path)
                elif not entry.is_dir():
                    found[os.path.normpath(entry.path)[prefix:]] = entry.stat()
            except OSError:
                with contextlib.suppress(OSError):
                    found[os.path.normpath(entry.path)[prefix:]] = entry.stat(follow_symlinks=False)
    return found


def _verify(
    venv: Path,
    expected: dict[str, list[Row]],
    present: dict[str, os.stat_result],
    owners: dict[str, list[tuple[str, str]]],
    seen: _Seen,
    jobs: int,
) -> list[dict[str, str]]:
    """Compare every recorded file with its hash. Of a file that two distributions claim, one is right."""
    problems: list[dict[str, str]] = []
    todo: list[tuple[str, list[Row], list[int]]] = []
    for path, rows in expected.items():
        status = present.get(path)
        if status is None:  # scripts lie outside site-packages
            try:
                status = (venv / path).stat()
            except OSError:
                problems.append(problem("missing", path, owners[path][0][0], "is in RECORD, but not there"))
                continue
            present[path] = status
        stamp = _stamp(status)
        if not any(row.size in (-1, status.st_size) for row in rows):
            detail = f"has {status.st_size} bytes, RECORD says {rows[0].size}"
            problems.append(problem("edited", path, owners[path][0][0], detail))
            continue
        digest = seen.known(path, stamp)
        if digest:
            if digest not in {row.hash for row in rows}:
                problems.append(problem("edited", path, owners[path][0][0], "does not have the hash that RECORD says"))
        else:
            todo.append((path, rows, stamp))
    for path, rows, stamp, digest in _hashed(venv, todo, jobs):
        if not digest:
            problems.append(problem("unreadable", path, owners[path][0][0], "cannot be read"))
            continue
        seen.note(path, stamp, digest)
        if digest not in {row.hash for row in rows}:
            problems.append(problem("edited", path, owners[path][0][0], "does not have the hash that RECORD says"))
    return problems


def _hashed(
    venv: Path, todo: list[tuple[str, list[Row], list[int]]], jobs: int
) -> Iterable[tuple[str, list[Row], list[int], str]]:
    """Hashes of files, big ones first. Threads suffice: hashing and reading leave the interpreter free."""
    todo.sort(key=lambda item: -item[2][0])
    batches: list[list[tuple[str, list[Row], list[int]]]] = []
    for item in todo:
        if item[2][0] >= _BIG or not batches or len(batches[-1]) >= _BATCH or batches[-1][0][2][0] >= _BIG:
            batches.append([])
        batches[-1].append(item)
    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        for batch, digests in zip(batches, pool.map(lambda items: _digests(venv, items), batches), strict=True):
            for (path, rows, stamp), digest in zip(batch, digests, strict=True):
                yield path, rows, stamp, digest


def _digests(venv: Path, items: list[tuple[str, list[Row], list[int]]]) -> list[str]:
    found = []
    for path, rows, _ in items:
        algorithm = rows[0].hash.partition("=")[0]
        try:
            with os.fdopen(_open(venv / path), "rb", buffering=0) as stream:
                digest = hashlib.file_digest(stream, algorithm).digest()  # type: ignore[arg-type]
        except OSError:
            found.append("")
            continue
        found.append(distinfo.record_hash(algorithm, digest))
    return found


def _unowned(
    present: dict[str, os.stat_result],
    expected: dict[str, list[Row]],
    infos: set[str],
    folders: list[Path],
    venv: Path,
) -> list[dict[str, str]]:
    """Files that no distribution brought, one line for each top-level name: copied there by hand, or left behind."""
    if any(info.endswith(".egg-info") for info in infos):
        return []  # such a distribution does not list its files
    found: dict[str, int] = {}
    for folder in folders:
        prefix = f"{_relative(folder, venv)}/"
        for path in present.keys() - expected.keys():
            inside = path.removeprefix(prefix)
            top = inside.partition("/")[0]
            if path.startswith(prefix) and top not in infos and not _UNRECORDED.match(inside):
                found[prefix + top] = found.get(prefix + top, 0) + 1
    return [
        problem("unowned", path, "", f"({count} files) was brought by no distribution") for path, count in found.items()
    ]


# -- libraries -------------------------------------------------------------------------------------------------------


def _native(venv: Path, files: dict[str, os.stat_result]) -> dict[str, Any]:
    libraries, problems = [], []
    for path, status in files.items():
        try:
            with os.fdopen(_open(venv / path), "rb", buffering=0) as stream:
                if stream.read(7) in (b"INPUT (", b"GROUP (", b"/* GNU "):
                    continue  # a linker script, no library
                image = native.Image(stream)
                libraries.append(linkage.Library.of(path, status.st_size, image.facts(), image.symbols()))
        except (native.BadLibrary, OSError) as error:
            problems.append(problem("damaged", path, "", str(error)))
    return linked(libraries, problems)


def linked(libraries: list[linkage.Library], problems: list[dict[str, str]]) -> dict[str, Any]:
    """What the libraries are to each other, as the part of a survey that the audit judges."""
    environment = linkage.Environment(libraries)
    return {
        "libraries": linkage.facts(environment),
        "unresolved": environment.unresolved(),
        "unversioned": [list(item) for item in environment.unversioned()],
        "wanted": linkage.system_needs(libraries, environment),
        "problems": problems,
    }


def host(wanted: Iterable[str] = ()) -> dict[str, Any]:
    """This machine, as far as libraries care: C library, processor, and which of the `wanted` libraries it has."""
    try:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (ValueError, OSError):
        glibc = ""
    machine = platform.machine()
    try:
        cache = Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        cache = b""
    folders = [Path(folder.format(machine)) for folder in _SYSTEM_FOLDERS]
    libraries: dict[str, list[str] | None] = {}
    for soname in wanted:
        path = next((folder / soname for folder in folders if (folder / soname).is_file()), None)
        if path is None:
            libraries[soname] = [] if b"\0" + soname.encode() + b"\0" in cache else None
            continue
        try:
            libraries[soname] = list(native.read(path).defines)
        except (native.BadLibrary, OSError):
            libraries[soname] = []
    return {"glibc": glibc, "machine": machine, "libraries": libraries}


# -- cache -----------------------------------------------------------------------------------------------------------


def _load(cache: Path | None, venv: Path) -> dict[str, Any]:
    """What the last survey of this environment left. A cache that cannot be trusted counts as none."""
    if cache is None:
        return {}
    try:
        value = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    fitting = isinstance(value, dict) and value.get("key") == _key(venv) and isinstance(value.get("files"), dict)
    return value if fitting else {}


def _key(venv: Path) -> list[str]:
    """Stamps are worth nothing for another folder, or after a change of the code that made them."""
    code = hashlib.sha256()
    for module in (native, linkage, distinfo):
        loader = module.__spec__.loader if module.__spec__ else None
        get_data = getattr(loader, "get_source", None)
        code.update(str(get_data(module.__name__) if get_data else "").encode())
    return [os.path.realpath(venv), str(SCHEMA), code.hexdigest()]


def _store(cache: Path | None, venv: Path, value: dict[str, Any], known: dict[str, Any]) -> None:
    value = {"key": _key(venv), **value}
    if cache is None or value == known:
        return
    with contextlib.suppress(OSError):  # the next survey takes longer, that is all
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(cache, json.dumps(value, separators=(",", ":")))
