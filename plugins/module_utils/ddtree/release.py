"""Releases: built under a temporary name, proven, and only then visible. Never changed afterwards.

<root>/releases/<id>/{venv/, manifest.json, bom.json, files.json}
<root>/releases/.building-<id>-<random>/      being built, or left by a build that was killed
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import bom as materials
from . import bytecode, files, intact, smoke, store, wheels
from .intact import Damage, verify
from .paths import Paths
from .process import CommandError, run
from .store import Blob

__all__ = ["BuildError", "Damage", "Report", "Request", "build", "listing", "prune", "remove", "verify"]

# Blobs younger than this may belong to a release that is about to be built.
_YOUNG_S = 3600.0
_INSTALL_TIMEOUT_S = 1800.0


class BuildError(Exception):
    """A release that could not be built; nothing of it is visible."""

    def __init__(self, stage: str, cause: str, details: str = "") -> None:
        super().__init__(f"{stage}: {cause}")
        self.stage, self.cause, self.details = stage, cause, details


@dataclasses.dataclass(frozen=True)
class Request:
    """What to build: the manifest names the wheels, `smoke` the modules to import as `user`."""

    manifest: dict[str, Any]
    python: str
    user: str
    smoke: tuple[str, ...]
    uv: Blob

    @property
    def id(self) -> str:
        return str(self.manifest["id"])

    @property
    def blobs(self) -> list[Blob]:
        return [Blob.of(wheel) for wheel in self.manifest["wheels"]]


@dataclasses.dataclass
class Report:
    """What a build did and how long each stage took."""

    built: bool
    repaired: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    bytecode_linked: int = 0
    bytecode_compiled: int = 0
    files: int = 0

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def present(paths: Paths, release_id: str) -> bool:
    return (paths.release(release_id) / "manifest.json").is_file()


def build(paths: Paths, request: Request) -> Report:
    """Make the release of `request` exist and be intact. Raises BuildError; then nothing of it is visible.

    A release that is there already is looked at (its activation reads it in full), and built again from its blobs if
    it is damaged.
    """
    final = paths.release(request.id)
    paths.releases.mkdir(parents=True, exist_ok=True)
    with _exclusive(paths):
        _sweep(paths)
        damage = verify(paths, request.id, quick=True) if final.exists() else []
        if final.exists() and not damage:
            return Report(built=False)
        return _build(paths, request, final, [str(item) for item in damage])


def _build(paths: Paths, request: Request, final: Path, damage: list[str]) -> Report:
    report = Report(built=True, repaired=damage)
    lacking = store.lacking(paths, [*request.blobs, request.uv])
    if lacking:
        names = [blob.filename for blob in (*request.blobs, request.uv) if blob.sha256 in lacking]
        raise BuildError("store", f"{len(names)} wheels are not in the store: {', '.join(names[:5])}")
    building = paths.releases / f".building-{request.id}-{secrets.token_hex(4)}"
    try:
        building.mkdir(mode=0o755)
        with intact.links_changing(paths, intact.others(paths, but=request.id)):
            _Builder(paths, request, building, report).run()
        with _timed(report, "publish"):
            _sync(building)
            _publish(paths, building, final)
            files_hash = store.hash_file(final / intact.LISTING)
            stamps = {name: store.stamp((final / name).lstat()) for name in report_files(final)}
            intact.keep_stamps(paths, request.id, files_hash, stamps)
        return report
    except CommandError as error:
        raise BuildError("install", error.result.explain(), error.result.err[-4000:]) from error
    except (wheels.WheelError, store.StoreError, bytecode.BytecodeError) as error:
        raise BuildError("install", str(error)) from error
    except OSError as error:
        hint = ": make room on the file system of the release" if error.errno == errno.ENOSPC else ""
        raise BuildError("install", f"{error.strerror or error} ({error.filename}){hint}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def report_files(root: Path) -> list[str]:
    listed = files.read_json(root / intact.LISTING)
    return [name for name, entry in listed.items() if "sha256" in entry]


class _Builder:
    """One build under its temporary name."""

    def __init__(self, paths: Paths, request: Request, building: Path, report: Report) -> None:
        self.paths, self.request, self.building, self.report = paths, request, building, report
        self.venv = building / "venv"
        self.uv = store.tool(paths, request.uv)
        self.cache = paths.store / "cache"
        self.kept = paths.store / "bytecode"

    def run(self) -> None:
        contents = {
            blob.sha256: wheels.contents(store.path(self.paths, blob), self._site()) for blob in self.request.blobs
        }
        for attempt in (1, 2):
            with _timed(self.report, "install"):
                scaffold = self._install()
            with _timed(self.report, "bytecode"):
                tag = self._bytecode(contents)
            with _timed(self.report, "verify"):
                found, tests = self._prove()
            bad = self._compare(contents, scaffold, found, tag)
            if not bad:
                break
            if attempt == 2:
                details = "\n".join(sorted(str(item) for items in bad.values() for item in items))
                first = details.partition("\n")[0]
                raise BuildError("verify", f"the installed files are not those of the wheels: {first}", details)
            # files that are shared with other releases were damaged: once more, from the verified wheels
            self.report.repaired += [str(item) for items in bad.values() for item in items]
            self._discard([blob for blob in self.request.blobs if blob.sha256 in bad or "" in bad])
            shutil.rmtree(self.venv)
        if tests.failed:
            raise BuildError("smoke", tests.cause, tests.output)
        self.report.seconds["smoke"] = round(tests.seconds, 2)
        self._write(found)

    def _site(self) -> str:
        version = ".".join(str(self.request.manifest["python"]).split(".")[:2])
        return f"lib/python{version}/site-packages"

    def _environment(self, temporary: Path) -> dict[str, str]:
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(temporary),
            "TMPDIR": str(temporary),  # on the release's own file system: /tmp may be small, and links cannot cross
            "UV_CACHE_DIR": str(self.cache),
            "UV_NO_CONFIG": "1",
            "UV_OFFLINE": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
        }

    def _install(self) -> set[str]:
        """Make the venv; returns the files that were there before any wheel."""
        temporary = self.building / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = self._environment(temporary)
        run(
            *(str(self.uv), "venv", "--quiet", "--relocatable", "--no-project", "--python", self.request.python),
            str(self.venv),
            env=environment,
            timeout=120,
        )
        self._check_python()
        scaffold = set(intact.scan(self.venv))
        requirements = temporary / "requirements.txt"
        blobs = self.request.blobs
        requirements.write_text("".join(f"{blob.name}=={blob.version} --hash=sha256:{blob.sha256}\n" for blob in blobs))
        folders = [f"--find-links={store.path(self.paths, blob).parent}" for blob in blobs]
        run(
            *(str(self.uv), "pip", "install", "--quiet", "--python", str(self.venv / "bin" / "python")),
            *("--no-index", "--no-deps", "--require-hashes", "--no-build", "--link-mode", self._link_mode()),
            *folders,
            *("--requirement", str(requirements)),
            env=environment,
            timeout=_INSTALL_TIMEOUT_S,
        )
        shutil.rmtree(temporary)
        (self.venv / ".lock").unlink(missing_ok=True)  # uv's own, while it installs
        return scaffold

    def _check_python(self) -> None:
        wanted = str(self.request.manifest["python"])
        real = materials.interpreter(self.venv)["version"]
        if real != wanted:
            raise BuildError(
                "install",
                f"{self.request.python} is Python {real} now, the release was planned for {wanted}: deploy again",
            )

    def _link_mode(self) -> str:
        """Reflinks where the file system has them (files share space but not damage), else hard links."""
        self.cache.mkdir(parents=True, exist_ok=True)
        first, second = self.building / ".clone-a", self.building / ".clone-b"
        try:
            first.write_bytes(b"x" * 4096)
            with first.open("rb") as source, second.open("wb") as target:
                fcntl.ioctl(target.fileno(), 0x40049409, source.fileno())  # FICLONE
            return "clone"
        except OSError:
            return "hardlink"
        finally:
            for path in (first, second):
                path.unlink(missing_ok=True)

    def _key(self) -> str:
        return f"cpython-{self.request.manifest['python']}"

    def _bytecode(self, contents: dict[str, wheels.Contents]) -> str:
        """Bytecode for every module; returns the tag in its file names."""
        tag = "cpython-" + "".join(str(self.request.manifest["python"]).split(".")[:2])
        self.kept.mkdir(parents=True, exist_ok=True)
        sources = {
            sha256: sorted(name for name in content.hashes if name.endswith(".py") and (self.venv / name).is_file())
            for sha256, content in contents.items()
        }
        linked, compiled = bytecode.provide(
            self.venv / "bin" / "python", self.venv, self.kept, self._key(), tag, sources
        )
        self.report.bytecode_linked, self.report.bytecode_compiled = linked, compiled
        return tag

    def _prove(self) -> tuple[dict[str, dict[str, Any]], smoke.Outcome]:
        """Read every file while the import smoke run goes on beside it."""
        outcome: list[smoke.Outcome] = []
        worker = threading.Thread(
            target=lambda: outcome.append(
                smoke.imports(self.venv / "bin" / "python", self.request.smoke, self.request.user)
            )
        )
        worker.start()
        try:
            found, _ = intact.describe(self.venv)
        finally:
            worker.join()
        if not outcome:
            raise BuildError("smoke", "the import smoke run could not be started")
        return found, outcome[0]

    def _compare(
        self,
        contents: dict[str, wheels.Contents],
        scaffold: set[str],
        found: dict[str, dict[str, Any]],
        tag: str,
    ) -> dict[str, list[Damage]]:
        """Files that are not the wheels' own, by the sha256 of the wheel they belong to ("" for none)."""
        bad: dict[str, list[Damage]] = {}
        compiled = bytecode.expected(self.kept, self._key(), contents)
        known = set(scaffold)
        for sha256, content in contents.items():
            for name, wanted in content.hashes.items():
                real = found.get(name, {}).get("sha256")
                if real is None:
                    bad.setdefault(sha256, []).append(Damage(name, "missing after the installation"))
                elif wanted and real != wanted:
                    bad.setdefault(sha256, []).append(Damage(name, f"not as in {content.filename}"))
                if name.endswith(".py"):
                    known.add(bytecode.target(name, tag))
                    shadow = bytecode.target(name, tag)
                    if shadow in found and found[shadow].get("sha256") != compiled.get(shadow):
                        bad.setdefault(sha256, []).append(Damage(shadow, "bytecode was changed"))
            known |= content.hashes.keys() | content.generated
        for name in found:
            if name not in known and not name.startswith("bin/"):
                bad.setdefault("", []).append(Damage(name, "belongs to no wheel"))
        return bad

    def _discard(self, blobs: list[Blob]) -> None:
        """Forget what was unpacked and compiled from these wheels, so that it is made again."""
        names = sorted({blob.name for blob in blobs})
        if names:
            environment = self._environment(self.building)
            run(str(self.uv), "cache", "clean", "--quiet", *names, env=environment, timeout=300, check=False)
        for blob in blobs:
            for folder in self.kept.glob(f"{blob.sha256}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _write(self, found: dict[str, dict[str, Any]]) -> None:
        with _timed(self.report, "bom"):
            manifest = {**self.request.manifest, "created_t": time.time(), "interpreter": self.request.python}
            parts = {"manifest.json": manifest, "bom.json": materials.bom(self.venv)}
            whole = {f"venv/{name}": entry for name, entry in found.items()}
            for name, value in parts.items():
                files.write_json(self.building / name, value)
                path = self.building / name
                whole[name] = {"sha256": store.hash_file(path), "size": path.stat().st_size, "mode": 0o644}
            files.write_atomic(self.building / intact.LISTING, json.dumps(whole, sort_keys=True))
            self.report.files = len(whole)


def _publish(paths: Paths, building: Path, final: Path) -> None:
    """Give the release its name. A damaged one that had it before goes."""
    aside = paths.releases / f".damaged-{final.name}-{secrets.token_hex(4)}"
    if final.exists():
        final.rename(aside)
    building.rename(final)
    files.fsync_dir(paths.releases)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Everything of this file system to disk: one call is far cheaper than one for each of 20,000 files."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _timed(report: Report, stage: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        report.seconds[stage] = round(report.seconds.get(stage, 0.0) + time.monotonic() - began, 2)


@contextlib.contextmanager
def _exclusive(paths: Paths, wait: bool = True) -> Iterator[bool]:
    """One build or pruning at a time. Yields False where another one is under way and `wait` is not set."""
    descriptor = os.open(paths.releases / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _sweep(paths: Paths) -> None:
    """Remove what killed builds left; the lock says that none is under way."""
    for pattern in (".building-*", ".damaged-*", ".pruned-*"):
        for path in paths.releases.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def listing(paths: Paths) -> list[dict[str, Any]]:
    """Manifests of all releases, newest first; one that cannot be read has only its id and `damaged`."""
    found = []
    for path in paths.releases.glob("[!.]*/"):
        try:
            manifest = files.read_json(path / "manifest.json")
            if not isinstance(manifest, dict):
                raise ValueError("manifest.json is missing")
            found.append({**manifest, "id": path.name})
        except (OSError, ValueError) as error:
            found.append({"id": path.name, "damaged": str(error)})
    return sorted(found, key=lambda item: (-float(item.get("created_t") or 0), item["id"]))


def remove(paths: Paths, release_id: str) -> bool:
    """Remove a release from the host; False where it was not there. The caller has made sure that nobody needs it."""
    if not paths.release(release_id).exists():
        return False
    with _exclusive(paths):
        _remove(paths, [release_id])
    return True


def prune(paths: Paths, keep: int, protected: set[str], say: Callable[[str], None] = lambda text: None) -> list[str]:
    """Remove all but the `keep` newest releases and those in `protected`, and what only they used; returns their ids.

    Never fails an activation that has succeeded: what cannot be removed now goes next time.
    """
    try:
        with _exclusive(paths, wait=False) as mine:
            if not mine:
                return []
            known = [item["id"] for item in listing(paths)]
            doomed = [name for name in known[max(keep, 1) :] if name not in protected]
            _remove(paths, doomed)
            return doomed
    except OSError as error:
        say(f"old releases were not removed: {error}")
        return []


def _remove(paths: Paths, doomed: list[str]) -> None:
    if not doomed:
        return
    _sweep(paths)
    kept = [item for item in listing(paths) if item["id"] not in doomed]
    with intact.links_changing(paths, [item["id"] for item in kept]):
        for release_id in doomed:
            aside = paths.releases / f".pruned-{release_id}-{secrets.token_hex(4)}"
            paths.release(release_id).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(paths.cache / release_id, ignore_errors=True)
            intact.memory(paths, release_id).unlink(missing_ok=True)
        if all("wheels" in item for item in kept):  # of a damaged manifest nobody knows what it needs
            _forget_blobs(paths, kept)


def _forget_blobs(paths: Paths, kept: list[dict[str, Any]]) -> None:
    needed = {wheel["sha256"] for item in kept for wheel in item["wheels"]}
    programs = sorted(paths.store.glob("tools/uv-*/uv"), key=lambda path: path.stat().st_mtime)
    tools = {blob.name for blob in paths.store.glob("*/uv-*.whl")}
    needed |= {path.parent.name for path in paths.store.glob("*/uv-*.whl")}
    removed = store.forget(paths, needed, time.time() - _YOUNG_S)
    present_blobs = {path.parent.name for path in paths.store.glob("*/*.whl")}
    bytecode.forget(paths.store / "bytecode", needed | present_blobs)
    names = sorted({materials.normal(name.partition("-")[0]) for name in removed})
    if names and programs and tools:
        environment = {"PATH": "/usr/bin:/bin", "UV_CACHE_DIR": str(paths.store / "cache"), "UV_NO_CONFIG": "1"}
        run(str(programs[-1]), "cache", "clean", "--quiet", *names, env=environment, timeout=300, check=False)
