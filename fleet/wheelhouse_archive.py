"""Carry a wheelhouse to a control node without network, as one file.

The file is a tar: manifest.json with every wheel's name, size and sha256, then the wheels as <sha256>/<file name>. The
same wheels make the same file. Both ways can be cut off and run again: an export goes on behind the last complete
wheel, an import skips what is there. Nothing in the file is believed: its names are checked against its manifest, and
every wheel is hashed and opened before it is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from fleet import wheelfile
from fleet.stack import LockedWheel
from fleet.wheelhouse import Progress, Report, Wheelhouse, WheelhouseError

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_MOST_MANIFEST = 16 << 20
_RESERVE = 200 << 20


@dataclasses.dataclass(frozen=True)
class Exported:
    file: Path
    wheels: int
    bytes: int
    # wheels that an earlier, interrupted run had written already
    continued: int


@dataclasses.dataclass(frozen=True)
class Imported:
    stacks: tuple[str, ...]
    added: tuple[LockedWheel, ...]
    present: int


class _Meter:
    """Tells whoever wants to know how far a copy is, a few times per second."""

    def __init__(self, report: Report | None, wheels: Iterable[LockedWheel]) -> None:
        sizes = [wheel.size for wheel in wheels]
        self._report, self._files, self._bytes = report, len(sizes), sum(sizes)
        self._done = self._written = 0
        self._began = self._told = time.monotonic()

    def add(self, wheel: LockedWheel, count: int, done: bool = False) -> None:
        self._written += count
        self._done += done
        now = time.monotonic()
        if self._report is not None and (done or now - self._told > 0.2):
            self._told = now
            seconds = now - self._began
            self._report(Progress(wheel.filename, self._done, self._files, self._written, self._bytes, seconds))


def export(
    house: Wheelhouse, stacks: Iterable[str], wheels: Iterable[LockedWheel], file: Path, report: Report | None = None
) -> Exported:
    """Write `wheels` into `file`. Raises WheelhouseError."""
    wanted = sorted(set(wheels), key=lambda wheel: wheel.sha256)
    lacking = house.missing(wanted)
    if lacking:
        names = sorted(wheel.filename for wheel in lacking)
        raise WheelhouseError(f"wheelhouse {house.root} is not complete: run `fleet wheelhouse build` first", names)
    listed = {"format": FORMAT, "stacks": sorted(set(stacks)), "wheels": [wheel.as_dict() for wheel in wanted]}
    manifest = json.dumps(listed, indent=1, sort_keys=True).encode()
    partial = file.with_name(f"{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        end, done = _usable(partial, manifest, wanted)
        _check_space(file.parent, sum(wheel.size + 1536 for wheel in wanted[done:]))
        meter = _Meter(report, wanted)
        for wheel in wanted[:done]:
            meter.add(wheel, wheel.size, done=True)
        with partial.open("r+b" if end else "wb") as stream:
            stream.seek(end)
            stream.truncate()
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
                if not end:
                    archive.addfile(_entry(MANIFEST, len(manifest)), io.BytesIO(manifest))
                for wheel in wanted[done:]:
                    _append(archive, house, wheel, meter)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:
        raise WheelhouseError(f"{file} cannot be written: {error.strerror or error}") from error
    return Exported(file, len(wanted), file.stat().st_size, done)


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o444
    return entry


def _append(archive: tarfile.TarFile, house: Wheelhouse, wheel: LockedWheel, meter: _Meter) -> None:
    with house.path(wheel).open("rb") as source:
        watched = _Watched(source, wheel, meter)
        archive.addfile(_entry(f"{wheel.sha256}/{wheel.filename}", wheel.size), watched)  # type: ignore[arg-type]
    if watched.digest.hexdigest() != wheel.sha256:
        raise WheelhouseError(f"{house.path(wheel)} was changed: run `fleet wheelhouse build`, which mends it")
    meter.add(wheel, 0, done=True)


class _Watched:
    """A file that is hashed and counted while somebody else reads it."""

    def __init__(self, stream: IO[bytes], wheel: LockedWheel, meter: _Meter) -> None:
        self._stream, self._wheel, self._meter = stream, wheel, meter
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.digest.update(data)
        self._meter.add(self._wheel, len(data))
        return data


def _usable(partial: Path, manifest: bytes, wanted: list[LockedWheel]) -> tuple[int, int]:
    """(bytes, wheels) of an interrupted export that are as they must be; (0, 0) for one of other wheels."""
    end, done = 0, 0
    try:
        with tarfile.open(partial, "r:") as archive:
            for entry in archive:
                stream = archive.extractfile(entry)
                if stream is None:
                    break
                if not end:
                    if entry.name != MANIFEST or stream.read(_MOST_MANIFEST) != manifest:
                        return 0, 0
                elif done < len(wanted) and entry.name == f"{wanted[done].sha256}/{wanted[done].filename}":
                    if hashlib.file_digest(stream, "sha256").hexdigest() != wanted[done].sha256:  # type: ignore[arg-type]
                        break
                    done += 1
                else:
                    break
                end = entry.offset_data + -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    except (OSError, tarfile.TarError):
        pass
    return end, done


def import_(house: Wheelhouse, file: Path, report: Report | None = None) -> Imported:
    """Take every wheel of `file` into the wheelhouse. Raises WheelhouseError."""
    try:
        with tarfile.open(file, "r:") as archive:
            stacks, wheels = _manifest(archive, file)
            wanted = {f"{wheel.sha256}/{wheel.filename}": wheel for wheel in wheels}
            house.root.mkdir(parents=True, exist_ok=True)
            lacking = set(house.missing(wheels))
            _check_space(house.root, sum(wheel.size for wheel in lacking))
            meter, added = _Meter(report, wheels), []
            for entry in archive:
                if entry.name == MANIFEST:
                    continue
                wheel = wanted.pop(entry.name, None)
                if wheel is None or not entry.isreg() or entry.size != wheel.size:
                    raise WheelhouseError(f"{file}: {entry.name!r} is not what its manifest lists: nothing is taken")
                if wheel in lacking:
                    _take(house, archive, entry, wheel, meter)
                    added.append(wheel)
                else:
                    meter.add(wheel, wheel.size)
                meter.add(wheel, 0, done=True)
    except tarfile.TarError as error:
        raise WheelhouseError(f"{file} is cut off or no export of a wheelhouse ({error}): copy it again") from error
    except OSError as error:
        raise WheelhouseError(f"{file} cannot be imported: {error.strerror or error}") from error
    if wanted:
        names = sorted(wheel.filename for wheel in wanted.values())
        raise WheelhouseError(f"{file} is cut off: {len(names)} wheels are not in it; copy it again", names)
    return Imported(stacks, tuple(added), len(wheels) - len(added))


def _manifest(archive: tarfile.TarFile, file: Path) -> tuple[tuple[str, ...], list[LockedWheel]]:
    first = archive.next()
    stream = archive.extractfile(first) if first is not None and first.isreg() else None
    if first is None or first.name != MANIFEST or stream is None or first.size > _MOST_MANIFEST:
        raise WheelhouseError(f"{file} is no export of a wheelhouse: it does not begin with {MANIFEST}")
    try:
        value = json.loads(stream.read())
        if value["format"] != FORMAT:
            raise WheelhouseError(
                f"{file} has format {value['format']}, this fleet reads {FORMAT}: use the same version"
            )
        wheels = [_wheel(item) for item in value["wheels"]]
        return tuple(str(name) for name in value["stacks"]), wheels
    except (ValueError, KeyError, TypeError) as error:
        raise WheelhouseError(f"{file}: its {MANIFEST} cannot be read: {error}") from error


def _wheel(item: dict[str, Any]) -> LockedWheel:
    wheel = LockedWheel(**item)
    name, _, _ = wheelfile.name_parts(wheel.filename)  # refuses paths
    if name != wheel.name or len(wheel.sha256) != 64 or not set(wheel.sha256) <= set("0123456789abcdef"):
        raise ValueError(f"{wheel.filename!r} is not a wheel of {wheel.name!r}")
    if not isinstance(wheel.size, int) or wheel.size < 0:
        raise ValueError(f"{wheel.filename} cannot have {wheel.size} bytes")
    return wheel


def _take(
    house: Wheelhouse, archive: tarfile.TarFile, entry: tarfile.TarInfo, wheel: LockedWheel, meter: _Meter
) -> None:
    stream = archive.extractfile(entry)
    assert stream is not None  # a regular file
    partial = house.partial(wheel).with_name(f"{wheel.sha256}.{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as target:
            while data := stream.read(_CHUNK):
                target.write(data)
                meter.add(wheel, len(data))
        if partial.stat().st_size != wheel.size:
            raise WheelhouseError(f"the file ends within {wheel.filename}: copy it again; what came before it is kept")
        house.admit(wheel, partial)
    except wheelfile.BadWheel as error:
        raise WheelhouseError(f"{wheel.filename} in the file is damaged: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + _RESERVE > free:
        raise WheelhouseError(
            f"{folder} needs {(needed + _RESERVE) >> 20} MiB of free space, but has {free >> 20} MiB: make room, or "
            "choose a folder on a larger disk"
        )
