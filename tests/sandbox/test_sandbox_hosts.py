"""Sandbox hosts are real hosts: systemd, sshd, an address; reached over SSH with pinned keys, and with no way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fleet.sandbox import Sandbox

HOSTS = ("ct129", "ct200")


@pytest.mark.parametrize("host", HOSTS)
def test_systemd_is_pid_1_and_no_unit_has_failed(sandbox: Sandbox, host: str) -> None:
    sandbox.ssh(host, "systemctl is-system-running --wait")
    answer = sandbox.ssh(
        host, "cat /proc/1/comm; systemctl is-system-running; hostname; systemctl --failed --no-legend"
    )
    assert answer.stdout.split() == ["systemd", "running", host], answer.stdout


def test_services_run_under_limits_and_restart(sandbox: Sandbox) -> None:
    """What slots need of systemd: cgroups of their own, Restart= and the journal."""
    host, unit = "ct200", "sandbox-test-restart"
    sandbox.ssh(host, f"systemctl stop {unit}; systemctl reset-failed {unit}")
    script = "echo hello from the unit; cat /proc/self/cgroup; sleep 0.2; exit 3"
    properties = "-p Restart=on-failure -p RestartSec=100ms -p StartLimitBurst=3 -p TasksMax=20"
    sandbox.ssh(host, f"systemd-run --quiet --unit={unit} {properties} /bin/sh -c '{script}'", check=True)
    state = f"for i in $(seq 50); do systemctl is-failed -q {unit} && break; sleep 0.1; done; "
    answer = sandbox.ssh(
        host, state + f"systemctl show {unit} -p NRestarts -p ExecMainStatus; journalctl -u {unit} -o cat"
    )
    sandbox.ssh(host, f"systemctl reset-failed {unit}")
    assert "NRestarts=3" in answer.stdout and "ExecMainStatus=3" in answer.stdout, answer.stdout
    assert "hello from the unit" in answer.stdout
    assert f"/system.slice/{unit}.service" in answer.stdout


def test_hosts_have_identities_of_their_own(sandbox: Sandbox) -> None:
    question = "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub"
    assert sandbox.ssh("ct129", question).stdout != sandbox.ssh("ct200", question).stdout


def test_hosts_reach_each_other_by_name(sandbox: Sandbox) -> None:
    code = "import socket; print(socket.create_connection(('ct129', 22), 5).recv(7))"
    assert "SSH-2.0" in sandbox.ssh("ct200", ["python3", "-c", code]).stdout


def test_hosts_have_no_way_out(sandbox: Sandbox) -> None:
    """Neither by the routes they have nor by one that root on the host tries to add."""
    routes = sandbox.ssh("ct200", "ip route show table all type unicast; ip -6 route show").stdout.splitlines()
    assert all(sandbox.layout.subnet.removesuffix("0/24") in route or "dev lo" in route for route in routes), routes
    gateway = sandbox.layout.gateway
    outside = "192.0.2.1"  # reserved for documentation: an address of nobody, to which a router would forward
    code = f"import socket; socket.create_connection(('{outside}', 53), 3)"
    for attempt in ("true", f"ip route add default via {gateway}"):
        answer = sandbox.ssh("ct200", f'{attempt}; python3 -c "{code}"; ip route show default')
        assert "Network is unreachable" in answer.stderr, answer.stderr
        assert answer.stdout == ""


def test_the_machine_does_not_forward_for_hosts(sandbox: Sandbox) -> None:
    """Even where this machine is a router for others (with containers it often is)."""
    bridge = sandbox.names.bridge
    assert Path(f"/proc/sys/net/ipv4/conf/{bridge}/forwarding").read_text().strip() == "0"
    assert (
        "default" not in subprocess.run(["ip", "route", "show", "dev", bridge], capture_output=True, text=True).stdout
    )


def test_a_host_with_another_key_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    """Host-key checking is really on: the key of one host does not open the address of another."""
    own, other = (sandbox.address(host) for host in HOSTS)
    swapped = tmp_path / "known_hosts"
    swapped.write_text(sandbox.names.known_hosts.read_text().replace(own, "x").replace(other, own))
    command = [
        part.replace(str(sandbox.names.known_hosts), str(swapped)) for part in sandbox.ssh_command("ct129", ["true"])
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert answer.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in answer.stderr or "verification failed" in answer.stderr


def test_ssh_passes_arguments_exactly(sandbox: Sandbox) -> None:
    arguments = ["a b", "$HOME", "'quoted'", "*", "", "; false"]
    answer = sandbox.ssh("ct200", ["python3", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *arguments])
    assert json.loads(answer.stdout) == arguments


def test_ansible_reaches_the_hosts_with_the_written_inventory(sandbox: Sandbox, tmp_path: Path) -> None:
    ansible = Path(sys.executable).with_name("ansible")
    (tmp_path / "ansible.cfg").write_text("[defaults]\nhost_key_checking = true\n")
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg")}
    command = [str(ansible), "-i", str(sandbox.inventory), "all", "-m", "ansible.builtin.command", "-a", "hostname"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert {line for line in answer.stdout.splitlines() if line in HOSTS} == set(HOSTS)


def test_the_inventory_names_the_gpus_that_the_hosts_have(sandbox: Sandbox) -> None:
    hosts = yaml.safe_load(sandbox.inventory.read_text())["all"]["children"]["sandbox"]["hosts"]
    placed = {
        host: [(slot["name"], slot["gpu"], slot["port"]) for slot in hosts[host]["fleet_slots"]] for host in HOSTS
    }
    listed = {
        host: sandbox.ssh(host, "nvidia-smi --query-gpu=uuid --format=csv,noheader").stdout.split() for host in HOSTS
    }
    assert placed["ct200"] == [("gpu1", listed["ct200"][1], 30001), ("gpu2", listed["ct200"][2], 30002)]
    assert placed["ct129"] == [("gpu2", listed["ct129"][2], 30001)]
    assert not set(listed["ct129"]) & set(listed["ct200"])


def test_a_foreign_service_holds_gpu_0_and_port_30000_of_ct200(sandbox: Sandbox) -> None:
    code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:30000/', timeout=5).read().decode())"
    service = json.loads(sandbox.ssh("ct200", ["python3", "-c", code], check=True).stdout)
    assert service["service"] == "wrapper"
    apps = sandbox.ssh("ct200", "nvidia-smi --query-compute-apps=gpu_uuid,pid --format=csv,noheader").stdout
    assert f"{sandbox.gpu_uuid('ct200', 0)}, {service['pid']}" in apps.splitlines()
    assert sandbox.ssh("ct129", "systemctl cat wrapper.service").returncode != 0
