"""The wheelhouse takes a file from any source, but only the right one."""

from __future__ import annotations

import dataclasses
import http.server
import json
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import wheel_kit

from fleet import stack as stacks
from fleet import wheelhouse_sources as sources
from fleet.stack import LockedWheel, Stack
from fleet.wheelhouse import Progress, Wheelhouse, WheelhouseError
from fleet.wheelhouse_sources import Configured, Finder


@dataclasses.dataclass
class Index:
    """A real HTTP server with an index page per package, JSON or HTML, that can be told to misbehave."""

    folder: Path
    url: str = ""
    json: bool = True
    ranges: list[str] = dataclasses.field(default_factory=list)
    served: list[str] = dataclasses.field(default_factory=list)
    cut_after: int | None = None


def serve(index: Index) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urllib.parse.unquote(self.path)
            if path.startswith("/simple/"):
                self._page(path.split("/")[2])
                return
            file = index.folder / Path(path).name
            if not file.is_file():
                self.send_error(404)
                return
            index.served.append(file.name)
            data = file.read_bytes()
            start = 0
            if asked := self.headers.get("Range"):
                index.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            end = len(data) if index.cut_after is None else index.cut_after
            self.wfile.write(data[start:end])
            self.close_connection = True

        def _page(self, name: str) -> None:
            files = [path.name for path in index.folder.glob("*.whl") if path.name.startswith(name.replace("-", "_"))]
            if index.json:
                kind = sources.JSON
                text = json.dumps({"files": [{"filename": file, "url": f"../../files/{file}"} for file in files]})
            else:
                kind = "text/html"
                text = "".join(f'<a href="../../files/{file}#sha256=">{file}</a>\n' for file in files)
            self.send_response(200 if files else 404)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    return server


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    found = Index(tmp_path / "index")
    server = serve(found)
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def pins(tmp_path: Path) -> list[LockedWheel]:
    """Three wheels and uv, in the index's folder."""
    folder = tmp_path / "index"
    made = [wheel_kit.make_wheel(folder, name) for name in ("alpha", "beta-two")]
    made.append(wheel_kit.make_wheel(folder, "gamma", files={"gamma/data.txt": "x" * 3_000_000}))
    return [*made, wheel_kit.make_wheel(folder, "uv", "0.13.9")]


@pytest.fixture
def stack(tmp_path: Path, pins: list[LockedWheel]) -> Stack:
    folder = Path(shutil.copytree(stacks.load("cpu").directory, tmp_path / "stacks" / "cpu"))
    (folder / "requirements-py311.lock").write_text(stacks.format_lock("test", tuple(pins[:-1])))
    found = stacks.load_directory(folder)
    uv = pins[-1]
    tool = stacks.Tool(version=uv.version, filename=uv.filename, sha256=uv.sha256, size=uv.size)
    return found.model_copy(update={"tools": {"uv": tool}, "sources": stacks.Sources()})


def finder(stack: Stack, *, indexes: tuple[str, ...] = (), links: tuple[str | Path, ...] = ()) -> Finder:
    return Finder(stack, Configured(extra_indexes=indexes, find_links=tuple(map(str, links))))


@pytest.mark.parametrize("as_json", [True, False])
def test_an_index_is_enough_and_a_second_run_fetches_nothing(
    tmp_path: Path, stack: Stack, pins: list[LockedWheel], index: Index, as_json: bool
) -> None:
    index.json = as_json
    house = Wheelhouse(tmp_path / "house")
    told: list[Progress] = []
    done = house.complete(stack, "3.11", told.append, finder(stack, indexes=(index.url,)))
    assert {wheel.filename for wheel in done.fetched} == {wheel.filename for wheel in pins}
    assert all(house.has(pin) for pin in pins)
    assert told[-1].files_done == told[-1].files == 4 and told[-1].bytes_done == told[-1].bytes == done.bytes
    served = len(index.served)
    assert house.complete(stack, "3.11", finder=finder(stack, indexes=(index.url,))).fetched == ()
    assert len(index.served) == served
    assert house.verify() == []


def test_a_folder_is_enough(tmp_path: Path, stack: Stack, pins: list[LockedWheel]) -> None:
    house = Wheelhouse(tmp_path / "house")
    house.complete(stack, "3.11", finder=finder(stack, links=(tmp_path / "index",)))
    assert [entry.filename for entry in house.entries()] == sorted(pin.filename for pin in pins)


def test_pips_own_configuration_is_honoured(
    tmp_path: Path, stack: Stack, pins: list[LockedWheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    house = Wheelhouse(tmp_path / "house")
    assert len(house.complete(stack, "3.11").fetched) == len(pins)


def test_other_bytes_than_the_lock_are_refused_and_the_next_source_is_asked(
    tmp_path: Path, stack: Stack, pins: list[LockedWheel], index: Index
) -> None:
    bad = tmp_path / "bad"
    wheel_kit.make_wheel(bad, "alpha", files={"alpha/__init__.py": "EVIL = 1\n"})
    house = Wheelhouse(tmp_path / "house")
    house.complete(stack, "3.11", finder=finder(stack, links=(bad,), indexes=(index.url,)))
    assert house.verify() == [] and house.has(pins[0])


def test_an_index_that_serves_other_bytes_is_named_and_nothing_is_kept(
    tmp_path: Path, stack: Stack, pins: list[LockedWheel], index: Index
) -> None:
    wheel_kit.make_wheel(index.folder, "alpha", files={"alpha/__init__.py": "EVIL = 1\n"})
    house = Wheelhouse(tmp_path / "house")
    with pytest.raises(WheelhouseError, match=r"alpha-1\.0-py3-none-any\.whl: http://127.*other bytes than the lock"):
        house.complete(stack, "3.11", finder=finder(stack, indexes=(index.url,)))
    assert not house.has(pins[0]) and house.has(pins[1])
    assert not list((house.root / "partial").glob("*"))


def test_the_right_bytes_of_a_bad_wheel_are_refused(tmp_path: Path, stack: Stack, pins: list[LockedWheel]) -> None:
    """The hash says that it is the file that was locked, opening it says that it must not be installed."""
    path = tmp_path / "index" / pins[0].filename
    wheel_kit.rewrite(path, {}, {"../outside.py": b"x"})
    bad = wheel_kit.put(path.parent, path.name, path.read_bytes(), "alpha", "1.0")
    (stack.directory / "requirements-py311.lock").write_text(stacks.format_lock("bad", (bad,)))
    stacks._read_lock.cache_clear()
    house = Wheelhouse(tmp_path / "house")
    with pytest.raises(WheelhouseError, match="would write outside its target"):
        house.complete(stack, "3.11", finder=finder(stack, links=(path.parent,)))
    assert not house.has(bad)


def test_a_cut_off_download_is_continued(tmp_path: Path, stack: Stack, pins: list[LockedWheel], index: Index) -> None:
    house = Wheelhouse(tmp_path / "house")
    index.cut_after = 2_500_000
    with pytest.raises(WheelhouseError, match="gamma"):
        house.complete(stack, "3.11", finder=finder(stack, indexes=(index.url,)))
    part = house.partial(pins[2])
    have = part.stat().st_size
    assert 0 < have <= 2_500_000
    index.cut_after = None
    index.served.clear()
    done = house.complete(stack, "3.11", finder=finder(stack, indexes=(index.url,)))
    assert [wheel.name for wheel in done.fetched] == ["gamma"] and index.served == [pins[2].filename]
    assert index.ranges[-1] == f"bytes={have}-" and house.verify() == []


def test_a_part_with_wrong_bytes_is_thrown_away(
    tmp_path: Path, stack: Stack, pins: list[LockedWheel], index: Index
) -> None:
    house = Wheelhouse(tmp_path / "house")
    part = house.partial(pins[2])
    part.parent.mkdir(parents=True)
    part.write_bytes(b"other" * 1000)
    house.complete(stack, "3.11", finder=finder(stack, indexes=(index.url,)))
    assert house.has(pins[2]) and house.verify() == []


def test_a_changed_byte_is_found_named_and_mended(tmp_path: Path, stack: Stack, pins: list[LockedWheel]) -> None:
    house = Wheelhouse(tmp_path / "house")
    links = (tmp_path / "index",)
    house.complete(stack, "3.11", finder=finder(stack, links=links))
    path = house.path(pins[1])
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))
    assert not house.has(pins[1])
    (problem,) = house.verify()
    assert str(path) in problem and "was changed" in problem
    assert [wheel.name for wheel in house.complete(stack, "3.11", finder=finder(stack, links=links)).fetched] == [
        "beta-two"
    ]
    assert house.verify() == []


def test_a_file_that_nobody_has_is_told_with_every_source_and_the_password_of_none(
    tmp_path: Path, stack: Stack, pins: list[LockedWheel], index: Index
) -> None:
    (index.folder / pins[0].filename).unlink()
    house = Wheelhouse(tmp_path / "house")
    links = tmp_path / "empty"
    links.mkdir()
    nowhere = "http://user:secret@127.0.0.1:9/simple"
    with pytest.raises(WheelhouseError) as caught:
        house.complete(stack, "3.11", finder=finder(stack, links=(links,), indexes=(index.url, nowhere)))
    (problem,) = caught.value.problems
    assert problem.startswith(pins[0].filename)
    assert f"{links}: does not have it" in problem and f"{index.url}: does not have it" in problem
    assert "http://127.0.0.1:9/simple: cannot be reached" in problem and "secret" not in problem
    assert house.has(pins[1])


def test_too_little_space_is_told_before_anything_is_fetched(
    tmp_path: Path, stack: Stack, pins: list[LockedWheel], index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    house = Wheelhouse(tmp_path / "house")
    with pytest.raises(WheelhouseError, match=r"needs \d+ MiB of free space, but has 1 MiB"):
        house.complete(stack, "3.11", finder=finder(stack, indexes=(index.url,)))
    assert index.served == []


def test_a_wheel_made_here_is_kept_like_the_others(tmp_path: Path) -> None:
    made = wheel_kit.make_wheel(tmp_path / "made", "delta")
    house = Wheelhouse(tmp_path / "house")
    data = (tmp_path / "made" / made.filename).read_bytes()
    assert house.add(made, data) == house.path(made) and house.has(made)
    with pytest.raises(WheelhouseError, match="does not have the hash"):
        house.add(dataclasses.replace(made, sha256="0" * 64), data)


def test_an_index_on_disk_may_point_elsewhere(tmp_path: Path, stack: Stack, pins: list[LockedWheel]) -> None:
    page = tmp_path / "simple" / "alpha"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="../../index/{pins[0].filename}">x</a>')
    problems: list[str] = []
    found = list(finder(stack, indexes=((tmp_path / "simple").as_uri(),)).find("alpha", pins[0].filename, problems))
    assert [candidate.path for candidate in found] == [tmp_path / "index" / pins[0].filename]
