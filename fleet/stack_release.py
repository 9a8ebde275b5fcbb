"""Which release a host is to have: its id, its wheels and everything the host needs to know to build it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet import content, engine_wheel, stack
from fleet.engine_wheel import EngineWheel
from fleet.stack import LockedWheel, Stack, StackError


@dataclasses.dataclass(frozen=True)
class ReleasePlan:
    """One release, worked out on the control node without asking anybody."""

    id: str
    stack: Stack
    engine: str
    python: str
    lock_sha256: str
    engine_wheel: EngineWheel
    wheels: tuple[LockedWheel, ...]
    tools: tuple[LockedWheel, ...]

    @property
    def locked(self) -> tuple[LockedWheel, ...]:
        """What has to come from outside: everything but the engine's own wheel."""
        return tuple(wheel for wheel in self.wheels if wheel.sha256 != self.engine_wheel.sha256) + self.tools

    def manifest(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "stack": self.stack.name,
            "engine": self.engine,
            "engine_version": self.engine_wheel.version,
            "python": self.python,
            "lock_sha256": self.lock_sha256,
            "engine_wheel_sha256": self.engine_wheel.sha256,
            "wheels": [wheel.as_dict() for wheel in self.wheels],
            "built_by": f"ddtree-fleet {content.version()}",
        }


def plan(desired: Mapping[str, Any], python_version: str) -> ReleasePlan:
    """The release that `desired` (a host's desired state) asks for on a host with this Python.

    Raises StackError or EngineError, which say what to mend.
    """
    chosen = stack.load(desired["stack"])
    engine = desired["engine"]
    if engine not in chosen.engines:
        raise StackError(f"stack {chosen.name} does not hold engine {engine}, only {', '.join(chosen.engines)}")
    lock = chosen.lock(python_version)
    wheel = _rendered(engine_wheel.package_directory(desired.get("engine_path") or ""))
    own = LockedWheel("ddtree-engine", wheel.version, wheel.filename, wheel.sha256, wheel.size)
    return ReleasePlan(
        id=stack.release_id(chosen, python_version, wheel.sha256, wheel.version, engine),
        stack=chosen,
        engine=engine,
        python=python_version,
        lock_sha256=lock.sha256,
        engine_wheel=wheel,
        wheels=tuple(sorted((*chosen.release_wheels(python_version, engine), own))),
        tools=tuple(chosen.tool(name) for name in sorted(chosen.tools)),
    )


@functools.lru_cache(maxsize=4)
def _rendered(package: Path) -> EngineWheel:
    # one process handles one run: the package is read once, so that all hosts get the same
    return engine_wheel.render(package)
