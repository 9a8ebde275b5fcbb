"""What a wheel will look like once it is installed, worked out from the wheel itself: the yardstick for a release."""

from __future__ import annotations

import base64
import binascii
import csv
import dataclasses
import io
import zipfile
from pathlib import Path


class WheelError(Exception):
    """A wheel that must not be installed."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """Installed files by path below the venv -> sha256 (hex; empty where installers write their own version of it).

    `generated` are files that an installer may add.
    """

    filename: str
    hashes: dict[str, str]
    generated: frozenset[str]


def contents(path: Path, site: str) -> Contents:
    """Read a wheel's RECORD; `site` is the venv's package directory. Raises WheelError."""
    try:
        with zipfile.ZipFile(path) as archive:
            record = next(
                (name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/RECORD")),
                None,
            )
            if record is None:
                raise WheelError(f"{path.name} has no RECORD")
            rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
    except (OSError, zipfile.BadZipFile, UnicodeDecodeError, csv.Error) as error:
        raise WheelError(f"{path.name} cannot be read: {error}") from error
    info = record.rpartition("/")[0]
    data = info.removesuffix(".dist-info") + ".data"
    hashes: dict[str, str] = {}
    for row in rows:
        if not row or row[0] == record:
            continue
        name = row[0]
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise WheelError(f"{path.name} would write outside its target: {name!r}")
        if name.startswith(f"{data}/"):
            kind, _, rest = name.removeprefix(f"{data}/").partition("/")
            if kind in ("purelib", "platlib"):
                hashes[f"{site}/{rest}"] = _hex(row[1], path.name)
            elif kind == "scripts":
                hashes[f"bin/{rest}"] = ""  # the first line becomes the venv's interpreter
            elif kind == "data":
                hashes[rest] = _hex(row[1], path.name)
        else:
            hashes[f"{site}/{name}"] = _hex(row[1], path.name)
    generated = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")
    return Contents(path.name, hashes, frozenset(f"{site}/{info}/{name}" for name in generated))


def _hex(value: str, filename: str) -> str:
    """RECORD's notation (`sha256=` and base64) as hex digits; empty where it is another algorithm."""
    algorithm, separator, text = value.partition("=")
    if not separator or algorithm != "sha256":
        return ""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    except (binascii.Error, ValueError) as error:
        raise WheelError(f"{filename}: RECORD holds no valid hash: {value[:60]!r}") from error
