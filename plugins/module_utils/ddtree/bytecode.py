"""Compiled bytecode of a release: made once per wheel and interpreter, then shared by hard links like the sources.

Files of a release never change, so the bytecode is not compared with its source at import (`unchecked-hash`), and the
path inside it does not matter: Python replaces it by the real one when it loads the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from . import files
from .intact import hash_all

# Run by the release's own interpreter; reads one "source<TAB>name" per line.
_COMPILE = """
import py_compile, sys
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
for line in sys.stdin:
    source, _, name = line.rstrip("\\n").partition("\\t")
    try:
        py_compile.compile(source, dfile=name, doraise=True, quiet=2, invalidation_mode=mode)
    except Exception:
        pass  # templates and tests for other Pythons are no modules of this one
"""


class BytecodeError(Exception):
    """The interpreter could not compile at all."""


def target(source: str, tag: str) -> str:
    """Where Python looks for the bytecode of `source` (relative paths)."""
    folder, _, name = source.rpartition("/")
    return f"{folder + '/' if folder else ''}__pycache__/{name[:-3]}.{tag}.pyc"


def provide(python: Path, base: Path, kept: Path, key: str, tag: str, wheels: dict[str, list[str]]) -> tuple[int, int]:
    """Give all sources below `base` their bytecode; returns how many were linked and how many compiled.

    `wheels` says which sources came from which wheel (sha256); `kept` is the shared store; `key` names the interpreter.
    """
    linked = 0
    new: dict[str, list[str]] = {}
    for sha256, sources in wheels.items():
        if not sources:
            continue
        known = _index(kept / f"{sha256}-{key}")
        if known is None:
            new[sha256] = sources
            continue
        for name in known:
            destination = base / name
            destination.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):  # two wheels bring the same file; the check after this names it
                os.link(kept / f"{sha256}-{key}" / name, destination)
                linked += 1
    compile_all(python, base, [source for sources in new.values() for source in sources])
    for sha256, sources in new.items():
        _keep(base, kept / f"{sha256}-{key}", [target(source, tag) for source in sources])
    return linked, sum(map(len, new.values()))


def compile_all(python: Path, base: Path, sources: list[str]) -> None:
    """Compile sources below `base`, on every core. Raises BytecodeError."""
    if not sources:
        return
    workers = min(os.cpu_count() or 1, 16, len(sources))
    by_size = sorted(sources, key=lambda name: -(base / name).stat().st_size)
    running = []
    for start in range(workers):
        # a file and not a pipe: a pipe that is full would make the workers wait for one another
        with tempfile.TemporaryFile("w+", dir=base) as work:
            work.writelines(f"{base / name}\t{name}\n" for name in by_size[start::workers])
            work.seek(0)
            argv = [str(python), "-I", "-W", "ignore", "-c", _COMPILE]
            running.append(
                subprocess.Popen(argv, stdin=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
    problems = []
    for process in running:
        assert process.stderr is not None
        words = process.stderr.read()
        if process.wait() != 0:
            problems.append(words.strip().splitlines()[-1] if words.strip() else f"status {process.returncode}")
    if problems:
        raise BytecodeError(f"{python} could not compile the release: {problems[0]}")


def _index(folder: Path) -> dict[str, str] | None:
    try:
        found = files.read_json(folder / "index.json")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _keep(base: Path, folder: Path, names: list[str]) -> None:
    made = [name for name in names if (base / name).is_file()]
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name in made:
        destination = temporary / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        os.link(base / name, destination)
    temporary.mkdir(parents=True, exist_ok=True)
    (temporary / "index.json").write_text(json.dumps(hash_all(base, made)))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def expected(kept: Path, key: str, wheels: Iterable[str]) -> dict[str, str]:
    """sha256 of every bytecode file of these wheels as it was when it was compiled."""
    found: dict[str, str] = {}
    for sha256 in wheels:
        found.update(_index(kept / f"{sha256}-{key}") or {})
    return found


def forget(kept: Path, keep: set[str]) -> None:
    """Remove bytecode of wheels that are not in `keep` (sha256), and what a killed build left."""
    for folder in kept.glob("*"):
        if folder.name.startswith(".") or folder.name.partition("-")[0] not in keep:
            shutil.rmtree(folder, ignore_errors=True)
