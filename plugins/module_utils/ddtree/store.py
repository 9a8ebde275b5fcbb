"""The host's store of wheels by sha256: what arrives is verified before it has a name there.

<root>/store/<sha256>/<file name>     a complete blob, read-only
<root>/store/incoming/                uploads under way
<root>/store/tools/uv-<version>/uv    the installer, unpacked from its wheel
<root>/store/cache/                   uv's unpacked wheels; releases link to its files
<root>/store/bytecode/                compiled bytecode by wheel and interpreter; releases link to it too
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import re
import secrets
import shutil
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from . import files
from .paths import Paths

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FILENAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,254}\.whl\Z")
_CHUNK = 1 << 20


class StoreError(Exception):
    """A blob that did not arrive as it was sent, or that is not here."""


@dataclasses.dataclass(frozen=True)
class Blob:
    """One file of the store."""

    filename: str
    sha256: str
    name: str = ""
    version: str = ""
    size: int = 0

    @classmethod
    def of(cls, value: dict[str, Any]) -> Blob:
        names = {field.name for field in dataclasses.fields(cls)}
        blob = cls(**{key: item for key, item in value.items() if key in names})
        if not _SHA256.match(blob.sha256) or not _FILENAME.match(blob.filename):
            raise StoreError(f"not a blob: {blob.filename!r} with sha256 {blob.sha256!r}")
        return blob


def path(paths: Paths, blob: Blob) -> Path:
    return paths.store / blob.sha256 / blob.filename


def incoming(paths: Paths) -> Path:
    return paths.store / "incoming"


def stamp(info: os.stat_result) -> list[int]:
    """What changes when a file is written to: cheap to look at, and enough to know that it need not be read again."""
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def lacking(paths: Paths, blobs: Iterable[Blob], *, remember: bool = True) -> dict[str, str]:
    """sha256 of every blob that is not here in order -> "missing" or "damaged".

    A blob that was written to since it was last read is read again. `remember` False leaves no trace (check mode).
    """
    known = _stamps(paths)
    found: dict[str, str] = {}
    unsure: list[tuple[Blob, Path]] = []
    for blob in blobs:
        file = path(paths, blob)
        try:
            info = file.lstat()
        except OSError:
            found[blob.sha256] = "missing"
            continue
        if known.get(blob.sha256) != stamp(info):
            unsure.append((blob, file))
    fresh: dict[str, list[int]] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for (blob, file), real in zip(unsure, pool.map(lambda item: _hash(item[1]), unsure), strict=True):
            if real == blob.sha256:
                fresh[blob.sha256] = stamp(file.lstat())
            else:
                found[blob.sha256] = "damaged"
    if fresh and remember:
        _remember(paths, fresh)
    return found


def _hash(file: Path) -> str:
    try:
        return hash_file(file)
    except OSError:
        return ""


def _stamp_file(paths: Paths) -> Path:
    return paths.verified / "store.json"


def _stamps(paths: Paths) -> dict[str, list[int]]:
    try:
        return dict(files.read_json(_stamp_file(paths)) or {})
    except (OSError, ValueError, TypeError):
        return {}


def _remember(paths: Paths, fresh: dict[str, list[int]]) -> None:
    known = {sha256: value for sha256, value in _stamps(paths).items() if (paths.store / sha256).is_dir()}
    files.write_json(_stamp_file(paths), {**known, **fresh}, 0o600)


def receive(paths: Paths, uploads: Iterable[str], blobs: Iterable[Blob]) -> list[str]:
    """Take uploads out of the incoming folder into the store and return the sha256 of what was taken.

    An upload is a blob, called after its sha256, or a tar of several such. Only `blobs` are taken, only with the right
    bytes. Raises StoreError.
    """
    wanted = {blob.sha256: blob for blob in blobs}
    taken: list[str] = []
    fresh: dict[str, list[int]] = {}
    for name in uploads:
        if "/" in name or name.startswith("."):
            raise StoreError(f"not the name of an upload: {name!r}")
        file = incoming(paths) / name
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise StoreError(f"upload {name} did not arrive: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as stream:
            if name.endswith(".tar"):
                taken += _take_bundle(paths, name, stream, wanted, fresh)
            else:
                taken.append(_take_one(paths, name, stream, wanted, fresh))
        file.unlink()
    if fresh:
        _remember(paths, fresh)
    return taken


def _take_bundle(
    paths: Paths, name: str, stream: BinaryIO, wanted: dict[str, Blob], fresh: dict[str, list[int]]
) -> list[str]:
    taken = []
    try:
        with tarfile.open(fileobj=stream, mode="r:") as bundle:
            for member in bundle:
                content = bundle.extractfile(member) if member.isreg() else None
                if content is None:
                    raise StoreError(f"upload {name} holds something that is no file: {member.name!r}")
                taken.append(_take_one(paths, member.name, content, wanted, fresh))  # type: ignore[arg-type]
    except (tarfile.TarError, EOFError) as error:
        raise StoreError(f"upload {name} is cut off or damaged ({error}): deploy again") from error
    return taken


def _take_one(paths: Paths, name: str, stream: BinaryIO, wanted: dict[str, Blob], fresh: dict[str, list[int]]) -> str:
    """Copy, so that nobody who sent the file can still write to it afterwards; hashed in the same pass."""
    blob = wanted.get(name)
    if blob is None:
        raise StoreError(f"upload {name[:80]!r} was not asked for")
    target = path(paths, blob)
    target.parent.mkdir(mode=0o755, exist_ok=True)
    temporary = target.parent / f".{secrets.token_hex(4)}.tmp"
    digest = hashlib.sha256()
    try:
        with temporary.open("xb") as copy:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fchmod(copy.fileno(), 0o444)
            os.fsync(copy.fileno())
        if digest.hexdigest() != blob.sha256:
            raise StoreError(
                f"{blob.filename} arrived with other bytes: sha256 {digest.hexdigest()[:16]}..., expected "
                f"{blob.sha256[:16]}...; deploy again"
            )
        temporary.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    files.fsync_dir(target.parent)
    fresh[blob.sha256] = stamp(target.lstat())
    return blob.sha256


def clear_incoming(paths: Paths) -> None:
    """Remove uploads that nobody waits for any more."""
    for file in incoming(paths).glob("*"):
        with contextlib.suppress(OSError):
            file.unlink()


def tool(paths: Paths, blob: Blob) -> Path:
    """The program `blob.name` of a tool's wheel, unpacked. Raises StoreError where the wheel does not hold it."""
    program = paths.store / "tools" / f"{blob.name}-{blob.version}" / blob.name
    wheel = path(paths, blob)
    suffix = f".data/scripts/{blob.name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((info for info in archive.infolist() if info.filename.endswith(suffix)), None)
            if member is None:
                raise StoreError(f"{blob.filename} holds no program {blob.name}")
            if program.is_file() and program.stat().st_size == member.file_size and os.access(program, os.X_OK):
                return program
            program.parent.mkdir(parents=True, exist_ok=True)
            temporary = program.with_name(f".{secrets.token_hex(4)}.tmp")
            with archive.open(member) as source, temporary.open("xb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
                os.fchmod(target.fileno(), 0o755)
                os.fsync(target.fileno())
            temporary.replace(program)
    except (OSError, zipfile.BadZipFile) as error:
        raise StoreError(f"{blob.filename} cannot be unpacked: {error}") from error
    return program


def forget(paths: Paths, keep: set[str], older_than: float) -> list[str]:
    """Remove blobs that are not in `keep` and came before `older_than` (epoch seconds); returns their file names.

    Younger ones may belong to a release that is about to be built.
    """
    removed = []
    for folder in paths.store.glob("*"):
        if not _SHA256.match(folder.name) or folder.name in keep:
            continue
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < older_than:
                removed += [file.name for file in folder.glob("*.whl")]
                shutil.rmtree(folder)
    return removed
