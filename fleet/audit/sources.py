"""Where environments come from on this machine: venvs, folders of wheels, stacks' locks, files that were saved."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet import content, stack
from fleet.stack import Lock, Stack
from fleet.wheelhouse import Wheelhouse

content.add_host_code()

from ddtree import bom as host_bom  # noqa: E402
from ddtree import survey as host_survey  # noqa: E402

from . import gaps, wheels  # noqa: E402
from .case import Case, Target, Wanted  # noqa: E402

# Part of every release beside the lock's wheels.
OWN = ("ddtree-engine",)


class SourceError(ValueError):
    """Nothing that could be audited or compared; the message says what would be."""


def venv(path: Path, *, cached: bool = True, jobs: int | None = None) -> dict[str, Any]:
    """Survey of an environment on this machine."""
    cache = _cache(path) if cached else None
    try:
        return host_survey.survey(path, cache, jobs or min(4, os.cpu_count() or 1))
    except (host_bom.NotAVenv, OSError) as error:
        raise SourceError(str(error)) from error


def _cache(path: Path) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:16]
    return Path(base) / "ddtree-fleet" / "audit" / f"{key}.json"


def folder_of_wheels(path: Path, python: str = "") -> dict[str, Any]:
    found = wheels.wheels_in(path)
    if not found:
        raise SourceError(f"{path} holds no wheels: name a folder with *.whl files")
    facts = wheels.survey_wheels(found, python, min(4, os.cpu_count() or 1))
    wheels.note_digests(facts, ((file.name, file.parent.name) for file in found if len(file.parent.name) == 64))
    return {**facts, "root": str(path)}


def stack_wheels(chosen: Stack, minor: str, root: Path | None = None) -> dict[str, Any]:
    """Survey of the wheels that a stack's lock names, as they lie in the wheelhouse."""
    house = Wheelhouse(root)
    lock = chosen.lock(minor)
    lacking = house.missing(lock.wheels)
    if lacking:
        raise SourceError(
            f"the wheelhouse lacks {len(lacking)} of {len(lock.wheels)} wheels of stack {chosen.name}: "
            f"fleet wheelhouse build --stack {chosen.name}"
        )
    # the wheelhouse has compared each file with its hash; RECORD is compared here
    facts = wheels.survey_wheels([house.path(wheel) for wheel in lock.wheels], minor, min(4, os.cpu_count() or 1))
    wheels.note_digests(facts, ((wheel.filename, wheel.sha256) for wheel in lock.wheels))
    return {**facts, "root": f"wheels of stack {chosen.name} for Python {minor}"}


def load_stack(name: str, minor: str = "") -> tuple[Stack, Lock]:
    """A stack and its lock for one Python minor (default: its first)."""
    chosen = stack.load(name)
    return chosen, chosen.lock(minor or chosen.python[0])


def wanted(lock: Lock) -> list[Wanted]:
    return [Wanted(wheel.name, wheel.version, wheel.sha256) for wheel in lock.wheels]


def wanted_of_manifest(manifest: Mapping[str, Any]) -> list[Wanted] | None:
    """What a release's manifest says that it was built from."""
    listed = manifest.get("wheels")
    if not isinstance(listed, Sequence) or not listed:
        return None
    return [Wanted(str(item["name"]), str(item["version"]), str(item.get("sha256") or "")) for item in listed]


def case(
    facts: Mapping[str, Any],
    *,
    stack_name: str = "",
    manifest: Mapping[str, Any] | None = None,
    target: Target | None = None,
) -> Case:
    """What there is to judge, against a stack's lock or the manifest of the release that it is."""
    chosen: Stack | None = None
    expected: list[Wanted] | None = wanted_of_manifest(manifest or {})
    if not stack_name and manifest:
        stack_name = str(manifest.get("stack") or "")
        if stack_name not in stack.available():
            stack_name = ""
    if stack_name:
        chosen, lock = load_stack(stack_name, str((facts.get("python") or {}).get("minor") or ""))
        expected = expected or wanted(lock)
    return Case(facts, chosen.model_dump() if chosen else None, expected, target, OWN)


def bill(source: str) -> tuple[str, dict[str, Any]] | None:
    """(name, bill of materials) of a file, venv, release, folder of wheels or stack; None where it is none of these.

    A stack may be followed by a Python minor: `cpu:3.11`.
    """
    path = Path(source)
    if path.is_file():
        return source, of_file(path)
    if path.is_dir():
        if (path / "venv").is_dir() and not host_bom.site_packages(path):
            path = path / "venv"
        if host_bom.site_packages(path):
            return source, gaps.of_survey(venv(path))
        return source, gaps.of_survey(folder_of_wheels(path))
    name, _, minor = source.partition(":")
    if name in stack.available():
        chosen, lock = load_stack(name, minor)
        return source, of_lock(chosen, lock)
    return None


def of_file(path: Path) -> dict[str, Any]:
    """A bill of materials that was saved: by `fleet bom --json`, or as a release's bom.json."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read as a bill of materials: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("boms"), dict) and len(value["boms"]) == 1:
        value = next(iter(value["boms"].values()))
    listed = value.get("distributions") if isinstance(value, dict) else None
    if not isinstance(listed, list) or not all(isinstance(item, dict) and "name" in item for item in listed):
        raise SourceError(f"{path} is no bill of materials: it must be what `fleet bom --json` prints, or a bom.json")
    return dict(value)


def of_lock(chosen: Stack, lock: Lock) -> dict[str, Any]:
    return {
        "schema": 1,
        "root": f"stack {chosen.name}",
        "python": {"minor": lock.python, "version": ""},
        "torch": {"version": chosen.torch, "cuda": ""},
        "distributions": [{"name": wheel.name, "version": wheel.version} for wheel in lock.wheels],
    }
