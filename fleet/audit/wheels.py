"""Survey wheels before they are installed anywhere: the same facts as of a venv, read out of the archives.

Only shared libraries are unpacked, one at a time, into a file without a name; nothing is ever written under a name that
an archive chose.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import posixpath
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fleet import content

content.add_host_code()

from ddtree import distinfo, linkage, native, survey  # noqa: E402

_CHUNK = 1 << 20
_MOST_LIBRARY = 8 << 30
_MOST_MEMBERS = 500_000


@dataclasses.dataclass
class _Found:
    """What one wheel holds."""

    distribution: dict[str, Any] | None = None
    rows: list[distinfo.Row] = dataclasses.field(default_factory=list)
    libraries: list[linkage.Library] = dataclasses.field(default_factory=list)
    problems: list[dict[str, str]] = dataclasses.field(default_factory=list)
    torch: dict[str, str] = dataclasses.field(default_factory=dict)


def survey_wheels(paths: Sequence[Path], python: str = "", jobs: int = 2, *, verify: bool = True) -> dict[str, Any]:
    """Facts of the environment that these wheels would make. `verify` also compares every member with RECORD."""
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        found = list(pool.map(lambda path: _wheel(path, verify), sorted(paths, key=_size, reverse=True)))
    owners: dict[str, list[tuple[str, str]]] = {}
    for item in found:
        for row in item.rows:
            if row.hash and item.distribution:
                owners.setdefault(_installed(row.path), []).append((item.distribution["name"], row.hash))
    problems = [problem for item in found for problem in item.problems]
    compiled = survey.linked([library for item in found for library in item.libraries], [])
    for library in compiled["libraries"]:
        library["distribution"] = owners.get(library["path"], [("", "")])[0][0]
    distributions = [item.distribution for item in found if item.distribution]
    return {
        "schema": survey.SCHEMA,
        "root": "wheels",
        "python": {"version": "", "minor": python},
        "torch": next((item.torch for item in found if item.torch), {}),
        "distributions": sorted(distributions, key=lambda item: (item["name"], item["version"])),
        "shared": survey.shared(owners),
        **{key: value for key, value in compiled.items() if key != "problems"},
        "problems": sorted(problems, key=lambda item: (item["kind"], item["path"])),
        "host": {},
        "files": sum(len(item.rows) for item in found),
        "seconds": round(time.monotonic() - started, 3),
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wheel(path: Path, verify: bool) -> _Found:
    found = _Found()
    try:
        with zipfile.ZipFile(path) as archive:
            _read(path, archive, found, verify)
    except Exception as error:  # crafted archives make decoders raise whatever they like, IndexError included
        name = distinfo.normal(path.name.partition("-")[0])
        detail = f"cannot be read as a wheel: {error or type(error).__name__}"
        found.problems.append(survey.problem("metadata", path.name, name, detail))
    return found


def _read(path: Path, archive: zipfile.ZipFile, found: _Found, verify: bool) -> None:
    entries = archive.infolist()[:_MOST_MEMBERS]
    members = {info.filename: info for info in entries if info.filename and not info.filename.endswith("/")}
    folders = sorted({name.split("/", 1)[0] for name in members if name.split("/", 1)[0].endswith(".dist-info")})
    name = distinfo.normal(path.name.partition("-")[0])
    for member in members:
        if member.startswith("/") or "\\" in member or "\0" in member or ".." in member.split("/"):
            found.problems.append(survey.problem("escapes", member[:300], name, "lies outside the environment"))
    if len(folders) != 1:
        found.problems.append(survey.problem("metadata", path.name, name, f"holds {len(folders)} .dist-info folders"))
        return
    folder = folders[0]
    texts = {
        part: _text(archive, members.get(f"{folder}/{part}"), limit)
        for part, limit in (
            ("METADATA", distinfo.METADATA_LIMIT),
            ("WHEEL", distinfo.METADATA_LIMIT),
            ("RECORD", distinfo.RECORD_LIMIT),
        )
    }
    facts, found.rows = distinfo.distribution(
        folder, texts["METADATA"] or "", texts["WHEEL"] or "", texts["RECORD"] or ""
    )
    found.distribution = {**facts, "filename": path.name, "sha256": ""}
    if facts["problem"]:
        found.problems.append(survey.problem("metadata", path.name, facts["name"], facts["problem"]))
    if "torch/version.py" in members:
        found.torch = distinfo.torch_build(_text(archive, members["torch/version.py"], 1 << 16) or "")
    if verify:
        _compare(archive, members, folder, found)
    for member, info in members.items():
        if survey.is_library(member):
            _library(archive, info, facts["name"], found)


def _text(archive: zipfile.ZipFile, info: zipfile.ZipInfo | None, limit: int) -> str | None:
    if info is None or info.file_size > limit:
        return None
    with archive.open(info) as stream:
        return stream.read(limit).decode("utf-8", "replace")


def _compare(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], folder: str, found: _Found) -> None:
    """Members against RECORD. Libraries are hashed while they are read; see `_library`."""
    name = str((found.distribution or {}).get("name"))
    said = {row.path: row for row in found.rows}
    free = {f"{folder}/{part}" for part in ("RECORD", "RECORD.jws", "RECORD.p7s")}
    for path in said:
        if path not in members:
            found.problems.append(survey.problem("missing", path, name, "is in RECORD, but not in the wheel"))
    for path, info in members.items():
        row = said.get(path)
        if path in free:
            continue
        if row is None or not row.hash:
            found.problems.append(
                survey.problem("edited", path, name, "stands in RECORD without a hash, or not at all")
            )
        elif row.size not in (-1, info.file_size):
            detail = f"has {info.file_size} bytes, RECORD says {row.size}"
            found.problems.append(survey.problem("edited", path, name, detail))
        elif not survey.is_library(path):
            algorithm = row.hash.partition("=")[0]
            digest = hashlib.new(algorithm)
            try:
                with archive.open(info) as stream:
                    _copy(stream, digest.update, info.file_size)
            except Exception as error:  # see _wheel
                found.problems.append(survey.problem("edited", path, name, f"cannot be read: {error}"))
                continue
            if distinfo.record_hash(algorithm, digest.digest()) != row.hash:
                detail = "does not have the hash that RECORD says"
                found.problems.append(survey.problem("edited", path, name, detail))


def _library(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, found: _Found) -> None:
    path = _installed(info.filename)
    row = next((row for row in found.rows if row.path == info.filename and row.hash), None)
    digest = hashlib.new(row.hash.partition("=")[0]) if row else hashlib.sha256()
    try:
        with tempfile.TemporaryFile(prefix="ddtree-audit-") as file, archive.open(info) as stream:
            if info.file_size > _MOST_LIBRARY:
                raise native.BadLibrary(f"claims {info.file_size} bytes")

            def keep(chunk: bytes) -> None:
                digest.update(chunk)
                file.write(chunk)

            _copy(stream, keep, info.file_size)
            file.flush()
            if os.pread(file.fileno(), 7, 0) in (b"INPUT (", b"GROUP (", b"/* GNU "):
                return  # a linker script
            image = native.Image(file)
            found.libraries.append(linkage.Library.of(path, info.file_size, image.facts(), image.symbols()))
    except Exception as error:  # see _wheel
        found.problems.append(survey.problem("damaged", path, name, str(error) or type(error).__name__))
        return
    same_size = row is not None and row.size in (-1, info.file_size)
    if row and same_size and distinfo.record_hash(digest.name, digest.digest()) != row.hash:
        found.problems.append(survey.problem("edited", path, name, "does not have the hash that RECORD says"))


def _copy(stream: Any, sink: Any, limit: int) -> None:
    """At most as many bytes as the archive's directory claims: a member may unpack to more than it says."""
    left = limit + 1
    while left > 0 and (chunk := stream.read(min(_CHUNK, left))):
        sink(chunk)
        left -= len(chunk)
    if left <= 0:
        raise zipfile.BadZipFile("unpacks to more bytes than it claims")


def _installed(member: str) -> str:
    """Where an installer puts a member, from site-packages."""
    top, _, rest = member.partition("/")
    if top.endswith(".data") and rest.partition("/")[0] in ("purelib", "platlib"):
        return rest.partition("/")[2]
    return posixpath.normpath(member)


def wheels_in(folder: Path) -> list[Path]:
    """Every wheel in a folder, or in the folders that it holds (a wheelhouse is one folder for each digest)."""
    return sorted({*folder.glob("*.whl"), *folder.glob("*/*.whl")})


def note_digests(facts: dict[str, Any], digests: Iterable[tuple[str, str]]) -> None:
    """Enter the sha256 of wheels (file name, digest), which ties kernels to their torch."""
    known = dict(digests)
    for item in facts["distributions"]:
        item["sha256"] = known.get(item.get("filename", ""), item.get("sha256", ""))
