"""Every kind of damage to a release is found and named, and what was not touched is not read twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import wheel_kit
from ddtree import intact, release

from fleet.stack import LockedWheel

FILES = {"base/__init__.py": "NAME = 'base'\n", "base/data.bin": "x" * 5000}


@pytest.fixture
def host(release_host: wheel_kit.Host) -> wheel_kit.Host:
    release_host.build("cpu-a", wheel_kit.make_wheel(release_host.wheels, "base", files=FILES))
    return release_host


@pytest.fixture
def base(host: wheel_kit.Host) -> LockedWheel:
    return wheel_kit.make_wheel(host.wheels, "base", files=FILES)


def flip(path: Path) -> None:
    """Change one byte in place and put the time of the last change back, as damage that hides would."""
    info = path.stat()
    with path.open("r+b") as stream:
        first = stream.read(1)
        stream.seek(0)
        stream.write(bytes([first[0] ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/bin/sh")


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("base/data.bin", flip, "content changed"),
    ("base/data.bin", lambda path: path.write_bytes(b"short"), "5 bytes instead of 5000"),
    ("base/data.bin", lambda path: path.unlink(), "missing"),
    ("base/data.bin", lambda path: path.chmod(0o666), "mode 0666 instead of 0644"),
    ("base/data.bin", relink, "no longer a file"),
    ("base/new.py", lambda path: path.write_text("evil = 1\n"), "unexpected file"),
    ("evil.pth", lambda path: path.write_text("import evil\n"), "unexpected file"),
    ("../../../bin/python", relink, "points at /bin/sh"),
    ("../../../../manifest.json", flip, "content changed"),
    ("../../../../bom.json", lambda path: path.unlink(), "missing"),
    ("../../../../files.json", lambda path: path.write_text("{}"), "missing or unreadable"),
    ("../../../../files.json", lambda path: path.write_text(path.read_text() + " "), "changed"),
]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("name", "act", "words"), DAMAGE)
def test_damage_is_found_and_named(
    host: wheel_kit.Host, name: str, act: Callable[[Path], object], words: str, quick: bool
) -> None:
    assert release.verify(host.paths, "cpu-a", quick=quick) == []
    path = host.site("cpu-a") / name
    act(path)
    (damage,) = release.verify(host.paths, "cpu-a", quick=quick)
    assert words in damage.what
    assert Path(damage.path).name == path.name
    assert release.verify(host.paths, "cpu-a", quick=True) == [damage]  # and it does not become good by looking


def test_a_release_that_is_not_there_is_damaged(host: wheel_kit.Host) -> None:
    (damage,) = release.verify(host.paths, "cpu-x")
    assert "not on this host" in damage.what


@contextmanager
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the files that are read in full."""
    read: list[str] = []
    real = intact.hash_all

    def count(root: Path, names: object) -> dict[str, str]:
        listed = list(names)  # type: ignore[call-overload]
        read.extend(listed)
        return real(root, listed)

    with monkeypatch.context() as patch:
        patch.setattr(intact, "hash_all", count)
        yield read


def test_a_quick_look_reads_only_what_was_written_to(host: wheel_kit.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with reading(monkeypatch) as read:
        assert release.verify(host.paths, "cpu-a", quick=True) == []
    assert read == []
    path = host.site("cpu-a") / "base/data.bin"
    os.utime(path)
    with reading(monkeypatch) as read:
        assert release.verify(host.paths, "cpu-a", quick=True) == []
    assert [Path(name).name for name in read] == ["data.bin"]
    with reading(monkeypatch) as read:
        assert release.verify(host.paths, "cpu-a") == []
    assert len(read) > 5


def test_links_of_other_releases_do_not_make_it_slow(
    host: wheel_kit.Host, base: LockedWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.build("cpu-b", base)
    with reading(monkeypatch) as read:
        assert release.verify(host.paths, "cpu-a", quick=True) == []
        assert release.verify(host.paths, "cpu-b", quick=True) == []
    assert read == []
    release.prune(host.paths, 1, set())
    with reading(monkeypatch) as read:
        assert release.verify(host.paths, "cpu-b", quick=True) == []
    assert read == []


def test_damage_done_before_another_build_is_still_found(host: wheel_kit.Host, base: LockedWheel) -> None:
    """The build touches the links of shared files; that must not make a damaged one look like an intact one."""
    flip(host.site("cpu-a") / "base/data.bin")
    host.build("cpu-b", base)
    (damage,) = release.verify(host.paths, "cpu-a", quick=True)
    assert damage.path.endswith("base/data.bin")


def test_looking_may_leave_no_trace(host: wheel_kit.Host) -> None:
    intact.memory(host.paths, "cpu-a").unlink()
    assert release.verify(host.paths, "cpu-a", remember=False) == []
    assert not intact.memory(host.paths, "cpu-a").exists()
