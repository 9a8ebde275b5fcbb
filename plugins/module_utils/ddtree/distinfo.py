"""What an installed distribution or a wheel says of itself: METADATA, WHEEL and RECORD, read with suspicion.

One reader for both, so that wheels before staging and a venv after it are judged by the same facts. Texts are bounded
by whoever reads them; nothing here opens a file.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import re
from collections.abc import Iterable
from typing import Any

METADATA_LIMIT = 4 << 20
RECORD_LIMIT = 64 << 20
# Written by installers, so different in two installations of the same wheel.
INSTALLER_FILES = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json")
_ALGORITHMS = ("sha256", "sha384", "sha512")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of RECORD: a path as it stands there, the hash (`sha256=...`, empty if none) and the size (or -1)."""

    path: str
    hash: str
    size: int


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def headers(text: str) -> dict[str, list[str]]:
    """The header block of METADATA or WHEEL; names in lower case. Whatever stands there, this ends and returns."""
    found: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in text.splitlines():
        if not line.strip():
            break
        if line[0] in " \t":
            if last:
                last[-1] += " " + line.strip()
            continue
        name, separator, value = line.partition(":")
        if not separator:
            last = None
            continue
        last = found.setdefault(name.strip().lower(), [])
        last.append(value.strip())
    return found


def record(text: str) -> list[Row]:
    """The lines of a RECORD. Raises ValueError, which says what is wrong with it."""
    rows = []
    try:
        for number, fields in enumerate(csv.reader(io.StringIO(text)), 1):
            if not fields:
                continue
            if len(fields) != 3 or "\0" in fields[0] or not fields[0]:
                raise ValueError(f"line {number} is not path, hash and size")
            path, said, size = fields
            if said and said.partition("=")[0] not in _ALGORITHMS:
                raise ValueError(f"line {number} has a hash that is not accepted: {said[:20]!r}")
            if size and not (size.isascii() and size.isdigit() and len(size) < 16):
                raise ValueError(f"line {number} has a size that is no number: {size[:20]!r}")
            rows.append(Row(path, said, int(size) if size else -1))
    except csv.Error as error:
        raise ValueError(f"is no table: {error}") from error
    return rows


def record_hash(algorithm: str, digest: bytes) -> str:
    """A hash as RECORD writes it."""
    return f"{algorithm}=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def distribution(folder: str, metadata: str, wheel: str, record_text: str | None) -> tuple[dict[str, Any], list[Row]]:
    """Facts of one distribution from the texts of its `.dist-info` folder, and its RECORD.

    What is broken is told in `problem`, and the listing goes on with what can be known.
    """
    folder_name, _, folder_version = folder.rsplit(".", 1)[0].partition("-")
    said = headers(metadata)
    name = (said.get("name") or [folder_name])[0]
    version = (said.get("version") or [folder_version])[0]
    problem = "" if said.get("name") and said.get("version") else "METADATA is missing or names no name and version"
    rows: list[Row] = []
    if record_text is not None:
        try:
            rows = record(record_text)
        except ValueError as error:
            problem = f"RECORD {error}"
    facts = {
        "name": normal(name)[:200],
        "version": version[:200],
        "local": version.partition("+")[2][:200],
        "folder": folder,
        "tags": headers(wheel).get("tag", []),
        "requires": said.get("requires-dist", []),
        "requires_python": (said.get("requires-python") or [""])[0],
        "modules": sorted({module for row in rows for module in _module(row.path)}),
        "content_sha256": content_digest(folder, rows) if rows else "",
        "files": len(rows),
        "problem": problem,
    }
    return facts, rows


def content_digest(folder: str, rows: Iterable[Row]) -> str:
    """Digest of what a wheel brought, the same wherever and by whomever it was installed."""
    own = {f"{folder}/{name}" for name in INSTALLER_FILES}
    lines = sorted(
        f"{row.path}\0{row.hash}"
        for row in rows
        if row.path not in own and not row.path.endswith(".pyc") and not row.path.startswith(("../", "/"))
    )
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _module(path: str) -> set[str]:
    """The importable top-level name that a file belongs to."""
    top, separator, _ = path.partition("/")
    if separator:
        hidden = top.endswith((".dist-info", ".data", ".libs")) or top in ("__pycache__", "..", "")
        return set() if hidden else {top}
    return {top.partition(".")[0]} if top.endswith((".py", ".so")) else set()


def torch_build(version_py: str) -> dict[str, str]:
    """Version, CUDA release and source revision that torch/version.py states; the file is read, not run."""
    found = {}
    for key, name in (("version", "__version__"), ("cuda", "cuda"), ("git", "git_version")):
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"\n]{{1,100}})['\"]", version_py, re.MULTILINE)
        found[key] = match.group(1) if match else ""
    return found
