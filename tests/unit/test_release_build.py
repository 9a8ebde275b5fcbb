"""Releases are built for real, from tiny wheels, with the real uv; what fails is never visible."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import wheel_kit
from ddtree import files, intact, release, store
from ddtree.release import BuildError

from fleet.stack import LockedWheel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def host(release_host: wheel_kit.Host) -> wheel_kit.Host:
    return release_host


@pytest.fixture
def base(host: wheel_kit.Host) -> LockedWheel:
    return wheel_kit.make_wheel(
        host.wheels, "base", files={"base/__init__.py": "NAME = 'base'\n", "base/data.bin": "x" * 5000}
    )


def engine(host: wheel_kit.Host, code: str = "import base\n", version: str = "1.0") -> LockedWheel:
    return wheel_kit.make_wheel(host.wheels, "engine", version, {"engine/__init__.py": code})


def test_a_release_runs_and_every_file_of_it_is_accounted_for(host: wheel_kit.Host, base: LockedWheel) -> None:
    report = host.build("cpu-a", base, engine(host))
    assert report.built and report.bytecode_compiled == 2
    root = host.paths.release("cpu-a")
    code = "import engine, base, sys; print(base.NAME, base.__cached__, sys.prefix)"
    out = subprocess.run([root / "venv/bin/python", "-c", code], capture_output=True, text=True, check=True).stdout
    name, cached, prefix = out.split()
    assert name == "base" and Path(cached).is_file() and prefix == str(root / "venv")
    assert release.verify(host.paths, "cpu-a") == []
    listed = files.read_json(root / "files.json")
    on_disk = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or path.is_file()}
    assert on_disk - {"files.json"} == set(listed)
    manifest = files.read_json(root / "manifest.json")
    assert manifest["id"] == "cpu-a" and manifest["created_t"] > 0
    assert [item["name"] for item in files.read_json(root / "bom.json")["distributions"]] == ["base", "engine"]


def test_a_release_that_is_there_is_not_built_again(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.build("cpu-a", base)
    before = host.paths.release("cpu-a").stat()
    assert not host.build("cpu-a", base).built
    assert host.paths.release("cpu-a").stat().st_ino == before.st_ino


def test_releases_share_the_files_that_are_the_same(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.build("cpu-a", base, engine(host))
    report = host.build("cpu-b", base, engine(host, "import base  # new\n", "2.0"))
    assert (report.bytecode_linked, report.bytecode_compiled) == (1, 1)
    for name in ("base/data.bin", f"base/__pycache__/__init__.cpython-{sys.version_info[0]}{sys.version_info[1]}.pyc"):
        assert (host.site("cpu-a") / name).stat().st_ino == (host.site("cpu-b") / name).stat().st_ino
    assert not (host.site("cpu-a") / "engine/__init__.py").samefile(host.site("cpu-b") / "engine/__init__.py")


def test_bytecode_says_where_its_source_really_is(host: wheel_kit.Host, base: LockedWheel) -> None:
    bad = engine(host, "import base\ndef fail():\n    raise ValueError('here')\n")
    host.build("cpu-a", base, bad)
    done = subprocess.run(
        [host.paths.release("cpu-a") / "venv/bin/python", "-c", "import engine; engine.fail()"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f'File "{host.site("cpu-a")}/engine/__init__.py", line 3' in done.stderr


def test_a_failing_import_names_its_cause_and_leaves_nothing(host: wheel_kit.Host, base: LockedWheel) -> None:
    broken = engine(host, "import base\nraise RuntimeError('no good')\n")
    with pytest.raises(BuildError, match="smoke: import of engine failed: RuntimeError: no good") as caught:
        host.build("cpu-a", base, broken)
    assert 'raise RuntimeError("no good")' in caught.value.details or "no good" in caught.value.details
    assert host.visible() == []


def test_a_missing_module_is_the_cause_of_a_failing_import(host: wheel_kit.Host) -> None:
    with pytest.raises(BuildError, match="ModuleNotFoundError: No module named 'soundfile'"):
        host.build("cpu-a", engine(host, "import soundfile\n"))


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "import os; os._exit(0) if 0 else os.kill(os.getpid(), 9)"])
def test_an_import_that_ends_the_process_is_a_failure(host: wheel_kit.Host, ending: str) -> None:
    with pytest.raises(BuildError, match=r"SystemExit: import of engine left with 0|ended with signal 9"):
        host.build("cpu-a", engine(host, f"{ending}\n"))
    assert host.visible() == []


def test_a_wheel_that_is_not_in_the_store_is_named(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.send(base)
    lost = engine(host)
    with pytest.raises(BuildError, match=r"store: 1 wheels are not in the store: engine-1\.0"):
        release.build(host.paths, host.request("cpu-a", base, lost))


def test_another_interpreter_than_planned_is_refused(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.send(base)
    request = host.request("cpu-a", base)
    request.manifest["python"] = "3.11.99"
    with pytest.raises(BuildError, match=r"is Python .* now, the release was planned for 3\.11\.99"):
        release.build(host.paths, request)
    assert host.visible() == []


def test_a_wheel_that_does_not_install_what_its_record_says_is_refused(host: wheel_kit.Host) -> None:
    made = engine(host, "X = 1\n")
    path = host.wheels / made.filename
    wheel_kit.rewrite(path, {"engine/__init__.py": b"X = 2\n"})
    lying = wheel_kit.put(host.wheels, path.name, path.read_bytes(), "engine", "1.0")
    with pytest.raises(BuildError, match=r"engine/__init__.py|RECORD|hash"):
        host.build("cpu-a", lying)
    assert host.visible() == []


def test_two_wheels_with_the_same_file_are_found(host: wheel_kit.Host, base: LockedWheel) -> None:
    rival = wheel_kit.make_wheel(host.wheels, "rival", files={"base/__init__.py": "NAME = 'rival'\n"})
    with pytest.raises(BuildError, match=r"base/__init__\.py \(not as in (base|rival)-1\.0"):
        host.build("cpu-a", base, rival, smoke=("base",))
    assert host.visible() == []


def test_the_imports_run_as_the_service_user(host: wheel_kit.Host, uv_wheel: tuple[LockedWheel, Path]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="ddtree-test-"))
    folder.chmod(0o755)  # the service user must get there; pytest's own folders are closed
    try:
        open_host = wheel_kit.Host(folder / "host", *uv_wheel)
        nobody = pwd.getpwnam("nobody").pw_uid
        check = f"import os\nassert os.getuid() == {nobody}, os.getuid()\nassert 'SECRET' not in os.environ\n"
        check += "try:\n    open(__file__, 'a')\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError\n"
        os.environ["SECRET"] = "1"
        python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
        made = wheel_kit.make_wheel(open_host.wheels, "engine", files={"engine/__init__.py": check})
        open_host.send(made)
        request = open_host.request("cpu-a", made, user="nobody", python=python)
        ask = [python, "-c", "import platform; print(platform.python_version())"]
        version = subprocess.run(ask, capture_output=True, text=True, check=True)
        request.manifest["python"] = version.stdout.strip()
        assert release.build(open_host.paths, request).built
    finally:
        os.environ.pop("SECRET", None)
        shutil.rmtree(folder)


def test_the_imports_see_the_releases_own_cuda_toolkit(host: wheel_kit.Host) -> None:
    check = "import os, sys\nassert os.environ['CUDA_HOME'].startswith(sys.prefix), os.environ\n"
    check += "assert os.path.isfile(os.environ['CUDA_HOME'] + '/bin/nvcc')\n"
    files = {"engine/__init__.py": check, "nvidia/cu13/bin/nvcc": "#!/bin/sh\n"}
    assert host.build("cpu-a", wheel_kit.make_wheel(host.wheels, "engine", files=files)).built


def test_a_build_killed_half_way_is_not_visible_and_the_next_one_succeeds(
    host: wheel_kit.Host, base: LockedWheel
) -> None:
    slow = engine(
        host, "import os, time\nif os.path.exists('/tmp'):\n    time.sleep(SECONDS)\n".replace("SECONDS", "30")
    )
    host.send(base, slow)
    request = host.request("cpu-a", base, slow)
    script = (
        "import json, sys; from ddtree import release, store; from ddtree.paths import Paths\n"
        "v = json.load(sys.stdin); v['uv'] = store.Blob.of(v['uv']); v['smoke'] = tuple(v['smoke'])\n"
        "release.build(Paths.of(v.pop('paths')), release.Request(**v))\n"
    )
    values = {
        "paths": host.paths.as_dict(),
        "manifest": request.manifest,
        "python": request.python,
        "user": request.user,
        "smoke": request.smoke,
        "uv": host.uv.as_dict(),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils")}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(values))
    process.stdin.close()
    end = time.monotonic() + 30
    while not list(host.paths.releases.glob(".building-*/venv/lib/*/site-packages/engine/__pycache__/*")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert [name for name in host.visible() if not name.startswith(".")] == []
    assert any(name.startswith(".building-") for name in host.visible())
    assert release.listing(host.paths) == []
    host.build("cpu-b", base)
    assert host.visible() == ["cpu-b"]


def test_a_full_disk_is_said_plainly(host: wheel_kit.Host, base: LockedWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    host.send(base)
    monkeypatch.setattr(release, "_sync", full)
    with pytest.raises(BuildError, match=r"No space left on device .*make room"):
        release.build(host.paths, host.request("cpu-a", base))
    assert host.visible() == []


def test_damage_in_shared_files_is_repaired_from_the_wheels(host: wheel_kit.Host, base: LockedWheel) -> None:
    """The cache that releases link to holds the same inode, so the damage is there too."""
    host.build("cpu-a", base)
    target = host.site("cpu-a") / "base/data.bin"
    with target.open("r+b") as stream:
        stream.write(b"#")
    assert host.build("cpu-b", base).repaired == [
        str(intact.Damage(f"{host.site('cpu-b').relative_to(host.paths.release('cpu-b') / 'venv')}/base/data.bin",
                          f"not as in {base.filename}"))
    ]  # fmt: skip
    assert release.verify(host.paths, "cpu-b") == []
    assert [damage.what for damage in release.verify(host.paths, "cpu-a")] == ["content changed"]
    report = host.build("cpu-a", base)
    assert report.built and "content changed" in report.repaired[0]
    assert release.verify(host.paths, "cpu-a") == [] and host.visible() == ["cpu-a", "cpu-b"]


def test_damaged_bytecode_is_not_passed_on(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.build("cpu-a", base)
    (compiled,) = (host.site("cpu-a") / "base" / "__pycache__").iterdir()
    data = bytearray(compiled.read_bytes())
    data[-1] ^= 1
    with compiled.open("r+b") as stream:
        stream.write(bytes(data))
    report = host.build("cpu-b", base)
    assert any("bytecode was changed" in item for item in report.repaired)
    assert not (host.site("cpu-b") / "base" / "__pycache__" / compiled.name).samefile(compiled)


def test_pruning_keeps_the_newest_and_the_protected(
    host: wheel_kit.Host, base: LockedWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = {name: engine(host, f"import base  # {name}\n", f"{number}.0") for number, name in enumerate("abcde")}
    for name, wheel in wheels.items():
        host.build(f"cpu-{name}", base, wheel)
    (host.paths.cache / "cpu-b").mkdir(parents=True)
    assert release.prune(host.paths, 2, {"cpu-a"}) == ["cpu-c", "cpu-b"]
    assert host.visible() == ["cpu-a", "cpu-d", "cpu-e"]
    assert not (host.paths.cache / "cpu-b").exists()
    assert store.lacking(host.paths, [store.Blob.of(wheels["b"].as_dict())]) == {}  # young: maybe about to be built
    monkeypatch.setattr(release, "_YOUNG_S", -5.0)
    assert release.prune(host.paths, 1, set()) == ["cpu-d", "cpu-a"]
    gone = [store.Blob.of(wheels[name].as_dict()) for name in "abcd"]
    assert set(store.lacking(host.paths, gone).values()) == {"missing"}
    assert store.lacking(host.paths, [store.Blob.of(base.as_dict()), store.Blob.of(host.uv.as_dict())]) == {}
    assert release.verify(host.paths, "cpu-e") == []
    assert host.build("cpu-f", base, engine(host, "import base  # f\n", "7.0")).built


def test_pruning_gives_way_to_a_build(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.build("cpu-a", base)
    host.build("cpu-b", base)
    with release._exclusive(host.paths):
        assert release.prune(host.paths, 1, set()) == []
    assert host.visible() == ["cpu-a", "cpu-b"]


def test_removing_a_release_removes_just_that(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.build("cpu-a", base)
    host.build("cpu-b", base)
    assert release.remove(host.paths, "cpu-a") and not release.remove(host.paths, "cpu-a")
    assert host.visible() == ["cpu-b"] and release.verify(host.paths, "cpu-b") == []


def test_a_release_with_a_broken_manifest_is_listed_as_such(host: wheel_kit.Host, base: LockedWheel) -> None:
    host.build("cpu-a", base)
    (host.paths.release("cpu-a") / "manifest.json").write_text("{")
    (item,) = release.listing(host.paths)
    assert item["id"] == "cpu-a" and "not valid JSON" in item["damaged"]
