"""Wheels are opened with suspicion and written reproducibly."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import wheel_kit

from fleet import wheelfile
from fleet.wheelfile import BadWheel

INFO = "demo_pkg-1.0.dist-info"


def wheel(folder: Path) -> Path:
    return folder / wheel_kit.make_wheel(folder, "demo-pkg").filename


def test_a_wheel_in_order_says_what_it_is(tmp_path: Path) -> None:
    found = wheelfile.inspect(wheel(tmp_path))
    assert (found.name, found.version, found.dist_info) == ("demo-pkg", "1.0", INFO)
    assert {str(tag) for tag in found.tags} == {"py3-none-any"}


def test_the_same_content_gives_the_same_bytes_whatever_its_order() -> None:
    files = [("b.py", b"2", False), ("a,with comma.txt", b"1", False), ("bin.sh", b"#!", True)]
    one = wheelfile.compose("demo", "1.0", files)
    assert wheelfile.compose("demo", "1.0", reversed(files)) == one
    assert wheelfile.compose("demo", "1.0", [*files[:2], ("bin.sh", b"#!", False)]) != one
    with zipfile.ZipFile(io.BytesIO(one[1])) as archive:
        # time is no part of it, and nor is a compressor, whose next version may write other bytes
        members = archive.infolist()
    assert {info.date_time for info in members} == {(1980, 1, 1, 0, 0, 0)}
    assert {info.compress_type for info in members} == {zipfile.ZIP_STORED}


def rename(new: str) -> Callable[[Path], Path]:
    return lambda path: path.rename(path.with_name(new))


def change(**members: bytes | None) -> Callable[[Path], Path]:
    def act(path: Path) -> Path:
        names = {"metadata": f"{INFO}/METADATA", "wheel": f"{INFO}/WHEEL", "code": "demo_pkg/__init__.py"}
        names["record"] = f"{INFO}/RECORD"
        wheel_kit.rewrite(path, {names[key]: data for key, data in members.items()})
        return path

    return act


def add(**extra: str) -> Callable[[Path], Path]:
    def act(path: Path) -> Path:
        wheel_kit.rewrite(path, {}, {extra["name"]: b"x"})
        return path

    return act


def link(path: Path) -> Path:
    info = zipfile.ZipInfo("demo_pkg/link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(info, "/etc/passwd")
    return path


def twice(path: Path) -> Path:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning):
        archive.writestr("demo_pkg/__init__.py", "VERSION = '1.0'\n")
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


METADATA = b"Metadata-Version: 2.1\nName: demo-pkg\nVersion: %s\n"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (rename("demo_pkg-1.0+cu130-py3-none-any.whl"), r"the file says 1\.0\+cu130, METADATA says 1\.0"),
        (change(metadata=METADATA % b"2.0"), "METADATA says 2.0"),
        (rename("other-1.0-py3-none-any.whl"), "the file says other, METADATA says demo-pkg"),
        (rename("demo_pkg-1.0-cp311-cp311-linux_x86_64.whl"), "none of the file name's tags stands in WHEEL"),
        (rename("demo.zip"), "is not named as a wheel"),
        (add(name="../evil.py"), r"outside its target: member '\.\./evil\.py'"),
        (add(name="/etc/evil"), "outside its target"),
        (add(name="demo_pkg/new.py"), "RECORD has no hash for demo_pkg/new.py"),
        (change(code=b"VERSION = '6.6'\n"), "does not have the hash that RECORD says"),
        (change(code=b"VERSION = 'longer'\n"), "RECORD says that demo_pkg/__init__.py has 16 bytes, it has 19"),
        (change(code=None), "RECORD lists demo_pkg/__init__.py, which the wheel does not hold"),
        (change(metadata=None), "has no demo_pkg-1.0.dist-info/METADATA"),
        (change(record=None), "has no demo_pkg-1.0.dist-info/RECORD"),
        (add(name="more-1.0.dist-info/METADATA"), "exactly one .dist-info folder"),
        (link, "symbolic link"),
        (twice, "holds demo_pkg/__init__.py twice"),
        (cut, "cannot be read as a wheel"),
    ],
)
def test_a_wheel_that_is_not_what_it_says_is_refused(tmp_path: Path, spoil: Callable[[Path], Path], words: str) -> None:
    with pytest.raises(BadWheel, match=words):
        wheelfile.inspect(spoil(wheel(tmp_path)))


def test_damaged_bytes_are_a_finding_and_never_a_crash(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    good = path.read_bytes()
    dice = random.Random(7)
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(bytes(data[: dice.randint(1, len(data))] if dice.random() < 0.3 else data))
        try:
            wheelfile.inspect(path)
        except BadWheel:
            refused += 1
    assert refused > 300


def test_a_file_name_may_claim_python_2_beside_what_the_wheel_says(tmp_path: Path) -> None:
    made = wheel(tmp_path)
    assert wheelfile.inspect(made.rename(made.with_name("demo_pkg-1.0-py2.py3-none-any.whl"))).name == "demo-pkg"
