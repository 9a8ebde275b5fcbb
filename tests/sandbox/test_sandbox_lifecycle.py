"""`up` and `down`: quick, repeatable, undisturbed by whatever interrupts them, and clear about what they cannot do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fleet.sandbox import Sandbox, SandboxError, cgroups, requirements
from fleet.sandbox.layout import Names, parse_subnet, place_hosts

Make = Callable[[Sequence[str]], Sandbox]
CLI = [sys.executable, "-c", "from fleet.cli_sandbox import app; app()"]


def call(sandbox: Sandbox, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, on the sandbox's state directory."""
    variables = {**os.environ, "DDTREE_SANDBOX_DIR": str(sandbox.names.state), **environment}
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, env=variables, timeout=60)


def free_subnet() -> str:
    """A subnet that no interface of this machine has."""
    addresses = subprocess.run(["ip", "-4", "-brief", "address"], capture_output=True, text=True).stdout
    return next(f"10.{number}.78.0/24" for number in range(220, 250) if f"10.{number}." not in addresses)


def traces(sandbox: Sandbox) -> str:
    """All that this machine shows of the sandbox, found by other means than the sandbox's own."""
    mark = sandbox.names.id
    found = []
    for argv in (["ip", "-o", "link"], ["ip", "netns"], ["mount"], ["ps", "-eo", "args"]):
        found += [
            line for line in subprocess.run(argv, capture_output=True, text=True).stdout.splitlines() if mark in line
        ]
    for top in ("/sys/fs/cgroup", "/run", "/var/tmp"):
        find = ["find", top, "-xdev", "-maxdepth", "5", "-name", f"*{mark}*"]
        if top == "/sys/fs/cgroup":
            find.remove("-xdev")
        found += subprocess.run(find, capture_output=True, text=True).stdout.split()
    found += [str(sandbox.names.state)] if sandbox.names.state.exists() else []
    return "\n".join(found)


def test_up_is_quick_and_the_second_time_does_nothing(new_sandbox: Make) -> None:
    sandbox = new_sandbox(["one"])
    first = sandbox.ssh("one", "stat -c %Y /proc/1; systemctl show -p UserspaceTimestampMonotonic").stdout
    started = time.monotonic()
    assert sandbox.up() is False
    assert time.monotonic() - started < 3
    answer = call(sandbox, "up")
    assert answer.returncode == 0 and answer.stdout.startswith("already up: one ("), answer.stdout + answer.stderr
    assert sandbox.ssh("one", "stat -c %Y /proc/1; systemctl show -p UserspaceTimestampMonotonic").stdout == first


def test_down_leaves_nothing_and_says_so_when_there_is_nothing(new_sandbox: Make) -> None:
    sandbox = new_sandbox(["one", "two"])
    sandbox.kill("two")
    sandbox.cut("two")
    # A connection that stays open, as Ansible leaves them where the inventory tells it to.
    options = ["-oControlMaster=auto", "-oControlPersist=60", f"-oControlPath={sandbox.names.control_sockets}/shared"]
    ssh, *rest = sandbox.ssh_command("one", ["true"])
    subprocess.run([ssh, *options, *rest], check=True, capture_output=True, timeout=20)
    assert "shared" in traces(sandbox)
    assert sandbox.down() is True
    assert traces(sandbox) == ""
    assert sandbox.remains() == []
    answer = call(sandbox, "down")
    assert answer.returncode == 0 and "there was no sandbox" in answer.stdout


def test_hosts_outlive_the_command_that_started_them(new_sandbox: Make) -> None:
    """Session, process group and cgroup of the command end; the hosts do not, and they still reboot by themselves."""
    sandbox = new_sandbox([])
    environment = {**os.environ, "DDTREE_SANDBOX_DIR": str(sandbox.names.state)}
    command = subprocess.Popen(
        [*CLI, "up", "--hosts", "one", "--subnet", free_subnet()], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    output, _ = command.communicate(timeout=60)
    assert command.returncode == 0, output
    for number in (signal.SIGHUP, signal.SIGKILL):
        with pytest.raises(ProcessLookupError):  # nobody is left in the group: the keeper has a session of its own
            os.killpg(command.pid, number)
    assert sandbox.ssh("one", "hostname").stdout == "one\n"
    sandbox.ssh("one", "systemctl reboot")
    time.sleep(0.5)
    sandbox.wait("one")
    assert sandbox.ssh("one", "hostname").stdout == "one\n"


@pytest.mark.parametrize("delay", [0.35, 0.5])
def test_a_killed_up_is_completed_by_the_next_and_removed_by_down(new_sandbox: Make, delay: float) -> None:
    sandbox = new_sandbox([])
    subnet = free_subnet()
    environment = {**os.environ, "DDTREE_SANDBOX_DIR": str(sandbox.names.state)}
    command = [*CLI, "up", "--hosts", "one,two", "--subnet", subnet]
    for _ in range(2):
        process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    answer = call(sandbox, "up", "--hosts", "one,two", "--subnet", subnet)
    assert answer.returncode == 0, answer.stderr
    assert [sandbox.ssh(host, "hostname").stdout for host in ("one", "two")] == ["one\n", "two\n"]
    process = subprocess.Popen([*CLI, "down"], env=environment, start_new_session=True)
    time.sleep(delay)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    sandbox.down()
    assert traces(sandbox) == ""


def test_ctrl_c_takes_back_what_was_made(new_sandbox: Make) -> None:
    sandbox = new_sandbox([])
    environment = {**os.environ, "DDTREE_SANDBOX_DIR": str(sandbox.names.state)}
    command = [*CLI, "up", "--hosts", "one,two", "--subnet", free_subnet()]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    record = sandbox.names.record
    while process.poll() is None and not record.exists():
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in errors
    assert traces(sandbox) == ""


def test_records_that_are_damaged_do_not_keep_down_from_working(new_sandbox: Make) -> None:
    sandbox = new_sandbox(["one"])
    sandbox.names.record.write_text("{")
    with pytest.raises(SandboxError, match=r"sandbox\.json is damaged"):
        sandbox.up()
    assert sandbox.down() is True
    assert traces(sandbox) == ""


def test_a_subnet_in_use_is_refused_with_the_name_of_its_user(sandbox: Sandbox, new_sandbox: Make) -> None:
    other = new_sandbox([])
    answer = call(other, "up", "--subnet", sandbox.layout.subnet)
    assert answer.returncode == 1
    assert f"sandbox in {sandbox.names.state}" in answer.stderr and "--subnet" in answer.stderr
    assert traces(other) == ""


def test_two_sandboxes_with_equal_host_names_live_side_by_side(sandbox: Sandbox, new_sandbox: Make) -> None:
    other = new_sandbox(["ct200"])
    assert other.address("ct200") != sandbox.address("ct200")
    other.ssh("ct200", "touch /var/lib/other", check=True)
    assert sandbox.ssh("ct200", "test -e /var/lib/other").returncode == 1
    other.down()
    assert sandbox.ssh("ct200", "hostname").stdout == "ct200\n"


def test_an_inventory_of_somebody_else_is_not_overwritten(new_sandbox: Make, tmp_path: Path) -> None:
    sandbox = new_sandbox([])
    mine = tmp_path / "hosts.yml"
    mine.write_text("all: {}\n")
    answer = call(sandbox, "up", "--subnet", free_subnet(), "--inventory", str(mine))
    assert answer.returncode == 1 and "was not written by the sandbox" in answer.stderr
    assert mine.read_text() == "all: {}\n"
    assert traces(sandbox) == ""


def test_other_hosts_than_those_that_are_up_are_refused(new_sandbox: Make) -> None:
    sandbox = new_sandbox(["one"])
    with pytest.raises(SandboxError, match=r"a sandbox with hosts one on .* exists already"):
        sandbox.up(["one", "two"])


def test_status_reports_the_truth_in_json(new_sandbox: Make) -> None:
    sandbox = new_sandbox(["one", "two"])
    assert call(sandbox, "fault", "set", "one", "3=ecc:5", "1=gone").returncode == 0
    assert call(sandbox, "power", "kill", "two").returncode == 0
    answer = call(sandbox, "status", "--json")
    document = json.loads(answer.stdout)
    hosts = {host["name"]: host for host in document["hosts"]}
    assert answer.returncode == 1
    assert (hosts["one"]["power"], hosts["one"]["ssh"]) == ("on", True)
    assert hosts["one"]["faults"] == {"3": {"ecc": 5}, "1": {"gone": True}}
    assert (hosts["two"]["power"], hosts["two"]["ssh"]) == ("off", False)
    assert call(sandbox, "power", "start", "two").returncode == 0
    assert call(sandbox, "fault", "clear", "one").returncode == 0
    assert call(sandbox, "status").returncode == 0
    assert call(sandbox, "ssh", "two", "hostname | tr a-z A-Z").stdout == "TWO\n"
    assert call(sandbox, "down", "--json").stdout == '{\n  "changed": true\n}\n'
    assert call(sandbox, "status", "--json").returncode == 1


def test_without_root_one_message_names_the_fix(new_sandbox: Make) -> None:
    sandbox = new_sandbox([])
    command = ["setpriv", "--reuid=65534", "--clear-groups", *CLI, "up"]
    environment = {**os.environ, "DDTREE_SANDBOX_DIR": "/nonexistent", "HOME": "/nonexistent"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=60)
    if "Permission denied" in answer.stderr or "ModuleNotFoundError" in answer.stderr:
        pytest.skip("the checkout is not readable for other users, so none can try the command")
    assert answer.returncode == 1
    assert "must be root" in answer.stderr and "sudo" in answer.stderr and "Traceback" not in answer.stderr
    assert traces(sandbox) == ""


def test_root_without_its_powers_is_told_so(new_sandbox: Make) -> None:
    sandbox = new_sandbox([])
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all", *CLI, "up"]
    environment = {**os.environ, "DDTREE_SANDBOX_DIR": str(sandbox.names.state)}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert answer.returncode == 1 and "root lacks CAP_SYS_ADMIN" in answer.stderr and "--privileged" in answer.stderr


def test_missing_packages_are_named_in_one_install_command(
    new_sandbox: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_sandbox([])
    for tool in ("ssh", "ssh-keygen", "mount", "nsenter", "setpriv", "setsid", "unshare"):
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as refusal:
        requirements.check_packages()
    assert refusal.value.fix == "apt-get install -y iproute2 systemd-container"


def test_a_missing_kernel_feature_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path)
    with pytest.raises(SandboxError, match="no cgroup hierarchy is mounted"):
        cgroups.hierarchies()


def test_addresses_follow_the_numbers_in_the_names() -> None:
    subnet = parse_subnet("10.9.8.0/24")
    placed = {host.name: host.address for host in place_hosts(["ct129", "ct200", "x129", "big999", "web"], subnet)}
    assert placed == {
        "ct129": "10.9.8.129", "ct200": "10.9.8.200", "x129": "10.9.8.11", "big999": "10.9.8.12", "web": "10.9.8.13"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["10.0.0.0/8", "10.200.0.1/24", "8.8.8.0/24", "nonsense"])
def test_subnets_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(SandboxError, match="--subnet"):
        parse_subnet(text)


@pytest.mark.parametrize("names", [["A"], ["a", "a"], ["a b"], ["-x"], []])
def test_host_names_that_do_not_fit_are_refused(names: list[str]) -> None:
    with pytest.raises(SandboxError):
        place_hosts(names, parse_subnet("10.9.8.0/24"))


def test_interface_names_fit_into_fifteen_characters() -> None:
    names = Names(Path("/some/where"))
    (host,) = place_hosts(["a-host-with-a-rather-long-name1"], parse_subnet("10.9.8.0/24"))
    assert len(names.link(host)) <= 15 and len(names.bridge) <= 15
