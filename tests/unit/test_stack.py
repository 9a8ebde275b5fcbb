"""Stacks and their locks: strict to read, and the whole of what a release id depends on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet import content, stack, stack_release, wheelfile
from fleet.stack import StackError
from fleet.stack_lock import supported

CPU = content.root() / "stacks" / "cpu"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CPU, tmp_path / "cpu"))


def test_every_stack_loads_with_all_its_locks() -> None:
    assert "cpu" in stack.available()
    for name in stack.available():
        found = stack.load(name)
        for minor in found.python:
            assert found.lock(minor).wheels


def test_the_cpu_lock_pins_one_fitting_wheel_each() -> None:
    found = stack.load("cpu")
    fitting = set(supported("3.11", found.arch, found.min_glibc))
    wheels = {wheel.name: wheel for wheel in found.lock("3.11").wheels}
    assert wheels["torch"].version == found.torch == "2.13.0+cpu"
    for wheel in wheels.values():
        assert fitting & wheelfile.name_parts(wheel.filename)[2], wheel.filename
    for line in (CPU / "requirements.in").read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.split(r"[=><]", line)[0] in wheels


def test_the_sizes_that_preflight_asks_for_are_those_of_the_largest_lock() -> None:
    for name in stack.available():
        found = stack.load(name)
        tools = sum(found.tool(tool).size for tool in found.tools)
        releases = [found.release_wheels(minor, engine) for minor in found.python for engine in found.engines]
        assert found.wheels_bytes == max(sum(wheel.size for wheel in wheels) for wheels in releases) + tools, name


def test_a_lock_reads_back_as_it_was_written() -> None:
    wheels = stack.load("cpu").lock("3.11").wheels
    assert stack.parse_lock(stack.format_lock("Header\n\nmore", wheels)) == wheels


HASH = "a" * 64
GOOD = f"# demo-1.0-py3-none-any.whl (10 bytes)\ndemo==1.0 \\\n    --hash=sha256:{HASH}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("==1.0", ">=1.0"), "line 2 is no pinned and hashed requirement"),
        (GOOD.replace(" \\\n    --hash=sha256:" + HASH, ""), "line 2 is no pinned"),
        (GOOD.replace("sha256:", "md5:"), "line 2: demo has no single sha256"),
        (GOOD.replace(HASH, HASH + " \\"), "line 2: demo has no single sha256"),
        (GOOD.partition("\n")[2], "line 1: demo does not name its wheel"),
        (GOOD.replace("demo==", "other=="), "demo-1.0-py3-none-any.whl is not other 1.0"),
        (GOOD.replace("==1.0 ", "==1.1 "), "is not demo 1.1"),
        (GOOD + "\n" + GOOD, "line 6: demo is there twice"),
        ("--index-url https://example.org\n" + GOOD, "line 1 is no pinned"),
        ("# nothing\n", "holds no requirement"),
    ],
)
def test_a_lock_that_is_not_fully_pinned_is_refused_by_line(text: str, words: str) -> None:
    with pytest.raises(StackError, match=re.escape(words)):
        stack.parse_lock(text)


def test_a_python_without_a_lock_is_named_with_the_fix() -> None:
    with pytest.raises(StackError, match=r"no lock for Python 3\.12, only for 3\.11.*fleet_python"):
        stack.load("cpu").lock("3.12.3")


def test_an_unknown_stack_is_named_with_the_known_ones() -> None:
    with pytest.raises(StackError, match=r"unknown stack 'cpux'.*cpu"):
        stack.load("cpux")
    with pytest.raises(StackError, match="unknown stack"):
        stack.load("../cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("arch:", "architecture:"), "architecture"),
        (lambda text: text.replace("version: 0.13.9", "version: 0.13.8"), "is not version 0.13.8 of uv"),
        (lambda text: text.replace("engines: [standalone]", "engines: [standalone, sglang]"), "smoke .* sglang"),
        (lambda text: text.replace("name: cpu", "name: gpu"), "folder is called cpu"),
        (lambda text: text + "\n- broken", "cannot be read"),
    ],
)
def test_a_stack_file_that_is_wrong_is_explained(copied: Path, change: Callable[[str], str], words: str) -> None:
    path = copied / "stack.yml"
    path.write_text(change(path.read_text()))
    with pytest.raises(StackError, match=words):
        stack.load_directory(copied)


def test_the_release_id_depends_on_everything_in_the_release_and_on_nothing_else(copied: Path, tmp_path: Path) -> None:
    base = stack.load("cpu")
    one = stack.release_id(base, "3.11.2", "0" * 64, "1.0")
    assert re.fullmatch(r"cpu-standalone-1\.0-[0-9a-f]{12}", one)
    assert stack.release_id(stack.load_directory(copied), "3.11.2", "0" * 64, "1.0") == one
    others = {
        stack.release_id(base, "3.11.3", "0" * 64, "1.0"),
        stack.release_id(base, "3.11.2", "1" * 64, "1.0"),
    }
    moved = Path(shutil.copytree(copied, tmp_path / "again" / "cpu"))
    lock = moved / "requirements-py311.lock"
    lock.write_text(lock.read_text() + "# x\n")
    others.add(stack.release_id(stack.load_directory(moved), "3.11.2", "0" * 64, "1.0"))
    assert one not in others and len(others) == 3


def test_a_patched_engine_has_its_patches_in_the_id(copied: Path) -> None:
    base = stack.load_directory(copied)
    before = stack.release_id(base, "3.11.2", "0" * 64, "1.0", "sglang")
    (copied / "patches").mkdir()
    (copied / "patches" / "one.patch").write_text("--- a\n+++ b\n")
    assert stack.release_id(base, "3.11.2", "0" * 64, "1.0", "sglang") != before


def test_the_plan_of_a_release_names_every_wheel(tmp_path: Path) -> None:
    package = tmp_path / "ddtree_engine"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "9.9"\n')
    desired = {"stack": "cpu", "engine": "standalone", "engine_path": str(package)}
    plan = stack_release.plan(desired, "3.11.2")
    manifest = plan.manifest()
    assert plan.id == manifest["id"] and plan.id.startswith("cpu-standalone-9.9-")
    assert {wheel["name"] for wheel in manifest["wheels"]} >= {"torch", "fastapi", "ddtree-engine"}
    assert plan.engine_wheel.sha256 not in {wheel.sha256 for wheel in plan.locked}
    with pytest.raises(StackError, match="does not hold engine sglang"):
        stack_release.plan({**desired, "engine": "sglang"}, "3.11.2")
