"""The engine's wheel: the same package gives the same bytes, anything else another hash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet import engine_wheel, wheelfile
from fleet.engine_wheel import EngineError


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "ddtree_engine"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text('__version__ = "3.1.0"\n')
    (folder / "models" / "weights.bin").write_bytes(bytes(range(256)) * 10)
    return folder


def test_the_wheel_is_in_order_and_holds_the_models(package: Path, tmp_path: Path) -> None:
    path = engine_wheel.build(package, tmp_path / "out")
    assert path.name == "ddtree_engine-3.1.0-py3-none-any.whl"
    assert wheelfile.inspect(path).files == 5


def test_time_umask_and_leftovers_are_no_part_of_the_bytes(package: Path) -> None:
    before = engine_wheel.render(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"old")
    os.utime(package / "__init__.py", (1, 1))
    (package / "__init__.py").chmod(0o600)
    assert engine_wheel.render(package) == before


def test_a_changed_file_gives_another_hash(package: Path) -> None:
    before = engine_wheel.render(package).sha256
    (package / "models" / "weights.bin").write_bytes(b"other")
    assert engine_wheel.render(package).sha256 != before


def test_an_equal_wheel_that_is_there_is_left_alone(package: Path, tmp_path: Path) -> None:
    first = engine_wheel.build(package, tmp_path / "out").stat()
    assert engine_wheel.build(package, tmp_path / "out").stat().st_ino == first.st_ino


def test_what_is_no_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"fleet_engine_path .* is not a Python package"):
        engine_wheel.package_directory(tmp_path)


def test_a_folder_that_holds_the_package_will_do(package: Path) -> None:
    assert engine_wheel.package_directory(package.parent) == package


@pytest.mark.parametrize("text", ['__version__ = "1; rm"\n', "def broken(\n"])
def test_a_version_that_cannot_be_used_is_an_error(package: Path, text: str) -> None:
    (package / "__init__.py").write_text(text)
    with pytest.raises(EngineError, match=r"plain version number|not valid Python"):
        engine_wheel.render(package)


def test_the_engine_of_this_installation_can_be_shipped(tmp_path: Path) -> None:
    path = engine_wheel.build(engine_wheel.installed(), tmp_path)
    assert wheelfile.inspect(path).name == "ddtree-engine"
