"""The bill of materials of any environment, read from its files alone."""

from __future__ import annotations

import _ctypes
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import wheel_kit
from ddtree import bom

from fleet.stack import LockedWheel


@pytest.fixture
def wheels(tmp_path: Path) -> list[LockedWheel]:
    folder = tmp_path / "wheels"
    first = wheel_kit.make_wheel(folder, "First_Pkg", "2.11.0+cu130", {"first/__init__.py": "", "shared/a.py": ""})
    second = wheel_kit.make_wheel(folder, "second", "1.0", {"second.py": "raise SystemExit('imported')\n"})
    return [first, second]


def venv_by_uv(path: Path, wheels: list[Path]) -> Path:
    from uv import find_uv_bin

    uv = str(find_uv_bin())
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, path], check=True)
    argv = [uv, "pip", "install", "-q", "--python", path / "bin/python", "--no-deps", "--no-index", *wheels]
    subprocess.run(list(map(str, argv)), check=True)
    return path


def venv_by_hand(path: Path, wheels: list[Path]) -> Path:
    """As an installer that only unpacks."""
    site = path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return path


def test_every_distribution_is_listed_with_its_local_tag(tmp_path: Path, wheels: list[LockedWheel]) -> None:
    found = bom.bom(venv_by_uv(tmp_path / "venv", [tmp_path / "wheels" / item.filename for item in wheels]))
    first, second = found["distributions"]
    assert (first["name"], first["version"], first["local"]) == ("first-pkg", "2.11.0+cu130", "cu130")
    assert first["modules"] == ["first", "shared"] and second["modules"] == ["second"]
    assert first["installer"] == "uv" and first["tags"] == ["py3-none-any"] and len(first["record_sha256"]) == 64
    assert found["python"]["version"] == wheel_kit.PYTHON


def test_two_installers_of_one_wheel_give_the_same_content(tmp_path: Path, wheels: list[LockedWheel]) -> None:
    paths = [tmp_path / "wheels" / item.filename for item in wheels]
    one = bom.bom(venv_by_uv(tmp_path / "one", paths))
    other = bom.bom(venv_by_hand(tmp_path / "other", paths))
    for left, right in zip(one["distributions"], other["distributions"], strict=True):
        assert left["content_sha256"] == right["content_sha256"]
        assert left["record_sha256"] != right["record_sha256"]
    assert bom.difference(one, other) == []


def test_the_difference_names_what_is_new_gone_and_other(tmp_path: Path, wheels: list[LockedWheel]) -> None:
    folder = tmp_path / "wheels"
    base = [folder / item.filename for item in wheels]
    newer = wheel_kit.make_wheel(folder / "n", "First_Pkg", "2.12.0", {"first/__init__.py": ""})
    same = wheel_kit.make_wheel(folder / "s", "second", "1.0", {"second.py": "x = 1\n"})
    third = wheel_kit.make_wheel(folder, "third")
    one = bom.bom(venv_by_hand(tmp_path / "one", [*base, folder / third.filename]))
    two = bom.bom(venv_by_hand(tmp_path / "two", [folder / "n" / newer.filename, folder / "s" / same.filename]))
    assert bom.difference(one, two) == [
        "~ first-pkg 2.11.0+cu130 -> 2.12.0",
        "~ second 1.0 (same version, other files)",
        "- third 1.0",
    ]


def test_native_libraries_are_listed_and_unreadable_ones_are_findings(
    tmp_path: Path, wheels: list[LockedWheel]
) -> None:
    venv = venv_by_hand(tmp_path / "venv", [tmp_path / "wheels" / wheels[0].filename])
    (site,) = bom.site_packages(venv)
    (site / "first" / "_ext.so").write_bytes(Path(_ctypes.__file__).read_bytes())
    (site / "first" / "broken.so.1.2").write_bytes(b"\x7fELF" + b"\0" * 20)
    found = {Path(item["path"]).name: item for item in bom.bom(venv)["native"]}
    assert "libc.so.6" in found["_ext.so"]["needed"]
    assert "cannot be read" in found["broken.so.1.2"]["problem"]


def test_a_broken_distribution_is_listed_and_does_not_stop_the_rest(tmp_path: Path, wheels: list[LockedWheel]) -> None:
    venv = venv_by_hand(tmp_path / "venv", [tmp_path / "wheels" / item.filename for item in wheels])
    (site,) = bom.site_packages(venv)
    (site / "first_pkg-2.11.0+cu130.dist-info" / "METADATA").unlink()
    (site / "old.egg-info").write_text("Name: old\nVersion: 0.1\n")
    found = {item["name"]: item for item in bom.bom(venv)["distributions"]}
    assert found["first-pkg"]["problem"] == "METADATA is missing"
    assert found["first-pkg"]["version"] == "2.11.0+cu130"
    assert found["second"]["problem"] == "" and found["old"]["version"] == "0.1"


def test_a_folder_that_is_no_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(bom.NotAVenv, match="no virtual environment"):
        bom.bom(tmp_path)
