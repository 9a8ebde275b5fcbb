"""One file carries a wheelhouse to another control node; nothing in it is believed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import wheel_kit

from fleet import wheelhouse_archive as archive
from fleet.stack import LockedWheel
from fleet.wheelhouse import Progress, Wheelhouse, WheelhouseError
from fleet.wheelhouse_prune import prune


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "here")


@pytest.fixture
def wheels(tmp_path: Path, house: Wheelhouse) -> list[LockedWheel]:
    made = [wheel_kit.make_wheel(tmp_path / "made", name) for name in ("alpha", "beta-two")]
    made.append(wheel_kit.make_wheel(tmp_path / "made", "gamma", files={"gamma/data.txt": "x" * 3_000_000}))
    for wheel in made:
        house.add(wheel, (tmp_path / "made" / wheel.filename).read_bytes())
    return made


def test_what_was_exported_verifies_on_an_empty_control_node(
    tmp_path: Path, house: Wheelhouse, wheels: list[LockedWheel]
) -> None:
    told: list[Progress] = []
    done = archive.export(house, ["demo"], wheels, tmp_path / "out.tar", told.append)
    assert (done.wheels, done.continued) == (3, 0)
    assert (told[-1].files_done, told[-1].bytes_done) == (3, told[-1].bytes)
    there = Wheelhouse(tmp_path / "there")
    taken = archive.import_(there, tmp_path / "out.tar")
    assert (taken.stacks, len(taken.added), taken.present) == (("demo",), 3, 0)
    assert there.verify(wheels) == [] and there.missing(wheels) == []
    again = archive.import_(there, tmp_path / "out.tar")
    assert (len(again.added), again.present) == (0, 3)


def test_the_same_wheels_make_the_same_file(tmp_path: Path, house: Wheelhouse, wheels: list[LockedWheel]) -> None:
    archive.export(house, ["demo"], wheels, tmp_path / "a.tar")
    archive.export(house, ["demo"], reversed(wheels), tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


@pytest.mark.parametrize("share", [0.0001, 0.2, 0.5, 0.9, 0.999])
def test_an_export_that_was_killed_goes_on_and_makes_the_same_file(
    tmp_path: Path, house: Wheelhouse, wheels: list[LockedWheel], share: float
) -> None:
    whole = archive.export(house, ["demo"], wheels, tmp_path / "whole.tar").file.read_bytes()
    (tmp_path / "out.tar.partial").write_bytes(whole[: int(len(whole) * share)])
    done = archive.export(house, ["demo"], wheels, tmp_path / "out.tar")
    assert done.file.read_bytes() == whole
    assert not (tmp_path / "out.tar.partial").exists()
    if share > 0.99:
        assert done.continued >= 2


def test_a_damaged_or_foreign_part_of_an_export_is_not_continued(
    tmp_path: Path, house: Wheelhouse, wheels: list[LockedWheel]
) -> None:
    whole = archive.export(house, ["demo"], wheels, tmp_path / "whole.tar").file.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    (tmp_path / "out.tar.partial").write_bytes(damaged)
    assert archive.export(house, ["demo"], wheels, tmp_path / "out.tar").file.read_bytes() == whole
    archive.export(house, ["other"], wheels[:1], tmp_path / "other.tar").file.rename(tmp_path / "out.tar.partial")
    done = archive.export(house, ["demo"], wheels, tmp_path / "out.tar")
    assert (done.file.read_bytes(), done.continued) == (whole, 0)


def test_an_import_that_was_cut_off_keeps_what_it_had_and_goes_on(
    tmp_path: Path, house: Wheelhouse, wheels: list[LockedWheel]
) -> None:
    file = archive.export(house, ["demo"], wheels, tmp_path / "out.tar").file
    whole, there = file.read_bytes(), Wheelhouse(tmp_path / "there")
    with tarfile.open(file) as members:
        second = members.getmembers()[2]
    file.write_bytes(whole[: second.offset_data + 10])
    with pytest.raises(WheelhouseError, match=r"cut off|ends within"):
        archive.import_(there, file)
    assert len(there.missing(wheels)) == 2
    assert not list((there.root / "partial").glob("*"))
    file.write_bytes(whole)
    taken = archive.import_(there, file)
    assert (len(taken.added), taken.present) == (2, 1)


def test_an_incomplete_wheelhouse_is_not_exported(tmp_path: Path, house: Wheelhouse, wheels: list[LockedWheel]) -> None:
    house.path(wheels[1]).unlink()
    with pytest.raises(WheelhouseError, match=r"beta_two-1\.0"):
        archive.export(house, ["demo"], wheels, tmp_path / "out.tar")
    assert not (tmp_path / "out.tar").exists()


Members = list[tuple[tarfile.TarInfo, bytes]]


def rewrite(file: Path, change: Callable[[Members], Members]) -> None:
    with tarfile.open(file) as members:
        content: Members = []
        for entry in members.getmembers():
            stream = members.extractfile(entry)
            assert stream is not None
            content.append((entry, stream.read()))
    with tarfile.open(file, "w") as members:
        for entry, data in change(content):
            entry.size = len(data)
            members.addfile(entry, io.BytesIO(data))


def other_bytes(content: Members) -> Members:
    entry, data = content[-1]
    return [*content[:-1], (entry, data[:-100] + bytes(100))]


def outside(content: Members) -> Members:
    return [*content, (tarfile.TarInfo("../evil.whl"), b"evil")]


def unlisted(content: Members) -> Members:
    return [*content, (tarfile.TarInfo(f"{'0' * 64}/evil-1.0-py3-none-any.whl"), b"evil")]


def no_manifest(content: Members) -> Members:
    return content[1:]


def path_in_manifest(content: Members) -> Members:
    value = json.loads(content[0][1])
    value["wheels"][0]["filename"] = "../../evil-1.0-py3-none-any.whl"
    return [(content[0][0], json.dumps(value).encode()), *content[1:]]


def hash_is_a_path(content: Members) -> Members:
    value = json.loads(content[0][1])
    value["wheels"][0]["sha256"] = "../" * 21 + "x"
    return [(content[0][0], json.dumps(value).encode()), *content[1:]]


def another_format(content: Members) -> Members:
    value = {**json.loads(content[0][1]), "format": 99}
    return [(content[0][0], json.dumps(value).encode()), *content[1:]]


def without_one(content: Members) -> Members:
    return content[:-1]


def no_wheel(content: Members) -> Members:
    """Its hash is right, but it is not a wheel."""
    data = b"not a zip"
    sha256 = hashlib.sha256(data).hexdigest()
    wheel = LockedWheel("evil", "1.0", "evil-1.0-py3-none-any.whl", sha256, len(data))
    value = {**json.loads(content[0][1]), "wheels": [wheel.as_dict()]}
    return [(content[0][0], json.dumps(value).encode()), (tarfile.TarInfo(f"{sha256}/{wheel.filename}"), data)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_bytes, "is damaged: other bytes than the lock"),
        (outside, r"'\.\./evil\.whl' is not what its manifest lists"),
        (unlisted, "is not what its manifest lists"),
        (no_manifest, "does not begin with manifest.json"),
        (path_in_manifest, "is a path, not the name of a wheel"),
        (hash_is_a_path, "manifest.json cannot be read"),
        (another_format, "has format 99"),
        (without_one, "1 wheels are not in it"),
        (no_wheel, "is damaged: .* cannot be read as a wheel"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(
    tmp_path: Path,
    house: Wheelhouse,
    wheels: list[LockedWheel],
    change: Callable[[Members], Members],
    words: str,
) -> None:
    file = archive.export(house, ["demo"], wheels, tmp_path / "out.tar").file
    rewrite(file, change)
    there = Wheelhouse(tmp_path / "deep" / "there")
    with pytest.raises(WheelhouseError, match=words):
        archive.import_(there, file)
    assert not list(tmp_path.rglob("*evil*.whl"))
    assert there.verify() == []


def test_a_file_of_another_kind_is_named(tmp_path: Path, house: Wheelhouse) -> None:
    (tmp_path / "x.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(WheelhouseError, match="no export of a wheelhouse"):
        archive.import_(house, tmp_path / "x.tar")


def test_pruning_keeps_what_is_named_and_removes_the_rest(house: Wheelhouse, wheels: list[LockedWheel]) -> None:
    (house.root / "partial").mkdir(exist_ok=True)
    (house.root / "partial" / ("0" * 64)).write_bytes(b"half")
    would = prune(house, wheels[:2], check=True)
    assert house.missing(wheels) == []
    done = prune(house, wheels[:2])
    assert would == done
    assert done.removed == (wheels[2].filename, f"partial/{'0' * 64}")
    assert (done.kept, done.bytes > wheels[2].size) == (2, True)
    assert house.missing(wheels) == [wheels[2]]
    assert prune(house, wheels[:2]).removed == ()
