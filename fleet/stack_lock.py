"""Make a stack's lock: uv resolves requirements.in, and the one wheel per package that hosts will get is pinned.

python -m fleet.stack_lock cpu             write stacks/cpu/requirements-py3XX.lock, keeping versions that still fit
python -m fleet.stack_lock cpu --check     say whether it would come out the same
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from packaging import tags
from packaging.utils import canonicalize_name

from fleet import stack as stacks
from fleet.patched_wheel import PatchedWheelError
from fleet.stack import LockedWheel, Stack, StackError, format_lock
from fleet.stack_patched import lock_file, lock_text
from fleet.wheelfile import name_parts
from fleet.wheelhouse import Wheelhouse, WheelhouseError
from fleet.wheelhouse_sources import Configured, pip_configuration

HEADER = """Lock of stack {stack} for Python {minor}, linux {arch}, glibc {glibc} or newer.
Made by `python -m fleet.stack_lock {stack}` from requirements.in; changes made here are lost.
Install with --require-hashes --no-deps --no-index; each wheel's file name and size stand above it."""


def make(stack: Stack, minor: str, *, upgrade: bool = False) -> str:
    """The text of the lock for one Python minor. Versions of the present lock are kept unless `upgrade`."""
    pip = pip_configuration()
    with tempfile.TemporaryDirectory(prefix="ddtree-lock-") as folder:
        output = Path(folder, "pylock.toml")
        platform = f"{stack.arch}-manylinux_{stack.min_glibc.replace('.', '_')}"
        argv = [
            *(_uv(), "pip", "compile", str(stack.directory / "requirements.in"), "--format", "pylock.toml", "--quiet"),
            *("--no-header", "--no-annotate", "--output-file", str(output), "--only-binary", ":all:"),
            *("--python-version", minor, "--python-platform", platform),
        ]
        argv += _sources(stack, pip)
        present = stack.lock_file(minor)
        if present.is_file() and not upgrade:
            kept = Path(folder, "kept.txt")
            kept.write_text("".join(f"{item.name}=={item.version}\n" for item in stack.lock(minor).wheels))
            argv += ["--constraint", str(kept)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=_environment())
        if done.returncode != 0:
            raise StackError(f"stack {stack.name} cannot be resolved for Python {minor}:\n{done.stderr.strip()}")
        packages = tomllib.loads(output.read_text())["packages"]
        wheels = tuple(_choose(stack, minor, package, Path(folder)) for package in packages)
    header = HEADER.format(stack=stack.name, minor=minor, arch=stack.arch, glibc=stack.min_glibc)
    return format_lock(header, wheels)


def _uv() -> str:
    from uv import find_uv_bin

    return str(find_uv_bin())


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("UV_") or key == "UV_CACHE_DIR"}


def _sources(stack: Stack, pip: Configured) -> list[str]:
    """A page with one package's files is given as find-links, never as an index: an index that also lists old copies of
    other packages would be preferred for those."""
    argv = ["--default-index", pip.index or stack.sources.indexes[0]]
    for link in dict.fromkeys(pip.find_links):
        argv += ["--find-links", link]
    for page in stack.sources.find_links:
        try:
            httpx.head(page, follow_redirects=True, timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            print(f"{page} cannot be reached and is left out: {error}", file=sys.stderr)
            continue
        argv += ["--find-links", page]
    return argv


def supported(minor: str, arch: str, glibc: str) -> list[tags.Tag]:
    """Tags that a host with this Python, machine and C library accepts, best first."""
    version = tuple(int(part) for part in minor.split("."))
    newest = int(glibc.split(".")[1])
    platforms = [f"manylinux_2_{number}_{arch}" for number in range(newest, 16, -1)]
    platforms += [f"manylinux2014_{arch}", f"manylinux_2_16_{arch}", f"manylinux_2_12_{arch}", f"manylinux2010_{arch}"]
    platforms += [f"manylinux_2_5_{arch}", f"manylinux1_{arch}", f"linux_{arch}"]
    interpreter = f"cp{minor.replace('.', '')}"
    found = list(tags.cpython_tags(version, platforms=platforms))
    return found + list(tags.compatible_tags(version, interpreter, platforms))


def _choose(stack: Stack, minor: str, package: dict[str, Any], folder: Path) -> LockedWheel:
    """The best wheel of a package for the stack's hosts."""
    name, version = canonicalize_name(package["name"]), package["version"]
    ranks = {tag: rank for rank, tag in enumerate(supported(minor, stack.arch, stack.min_glibc))}
    ranked = []
    for wheel in package.get("wheels", ()):
        filename = wheel.get("name") or _filename(wheel.get("url") or wheel.get("path"))
        fitting = [ranks[tag] for tag in name_parts(filename)[2] if tag in ranks]
        if fitting:
            ranked.append((min(fitting), filename, wheel))
    if not ranked:
        raise StackError(
            f"{name} {version} has no wheel for Python {minor}, {stack.arch}, glibc {stack.min_glibc}: "
            "constrain it in requirements.in to a version that has one"
        )
    _, filename, wheel = min(ranked, key=lambda item: item[:2])
    location = wheel.get("url") or (folder / wheel["path"]).as_uri()
    size = wheel.get("size") or _size(location)
    return LockedWheel(name, version, filename, wheel["hashes"]["sha256"], size)


def _filename(location: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlsplit(location).path).rsplit("/", 1)[-1]


def _size(location: str) -> int:
    parts = urllib.parse.urlsplit(location)
    if parts.scheme == "file":
        return Path(urllib.parse.unquote(parts.path)).stat().st_size
    return int(httpx.head(location, follow_redirects=True, timeout=30).raise_for_status().headers["content-length"])


def drift(stack: Stack) -> Iterator[str]:
    """What is different between the locks that are there and those that would be made now."""
    for minor in stack.python:
        path = stack.lock_file(minor)
        if not path.is_file():
            yield f"{path.name} is missing"
            continue
        before, after = path.read_text(), make(stack, minor)
        if before == after:
            continue
        old = {wheel.name: wheel for wheel in stack.lock(minor).wheels}
        new = {wheel.name: wheel for wheel in stacks.parse_lock(after)}
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                was = f"{old[name].version} {old[name].sha256[:12]}" if name in old else "not there"
                now = f"{new[name].version} {new[name].sha256[:12]}" if name in new else "not needed"
                yield f"{path.name}: {name}: locked {was}, resolves to {now}"
        if old == new:
            yield f"{path.name}: text differs ({_short(before)}, would be {_short(after)})"
    yield from _patched_drift(stack)


def _patched_drift(stack: Stack) -> Iterator[str]:
    if not stack.patched:
        return
    for minor in stack.python:
        path = lock_file(stack, minor)
        try:
            wanted = lock_text(Wheelhouse(), stack, minor)
        except (PatchedWheelError, WheelhouseError) as error:
            yield f"{path.name}: cannot be made: {error}"
            continue
        if not path.is_file() or path.read_text() != wanted:
            yield f"{path.name}: the patches make another wheel than it pins"


def write(stack: Stack, *, upgrade: bool = False) -> list[dict[str, Any]]:
    """Make every lock of the stack again, and the pins of its patched wheels; says what was written."""
    texts = {stack.lock_file(minor): make(stack, minor, upgrade=upgrade) for minor in stack.python}
    written = _write(texts)  # all or none
    stacks.forget()
    return written + write_patched(stack)


def write_patched(stack: Stack, house: Wheelhouse | None = None) -> list[dict[str, Any]]:
    """Make the patched wheels of the present locks and patches, and pin them."""
    if not stack.patched:
        return []
    store = house or Wheelhouse()
    try:
        return _write({lock_file(stack, minor): lock_text(store, stack, minor) for minor in stack.python})
    except (PatchedWheelError, WheelhouseError) as error:
        raise StackError(str(error)) from error


def _write(texts: Mapping[Path, str]) -> list[dict[str, Any]]:
    written = []
    for path, text in texts.items():
        wheels = stacks.parse_lock(text)
        size = sum(wheel.size for wheel in wheels)
        path.write_text(text)
        line = f"{path}: {len(wheels)} wheels, {size} bytes"
        written.append({"file": str(path), "wheels": len(wheels), "bytes": size, "text": line})
    return written


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack")
    parser.add_argument("--check", action="store_true", help="fail when a lock has drifted from requirements.in")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    options = parser.parse_args()
    try:
        chosen = stacks.load(options.stack)
        if options.check:
            found = list(drift(chosen))
            print("\n".join(found) or f"the locks of stack {chosen.name} are what requirements.in resolves to")
            return 1 if found else 0
        for item in write(chosen, upgrade=options.upgrade):
            print(item["text"])
    except StackError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
