"""A patched engine wheel out of a pinned upstream wheel: verified, patched strictly, repacked reproducibly.

Nothing is guessed: the wheel's sha256 must be the pinned one, every hunk must match at exactly the line it names, and
the result carries a local version (`0.5.11+ddtree.1`), so it can never be mistaken for upstream's file.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


class PatchedWheelError(Exception):
    """The wheel could not be made; the message names the file, the place and the remedy."""


@dataclass(frozen=True)
class Hunk:
    start: int  # first line in the old file, 1-based
    old: list[str]
    new: list[str]


@dataclass(frozen=True)
class FilePatch:
    path: str
    hunks: list[Hunk]


def parse(text: str, name: str) -> list[FilePatch]:
    """A unified diff (paths prefixed a/ and b/) as file patches; creations and deletions are not supported."""
    patches: list[FilePatch] = []
    lines = text.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- "):
            if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ b/"):
                raise PatchedWheelError(f"{name}:{at + 1}: a '+++ b/' line must follow '---'")
            patches.append(FilePatch(lines[at + 1][6:].split("\t")[0].strip(), []))
            at += 2
        elif line.startswith("@@"):
            match = _HUNK.match(line)
            if match is None or not patches:
                raise PatchedWheelError(f"{name}:{at + 1}: not a hunk header of a named file: {line.strip()!r}")
            hunk, at = _hunk(lines, at + 1, match, name)
            patches[-1].hunks.append(hunk)
        else:
            at += 1
    if not any(patch.hunks for patch in patches):
        raise PatchedWheelError(f"{name}: holds no hunks")
    return patches


def _hunk(lines: list[str], at: int, match: re.Match[str], name: str) -> tuple[Hunk, int]:
    wanted_old, wanted_new = int(match[2] or 1), int(match[4] or 1)
    old: list[str] = []
    new: list[str] = []
    while at < len(lines) and (len(old) < wanted_old or len(new) < wanted_new):
        kind, text = lines[at][:1], lines[at][1:]
        if kind not in " +-":
            raise PatchedWheelError(f"{name}:{at + 1}: {lines[at].strip()!r} is no line of a hunk")
        if kind in " -":
            old.append(text)
        if kind in " +":
            new.append(text)
        at += 1
    if len(old) != wanted_old or len(new) != wanted_new:
        raise PatchedWheelError(f"{name}:{at}: the hunk is shorter than its header says")
    return Hunk(int(match[1]), old, new), at


def apply(source: str, patch: FilePatch) -> str:
    """The patched text; every hunk must match at exactly the line it names."""
    lines = source.splitlines(keepends=True)
    out: list[str] = []
    done = 0
    for number, hunk in enumerate(patch.hunks, start=1):
        start = hunk.start - 1
        found = lines[start : start + len(hunk.old)]
        if start < done or found != hunk.old:
            wrong = next((i for i, (a, b) in enumerate(zip(found, hunk.old, strict=False)) if a != b), len(found))
            expected = hunk.old[wrong].rstrip() if wrong < len(hunk.old) else "(end)"
            actual = found[wrong].rstrip() if wrong < len(found) else "(end of file)"
            raise PatchedWheelError(
                f"{patch.path}: hunk {number} of {len(patch.hunks)} does not apply at line {hunk.start + wrong}: "
                f"expected {expected!r}, found {actual!r}; the wheel is not the version this patch was made for"
            )
        out += lines[done:start] + hunk.new
        done = start + len(hunk.old)
    return "".join(out + lines[done:])


def patch_set_digest(patches: Sequence[Path]) -> str:
    """sha256 over names and contents, in name order: part of a release's identity."""
    digest = hashlib.sha256()
    for path in sorted(patches):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def build(wheel: Path, sha256: str, patches: Sequence[Path], out_dir: Path, revision: int = 1) -> Path:
    """Write `NAME-VERSION+ddtree.REVISION-TAGS.whl` into `out_dir` and return its path. Same inputs, same bytes."""
    content = wheel.read_bytes()
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        raise PatchedWheelError(f"{wheel.name}: sha256 is {actual}, pinned is {sha256}; fetch the pinned wheel again")
    name, version, tags = _names(wheel.name)
    local = f"{version}+ddtree.{revision}"
    old_info, new_info = f"{name}-{version}.dist-info/", f"{name}-{local}.dist-info/"
    members: dict[str, tuple[bytes, int]] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            target = info.filename
            if target.startswith(old_info):
                target = new_info + target[len(old_info) :]
            members[target] = (archive.read(info), info.external_attr >> 16)
    for patch_file in sorted(patches):
        for patch in parse(patch_file.read_text(), patch_file.name):
            if patch.path not in members:
                raise PatchedWheelError(f"{patch_file.name}: {patch.path} is not in {wheel.name}")
            data, mode = members[patch.path]
            members[patch.path] = (apply(data.decode(), patch).encode(), mode)
    _set_version(members, name, version, local, new_info)
    _write_record(members, new_info)
    out_dir.mkdir(parents=True, exist_ok=True)
    out = out_dir / f"{name}-{local}-{tags}.whl"
    temporary = out.with_suffix(".part")
    _pack(members, temporary, new_info)
    temporary.replace(out)
    return out


def _names(filename: str) -> tuple[str, str, str]:
    parts = filename.removesuffix(".whl").split("-")
    if len(parts) != 5 or not filename.endswith(".whl"):
        raise PatchedWheelError(f"{filename}: not a wheel's file name")
    return parts[0], parts[1], "-".join(parts[2:])


def _replace_once(text: str, old: str, new: str, where: str) -> str:
    if text.count(old) != 1:
        raise PatchedWheelError(f"{where}: expected {old!r} once, found it {text.count(old)} times")
    return text.replace(old, new)


def _set_version(members: dict[str, tuple[bytes, int]], name: str, version: str, local: str, info: str) -> None:
    data, mode = members[info + "METADATA"]
    text = _replace_once(data.decode(), f"\nVersion: {version}\n", f"\nVersion: {local}\n", "METADATA")
    members[info + "METADATA"] = (text.encode(), mode)
    path = f"{name}/_version.py"
    if path not in members:
        return
    data, mode = members[path]
    numbers, label = local.split("+")
    as_tuple = ", ".join(numbers.split("."))
    text = _replace_once(data.decode(), f"version = '{version}'", f"version = '{local}'", path)
    text = _replace_once(text, f"version_tuple = ({as_tuple})", f"version_tuple = ({as_tuple}, '{label}')", path)
    members[path] = (text.encode(), mode)


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _write_record(members: dict[str, tuple[bytes, int]], info: str) -> None:
    """File names with commas are common in engine wheels, so the rows go through a CSV writer."""
    _, mode = members.pop(info + "RECORD", (b"", 0o100644))
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for path in sorted(members):
        data = members[path][0]
        writer.writerow([path, _hash(data), len(data)])
    writer.writerow([info + "RECORD", "", ""])
    members[info + "RECORD"] = (rows.getvalue().encode(), mode)


def _pack(members: dict[str, tuple[bytes, int]], out: Path, info: str) -> None:
    # The dist-info comes last, as installers that stream a wheel expect. Nothing is compressed: compressors of
    # different versions write different bytes, and the wheel is known by its hash on every machine.
    order = sorted(members, key=lambda path: (path.startswith(info), path))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path in order:
            data, mode = members[path]
            entry = zipfile.ZipInfo(path, date_time=_TIMESTAMP)
            entry.external_attr = (mode or 0o100644) << 16
            entry.compress_type = zipfile.ZIP_STORED
            entry.create_system = 3
            archive.writestr(entry, data)


def verify_record(wheel: Path) -> list[str]:
    """What of a wheel disagrees with its RECORD; empty when all is well."""
    problems = []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = next((name for name in names if name.endswith(".dist-info/RECORD")), None)
        if record is None:
            return ["no RECORD"]
        listed = set()
        for path, digest, size in csv.reader(io.StringIO(archive.read(record).decode())):
            listed.add(path)
            if path == record:
                continue
            if path not in names:
                problems.append(f"{path}: listed, not there")
                continue
            data = archive.read(path)
            if _hash(data) != digest or str(len(data)) != size:
                problems.append(f"{path}: content differs from RECORD")
        problems += [f"{path}: not listed" for path in sorted(names - listed)]
    return problems
