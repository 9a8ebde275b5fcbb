"""The engine's patched wheel: made from pinned parts, pinned itself, and put in the place of the upstream one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import wheel_kit

from fleet import patched_wheel, stack_lock, stack_patched, wheelfile
from fleet import stack as stacks
from fleet.stack import LockedWheel, Stack, StackError
from fleet.wheelhouse import Wheelhouse, WheelhouseError
from fleet.wheelhouse_sources import Configured, Finder

CODE = "".join(f"line_{number} = {number}\n" for number in range(1, 21))
PATCH = """--- a/engine/main.py
+++ b/engine/main.py
@@ -9,4 +9,5 @@
 line_9 = 9
-line_10 = 10
+line_10 = 'patched'
+more = True
 line_11 = 11
 line_12 = 12
"""


@pytest.fixture
def engine(tmp_path: Path) -> LockedWheel:
    files = {"engine/main.py": CODE, "engine/odd, name.json": "{}\n", "engine/_version.py": "__version__ = '0'\n"}
    files["engine/_version.py"] = "__version__ = version = '1.2.3'\n__version_tuple__ = version_tuple = (1, 2, 3)\n"
    return wheel_kit.make_wheel(tmp_path / "files", "engine", "1.2.3", files)


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "wheelhouse")


@pytest.fixture
def stack(tmp_path: Path, engine: LockedWheel, house: Wheelhouse) -> Stack:
    folder = Path(shutil.copytree(stacks.load("cpu").directory, tmp_path / "stacks" / "cpu"))
    (folder / "patches").mkdir()
    (folder / "patches" / "0001-more.patch").write_text(PATCH)
    other = wheel_kit.make_wheel(tmp_path / "files", "alpha")
    (folder / "requirements-py311.lock").write_text(stacks.format_lock("test", (engine, other)))
    with (folder / "stack.yml").open("a") as stream:
        stream.write("patched:\n  standalone: {distribution: engine, revision: 4}\n")
    uv = wheel_kit.make_wheel(tmp_path / "files", "uv", "0.13.9")
    stacks.forget()
    tool = stacks.Tool(version=uv.version, filename=uv.filename, sha256=uv.sha256, size=uv.size)
    found = stacks.load_directory(folder)
    for wheel in (engine, other, uv):
        house.add(wheel, (tmp_path / "files" / wheel.filename).read_bytes())
    return found.model_copy(update={"tools": {"uv": tool}, "sources": stacks.Sources()})


def nowhere(stack: Stack) -> Finder:
    return Finder(stack, Configured())


def test_the_wheelhouse_makes_the_patched_wheel_that_is_pinned(stack: Stack, house: Wheelhouse) -> None:
    stack_lock.write_patched(stack, house)
    done = house.complete(stack, "3.11", finder=nowhere(stack))
    (wheel,) = done.made
    assert wheel.filename == "engine-1.2.3+ddtree.4-py3-none-any.whl"
    info = wheelfile.inspect(house.path(wheel))
    assert (info.name, info.version, info.dist_info) == ("engine", "1.2.3+ddtree.4", "engine-1.2.3+ddtree.4.dist-info")
    assert patched_wheel.verify_record(house.path(wheel)) == []
    assert house.complete(stack, "3.11", finder=nowhere(stack)).made == ()
    house.path(wheel).unlink()
    assert house.complete(stack, "3.11", finder=nowhere(stack)).made == (wheel,)  # and the same bytes again


def test_a_release_holds_the_patched_wheel_instead_of_the_upstream_one(
    stack: Stack, house: Wheelhouse, engine: LockedWheel
) -> None:
    stack_lock.write_patched(stack, house)
    held = {wheel.name: wheel.version for wheel in stack.release_wheels("3.11.2", "standalone")}
    assert held == {"alpha": "1.0", "engine": "1.2.3+ddtree.4"}
    assert engine in stack.release_wheels("3.11", "sglang")  # which this stack does not patch
    names = [wheel.filename for wheel in stack.all_wheels("3.11")]
    assert engine.filename in names and "engine-1.2.3+ddtree.4-py3-none-any.whl" in names and len(names) == 4


def test_an_installed_patched_wheel_works(stack: Stack, house: Wheelhouse, tmp_path: Path) -> None:
    import subprocess
    import sys

    from uv import find_uv_bin

    stack_lock.write_patched(stack, house)
    (wheel,) = house.complete(stack, "3.11", finder=nowhere(stack)).made
    argv = [find_uv_bin(), "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*argv, "--python", sys.executable, str(house.path(wheel))], check=True)
    code = "from engine import main, _version; print(main.line_10, main.more, _version.version, _version.version_tuple)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True)
    assert done.stdout.strip() == "patched True 1.2.3+ddtree.4 (1, 2, 3, 'ddtree.4')", done.stderr


def test_other_patches_than_the_pinned_ones_are_refused_with_what_to_run(stack: Stack, house: Wheelhouse) -> None:
    stack_lock.write_patched(stack, house)
    patch = stack.directory / "patches" / "0001-more.patch"
    patch.write_text(PATCH.replace("'patched'", "'changed'"))
    with pytest.raises(StackError, match=r"other patches .* `fleet stack lock cpu --patched`"):
        stack.release_wheels("3.11", "standalone")
    before = stack_patched.lock_file(stack, "3.11").read_text()
    stack_lock.write_patched(stack, house)
    assert stack_patched.lock_file(stack, "3.11").read_text() != before
    assert house.complete(stack, "3.11", finder=nowhere(stack)).made


def test_bytes_that_are_not_the_pinned_ones_are_not_kept(stack: Stack, house: Wheelhouse) -> None:
    stack_lock.write_patched(stack, house)
    path = stack_patched.lock_file(stack, "3.11")
    wheel = stack_patched.pinned(stack, "3.11")["standalone"]
    path.write_text(path.read_text().replace(wheel.sha256, "0" * 64))
    with pytest.raises(WheelhouseError, match=r"the patches make engine-1\.2\.3\+ddtree\.4"):
        house.complete(stack, "3.11", finder=nowhere(stack))
    assert not [entry for entry in house.entries() if "ddtree" in entry.filename]


def test_a_patch_that_does_not_fit_names_its_hunk(stack: Stack, house: Wheelhouse) -> None:
    (stack.directory / "patches" / "0001-more.patch").write_text(PATCH.replace("line_12 = 12", "line_12 = 'twelve'"))
    with pytest.raises(StackError, match=r"engine/main\.py: hunk 1 of 1 does not apply at line 12"):
        stack_lock.write_patched(stack, house)


@pytest.mark.parametrize("name", [n for n in stacks.available() if stacks.load(n).patched])
def test_the_pins_belong_to_the_patches_and_locks_that_are_here(name: str) -> None:
    found = stacks.load(name)
    for minor in found.python:
        for engine, wheel in stack_patched.pinned(found, minor).items():
            source = stack_patched.upstream(found, minor, engine)
            assert wheel.version == f"{source.version}+ddtree.{found.patched[engine].revision}"
            assert wheel.filename == source.filename.replace(source.version, wheel.version, 1)
