"""The wheelhouse: every wheel that a stack's lock names, each in a folder called after its sha256.

    <wheelhouse>/<sha256>/<file name>     complete, verified, read-only
    <wheelhouse>/<sha256>/checked.json    what the file looked like when it was last read in full
    <wheelhouse>/partial/<sha256>         a download that was cut off and will be continued

A file is taken from any configured source and kept only if its own hash is the lock's and it is a wheel in order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import httpx

from fleet import patched_wheel, stack_patched, wheelfile
from fleet.stack import LockedWheel, Stack
from fleet.wheelhouse_sources import Candidate, Finder, shown

_CHUNK = 1 << 20
_WORKERS = 6
# Free space that must be left on the wheelhouse's file system.
_RESERVE = 200 << 20


class WheelhouseError(RuntimeError):
    """The wheelhouse cannot be completed or is damaged; `problems` says for which file, and why."""

    def __init__(self, summary: str, problems: Iterable[str] = ()) -> None:
        self.problems = list(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a completion is: files and bytes, of those that were missing at its start."""

    filename: str
    files_done: int
    files: int
    bytes_done: int
    bytes: int
    seconds: float

    @property
    def eta_s(self) -> float | None:
        if self.bytes_done <= 0 or self.seconds < 0.5:
            return None
        return self.seconds * (self.bytes - self.bytes_done) / self.bytes_done


Report = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What `complete` did."""

    fetched: tuple[LockedWheel, ...]
    present: int
    bytes: int
    seconds: float
    # patched wheels that were made here
    made: tuple[LockedWheel, ...] = ()


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file of the store."""

    sha256: str
    filename: str
    size: int


def default_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ddtree-fleet" / "wheelhouse"


class Wheelhouse:
    """A hash-addressed store of wheels on the control node."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root).expanduser() if root else default_root()

    def path(self, wheel: LockedWheel) -> Path:
        return self.root / wheel.sha256 / wheel.filename

    def has(self, wheel: LockedWheel) -> bool:
        """Is the file there and unchanged since it was last read in full?"""
        path = self.path(wheel)
        try:
            seen = json.loads((path.parent / "checked.json").read_text())
            return path.stat().st_size == wheel.size and list(_stamp(path)) == seen
        except (OSError, ValueError):
            return False

    def missing(self, wheels: Iterable[LockedWheel]) -> list[LockedWheel]:
        """Wheels that are not there, or that were changed since; a file that was only touched is read again."""
        return [wheel for wheel in wheels if not self.has(wheel) and not self._reread(wheel)]

    def _reread(self, wheel: LockedWheel) -> bool:
        path = self.path(wheel)
        if not path.is_file() or path.stat().st_size != wheel.size or file_hash(path) != wheel.sha256:
            return False
        with contextlib.suppress(OSError):  # a wheelhouse on a read-only medium works too, only slower
            self._mark(path)
        return True

    def entries(self) -> list[Entry]:
        found = []
        for folder in self.root.glob("[0-9a-f]" * 64):
            for path in folder.glob("*.whl"):
                found.append(Entry(folder.name, path.name, path.stat().st_size))
        return sorted(found, key=lambda entry: entry.filename)

    def verify(self, wheels: Iterable[LockedWheel] | None = None) -> list[str]:
        """Read every file of the store, or those of a lock, in full; returns what is wrong, by file."""
        if wheels is None:
            checks: list[tuple[str, str, int | None]] = [
                (entry.sha256, entry.filename, None) for entry in self.entries()
            ]
        else:
            checks = [(wheel.sha256, wheel.filename, wheel.size) for wheel in wheels]
        with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
            found = pool.map(lambda item: self._verify(*item), checks)
        return [problem for problem in found if problem]

    def _verify(self, sha256: str, filename: str, size: int | None) -> str:
        path = self.root / sha256 / filename
        if not path.is_file():
            return f"{filename} is missing"
        real = file_hash(path)
        if real != sha256:
            return f"{path} was changed: its sha256 is {real[:16]}..., the lock's is {sha256[:16]}..."
        if size is not None and path.stat().st_size != size:
            return f"{filename}: the lock says {size} bytes, the file has {path.stat().st_size}"
        try:
            wheelfile.inspect(path)
        except wheelfile.BadWheel as error:
            return str(error)
        return ""

    def complete(
        self, stack: Stack, python_minor: str, report: Report | None = None, finder: Finder | None = None
    ) -> Completion:
        """Fetch what the stack's lock names and the store lacks, and make its patched wheels.

        Raises WheelhouseError, StackError. Safe to kill and to run again: complete files stay, a file that was cut off
        is continued.
        """
        wheels = (*stack.lock(python_minor).wheels, *(stack.tool(name) for name in stack.tools))
        fetched = self.fetch(stack, wheels, report, finder)
        try:
            made = stack_patched.provide(self, stack, python_minor)
        except patched_wheel.PatchedWheelError as error:
            raise WheelhouseError(f"stack {stack.name}, Python {python_minor}: {error}") from error
        return dataclasses.replace(fetched, made=tuple(made))

    def fetch(
        self, stack: Stack, wheels: Sequence[LockedWheel], report: Report | None = None, finder: Finder | None = None
    ) -> Completion:
        """Fetch those of `wheels` that are not there. Raises WheelhouseError."""
        began = time.monotonic()
        missing = self.missing(wheels)
        if not missing:
            return Completion((), len(wheels), 0, time.monotonic() - began)
        with self.exclusive():
            missing = self.missing(wheels)  # another run may have fetched them while this one waited
            self._check_space(missing)
            own = finder or Finder(stack)
            try:
                _Fetch(self, own, missing, report).run()
            finally:
                if finder is None:
                    own.close()
        size = sum(wheel.size for wheel in missing)
        return Completion(tuple(missing), len(wheels) - len(missing), size, time.monotonic() - began)

    def add(self, wheel: LockedWheel, data: bytes) -> Path:
        """Keep a wheel that was made here, such as the engine's."""
        if hashlib.sha256(data).hexdigest() != wheel.sha256:
            raise WheelhouseError(f"{wheel.filename} does not have the hash {wheel.sha256}")
        if not self.has(wheel):
            partial = self.partial(wheel).with_name(f"{wheel.sha256}.{os.getpid()}.{threading.get_ident()}")
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            self.admit(wheel, partial)
        return self.path(wheel)

    def partial(self, wheel: LockedWheel) -> Path:
        return self.root / "partial" / wheel.sha256

    def admit(self, wheel: LockedWheel, file: Path) -> None:
        """Move a finished download into the store if it is what the lock says and a wheel in order."""
        real = file_hash(file)
        if real != wheel.sha256:
            raise wheelfile.BadWheel(f"other bytes than the lock: sha256 is {real[:16]}..., not {wheel.sha256[:16]}...")
        folder = self.root / wheel.sha256
        folder.mkdir(parents=True, exist_ok=True)
        named = file.parent / f"{wheel.sha256}.d" / wheel.filename  # inspected under its own name, before it is visible
        named.parent.mkdir(exist_ok=True)
        try:
            file.replace(named)
            info = wheelfile.inspect(named)
            if info.name != wheel.name:
                raise wheelfile.BadWheel(f"{wheel.filename} is a wheel of {info.name}, not of {wheel.name}")
            named.chmod(0o444)
            _sync(named)
            named.replace(self.path(wheel))
            self._mark(self.path(wheel))
            _sync(folder)
        finally:
            shutil.rmtree(named.parent, ignore_errors=True)

    def _mark(self, path: Path) -> None:
        temporary = path.parent / f".checked.{os.getpid()}.{threading.get_ident()}"
        temporary.write_text(json.dumps(_stamp(path)))
        temporary.replace(path.parent / "checked.json")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One run at a time fetches into this store; others wait and then find the files there."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WheelhouseError(f"wheelhouse {self.root} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _check_space(self, missing: Iterable[LockedWheel]) -> None:
        needed = 0
        for wheel in missing:
            partial = self.partial(wheel)
            needed += wheel.size - (min(partial.stat().st_size, wheel.size) if partial.is_file() else 0)
        free = shutil.disk_usage(self.root).free
        if needed + _RESERVE > free:
            raise WheelhouseError(
                f"wheelhouse {self.root} needs {_mib(needed + _RESERVE)} of free space, but has {_mib(free)}: "
                "make room, or set fleet_wheelhouse to a folder on a larger disk"
            )


class _Fetch:
    """One completion under way: several files at once, each from the first source that has the right bytes."""

    def __init__(self, house: Wheelhouse, finder: Finder, wheels: list[LockedWheel], report: Report | None) -> None:
        self._house, self._finder, self._wheels, self._report = house, finder, wheels, report
        self._lock = threading.Lock()
        self._began = self._told = time.monotonic()
        self._bytes: dict[str, int] = {}
        self._done = 0
        self._stop = threading.Event()

    def run(self) -> None:
        largest_first = sorted(self._wheels, key=lambda wheel: -wheel.size)
        problems: list[str] = []
        with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
            waiting = [pool.submit(self._one, wheel) for wheel in largest_first]
            try:
                for future in waiting:
                    problem = future.result()
                    if problem:
                        problems.append(problem)
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        if problems:
            count = f"{len(problems)} of {len(self._wheels)} missing wheels"
            raise WheelhouseError(f"wheelhouse {self._house.root}: {count} could not be had", sorted(problems))

    def _one(self, wheel: LockedWheel) -> str:
        problems: list[str] = []
        for candidate in self._finder.find(wheel.name, wheel.filename, problems):
            where = shown(candidate.source)
            if candidate.sha256 and candidate.sha256 != wheel.sha256:
                problems.append(
                    f"{where}: offers other bytes than the lock (sha256 {candidate.sha256[:16]}..., not "
                    f"{wheel.sha256[:16]}...)"
                )
                continue
            try:
                self._take(wheel, candidate)
            except (wheelfile.BadWheel, httpx.HTTPError, OSError) as error:
                problems.append(f"{where}: {error or type(error).__name__}")
                continue
            with self._lock:
                self._done += 1
                self._bytes[wheel.sha256] = wheel.size
            self._tell(wheel, last=True)
            return ""
        reasons = "; ".join(dict.fromkeys(problems)) or "no source is configured"
        return f"{wheel.filename}: {reasons}"

    def _take(self, wheel: LockedWheel, candidate: Candidate) -> None:
        partial = self._house.partial(wheel)
        partial.parent.mkdir(parents=True, exist_ok=True)
        continued = partial.is_file() and partial.stat().st_size > 0
        try:
            self._transfer(wheel, candidate, partial)
            self._house.admit(wheel, partial)
        except wheelfile.BadWheel:
            partial.unlink(missing_ok=True)
            if not continued:
                raise
            # the part that was there already may be what is wrong: once more from the start
            self._transfer(wheel, candidate, partial)
            try:
                self._house.admit(wheel, partial)
            finally:
                partial.unlink(missing_ok=True)

    def _transfer(self, wheel: LockedWheel, candidate: Candidate, partial: Path) -> None:
        if candidate.path is not None:
            with candidate.path.open("rb") as source, partial.open("wb") as target:
                self._copy(wheel, iter(lambda: source.read(_CHUNK), b""), target)
            return
        have = partial.stat().st_size if partial.is_file() else 0
        if have >= wheel.size:
            have = 0
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        with self._finder.client.stream("GET", candidate.url, headers=headers) as answer:
            resumed = (
                have > 0
                and answer.status_code == 206
                and answer.headers.get("content-range", "").startswith(f"bytes {have}-")
            )
            if not resumed:
                answer.raise_for_status()
            with partial.open("ab" if resumed else "wb") as target:
                self._copy(wheel, answer.iter_bytes(_CHUNK), target)

    def _copy(self, wheel: LockedWheel, chunks: Iterator[bytes], target: object) -> None:
        write, tell = target.write, target.tell  # type: ignore[attr-defined]
        for chunk in chunks:
            if self._stop.is_set():
                raise OSError("interrupted")
            write(chunk)
            if tell() > wheel.size:
                raise wheelfile.BadWheel(f"other bytes than the lock: more than {wheel.size} bytes")
            with self._lock:
                self._bytes[wheel.sha256] = tell()
            self._tell(wheel)

    def _tell(self, wheel: LockedWheel, last: bool = False) -> None:
        if self._report is None:
            return
        with self._lock:
            now = time.monotonic()
            if not last and now - self._told < 0.2:
                return
            self._told = now
            progress = Progress(
                wheel.filename,
                self._done,
                len(self._wheels),
                sum(self._bytes.values()),
                sum(item.size for item in self._wheels),
                now - self._began,
            )
            self._report(progress)  # under the lock: whoever prints it gets one at a time


def file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _stamp(path: Path) -> tuple[int, int, int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
