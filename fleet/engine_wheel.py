"""The wheel of the engine that we ship: built from a package directory, the same bytes each time."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fleet import content, wheelfile

PACKAGE = "ddtree_engine"
_SKIPPED_DIRECTORIES = ("__pycache__", ".git", ".ruff_cache", ".mypy_cache", ".pytest_cache")
_SKIPPED_SUFFIXES = (".pyc", ".pyo", ".swp", ".tmp")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?\Z")


class EngineError(ValueError):
    """The engine's package cannot be shipped as it is."""


@dataclasses.dataclass(frozen=True)
class EngineWheel:
    """A built wheel in memory: what it is called, what it is, and its bytes."""

    version: str
    filename: str
    sha256: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


def installed() -> Path:
    """The engine package of this installation (the checkout's, when running from one)."""
    beside = Path(__file__).resolve().parent.parent / PACKAGE
    if (beside / "__init__.py").is_file():
        return beside
    raise EngineError(f"{beside} is missing: this installation is incomplete; set fleet_engine_path to the package")


def package_directory(path: str | Path | None) -> Path:
    """The package that `fleet_engine_path` names; empty means the installed one. Raises EngineError."""
    if not path:
        return installed()
    directory = Path(path).expanduser()
    if not (directory / "__init__.py").is_file() and (directory / PACKAGE / "__init__.py").is_file():
        directory = directory / PACKAGE
    if not (directory / "__init__.py").is_file():
        raise EngineError(f"fleet_engine_path {path} is not a Python package: it has no __init__.py")
    return directory


def version_of(package: Path) -> str:
    """`__version__` of the package, read without importing it; else the version of this installation."""
    try:
        tree = ast.parse((package / "__init__.py").read_text())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise EngineError(f"{package}/__init__.py is not valid Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__version__" for target in targets):
                return _checked(str(node.value.value), package)
    return _checked(content.version(), package)


def _checked(version: str, package: Path) -> str:
    if not _VERSION.match(version):
        raise EngineError(f"version {version!r} of {package} is not a plain version number such as 1.2.0")
    return version


def render(package: Path) -> EngineWheel:
    """The wheel of the package, without writing anything."""
    version = version_of(package)
    filename, data = wheelfile.compose(
        "ddtree-engine",
        version,
        _files(package),
        metadata=("Summary: Engine that ddtree-fleet deploys", "License-Expression: Apache-2.0"),
    )
    return EngineWheel(version, filename, hashlib.sha256(data).hexdigest(), data)


def build(package: Path, out_dir: Path) -> Path:
    """Write the wheel of `package` into `out_dir` and return its path; an equal file that is there already stays."""
    wheel = render(package)
    path = out_dir / wheel.filename
    if path.is_file() and path.stat().st_size == wheel.size and path.read_bytes() == wheel.data:
        return path
    out_dir.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(wheel.data)
    temporary.replace(path)
    return path


def _files(package: Path) -> Iterator[tuple[str, bytes, bool]]:
    for path in sorted(package.rglob("*")):
        relative = path.relative_to(package)
        if any(part in _SKIPPED_DIRECTORIES for part in relative.parts) or path.suffix in _SKIPPED_SUFFIXES:
            continue
        if path.is_symlink() and not path.exists():
            raise EngineError(f"{path} is a dangling link: the engine would be incomplete")
        if path.is_file():
            # a checkout's modes depend on the umask: only what is meant counts
            yield f"{PACKAGE}/{relative.as_posix()}", path.read_bytes(), bool(path.stat().st_mode & 0o100)
