"""Staging for real: over SSH, to a host with systemd, killed at the worst moment and damaged on purpose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
HOST = "ct129"
PLAYBOOK = """
- name: Stage a release and move nothing
  hosts: all
  gather_facts: false
  tasks:
    - {name: Look, ansible.builtin.import_role: {name: preflight, rolespec_validate: false}}
    - {name: Fetch, ansible.builtin.import_role: {name: wheelhouse, rolespec_validate: false}}
    - {name: Build, ansible.builtin.import_role: {name: release, rolespec_validate: false}}
"""


class Stage:
    """Runs of the three roles against one host."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox = sandbox
        self.playbook = folder / "stage.yml"
        self.playbook.write_text(PLAYBOOK)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(self.playbook), "-l", HOST, "-v", *arguments]
        env = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        env["ANSIBLE_ROLES_PATH"] = str(ROOT / "roles")
        argv += ["-i", str(self.sandbox.inventory)]
        return subprocess.Popen(
            argv, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

    def run(self, *arguments: str) -> str:
        process = self.start(*arguments)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out[-4000:]
        return out

    def ssh(self, command: str) -> str:
        done = self.sandbox.ssh(HOST, command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return str(done.stdout).strip()

    def releases(self) -> list[str]:
        return self.ssh("ls /opt/ddtree/releases 2>/dev/null || true").split()


def changed(out: str) -> int:
    found = re.search(rf"^{HOST}\s.*changed=(\d+)", out, re.MULTILINE)
    assert found, out[-2000:]
    return int(found.group(1))


@pytest.fixture(scope="module")
def stage(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(sandbox, tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def staged(stage: Stage) -> str:
    """A release, on a host whose first attempt at it was killed half-way."""
    process = stage.start()
    end = time.monotonic() + 120
    while not stage.ssh("ls -d /opt/ddtree/releases/.building-*/venv/lib 2>/dev/null || true"):
        assert time.monotonic() < end and process.poll() is None, "the build was not seen"
        time.sleep(0.2)
    # the module on the host, with all that it started: as when the host's memory runs out
    stage.ssh("pkill -KILL -f '[A]nsiballZ_ddtree_release'; pkill -KILL -f '[/]opt/ddtree/store/tools/uv'; true")
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert stage.releases() == [], "a half-built release is visible"
    sent = stage.ssh("cat /opt/ddtree/store/*/*.whl | wc -c")
    out = stage.run()
    assert changed(out) == 1 and "sent_bytes: 0" in out, out[-3000:]
    assert stage.ssh("cat /opt/ddtree/store/*/*.whl | wc -c") == sent
    (name,) = stage.releases()
    left = stage.ssh("ls -A /opt/ddtree/releases").split()
    assert name in left and not [entry for entry in left if "building" in entry], left
    return name


def test_a_killed_build_is_finished_by_the_next_run_without_sending_again(staged: str) -> None:
    assert staged.startswith("cpu-standalone-")


def test_staging_again_changes_nothing(stage: Stage, staged: str) -> None:
    assert changed(stage.run()) == 0
    assert changed(stage.run("--check", "--diff")) == 0


def test_the_host_had_no_way_out_while_it_built(stage: Stage, staged: str) -> None:
    assert stage.ssh("ip route show default") == ""
    assert "torch 2.13.0+cpu" in stage.ssh(
        f'python3 -c \'import json; b = json.load(open("/opt/ddtree/releases/{staged}/bom.json")); '
        'print(*(d["name"] + " " + d["version"] for d in b["distributions"]), sep="\\n")\''
    )


def test_the_service_user_may_read_the_release_and_not_write_to_it(stage: Stage, staged: str) -> None:
    venv = f"/opt/ddtree/releases/{staged}/venv"
    run = "setpriv --reuid ddtree --regid ddtree --clear-groups"
    assert stage.ssh(f"{run} {venv}/bin/python -B -c 'import ddtree_engine; print(1)'") == "1"
    assert stage.ssh(f"find {venv} -not -type l -perm /o=w | head") == ""
    assert stage.ssh(f"{run} touch {venv}/x 2>&1 || echo refused").endswith("refused")
    assert stage.ssh(f"{run} ls /var/lib/ddtree 2>&1 || echo refused").endswith("refused")


def test_damage_to_a_release_and_to_a_wheel_is_found_named_and_repaired(stage: Stage, staged: str) -> None:
    path = f"$(echo /opt/ddtree/releases/{staged}/venv/lib/python3*/site-packages/jinja2/runtime.py)"
    wheel = "$(echo /opt/ddtree/store/*/jinja2-*.whl)"
    stage.ssh(f"printf '#' | dd of={path} bs=1 conv=notrunc status=none")
    stage.ssh(f"printf '#' | dd of={wheel} bs=1 seek=200 conv=notrunc status=none")
    announced = stage.run("--check")
    assert "jinja2/runtime.py (content changed)" in announced and "it is damaged" in announced
    out = stage.run()
    assert changed(out) == 1 and "jinja2/runtime.py" in out
    assert changed(stage.run()) == 0
