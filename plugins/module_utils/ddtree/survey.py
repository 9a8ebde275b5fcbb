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
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import bom, distinfo, linkage, native
from .distinfo import Row
from .files import write_atomic

SCHEMA = 1
# size, mtime, ctime and inode: a file whose stamp is the same has not been written to
Stamp = list[int]
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
    present: dict[str, Stamp] = {}
    for folder in folders:
        present.update(_walk(folder, venv))
    reading = _Reading(venv, folders, present, known, jobs)
    if known and reading.unchanged():
        result = known["result"]
    else:
        result = reading.result()
        _store(cache, venv, reading.files, result)
    return {
        **result,
        "root": str(venv),
        "host": host(result["wanted"]),
        "files": len(present),
        "read_files": reading.hashed,
        "seconds": round(time.monotonic() - started, 3),
    }


def environments(venv: str, root: Path) -> list[tuple[str, Path, dict[str, Any]]]:
    """(name, environment, manifest of its release) of what is to be read on a host.

    That is `venv`, or without it the releases that slots point to, or where there are none the newest release.
    """
    if venv:
        return [(venv, Path(venv), {})]
    links = [link for link in sorted(root.glob("slots/*/current")) if link.is_symlink()]
    releases = sorted({path for path in (link.resolve() for link in links) if (path / "venv").is_dir()})
    if not releases:
        kept = [path for path in root.glob("releases/*") if (path / "venv").is_dir()]
        releases = sorted(kept, key=lambda path: path.stat().st_mtime)[-1:]
    return [(path.name, path / "venv", _manifest(path)) for path in releases]


def _manifest(release: Path) -> dict[str, Any]:
    try:
        value = json.loads((release / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class _Reading:
    """One pass over an environment, with what the last one left to spare work."""

    def __init__(
        self, venv: Path, folders: list[Path], present: dict[str, Stamp], known: dict[str, Any], jobs: int
    ) -> None:
        self.venv, self.folders, self.present, self.jobs = venv, folders, present, jobs
        self.before: dict[str, list[Any] | None] = known.get("files", {})
        self.last: dict[str, Any] = known.get("result", {})
        # every file that counts: its stamp, and its hash where it was read; None for one that is not there
        self.files: dict[str, list[Any] | None] = {path: [*stamp, ""] for path, stamp in present.items()}
        self.hashed = 0
        self.problems: list[dict[str, str]] = []
        self.owners: dict[str, list[tuple[str, str]]] = {}
        self.expected: dict[str, list[Row]] = {}

    def unchanged(self) -> bool:
        """Every file is as it was, those outside site-packages included, and there is no new one."""
        if not self.present.keys() <= self.before.keys():
            return False
        for path, entry in self.before.items():
            stamp = self.present.get(path)
            if stamp is None:
                stamp = _stamp(self.venv / path)
            if stamp != (entry[:4] if entry else None):
                return False
        return True

    def result(self) -> dict[str, Any]:
        distributions = [facts for folder in self.folders for facts in self._distributions(folder)]
        with concurrent.futures.ThreadPoolExecutor(max(1, self.jobs)) as pool:
            hashes = _hashed(pool, self.venv, self._verify())
            compiled = self._libraries()  # meanwhile: hashing leaves the interpreter free
            for path, stamp, digest in hashes:
                self.hashed += 1
                if digest:
                    self._judge(path, stamp, digest)
                else:
                    self._tell("unreadable", path, "cannot be read")
        self._unowned({item["folder"] for item in distributions})
        self.files["pyvenv.cfg"] = _entry(_stamp(self.venv / "pyvenv.cfg"))
        return {
            "schema": SCHEMA,
            "python": _python(self.venv, self.folders[0]),
            "torch": _torch(self.folders),
            "distributions": sorted(distributions, key=lambda item: (item["name"], item["version"])),
            "shared": shared(self.owners),
            **compiled,
            "problems": sorted(self.problems, key=lambda item: (item["kind"], item["path"])),
        }

    def _distributions(self, folder: Path) -> Iterator[dict[str, Any]]:
        site = os.path.relpath(folder, self.venv)
        for info in sorted(folder.iterdir()):
            if not info.name.endswith((".dist-info", ".egg-info")):
                continue
            facts, rows = _distribution(info)
            if facts["problem"]:
                self.problems.append(problem("metadata", f"{site}/{info.name}", facts["name"], facts["problem"]))
            for row in rows:
                path = _inside(site, row.path)
                if not path:
                    detail = "lies outside the environment"
                    self.problems.append(problem("escapes", row.path[:300], facts["name"], detail))
                elif row.hash:
                    self.expected.setdefault(path, []).append(row)
                    self.owners.setdefault(path, []).append((facts["name"], row.hash))
            yield facts

    def _verify(self) -> list[tuple[str, str, Stamp]]:
        """Compare every recorded file with its hash; those of unknown hash are returned.

        Of a file that two distributions claim, one is right.
        """
        todo: list[tuple[str, str, Stamp]] = []
        for path, rows in self.expected.items():
            stamp = self.present.get(path) or _stamp(self.venv / path)  # scripts lie outside site-packages
            self.files[path] = _entry(stamp)
            if stamp is None:
                self._tell("missing", path, "is in RECORD, but not there")
            elif not any(row.size in (-1, stamp[0]) for row in rows):
                self._tell("edited", path, f"has {stamp[0]} bytes, RECORD says {rows[0].size}")
            else:
                entry = self.before.get(path)
                if entry and entry[4] and entry[:4] == stamp:
                    self._judge(path, stamp, str(entry[4]))
                else:
                    todo.append((path, rows[0].hash.partition("=")[0], stamp))
        return todo

    def _judge(self, path: str, stamp: Stamp, digest: str) -> None:
        self.files[path] = [*stamp, digest]
        if digest not in {row.hash for row in self.expected[path]}:
            self._tell("edited", path, "does not have the hash that RECORD says")

    def _tell(self, kind: str, path: str, detail: str) -> None:
        self.problems.append(problem(kind, path, self.owners[path][0][0], detail))

    def _unowned(self, infos: set[str]) -> None:
        """Files that no distribution brought, told once for each top-level name: copied by hand, or left behind."""
        if any(info.endswith(".egg-info") for info in infos):
            return  # such a distribution does not list its files
        found: dict[str, int] = {}
        for folder in self.folders:
            prefix = f"{os.path.relpath(folder, self.venv)}/"
            for path in self.present.keys() - self.expected.keys():
                inside = path.removeprefix(prefix)
                top = inside.partition("/")[0]
                if path.startswith(prefix) and top not in infos and not _UNRECORDED.match(inside):
                    found[prefix + top] = found.get(prefix + top, 0) + 1
        for path, count in found.items():
            self.problems.append(problem("unowned", path, "", f"({count} files) was brought by no distribution"))

    def _libraries(self) -> dict[str, Any]:
        """Facts of the libraries; those of the last time, if none of them has changed."""
        stamps = {path: stamp for path, stamp in self.present.items() if is_library(path)}
        before = {path: entry[:4] for path, entry in self.before.items() if entry and is_library(path)}
        if self.last and stamps == before:
            compiled = {key: self.last[key] for key in ("libraries", "unresolved", "unversioned", "wanted")}
            damaged = [item for item in self.last["problems"] if item["kind"] == "damaged"]
        else:
            compiled = _native(self.venv, stamps)
            damaged = compiled.pop("problems")
        for item in (*compiled["libraries"], *damaged):
            item["distribution"] = self.owners.get(item["path"], [("", "")])[0][0]
        self.problems += damaged
        return compiled


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


def _stamp(path: Path) -> Stamp | None:
    try:
        return _numbers(path.stat())
    except OSError:
        return None


def _numbers(status: os.stat_result) -> Stamp:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _entry(stamp: Stamp | None) -> list[Any] | None:
    return None if stamp is None else [*stamp, ""]


def _inside(site: str, path: str) -> str:
    """A path of RECORD, from the environment; empty where it leads out of it."""
    if not path.startswith("/") and "//" not in path and "./" not in path:
        return f"{site}/{path}"
    path = os.path.normpath(os.path.join(site, path))  # noqa: PTH118  (nothing is asked of the file system)
    return "" if path.startswith(("/", "../")) or path == ".." else path


def _walk(folder: Path, venv: Path) -> dict[str, Stamp]:
    """Every file below `folder`, by path from the environment. Links to folders are not followed."""
    found: dict[str, Stamp] = {}
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
                    found[os.path.normpath(entry.path)[prefix:]] = _numbers(entry.stat())
            except OSError:  # a link to nowhere is there all the same
                with contextlib.suppress(OSError):
                    found[os.path.normpath(entry.path)[prefix:]] = _numbers(entry.stat(follow_symlinks=False))
    return found


def _hashed(
    pool: concurrent.futures.Executor, venv: Path, todo: list[tuple[str, str, Stamp]]
) -> Iterator[tuple[str, Stamp, str]]:
    """Hashes of files, big ones first; begun at once, to be taken later."""
    todo.sort(key=lambda item: -item[2][0])
    batches: list[list[tuple[str, str, Stamp]]] = []
    for item in todo:
        if item[2][0] >= _BIG or not batches or len(batches[-1]) >= _BATCH or batches[-1][0][2][0] >= _BIG:
            batches.append([])
        batches[-1].append(item)
    results = pool.map(lambda items: _digests(venv, items), batches)

    def taken() -> Iterator[tuple[str, Stamp, str]]:
        for batch, digests in zip(batches, results, strict=True):
            for (path, _, stamp), digest in zip(batch, digests, strict=True):
                yield path, stamp, digest

    return taken()


def _digests(venv: Path, items: list[tuple[str, str, Stamp]]) -> list[str]:
    found = []
    for path, algorithm, _ in items:
        try:
            with os.fdopen(_open(f"{venv}/{path}"), "rb", buffering=0) as stream:
                digest = hashlib.file_digest(stream, algorithm).digest()  # type: ignore[arg-type]
        except OSError:
            found.append("")
            continue
        found.append(distinfo.record_hash(algorithm, digest))
    return found


# -- libraries -------------------------------------------------------------------------------------------------------


def _native(venv: Path, files: dict[str, Stamp]) -> dict[str, Any]:
    libraries, problems = [], []
    for path, stamp in files.items():
        try:
            with os.fdopen(_open(venv / path), "rb", buffering=0) as stream:
                if stream.read(7) in (b"INPUT (", b"GROUP (", b"/* GNU "):
                    continue  # a linker script, no library
                image = native.Image(stream)
                libraries.append(linkage.Library.of(path, stamp[0], image.facts(), image.symbols()))
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
    if not isinstance(value, dict) or value.get("key") != _key(venv):
        return {}
    fitting = isinstance(value.get("files"), dict) and isinstance(value.get("result"), dict)
    return value if fitting else {}


def _key(venv: Path) -> list[str]:
    """Stamps are worth nothing for another folder, or after a change of the code that made them."""
    code = hashlib.sha256()
    for module in (native, linkage, distinfo, bom, sys.modules[__name__]):
        source = getattr(module.__spec__ and module.__spec__.loader, "get_source", None)
        code.update(str(source(module.__name__) if source else "").encode())
    return [os.path.realpath(venv), str(SCHEMA), code.hexdigest()]


def _store(cache: Path | None, venv: Path, files: dict[str, Any], result: dict[str, Any]) -> None:
    if cache is None:
        return
    value = {"key": _key(venv), "files": files, "result": result}
    with contextlib.suppress(OSError):  # the next survey takes longer, that is all
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(cache, json.dumps(value, separators=(",", ":")), 0o600)
