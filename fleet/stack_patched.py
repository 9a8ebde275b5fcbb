"""The engine's patched wheel: made from the pinned upstream wheel and the stack's patches, and pinned itself.

`patched-py3XX.lock` beside the lock names the result by sha256, so every control node makes the same file or none, and
a release's wheels are known before any of them is made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fleet import patched_wheel
from fleet.stack import LockedWheel, Stack, StackError, format_lock, minor_of, parse_lock

if TYPE_CHECKING:
    from fleet.wheelhouse import Wheelhouse

HEADER = """Patched wheels of stack {stack} for Python {minor}, made from the lock's wheel and patches/.
Made by `fleet stack lock {stack}`; changes made here are lost.
patches {digest}"""


def lock_file(stack: Stack, minor: str) -> Path:
    return stack.directory / f"patched-py{minor.replace('.', '')}.lock"


def upstream(stack: Stack, minor: str, engine: str) -> LockedWheel:
    """The lock's wheel that is patched for `engine`."""
    name = stack.patched[engine].distribution
    for wheel in stack.lock(minor).wheels:
        if wheel.name == name:
            return wheel
    raise StackError(f"stack {stack.name} patches {name}, which its lock for Python {minor} does not hold")


def patches(stack: Stack) -> list[Path]:
    return sorted((stack.directory / "patches").rglob("*.patch"))


def pinned(stack: Stack, python_version: str) -> dict[str, LockedWheel]:
    """Engine to its patched wheel. Raises StackError where the pins do not belong to the present patches."""
    minor = minor_of(python_version)
    if not stack.patched:
        return {}
    path = lock_file(stack, minor)
    mend = f"run `fleet stack lock {stack.name} --patched`"
    try:
        text = path.read_text()
        wheels = {wheel.name: wheel for wheel in parse_lock(text)}
    except OSError as error:
        raise StackError(f"{path} cannot be read ({error.strerror}): {mend}") from error
    except StackError as error:
        raise StackError(f"{path}: {error}") from error
    if f"# patches {patched_wheel.patch_set_digest(patches(stack))}" not in text.splitlines():
        raise StackError(f"{path} was made from other patches than those in {stack.directory / 'patches'}: {mend}")
    found = {}
    for engine, item in stack.patched.items():
        if item.distribution not in wheels:
            raise StackError(f"{path} does not hold {item.distribution}: {mend}")
        found[engine] = wheels[item.distribution]
    return found


def build(house: Wheelhouse, stack: Stack, minor: str, engine: str, folder: Path) -> Path:
    """Make the wheel in `folder`. The upstream wheel has to be in the wheelhouse. Raises PatchedWheelError."""
    source = upstream(stack, minor, engine)
    revision = stack.patched[engine].revision
    return patched_wheel.build(house.path(source), source.sha256, patches(stack), folder, revision)


def provide(house: Wheelhouse, stack: Stack, minor: str) -> list[LockedWheel]:
    """Make the patched wheels that the wheelhouse lacks; only the pinned bytes are kept. Raises PatchedWheelError."""
    made = []
    for engine, wheel in pinned(stack, minor).items():
        if not house.missing([wheel]):
            continue
        with tempfile.TemporaryDirectory(prefix="ddtree-patched-") as folder:
            path = build(house, stack, minor, engine, Path(folder))
            real = _pin(path, wheel.name)
            if real != wheel:
                raise patched_wheel.PatchedWheelError(
                    f"{path.name}: the patches make {real.filename} of sha256 {real.sha256[:16]}..., "
                    f"{lock_file(stack, minor).name} pins {wheel.filename} of {wheel.sha256[:16]}...: "
                    f"run `fleet stack lock {stack.name} --patched` and look at what changed"
                )
            house.add(wheel, path.read_bytes())
        made.append(wheel)
    return made


def lock_text(house: Wheelhouse, stack: Stack, minor: str) -> str:
    """What patched-py3XX.lock has to hold for the present patches. Each wheel is made twice: the bytes must agree."""
    house.fetch(stack, [upstream(stack, minor, engine) for engine in stack.patched])
    wheels = []
    for engine, item in sorted(stack.patched.items()):
        with tempfile.TemporaryDirectory(prefix="ddtree-patched-") as folder:
            first, second = (build(house, stack, minor, engine, Path(folder, name)) for name in ("first", "second"))
            if first.read_bytes() != second.read_bytes():
                raise patched_wheel.PatchedWheelError(f"{first.name} came out with other bytes the second time")
            wheels.append(_pin(first, item.distribution))
    digest = patched_wheel.patch_set_digest(patches(stack))
    return format_lock(HEADER.format(stack=stack.name, minor=minor, digest=digest), tuple(wheels))


def _pin(path: Path, name: str) -> LockedWheel:
    from fleet.wheelhouse import file_hash

    version = path.name.split("-")[1]
    return LockedWheel(name, version, path.name, file_hash(path), path.stat().st_size)
