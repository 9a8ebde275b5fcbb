"""Wheels: read one with suspicion, and write one whose bytes depend on nothing but its content."""

from __future__ import annotations

import base64
import csv
import dataclasses
import email.message
import email.parser
import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from packaging.tags import Tag, parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

# Files that RECORD cannot or need not vouch for.
_UNRECORDED = ("RECORD", "RECORD.jws", "RECORD.p7s")
# The oldest date that a zip file can hold: every member has it, so that time is no part of the bytes.
_DATE = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20


class BadWheel(ValueError):
    """A file that must not be installed; the message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Wheel:
    """What a wheel says of itself, all of it consistent."""

    name: str
    version: str
    tags: frozenset[Tag]
    dist_info: str
    requires: tuple[str, ...]
    requires_python: str
    files: int
    unpacked_bytes: int


def name_parts(filename: str) -> tuple[str, Version, frozenset[Tag]]:
    """(normalised name, version, tags) of a wheel's file name. Raises BadWheel."""
    if filename != PurePosixPath(filename).name:
        raise BadWheel(f"{filename!r} is a path, not the name of a wheel")
    try:
        name, version, _, tags = parse_wheel_filename(filename)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise BadWheel(f"{filename} is not named as a wheel: {error}") from error
    return name, version, tags


def inspect(path: Path, *, deep: bool = True) -> Wheel:
    """Open a wheel and require that its name, metadata, tags and list of files agree.

    `deep` also reads every member and compares it with its hash in RECORD. Nothing is extracted. Raises BadWheel.
    """
    name, version, tags = name_parts(path.name)
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(path.name, archive)
            dist_info = _dist_info(path.name, members)
            metadata = _headers(archive, f"{dist_info}/METADATA", path.name)
            _check_identity(path.name, name, version, dist_info, metadata)
            _check_tags(path.name, tags, _headers(archive, f"{dist_info}/WHEEL", path.name))
            _check_record(path.name, archive, members, dist_info, deep)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError, UnicodeDecodeError) as error:
        raise BadWheel(f"{path.name} cannot be read as a wheel: {error}") from error
    except Exception as error:  # zlib.error and whatever else a crafted archive makes a decoder say
        if isinstance(error, BadWheel):
            raise
        raise BadWheel(f"{path.name} cannot be read as a wheel: {type(error).__name__}: {error}") from error
    return Wheel(
        name=name,
        version=str(version),
        tags=tags,
        dist_info=dist_info,
        requires=tuple(metadata.get_all("Requires-Dist") or ()),
        requires_python=str(metadata.get("Requires-Python") or ""),
        files=len(members),
        unpacked_bytes=sum(info.file_size for info in members.values()),
    )


def _members(filename: str, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename
        parts = name.split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or ".." in parts or ":" in parts[0]:
            raise BadWheel(f"{filename} would write outside its target: member {name!r}")
        if (info.external_attr >> 16) & 0o170000 == 0o120000:
            raise BadWheel(f"{filename} holds a symbolic link: member {name!r}")
        if info.is_dir():
            continue
        if name in found:
            raise BadWheel(f"{filename} holds {name} twice")
        found[name] = info
    return found


def _dist_info(filename: str, members: Iterable[str]) -> str:
    folders = {name.split("/", 1)[0] for name in members if name.split("/", 1)[0].endswith(".dist-info")}
    if len(folders) != 1:
        listed = ", ".join(sorted(folders)) or "none"
        raise BadWheel(f"{filename} must hold exactly one .dist-info folder, but holds {listed}")
    return folders.pop()


def _headers(archive: zipfile.ZipFile, member: str, filename: str) -> email.message.Message:
    try:
        text = archive.read(member).decode("utf-8")
    except KeyError as error:
        raise BadWheel(f"{filename} has no {member}") from error
    return email.parser.HeaderParser().parsestr(text)


def _check_identity(
    filename: str, name: str, version: Version, dist_info: str, metadata: email.message.Message
) -> None:
    said_name, said_version = str(metadata.get("Name") or ""), str(metadata.get("Version") or "")
    if canonicalize_name(said_name) != name:
        raise BadWheel(f"{filename}: the file says {name}, METADATA says {said_name or 'no name'}")
    folder_name, _, folder_version = dist_info.removesuffix(".dist-info").rpartition("-")
    for where, text in (("METADATA", said_version), (dist_info, folder_version)):
        try:
            same = Version(text) == version
        except InvalidVersion:
            same = False
        if not same:
            raise BadWheel(f"{filename}: the file says {version}, {where} says {text or 'no version'}")
    if canonicalize_name(folder_name) != name:
        raise BadWheel(f"{filename}: the file says {name}, its folder is {dist_info}")


def _check_tags(filename: str, tags: frozenset[Tag], wheel: email.message.Message) -> None:
    said: set[Tag] = set()
    for line in wheel.get_all("Tag") or ():
        said |= parse_tag(str(line).strip())
    if not said & tags:
        listed = ", ".join(sorted(map(str, said))) or "none"
        raise BadWheel(f"{filename}: none of the file name's tags stands in WHEEL, which says {listed}")
    for tag in tags - said:
        if tag.interpreter.startswith("py2"):  # nothing here runs it, and some builders only add it to the name
            continue
        # a retagged platform is common and harmless, another interpreter or ABI is not
        if not any((tag.interpreter, tag.abi) == (other.interpreter, other.abi) for other in said):
            raise BadWheel(f"{filename}: the file name says {tag}, WHEEL does not")


def record_rows(text: str) -> Iterator[tuple[str, str, str]]:
    """(path, hash as RECORD writes it, size) of each line of a RECORD. Raises ValueError."""
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if not row:
            continue
        if len(row) != 3:
            raise ValueError(f"line {number} has {len(row)} fields instead of 3")
        yield row[0], row[1], row[2]


def record_hash(digest: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _check_record(
    filename: str, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], dist_info: str, deep: bool
) -> None:
    try:
        text = archive.read(f"{dist_info}/RECORD").decode("utf-8")
        rows = {path: (said, size) for path, said, size in record_rows(text)}
    except KeyError as error:
        raise BadWheel(f"{filename} has no {dist_info}/RECORD") from error
    except (ValueError, csv.Error) as error:
        raise BadWheel(f"{filename}: RECORD cannot be read: {error}") from error
    free = {f"{dist_info}/{name}" for name in _UNRECORDED}
    for path in rows:
        if path not in members and path not in free:
            raise BadWheel(f"{filename}: RECORD lists {path}, which the wheel does not hold")
    for path, info in members.items():
        if path in free:
            continue
        said, size = rows.get(path, ("", ""))
        if not said:
            raise BadWheel(f"{filename}: RECORD has no hash for {path}")
        if size and size != str(info.file_size):
            raise BadWheel(f"{filename}: RECORD says that {path} has {size} bytes, it has {info.file_size}")
        if deep and _hash_member(archive, info, said) != said:
            raise BadWheel(f"{filename}: {path} does not have the hash that RECORD says")


def _hash_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, said: str) -> str:
    algorithm = said.partition("=")[0]
    if algorithm not in ("sha256", "sha384", "sha512"):
        return f"{algorithm or 'no'} hash, which is not accepted"
    digest = hashlib.new(algorithm)
    with archive.open(info) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return f"{algorithm}=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def compose(name: str, version: str, files: Iterable[tuple[str, bytes, bool]], *, tag: str = "py3-none-any",
            metadata: Iterable[str] = (), generator: str = "ddtree-fleet") -> tuple[str, bytes]:  # fmt: skip
    """(file name, bytes) of a pure wheel with `files`: (path, content, executable?).

    The same content gives the same bytes on every machine: sorted members, a fixed date, fixed modes, and no
    compression, because compressors of different versions write different bytes.
    """
    distribution = canonicalize_name(name).replace("-", "_")
    dist_info = f"{distribution}-{version}.dist-info"
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
    members = sorted(files)
    members += [
        (f"{dist_info}/METADATA", ("\n".join(headers) + "\n").encode(), False),
        (
            f"{dist_info}/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: {generator}\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
            False,
        ),
    ]
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, content, executable in members:
            writer.writerow((path, record_hash(hashlib.sha256(content).digest()), len(content)))
            archive.writestr(_info(path, executable), content)
        writer.writerow((f"{dist_info}/RECORD", "", ""))
        archive.writestr(_info(f"{dist_info}/RECORD", False), record.getvalue())
    return f"{distribution}-{version}-{tag}.whl", buffer.getvalue()


def _info(path: str, executable: bool) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, _DATE)
    info.create_system = 3
    info.external_attr = (0o100755 if executable else 0o100644) << 16
    return info
