"""Preparing a host: what differs is named first, then mended, and a second look finds nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ddtree import install
from ddtree.install import InstallError, Spec
from ddtree.paths import Paths

from fleet import host_setup

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners of directories can only be set by root")

DESIRED = {"root": "/opt/ddtree", "state": "/var/lib/ddtree", "cache": "/var/cache/ddtree", "user": "nobody"}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    (tmp_path / "units").mkdir()
    return Paths(tmp_path / "opt", tmp_path / "state", tmp_path / "cache", tmp_path / "units", tmp_path / "run")


@pytest.fixture(autouse=True)
def reloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """This machine's own systemd is none of the test's business; how often it would be told is."""
    counted: list[int] = []
    monkeypatch.setattr(install.units, "daemon_reload", lambda: counted.append(1))
    yield counted


def spec(**changes: Any) -> Spec:
    return Spec.of({**host_setup.spec(DESIRED, with_agent=True), **changes})


def test_a_fresh_host_gets_everything_and_a_second_time_nothing(paths: Paths, reloads: list[int]) -> None:
    planned = [change.what for change in install.plan(paths, spec())]
    assert not paths.root.exists() and not list(paths.units.iterdir())
    assert [change.what for change in install.apply(paths, spec())] == planned
    assert len(reloads) == 1
    assert install.apply(paths, spec()) == [] and len(reloads) == 1
    assert (paths.units / "multi-user.target.wants" / "ddtree-recover.service").is_symlink()
    assert paths.state.stat().st_mode & 0o777 == 0o700 and paths.root.stat().st_mode & 0o777 == 0o755


def test_the_installed_agent_runs(paths: Paths) -> None:
    install.apply(paths, spec())
    agent = paths.agent / "current" / "ddtree-agent"
    argv = ["/usr/bin/python3", "-I", agent, "--state", paths.state, "status"]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stdout.strip()) == (0, "{}"), done.stderr


def test_an_altered_agent_is_installed_again(paths: Paths) -> None:
    install.apply(paths, spec())
    with (paths.agent / "current" / "ddtree" / "gate.py").open("a") as stream:
        stream.write("# changed by hand\n")
    (change,) = install.apply(paths, spec())
    assert change.what.startswith("install agent")
    assert install.agent_intact(paths, spec().agent_version)


def test_old_agents_go_but_the_last_few_stay(paths: Paths) -> None:
    versions = []
    for number in range(5):
        content = {**host_setup.agent_files(), "extra.py": f"N = {number}\n"}
        versions.append(install.agent_version(content))
        install.apply(paths, spec(agent=content, agent_version=versions[-1]))
    kept = {path.name for path in paths.agent.iterdir() if not path.is_symlink()}
    assert kept == set(versions[-3:])
    assert (paths.agent / "current").readlink().name == versions[-1]


def test_an_agent_that_arrives_altered_is_refused(paths: Paths) -> None:
    content = {**host_setup.agent_files(), "gate.py": "evil = 1\n"}
    with pytest.raises(InstallError, match="did not arrive as they were sent"):
        install.apply(paths, spec(agent=content))
    assert not (paths.agent / "current").exists()


def test_an_agent_that_does_not_run_is_not_made_current(paths: Paths) -> None:
    content = {**host_setup.agent_files(), "agent.py": "raise RuntimeError('too old')\n"}
    with pytest.raises(InstallError, match=r"does not run with this host's /usr/bin/python3.*too old"):
        install.apply(paths, spec(agent=content, agent_version=install.agent_version(content)))
    assert list(paths.agent.iterdir()) == []


def test_wrong_modes_are_corrected(paths: Paths) -> None:
    install.apply(paths, spec())
    paths.state.chmod(0o777)
    assert [change.what for change in install.apply(paths, spec())] == [f"correct owner and mode of {paths.state}"]
    assert paths.state.stat().st_mode & 0o777 == 0o700


def test_uploads_arrive_in_a_folder_of_their_sender(paths: Paths) -> None:
    install.apply(paths, spec(sender="nobody"))
    info = (paths.store / "incoming").stat()
    assert info.st_uid != 0 and info.st_mode & 0o777 == 0o700
    with pytest.raises(InstallError, match="does not exist on this host"):
        install.plan(paths, spec(sender="no-such-user"))


def test_a_changed_unit_is_rewritten_and_shown(paths: Paths, reloads: list[int]) -> None:
    install.apply(paths, spec())
    path = paths.units / "ddtree-recover.service"
    path.write_text("# mine\n")
    (change,) = install.apply(paths, spec())
    assert (change.before, change.header) == ("# mine\n", str(path)) and "[Service]" in change.after
    assert len(reloads) == 2


def test_a_service_user_that_is_root_is_refused(paths: Paths) -> None:
    with pytest.raises(InstallError, match="must not run as root"):
        install.plan(paths, spec(user="root"))


def test_something_in_the_way_is_named(paths: Paths) -> None:
    paths.root.mkdir()
    paths.releases.write_text("")
    with pytest.raises(InstallError, match="is in the way"):
        install.plan(paths, spec())


@pytest.mark.parametrize(
    "change",
    [
        {"user": "a b"},
        {"units": {"sshd.service": ""}},
        {"units": {"../ddtree-x.service": ""}},
        {"agent": {"../x.py": ""}},
        {"agent_version": "../../x"},
    ],
)
def test_names_that_could_reach_elsewhere_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InstallError, match=r"^not "):
        spec(**change)
