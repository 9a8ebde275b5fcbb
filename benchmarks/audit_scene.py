"""The production stack unpacked from its wheels, and ways to break it and put it together again."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet import stack
from fleet.wheelfile import name_parts

MINOR = "3.11"


@dataclasses.dataclass
class Scene:
    """The unpacked stack, and how to break and mend it."""

    venv: Path
    wheels: Path
    others: Path
    cache: Path

    @property
    def site(self) -> Path:
        return self.venv / "lib" / f"python{MINOR}" / "site-packages"

    def files_of(self, name: str) -> list[Path]:
        (info,) = self.site.glob(f"{name.replace('-', '_')}-[0-9]*.dist-info")
        with (info / "RECORD").open(newline="") as stream:
            return [self.site / row[0] for row in csv.reader(stream) if (self.site / row[0]).exists()]

    @contextmanager
    def aside(self, *names: str) -> Iterator[None]:
        """Without these distributions."""
        moved: list[tuple[Path, Path]] = []
        store = self.venv.parent / "aside"
        for name in names:
            for path in self.files_of(name):
                target = store / path.relative_to(self.site)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
                moved.append((path, target))
        self._tidy(path for path, _ in moved)
        try:
            yield
        finally:
            for path, target in moved:
                path.parent.mkdir(parents=True, exist_ok=True)
                target.rename(path)
            shutil.rmtree(store, ignore_errors=True)

    @contextmanager
    def beside(self, pattern: str) -> Iterator[None]:
        """With another wheel unpacked over what is there."""
        (wheel,) = self.others.glob(pattern)
        saved: list[tuple[Path, Path]] = []
        written: list[Path] = []
        store = self.venv.parent / "overwritten"
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                path = self.site / info.filename
                if info.is_dir():
                    continue
                if path.exists():
                    kept = store / info.filename
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(kept)
                    saved.append((path, kept))
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                written.append(path)
        try:
            yield
        finally:
            for path in written:
                path.unlink(missing_ok=True)
            for path, kept in saved:
                kept.rename(path)
            shutil.rmtree(store, ignore_errors=True)
            self._tidy(written)

    def _tidy(self, gone: Iterable[Path]) -> None:
        """Remove folders that were left empty, as an installer does."""
        for folder in sorted({path.parent for path in gone}, key=lambda item: -len(item.parts)):
            while folder != self.site and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent

    @contextmanager
    def changed(self, path: str, change: Callable[[bytes], bytes]) -> Iterator[None]:
        """With one file changed in place."""
        file = self.site / path
        before = file.read_bytes()
        file.write_bytes(change(before))
        try:
            yield
        finally:
            file.write_bytes(before)


def download(folder: Path, requirements: list[str]) -> None:
    """With pip, as hosts of this Python and platform would get them; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    have = {name_parts(path.name)[0] for path in folder.glob("*.whl")}
    wanted = [line for line in requirements if line.partition("==")[0].replace("_", "-").lower() not in have]
    if not wanted:
        return
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    argv += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", MINOR]
    for abi in (f"cp{MINOR.replace('.', '')}", "abi3", "none"):
        argv += ["--abi", abi]
    for tag in [f"manylinux_2_{minor}" for minor in range(34, 4, -1)] + [
        "manylinux2014",
        "manylinux2010",
        "manylinux1",
    ]:
        argv += ["--platform", f"{tag}_x86_64"]
    subprocess.run([*argv, *wanted], check=True)


def unpack(wheel: Path, site: Path) -> None:
    """As installers do: files of `.data` go to their places, and RECORD says so."""
    places = {
        "purelib": "",
        "platlib": "",
        "scripts": "../../../bin/",
        "data": "../../../",
        "headers": "../../../include/",
    }

    def place(member: str) -> str:
        top, _, rest = member.partition("/")
        if not top.endswith(".data"):
            return member
        kind, _, rest = rest.partition("/")
        return places[kind] + rest

    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            path = Path(os.path.normpath(site / place(info.filename)))
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            if info.filename.endswith(".dist-info/RECORD"):
                with path.open(newline="") as stream:
                    rows = [[place(row[0]), *row[1:]] for row in csv.reader(stream) if row]
                with path.open("w", newline="") as stream:
                    csv.writer(stream, lineterminator="\n").writerows(rows)


def check_wheels(folder: Path, lock: stack.Lock) -> None:
    """Exactly the lock's wheels, each with its hash."""
    have = {path.name for path in folder.glob("*.whl")}
    wanted = {wheel.filename: wheel.sha256 for wheel in lock.wheels}
    if have != wanted.keys():
        raise SystemExit(f"{folder} is not the lock's set: {sorted(have ^ wanted.keys())[:6]}; remove it and run again")
    for name, sha256 in wanted.items():
        with (folder / name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
                raise SystemExit(f"{folder / name} does not have the lock's hash; remove it and run again")


def forget_pages(folder: Path) -> None:
    """Drop the files below `folder` from the page cache, so that they come from the disk again."""
    os.sync()
    for directory, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)  # noqa: PTH118  (61,000 times)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
