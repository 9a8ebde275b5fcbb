"""The inventory check as Ansible runs it: all hosts of the play at once, before any of them is contacted."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fleet import content

PLAYBOOK = """
- hosts: all
  gather_facts: false
  serial: 1
  tasks:
    - name: Check the inventory
      ddtree_inventory:
      run_once: true
    - name: Contact the host
      ddtree_host:
"""

# Documentation addresses (RFC 5737): whoever tries to reach them gets no answer.
INVENTORY = """
all:
  hosts:
    ct129:
      ansible_host: 192.0.2.129
      fleet_slots:
        - {name: gpu2, gpu: GPU-11111111-2222-3333-4444-555555555555, port: 30001}
    ct200:
      ansible_host: 192.0.2.200
      fleet_slots:
        - name: gpu1
          gpu: GPU-99999999-8888-7777-6666-555555555555
          port: PORT
  vars:
    ansible_user: root
    fleet_stack: cpu
EXTRA
"""


# Writes what each task of each host returned, one JSON object a line.
CALLBACK = """
import json, os
from ansible.plugins.callback import CallbackBase

class CallbackModule(CallbackBase):
    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "notification", "results"

    def write(self, kind, result):
        line = {"kind": kind, "host": result.host.get_name(), "result": result.result}
        with open(os.environ["RESULTS"], "a") as file:
            file.write(json.dumps(line, default=str) + chr(10))

    def v2_runner_on_ok(self, result):
        self.write("ok", result)

    def v2_runner_on_failed(self, result, ignore_errors=False):
        self.write("failed", result)

    def v2_runner_on_unreachable(self, result):
        self.write("unreachable", result)
"""


@dataclasses.dataclass
class Run:
    """A finished play: status, all it printed, and what each task returned."""

    status: int
    text: str
    results: list[dict[str, Any]]

    @property
    def check(self) -> dict[str, Any]:
        """What the inventory check returned."""
        found: dict[str, Any] = self.results[0]["result"]
        return found

    def kinds(self) -> list[str]:
        return [item["kind"] for item in self.results]


def play(tmp_path: Path, *arguments: str, port: str = "30001", extra: str = "") -> Run:
    (tmp_path / "hosts.yml").write_text(INVENTORY.replace("PORT", port).replace("EXTRA", extra))
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "results.py").write_text(CALLBACK)
    lines = tmp_path / "results.jsonl"
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(content.config()),
        "ANSIBLE_CALLBACK_PLUGINS": str(tmp_path / "callbacks"),
        "ANSIBLE_CALLBACKS_ENABLED": "results",
        "ANSIBLE_TIMEOUT": "1",
        "ANSIBLE_SSH_RETRIES": "0",
        "RESULTS": str(lines),
    }
    ansible = str(Path(sys.executable).with_name("ansible-playbook"))
    argv = [ansible, "-i", "hosts.yml", "play.yml", *arguments]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    text = done.stdout + done.stderr
    assert lines.exists(), text
    return Run(done.returncode, text, [json.loads(line) for line in lines.read_text().splitlines()])


def test_every_problem_of_every_host_is_listed_with_file_and_line_and_no_host_is_contacted(tmp_path: Path) -> None:
    extra = "    fleet_sttate: /x\n    fleet_waves: [0]\n    fleet_cache: '{{ nothing }}'\n"
    run = play(tmp_path, port='"30001"', extra=extra)
    assert (run.status, run.kinds()) == (2, ["failed"])
    report = run.check["ddtree"]
    assert report["outcome"] == "refused"
    found = {problem["path"]: problem for problem in report["problems"]}
    assert set(found) == {
        "hosts.ct129.fleet_sttate",
        "hosts.ct129.fleet_waves[0]",
        "hosts.ct129.fleet_cache",
        "hosts.ct200.fleet_slots[0].port",
    }
    assert found["hosts.ct200.fleet_slots[0].port"]["origin"] == "hosts.yml:13"
    assert "also on ct200" in found["hosts.ct129.fleet_sttate"]["cause"]
    assert "nothing" in found["hosts.ct129.fleet_cache"]["cause"]
    message = run.check["msg"]
    assert message.startswith("4 problems in the inventory:") and message.endswith("No host has been contacted.")


def test_a_right_inventory_lets_the_play_go_on_to_the_hosts(tmp_path: Path) -> None:
    run = play(tmp_path)
    assert run.check["hosts"] == ["ct129", "ct200"]
    assert run.kinds() == ["ok", "unreachable"]
    assert run.status == 4


def test_hosts_that_the_limit_leaves_out_are_not_judged(tmp_path: Path) -> None:
    assert play(tmp_path, "-l", "ct129", port='"30001"').check["hosts"] == ["ct129"]


def test_values_of_the_command_line_are_text(tmp_path: Path) -> None:
    assert play(tmp_path, "-e", "fleet_keep_releases=5", "-e", "fleet_force=true").check["hosts"] == ["ct129", "ct200"]


def test_values_of_the_command_line_are_checked(tmp_path: Path) -> None:
    run = play(tmp_path, "-e", "fleet_keep_releases=five")
    assert "hosts.ct129.fleet_keep_releases: 'five' is not a whole number" in run.check["msg"]


def test_a_secret_is_not_repeated_by_the_check(tmp_path: Path) -> None:
    run = play(tmp_path, "-vvv", extra="    fleet_api_key: hunter2 with spaces\n")
    assert run.status == 2
    assert "fleet_api_key" in run.text
    assert "hunter2" not in run.text


def test_waves_in_the_inventory_are_told_to_be_without_effect(tmp_path: Path) -> None:
    told = play(tmp_path, extra="    fleet_waves: [1]\n").text
    assert "fleet_waves: not used" in " ".join(told.split())


def test_waves_on_the_command_line_are_not(tmp_path: Path) -> None:
    assert "not used" not in play(tmp_path, "-e", '{"fleet_waves": [1]}').text
