"""Small real wheels for tests, made by the product's own writer."""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

from ddtree import release, store
from ddtree.paths import Paths

from fleet import wheelfile
from fleet.stack import LockedWheel

PYTHON = platform.python_version()


def make_wheel(
    folder: Path, name: str, version: str = "1.0", files: dict[str, str] | None = None, tag: str = "py3-none-any"
) -> LockedWheel:
    """Write a wheel into `folder`; without `files` it has one module of its own name."""
    module = name.replace("-", "_")
    content = files if files is not None else {f"{module}/__init__.py": f"VERSION = {version!r}\n"}
    filename, data = wheelfile.compose(
        name, version, ((path, text.encode(), False) for path, text in content.items()), tag=tag
    )
    return put(folder, filename, data, name, version)


def put(folder: Path, filename: str, data: bytes, name: str, version: str) -> LockedWheel:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / filename).write_bytes(data)
    return LockedWheel(name, version, filename, hashlib.sha256(data).hexdigest(), len(data))


def rewrite(path: Path, changes: dict[str, bytes | None], extra: dict[str, bytes] | None = None) -> None:
    """Change or drop members of a wheel without touching its RECORD."""
    with zipfile.ZipFile(path) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in members:
            new = changes.get(info.filename, data)
            if new is not None:
                archive.writestr(info, new)
        for name, data in (extra or {}).items():
            archive.writestr(name, data)


def uv_wheel(folder: Path) -> LockedWheel:
    """The installed uv, in a wheel like the one that hosts get."""
    from uv import find_uv_bin

    filename, data = wheelfile.compose(
        "uv", "0.1", [("uv-0.1.data/scripts/uv", Path(find_uv_bin()).read_bytes(), True)]
    )
    return put(folder, filename, data, "uv", "0.1")


class Host:
    """A host's directories in a temporary folder, and releases built there for real."""

    def __init__(self, root: Path, uv: LockedWheel, uv_folder: Path) -> None:
        self.paths = Paths(root / "opt", root / "state", root / "cache", root / "units", root / "run")
        self.wheels = root / "wheels"
        self.uv, self._uv_folder = uv, uv_folder
        for folder in (store.incoming(self.paths), self.paths.releases, self.paths.state, self.paths.slots):
            folder.mkdir(parents=True)

    def send(self, *wheels: LockedWheel) -> None:
        blobs = [store.Blob.of(wheel.as_dict()) for wheel in (*wheels, self.uv)]
        lacking = store.lacking(self.paths, blobs)
        names = []
        for wheel in (*wheels, self.uv):
            if wheel.sha256 in lacking:
                source = (self._uv_folder if wheel is self.uv else self.wheels) / wheel.filename
                shutil.copy(source, store.incoming(self.paths) / wheel.sha256)
                names.append(wheel.sha256)
        store.receive(self.paths, names, blobs)

    def request(self, release_id: str, *wheels: LockedWheel, **changes: Any) -> release.Request:
        manifest = {
            "id": release_id,
            "stack": "test",
            "engine": "standalone",
            "engine_version": "1",
            "python": PYTHON,
            "wheels": [wheel.as_dict() for wheel in wheels],
        }
        smoke = tuple(wheel.name.replace("-", "_") for wheel in wheels)
        values: dict[str, Any] = {"python": sys.executable, "user": "root", "smoke": smoke, **changes}
        return release.Request(manifest=manifest, uv=store.Blob.of(self.uv.as_dict()), **values)

    def build(self, release_id: str, *wheels: LockedWheel, **changes: Any) -> release.Report:
        self.send(*wheels)
        return release.build(self.paths, self.request(release_id, *wheels, **changes))

    def visible(self) -> list[str]:
        return sorted(path.name for path in self.paths.releases.iterdir() if path.name != ".lock")

    def site(self, release_id: str) -> Path:
        minor = ".".join(PYTHON.split(".")[:2])
        return self.paths.release(release_id) / "venv" / "lib" / f"python{minor}" / "site-packages"
