"""Where wheels come from: what pip is configured with on this machine, then what the stack names.

A source is only ever asked for a file by its exact name; whether the bytes are right is decided by the lock's hash.
"""

from __future__ import annotations

import dataclasses
import shlex
import ssl
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx

from fleet.stack import Stack

JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


class SourceError(RuntimeError):
    """A source that cannot be used, and why."""


@dataclasses.dataclass(frozen=True)
class Configured:
    """pip's settings that say where packages come from."""

    index: str = ""
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    certificates: str = ""

    @property
    def indexes(self) -> tuple[str, ...]:
        return (*([self.index] if self.index else ()), *self.extra_indexes)


def pip_configuration() -> Configured:
    """What `pip config list` says: files and environment of this user and machine. Without pip, nothing."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    values: dict[str, str] = {}
    # the environment comes first in the listing but wins over the files
    for line in reversed(done.stdout.splitlines()):
        key, separator, raw = line.partition("=")
        scope, _, name = key.rpartition(".")
        if separator and scope in ("global", "install", "download", ":env:"):
            try:
                values[name.replace("_", "-")] = " ".join(shlex.split(raw.replace("\\n", " ")))
            except ValueError:
                continue
    return Configured(
        index=values.get("index-url", ""),
        extra_indexes=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        certificates=values.get("cert", ""),
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A file as a source offers it: a local path or an URL. `sha256` is the source's own claim, never trusted."""

    source: str
    filename: str
    path: Path | None = None
    url: str = ""
    sha256: str = ""


class Finder:
    """Looks wheels up by file name, in order: local folders, then indexes and pages. Pages are fetched once."""

    def __init__(self, stack: Stack, configured: Configured | None = None) -> None:
        pip = pip_configuration() if configured is None else configured
        links = [*pip.find_links, *([] if pip.no_index else stack.sources.find_links)]
        indexes = [] if pip.no_index else [*pip.indexes, *stack.sources.indexes]
        self._links = list(dict.fromkeys(links))
        self._indexes = [url.rstrip("/") for url in dict.fromkeys(indexes)]
        self._pages: dict[str, dict[str, Candidate]] = {}
        self._dead: dict[str, str] = {}
        # the system's certificates unless pip is given others: a company's proxy is known there
        context = ssl.create_default_context(cafile=pip.certificates or None)
        limits = httpx.Limits(max_connections=16)
        self.client = httpx.Client(
            verify=context, follow_redirects=True, timeout=_TIMEOUT, auth=_netrc(), limits=limits
        )

    def close(self) -> None:
        self.client.close()

    def find(self, name: str, filename: str, problems: list[str]) -> Iterator[Candidate]:
        """Every offer of the file, best first; what went wrong at a source is added to `problems`."""
        for source, page in self._places(name):
            if source in self._dead:
                problems.append(f"{shown(source)}: {self._dead[source]}")
                continue
            try:
                listed = self._page(source, page)
            except SourceError as error:
                problems.append(f"{shown(source)}: {error}")
                continue
            if filename in listed:
                yield listed[filename]
            else:
                problems.append(f"{shown(source)}: does not have it")

    def _places(self, name: str) -> list[tuple[str, str]]:
        """(source, the page or folder of it that lists this package), local ones first."""
        places = [(link, link) for link in self._links] + [(index, f"{index}/{name}/") for index in self._indexes]
        return sorted(places, key=lambda place: _local(place[0]) is None)

    def _page(self, source: str, page: str) -> dict[str, Candidate]:
        if page not in self._pages:
            folder = _local(page)
            self._pages[page] = _read_folder(source, folder) if folder is not None else self._fetch(source, page)
        return self._pages[page]

    def _fetch(self, source: str, page: str) -> dict[str, Candidate]:
        for last in (False, True):
            try:
                answer = self.client.get(page, headers={"Accept": _ACCEPT})
                break
            except httpx.HTTPError as error:
                if last or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    self._dead[source] = f"cannot be reached ({error or type(error).__name__})"
                    raise SourceError(self._dead[source]) from error
        if answer.status_code in (404, 403):
            return {}
        if answer.status_code != 200:
            raise SourceError(f"answered {answer.status_code} {answer.reason_phrase}")
        base = str(answer.url)
        if answer.headers.get("content-type", "").split(";")[0].strip() == JSON:
            return _from_json(source, base, answer)
        return _from_html(source, base, answer.text)


def shown(source: str) -> str:
    """A source for messages: without the password that its URL may hold."""
    parts = urllib.parse.urlsplit(source)
    return source.replace(parts.netloc, parts.netloc.rpartition("@")[2]) if "@" in parts.netloc else source


def _netrc() -> httpx.Auth | None:
    try:
        return httpx.NetRCAuth(None)
    except Exception:  # no such file, or one that cannot be parsed: then there is no login from it
        return None


def _local(location: str) -> Path | None:
    parts = urllib.parse.urlsplit(location)
    if parts.scheme == "file":
        return Path(urllib.parse.unquote(parts.path))
    return None if parts.scheme in ("http", "https") else Path(location).expanduser()


def _read_folder(source: str, folder: Path) -> dict[str, Candidate]:
    """A folder of wheels, or of an index on disk: the page in it may point elsewhere."""
    page = folder / "index.html" if folder.is_dir() else folder
    found: dict[str, Candidate] = {}
    if page.is_file() and page.suffix in (".html", ".htm"):
        found = _from_html(source, page.resolve().as_uri(), page.read_text(errors="replace"))
    if folder.is_dir():
        for path in folder.glob("*.whl"):
            found[path.name] = Candidate(source, path.name, path=path)
    return found


def _from_json(source: str, base: str, answer: httpx.Response) -> dict[str, Candidate]:
    found = {}
    try:
        for file in answer.json()["files"]:
            url = urllib.parse.urljoin(base, file["url"])
            found[file["filename"]] = Candidate(
                source, file["filename"], url=url, sha256=(file.get("hashes") or {}).get("sha256", "")
            )
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"its list of files cannot be read: {error}") from error
    return found


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for name, value in attrs if name == "href" and value]


def _from_html(source: str, base: str, text: str) -> dict[str, Candidate]:
    parser = _Anchors()
    parser.feed(text)
    found = {}
    for href in parser.hrefs:
        url, _, fragment = urllib.parse.urljoin(base, href).partition("#")
        filename = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1]
        if not filename.endswith(".whl"):
            continue
        said = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        path = _local(url)
        found[filename] = Candidate(source, filename, path=path, url="" if path else url, sha256=said)
    return found
