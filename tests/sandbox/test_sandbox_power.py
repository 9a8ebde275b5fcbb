"""Hosts lose power, shut down, reboot and are cut off, and come back as who they were."""

from __future__ import annotations

import time

import pytest

from fleet.sandbox import Sandbox, SandboxError, power
from fleet.sandbox.power import answers_ssh

HOST = "ct129"
IDENTITY = (
    "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub; hostname; ip -brief address show dev eth0 | cut -d@ -f1"
)


def boot_id(sandbox: Sandbox) -> str:
    """Of this boot of the host; the kernel's own boot_id is the machine's and stays."""
    return sandbox.ssh(
        HOST, "systemctl show -p UserspaceTimestampMonotonic --value; stat -c %Y.%i /proc/1", check=True
    ).stdout


def journal_of_last_boot(sandbox: Sandbox) -> str:
    return sandbox.ssh(HOST, "journalctl -b -1 -o cat --no-pager").stdout


def test_a_reboot_keeps_identity_and_disk(sandbox: Sandbox) -> None:
    identity, before = sandbox.ssh(HOST, IDENTITY, check=True).stdout, boot_id(sandbox)
    sandbox.ssh(HOST, "echo kept > /var/lib/kept; echo lost > /run/lost", check=True)
    sandbox.ssh(HOST, "systemctl reboot")
    deadline = time.monotonic() + 20
    while answers_ssh(sandbox.address(HOST), 0.3) and time.monotonic() < deadline:
        time.sleep(0.02)
    sandbox.wait(HOST)
    assert boot_id(sandbox) != before
    assert sandbox.ssh(HOST, IDENTITY).stdout == identity
    assert sandbox.ssh(HOST, "cat /var/lib/kept /run/lost").stdout == "kept\n"
    # It is still where the sandbox looks for it.
    assert power.leader(sandbox.names, sandbox.layout.host(HOST)) is not None


def test_power_loss_lets_nothing_finish(sandbox: Sandbox) -> None:
    on_stop = "-p ExecStop='/bin/sh -c \"echo stopped in order > /var/lib/farewell\"'"
    sandbox.ssh(HOST, "rm -f /var/lib/farewell")
    sandbox.ssh(HOST, f"systemd-run --quiet --unit=farewell {on_stop} sleep 1000", check=True)
    sandbox.kill(HOST)
    state = {host.name: host for host in sandbox.status()}[HOST]
    assert (state.power, state.ssh) == ("off", False)
    started = time.monotonic()
    sandbox.start(HOST)
    assert time.monotonic() - started < 10
    assert sandbox.ssh(HOST, "cat /var/lib/farewell").returncode != 0
    assert "Reached target" not in journal_of_last_boot(sandbox).splitlines()[-1]


def test_an_orderly_stop_lets_services_finish(sandbox: Sandbox) -> None:
    on_stop = "-p ExecStop='/bin/sh -c \"echo stopped in order > /var/lib/farewell\"'"
    sandbox.ssh(HOST, "rm -f /var/lib/farewell")
    sandbox.ssh(HOST, f"systemd-run --quiet --unit=farewell {on_stop} sleep 1000", check=True)
    sandbox.stop(HOST)
    assert {host.name: host.power for host in sandbox.status()} == {HOST: "off", "ct200": "on"}
    sandbox.start(HOST)
    assert sandbox.ssh(HOST, "cat /var/lib/farewell").stdout == "stopped in order\n"


def test_a_host_that_is_cut_off_runs_on(sandbox: Sandbox) -> None:
    before = boot_id(sandbox)
    count = "while :; do echo x >> /run/count; sleep 0.02; done"
    sandbox.ssh(HOST, f"systemd-run --quiet --unit=counter /bin/sh -c '{count}'", check=True)
    sandbox.cut(HOST)
    try:
        seen = int(sandbox.ssh("ct200", "true").returncode == 0)
        assert seen, "the other host stays reachable"
        state = {host.name: host for host in sandbox.status()}[HOST]
        assert (state.power, state.link, state.ssh) == ("on", "cut", False)
        time.sleep(0.3)
    finally:
        sandbox.restore(HOST)
    lines = int(sandbox.ssh(HOST, "systemctl stop counter; wc -l < /run/count", check=True).stdout)
    assert lines >= 10
    assert boot_id(sandbox) == before


def test_a_host_the_sandbox_does_not_have_is_named(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match=r"no host 'ct999'; it has ct129, ct200"):
        sandbox.kill("ct999")
