"""Stacks: everything below the engine that must match, as the folders stacks/<name>/ describe it.

A stack is stack.yml (what it is and needs) and one requirements-py3XX.lock per Python minor: one wheel per package,
each pinned by version, file name, size and sha256. Nothing is ever resolved after the lock was made.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import pydantic
import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version

from fleet import content, wheelfile

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s\\]+) \\\Z")
_HASH = re.compile(r" {4}--hash=sha256:([0-9a-f]{64})\Z")
_FILE = re.compile(r"# (\S+\.whl) \((\d+) bytes\)\Z")


class StackError(ValueError):
    """A stack that does not exist or is not as it must be; the message names the file and the fix."""


@dataclasses.dataclass(frozen=True, order=True)
class LockedWheel:
    """One wheel, pinned."""

    name: str
    version: str
    filename: str
    sha256: str
    size: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Lock:
    """The wheels of a stack for one Python minor; `sha256` is that of the lock's text."""

    python: str
    sha256: str
    wheels: tuple[LockedWheel, ...]

    @property
    def size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Sources(_Model):
    """Where wheels can be had, beside what pip is configured with."""

    indexes: list[str] = []
    find_links: list[str] = []


class Tool(_Model):
    """A program that hosts need to install a release; a wheel like the others, but outside the venv."""

    version: str
    filename: str
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    size: int = pydantic.Field(gt=0)


class Tie(_Model):
    """A kernel wheel, by its hash, and the one torch that it was built for: its metadata names none."""

    name: str
    version: str
    torch: str
    cuda: int
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    # of what RECORD lists, by which an installed one is known
    content_sha256: str = pydantic.Field(pattern=r"^([0-9a-f]{64})?$")


class Patched(_Model):
    """An engine's wheel that is changed by patches/, and the number that its local version gets."""

    distribution: str
    revision: int = pydantic.Field(gt=0)


class Stack(_Model):
    """One stack.yml. The keys from `python` to `needs_compiler` are what preflight asks of a host."""

    name: str
    summary: str
    python: list[str]
    arch: str
    torch: str
    # Python minor to sha256 of torch's wheel, where the file's own version does not tell which build it is
    torch_wheels: dict[str, str] = {}
    cuda: int | None
    ties: list[Tie] = []
    min_driver: str = ""
    min_glibc: str
    archs: list[str] = []
    toolkits: dict[str, str] = {}
    libraries: list[str] = []
    ships_toolkit: bool = False
    needs_compiler: bool = False
    min_memory_gib: float = 0.0
    engines: list[str]
    # engine to the wheel of the lock that its releases hold in a patched form
    patched: dict[str, Patched] = {}
    wheels_bytes: int
    install_bytes: int
    install_files: int
    sources: Sources
    tools: dict[str, Tool]
    smoke: dict[str, list[str]]
    directory: Path = pydantic.Field(exclude=True)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Stack:
        if not NAME.match(self.name):
            raise ValueError(f"name {self.name!r} must be lower-case letters, digits, '.', '_' and '-'")
        if "uv" not in self.tools:
            raise ValueError("tools must pin uv, which makes the releases on hosts")
        missing = [engine for engine in self.engines if not self.smoke.get(engine)]
        if missing:
            raise ValueError(f"smoke must list the modules to import for {', '.join(missing)}")
        for tool, value in self.tools.items():
            name, version, _ = wheelfile.name_parts(value.filename)
            if name != canonicalize_name(tool) or version != Version(value.version):
                raise ValueError(f"tools.{tool}: file {value.filename} is not version {value.version} of {tool}")
        return self

    def lock_file(self, minor: str) -> Path:
        return self.directory / f"requirements-py{minor.replace('.', '')}.lock"

    def lock(self, python_version: str) -> Lock:
        """The lock for a host's Python (full version or minor). Raises StackError where the stack has none."""
        minor = minor_of(python_version)
        path = self.lock_file(minor)
        if minor not in self.python or not path.is_file():
            raise StackError(
                f"stack {self.name} has no lock for Python {minor}, only for {', '.join(self.python)}: "
                f"set fleet_python to such an interpreter on the host, or add {path.name} to the stack"
            )
        lock = _read_lock(path, minor)
        self._check_ties(lock, path)
        return lock

    def _check_ties(self, lock: Lock, path: Path) -> None:
        """Kernels and the torch that they were built for are kept together by the hashes of their files."""
        wheels = {wheel.name: wheel for wheel in lock.wheels}
        torch = wheels.get("torch")
        wanted = self.torch_wheels.get(lock.python)
        if torch is not None and wanted is not None and torch.sha256 != wanted:
            raise StackError(
                f"{path}: {torch.filename} is not the {self.torch} build that stack.yml names in torch_wheels: lock "
                "that build, or tie the kernels to the other one and say so there"
            )
        for tie in self.ties:
            kernel = wheels.get(canonicalize_name(tie.name))
            if kernel is None:
                continue
            if kernel.sha256 != tie.sha256:
                raise StackError(
                    f"{path}: {kernel.filename} is not tied to a torch: stack.yml ties {tie.name} {tie.version} of "
                    f"sha256 {tie.sha256[:16]}... to torch {tie.torch}"
                )
            if torch is None or Version(torch.version).public != tie.torch or self.cuda != tie.cuda:
                found = f"torch {torch.version}" if torch else "no torch"
                raise StackError(
                    f"{path}: {tie.name} {tie.version} was built for torch {tie.torch} and CUDA {tie.cuda}, the lock "
                    f"has {found} and the stack CUDA {self.cuda}"
                )

    def release_wheels(self, python_version: str, engine: str) -> tuple[LockedWheel, ...]:
        """What a release of this engine holds beside our own package: the lock, with the engine's wheel patched."""
        from fleet import stack_patched

        patched = stack_patched.pinned(self, python_version)[engine] if engine in self.patched else None
        return tuple(
            patched if patched is not None and wheel.name == patched.name else wheel
            for wheel in self.lock(python_version).wheels
        )

    def all_wheels(self, python_version: str) -> tuple[LockedWheel, ...]:
        """Everything that hosts with this Python may need of the wheelhouse: lock, patched wheels, tools."""
        from fleet import stack_patched

        found = {*self.lock(python_version).wheels, *stack_patched.pinned(self, python_version).values()}
        return tuple(sorted(found | {self.tool(name) for name in self.tools}))

    def tool(self, name: str) -> LockedWheel:
        value = self.tools[name]
        return LockedWheel(canonicalize_name(name), value.version, value.filename, value.sha256, value.size)

    def patches_digest(self, engine: str) -> str:
        """Digest of the patch set that makes this stack's engine; empty for an engine that is not patched."""
        files = sorted((self.directory / "patches").rglob("*.patch")) if engine != "standalone" else []
        if not files:
            return ""
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(self.directory).as_posix()}\0".encode() + file.read_bytes() + b"\0")
        return digest.hexdigest()


def minor_of(python_version: str) -> str:
    match = re.match(r"(\d+\.\d+)(\.|\Z)", python_version)
    if match is None:
        raise StackError(f"{python_version!r} is not a Python version")
    return match.group(1)


def available() -> list[str]:
    return sorted(path.parent.name for path in (content.root() / "stacks").glob("*/stack.yml"))


def load(name: str) -> Stack:
    """The stack of that name. Raises StackError."""
    if not NAME.match(name) or name not in available():
        raise StackError(f"unknown stack {name!r}: choose one of {', '.join(available()) or 'none is installed'}")
    return load_directory(content.root() / "stacks" / name)


@functools.cache
def load_directory(directory: Path) -> Stack:
    """The stack in `directory`. Raises StackError."""
    path = directory / "stack.yml"
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise StackError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise StackError(f"{path} is not a mapping")
    try:
        stack = Stack(**values, directory=directory)
    except (pydantic.ValidationError, wheelfile.BadWheel, TypeError) as error:
        raise StackError(f"{path} is not a stack: {_words(error)}") from error
    if stack.name != directory.name:
        raise StackError(f"{path}: name is {stack.name}, but the folder is called {directory.name}")
    return stack


def forget() -> None:
    """Read files again that were read before: this process has written them."""
    load_directory.cache_clear()
    _read_lock.cache_clear()


def _words(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'stack'}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors()
        )
    return str(error)


@functools.cache
def _read_lock(path: Path, minor: str) -> Lock:
    text = path.read_text()
    try:
        wheels = parse_lock(text)
    except StackError as error:
        raise StackError(f"{path}: {error}") from error
    return Lock(minor, hashlib.sha256(text.encode()).hexdigest(), wheels)


def parse_lock(text: str) -> tuple[LockedWheel, ...]:
    """The wheels of a lock. Strict: what is not exactly one pinned, hashed wheel per package is an error by line."""
    found: dict[str, LockedWheel] = {}
    file: tuple[str, int] | None = None
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        line, number = lines[index], index + 1
        index += 1
        if match := _FILE.match(line):
            file = (match.group(1), int(match.group(2)))
            continue
        if not line.strip() or line.startswith("#"):
            continue
        match = _REQUIREMENT.match(line)
        if match is None:
            raise StackError(f"line {number} is no pinned and hashed requirement: {line.strip()[:80]!r}")
        name, version = canonicalize_name(match.group(1)), match.group(2)
        hashed = _HASH.match(lines[index]) if index < len(lines) else None
        if hashed is None:
            raise StackError(f"line {number}: {name} has no single sha256 on the next line; make the lock again")
        index += 1
        if file is None:
            raise StackError(f"line {number}: {name} does not name its wheel in the comment before it")
        found_name, found_version, _ = wheelfile.name_parts(file[0])
        if found_name != name or found_version != Version(version):
            raise StackError(f"line {number}: {file[0]} is not {name} {version}")
        if name in found:
            raise StackError(f"line {number}: {name} is there twice")
        found[name] = LockedWheel(name, version, file[0], hashed.group(1), file[1])
        file = None
    if not found:
        raise StackError("holds no requirement")
    return tuple(found[name] for name in sorted(found))


def format_lock(header: str, wheels: tuple[LockedWheel, ...]) -> str:
    """A lock as pip and uv read it too (`--require-hashes`)."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for wheel in sorted(wheels):
        lines += ["", f"# {wheel.filename} ({wheel.size} bytes)", f"{wheel.name}=={wheel.version} \\"]
        lines += [f"    --hash=sha256:{wheel.sha256}"]
    return "\n".join(lines) + "\n"


def release_id(
    stack: Stack, python_version: str, engine_wheel_sha256: str, engine_version: str, engine: str = "standalone"
) -> str:
    """Id of the release that these make: the same content has the same id, anything else another one."""
    parts = (
        stack.lock(python_version).sha256,
        python_version,
        engine_wheel_sha256,
        stack.patches_digest(engine),
    )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return f"{stack.name}-{engine}-{engine_version}-{digest}"
