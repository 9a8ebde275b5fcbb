"""The host's store takes what was asked for, with the right bytes, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from pathlib import Path

import pytest
import wheel_kit
from ddtree import store
from ddtree.store import Blob, StoreError

from fleet import staging
from fleet.stack import LockedWheel
from fleet.wheelhouse import Wheelhouse, WheelhouseError


@pytest.fixture
def pins(release_host: wheel_kit.Host) -> list[LockedWheel]:
    return [wheel_kit.make_wheel(release_host.wheels, name) for name in ("alpha", "beta")]


def blobs(pins: list[LockedWheel]) -> list[Blob]:
    return [Blob.of(pin.as_dict()) for pin in pins]


def upload(host: wheel_kit.Host, name: str, data: bytes) -> str:
    (store.incoming(host.paths) / name).write_bytes(data)
    return name


def test_what_arrives_is_verified_and_read_only(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    release_host.send(*pins)
    assert store.lacking(release_host.paths, blobs(pins)) == {}
    path = store.path(release_host.paths, blobs(pins)[0])
    assert path.stat().st_mode & 0o777 == 0o444
    assert list(store.incoming(release_host.paths).iterdir()) == []


def test_other_bytes_are_refused_and_leave_nothing(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    name = upload(release_host, pins[0].sha256, b"something else")
    with pytest.raises(StoreError, match="arrived with other bytes"):
        store.receive(release_host.paths, [name], blobs(pins))
    assert store.lacking(release_host.paths, blobs(pins))[pins[0].sha256] == "missing"
    assert list((release_host.paths.store / pins[0].sha256).iterdir()) == []


def test_what_was_not_asked_for_is_refused(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    name = upload(release_host, "f" * 64, b"x")
    with pytest.raises(StoreError, match="was not asked for"):
        store.receive(release_host.paths, [name], blobs(pins))
    with pytest.raises(StoreError, match="not the name of an upload"):
        store.receive(release_host.paths, ["../../etc/passwd"], blobs(pins))


def test_a_link_in_place_of_an_upload_is_not_followed(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    (store.incoming(release_host.paths) / pins[0].sha256).symlink_to(release_host.wheels / pins[0].filename)
    with pytest.raises(StoreError, match="did not arrive"):
        store.receive(release_host.paths, [pins[0].sha256], blobs(pins))


def test_small_wheels_travel_together(release_host: wheel_kit.Host, pins: list[LockedWheel], tmp_path: Path) -> None:
    house = Wheelhouse(tmp_path / "house")
    for pin in pins:
        house.add(pin, (release_host.wheels / pin.filename).read_bytes())
    with staging.pack(house, pins) as uploads:
        (one,) = uploads
        upload(release_host, one.name, one.file.read_bytes())
    assert set(store.receive(release_host.paths, [one.name], blobs(pins))) == {pin.sha256 for pin in pins}
    assert store.lacking(release_host.paths, blobs(pins)) == {}


def test_a_bundle_that_was_cut_off_is_an_error(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    path = store.incoming(release_host.paths) / "b.tar"
    with tarfile.open(path, "w") as bundle:
        bundle.add(release_host.wheels / pins[0].filename, arcname=pins[0].sha256)
    os.truncate(path, 700)
    with pytest.raises(StoreError, match="cut off or damaged"):
        store.receive(release_host.paths, ["b.tar"], blobs(pins))
    assert pins[0].sha256 in store.lacking(release_host.paths, blobs(pins))


def test_a_bundle_may_hold_no_paths_and_no_links(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    incoming = store.incoming(release_host.paths)
    with tarfile.open(incoming / "paths.tar", "w") as bundle:
        bundle.add(release_host.wheels / pins[0].filename, arcname="../../escaped")
    with pytest.raises(StoreError, match="was not asked for"):
        store.receive(release_host.paths, ["paths.tar"], blobs(pins))
    (incoming / "link").symlink_to("/etc/passwd")
    with tarfile.open(incoming / "links.tar", "w") as bundle:
        bundle.add(incoming / "link", arcname=pins[0].sha256)
    with pytest.raises(StoreError, match="is no file"):
        store.receive(release_host.paths, ["links.tar"], blobs(pins))


def test_a_changed_byte_in_the_store_is_found_and_mended(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    release_host.send(*pins)
    path = store.path(release_host.paths, blobs(pins)[1])
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert store.lacking(release_host.paths, blobs(pins)) == {pins[1].sha256: "damaged"}
    release_host.send(*pins)
    assert store.lacking(release_host.paths, blobs(pins)) == {}


def test_check_mode_leaves_no_trace(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    release_host.send(*pins)
    (release_host.paths.verified / "store.json").unlink()
    assert store.lacking(release_host.paths, blobs(pins), remember=False) == {}
    assert not (release_host.paths.verified / "store.json").exists()


@pytest.mark.parametrize("change", [{"filename": "../x.whl"}, {"filename": "x.zip"}, {"sha256": "zz"}])
def test_a_blob_is_named_plainly(pins: list[LockedWheel], change: dict[str, str]) -> None:
    with pytest.raises(StoreError, match="not a blob"):
        Blob.of({**pins[0].as_dict(), **change})


def test_a_wheelhouse_that_lacks_a_wheel_is_told_with_the_command(tmp_path: Path, pins: list[LockedWheel]) -> None:
    with (
        pytest.raises(WheelhouseError, match="fleet wheelhouse build"),
        staging.pack(Wheelhouse(tmp_path / "house"), pins),
    ):
        pass


def test_a_tool_without_its_program_is_named(release_host: wheel_kit.Host, pins: list[LockedWheel]) -> None:
    release_host.send(*pins)
    with pytest.raises(StoreError, match="holds no program alpha"):
        store.tool(release_host.paths, dataclasses.replace(blobs(pins)[0]))
