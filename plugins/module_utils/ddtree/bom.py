"""Bill of materials of a virtual environment, whoever made it: read from its files, never by importing its code."""

from __future__ import annotations

import csv
import email.parser
import hashlib
import io
import os
import re
from pathlib import Path
from typing import Any

from . import elf

SCHEMA = 1
# Written by installers, so different in two installations of the same wheel.
_INSTALLER_FILES = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json")
_LIBRARY = re.compile(r"\.so(\.\d+)*\Z")


class NotAVenv(ValueError):
    """The directory holds no Python environment."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def site_packages(venv: Path) -> list[Path]:
    """Package directories of an environment; lib64 is usually a link to lib."""
    found: dict[str, Path] = {}
    for pattern in ("lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages"):
        for path in sorted(venv.glob(pattern)):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def bom(venv: Path) -> dict[str, Any]:
    """Every distribution with version, local tag and digests, and every native library. Raises NotAVenv."""
    folders = site_packages(venv)
    if not folders:
        raise NotAVenv(f"{venv} holds no lib/python3.*/site-packages: it is no virtual environment")
    distributions = [
        _distribution(info)
        for folder in folders
        for info in sorted(folder.iterdir())
        if info.name.endswith((".dist-info", ".egg-info"))
    ]
    return {
        "schema": SCHEMA,
        "python": interpreter(venv),
        "distributions": sorted(distributions, key=lambda item: (item["name"], item["version"])),
        "native": [item for folder in folders for item in _native(venv, folder)],
    }


def interpreter(venv: Path) -> dict[str, str]:
    """Version and home of the interpreter that the environment was made from, as pyvenv.cfg says."""
    values = {}
    try:
        for line in (venv / "pyvenv.cfg").read_text(errors="replace").splitlines():
            key, separator, value = line.partition("=")
            if separator:
                values[key.strip().lower()] = value.strip()
    except OSError:
        return {"version": "", "home": ""}
    return {"version": values.get("version_info") or values.get("version", ""), "home": values.get("home", "")}


def _distribution(info: Path) -> dict[str, Any]:
    """One distribution; what is broken about it is told in `problem` instead of stopping the listing."""
    metadata_file = info / ("METADATA" if info.name.endswith(".dist-info") else "PKG-INFO")
    if info.is_file():
        metadata_file = info
    folder_name, _, folder_version = info.name.rsplit(".", 1)[0].partition("-")
    found: dict[str, Any] = {"name": normal(folder_name), "version": folder_version.partition("-")[0], "problem": ""}
    try:
        headers = email.parser.HeaderParser().parsestr(metadata_file.read_text("utf-8", errors="replace"))
        found["name"] = normal(str(headers.get("Name") or found["name"]))
        found["version"] = str(headers.get("Version") or found["version"])
    except OSError:
        found["problem"] = f"{metadata_file.name} is missing"
    found["local"] = found["version"].partition("+")[2]
    found["installer"] = _first_line(info / "INSTALLER")
    found["tags"] = _tags(info / "WHEEL")
    found.update(_record(info))
    return found


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip().partition("\n")[0]
    except OSError:
        return ""


def _tags(path: Path) -> list[str]:
    try:
        headers = email.parser.HeaderParser().parsestr(path.read_text("utf-8", errors="replace"))
    except OSError:
        return []
    return [str(tag).strip() for tag in headers.get_all("Tag") or ()]


def _record(info: Path) -> dict[str, Any]:
    """Digest of RECORD as it is, and of its rows without what differs between installers; and the modules it brings."""
    facts: dict[str, Any] = {"record_sha256": "", "content_sha256": "", "files": 0, "modules": []}
    if not info.is_dir():
        return facts
    try:
        raw = (info / "RECORD").read_bytes()
    except OSError:
        return facts
    rows, modules = [], set()
    try:
        for row in csv.reader(io.StringIO(raw.decode("utf-8", "replace"))):
            if len(row) < 2 or row[0].endswith(".pyc") or row[0].startswith(("../", "/")):
                continue
            if row[0] in {f"{info.name}/{name}" for name in _INSTALLER_FILES}:
                continue
            rows.append(f"{row[0]}\0{row[1]}")
            modules |= _module(row[0])
    except csv.Error as error:
        facts["problem"] = f"RECORD cannot be read: {error}"
    facts["record_sha256"] = hashlib.sha256(raw).hexdigest()
    facts["content_sha256"] = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()
    facts["files"] = len(rows)
    facts["modules"] = sorted(modules)
    return facts


def _module(path: str) -> set[str]:
    """The importable top-level name that a file belongs to."""
    top, separator, _ = path.partition("/")
    if separator:
        return set() if top.endswith((".dist-info", ".data", ".libs")) or top == "__pycache__" else {top}
    if top.endswith((".py", ".so")):
        return {top.partition(".")[0]}
    return set()


def _native(venv: Path, folder: Path) -> list[dict[str, Any]]:
    found = []
    for directory, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(directory, name)
            if not _LIBRARY.search(name) or not path.is_file():
                continue
            entry: dict[str, Any] = {"path": str(path.relative_to(venv)), "size": path.stat().st_size}
            try:
                library = elf.read(path)
                entry.update(machine=library.machine, soname=library.soname, needed=list(library.needed))
            except (ValueError, OSError) as error:
                entry["problem"] = f"cannot be read: {error}"
            found.append(entry)
    return sorted(found, key=lambda item: item["path"])


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line per distribution that is new, gone or another one."""
    old = {item["name"]: item for item in before.get("distributions", ())}
    new = {item["name"]: item for item in after.get("distributions", ())}
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"- {name} {old[name]['version']}")
        elif name not in old:
            lines.append(f"+ {name} {new[name]['version']}")
        elif old[name]["version"] != new[name]["version"]:
            lines.append(f"~ {name} {old[name]['version']} -> {new[name]['version']}")
        elif old[name]["content_sha256"] != new[name]["content_sha256"]:
            lines.append(f"~ {name} {new[name]['version']} (same version, other files)")
    return lines
