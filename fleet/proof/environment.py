"""A venv made from a lock's wheels as a host makes it: by uv, offline, every file by its hash, files linked."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from fleet.stack import LockedWheel
from fleet.wheelhouse import Wheelhouse

_TIMEOUT_S = 1800


class ProofError(RuntimeError):
    """The proof could not be carried out, or it failed; the message says at what, and why."""


@dataclasses.dataclass(frozen=True)
class Venv:
    folder: Path
    python: Path
    site: Path
    version: str
    seconds: float
    files: int
    bytes: int


def interpreter(minor: str) -> Path:
    """A Python of that minor: of pyenv, or of the system. Raises ProofError."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [path / "bin" / "python" for path in pyenv.glob(f"{minor}.*")]
    found = sorted(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.parent.name)])
    system = shutil.which(f"python{minor}", path="/usr/local/bin:/usr/bin:/bin")
    candidates = [*reversed(found), *([Path(system)] if system else [])]
    for path in candidates:
        if path.is_file():
            return path
    raise ProofError(f"there is no Python {minor} on this machine: install it (pyenv install {minor})")


def make(house: Wheelhouse, wheels: Sequence[LockedWheel], minor: str, folder: Path, cache: Path) -> Venv:
    """Raises ProofError. The caller removes `folder`."""
    lacking = house.missing(wheels)
    if lacking:
        raise ProofError(f"wheelhouse {house.root} lacks {len(lacking)} wheels: run `fleet wheelhouse build` first")
    from uv import find_uv_bin

    uv, began = str(find_uv_bin()), time.monotonic()
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR")}
    environment = {**kept, "UV_CACHE_DIR": str(cache), "UV_NO_CONFIG": "1", "UV_OFFLINE": "1", "UV_NO_PROGRESS": "1"}
    _run([uv, "venv", "--quiet", "--no-project", "--python", str(interpreter(minor)), str(folder)], environment)
    python = folder / "bin" / "python"
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels))
    argv = [uv, "pip", "install", "--quiet", "--python", str(python), "--no-index", "--no-deps", "--require-hashes"]
    argv += ["--no-build", "--link-mode", "hardlink", "--requirement", str(requirements)]
    argv += [f"--find-links={house.path(wheel).parent}" for wheel in wheels]
    _run(argv, environment)
    version = _run([str(python), "-c", "import platform; print(platform.python_version())"], environment).strip()
    site = folder / "lib" / f"python{minor}" / "site-packages"
    sizes = [path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return Venv(folder, python, site, version, time.monotonic() - began, len(sizes), sum(sizes))


def _run(argv: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environment)
    if done.returncode != 0:
        raise ProofError(f"{' '.join(argv[:4])} ... failed:\n{(done.stderr or done.stdout).strip()[-3000:]}")
    return done.stdout
