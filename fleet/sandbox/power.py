"""Power of the hosts: boot, orderly stop, sudden loss; and entering a running host without its network.

A host is systemd-nspawn under a *keeper*, a shell loop in a session and cgroup of its own. The keeper outlives the
command that started it, and starts the host again when the host reboots (nspawn ends with status 133 then). A keeper
that ends any other way leaves the host switched off.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from . import cgroups, image
from .commands import run
from .errors import SandboxError
from .layout import Host, Layout, Names

INIT = "/usr/local/sbin/sandbox-init"
# Joins its cgroups first and then detaches: when it returns, the keeper is where `is_on` looks for it.
DETACH = 'for group in $KEEPER_CGROUPS; do echo $$ > "$group/cgroup.procs" || exit; done; exec setsid --fork "$@"'
# A v2 cgroup that has passed controllers on takes no process any more, so each boot there begins with a fresh one.
KEEPER = """
enter() {
    if [ -e "$1/cgroup.controllers" ]; then
        for try in 1 2 3 4 5 6 7 8 9 10; do
            [ ! -d "$1" ] || find "$1" -depth -type d -exec rmdir {} + 2>/dev/null
            [ -d "$1" ] || break
            sleep 0.05
        done
        mkdir -p "$1"
    fi
    echo 0 > "$1/cgroup.procs"
}
while :; do
    (for group in $HOST_CGROUPS; do enter "$group" || exit; done; unset KEEPER_CGROUPS HOST_CGROUPS; exec "$@")
    [ $? -eq 133 ] || exit 0
done
"""
SIGHALT = signal.SIGRTMIN + 3  # systemd(1): "halts the machine"
# From this version on systemd refuses to run on cgroup v1.
SYSTEMD_WITHOUT_CGROUP_V1 = 256


def boot(names: Names, layout: Layout, host: Host) -> None:
    """Switch the host on; returns at once. Does nothing to a host that is on."""
    if is_on(names, host):
        return
    cgroups.remove(names.cgroup, host.name)
    host_groups = cgroups.create(names.cgroup, host.name)
    keeper_groups = cgroups.create(names.cgroup, cgroups.keeper_of(host.name))
    command = [
        *("/bin/sh", "-c", DETACH, "sandbox-detach"),
        *("/bin/sh", "-c", KEEPER, f"sandbox-keeper-{host.name}"),
        *("systemd-nspawn", "--quiet", f"--directory={names.root(host)}", f"--machine={names.machine(host)}"),
        *(
            f"--hostname={host.name}",
            "--register=no",
            "--keep-unit",
            f"--network-namespace-path=/run/netns/{names.netns(host)}",
        ),
        *("--link-journal=no", "--resolv-conf=off", "--timezone=off", "--console=pipe", f"--kill-signal={SIGHALT}"),
        INIT,
    ]
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SYSTEMD_NSPAWN_LOCK": "0",
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
        "KEEPER_CGROUPS": " ".join(map(str, keeper_groups)),
        "HOST_CGROUPS": " ".join(map(str, host_groups)),
    }
    systemd = image.package_version(layout.image, "systemd")
    if not cgroups.is_unified() and systemd and systemd[0] >= SYSTEMD_WITHOUT_CGROUP_V1:
        environment["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] = "1"
    with names.console(host).open("ab") as console:
        status = subprocess.run(
            command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=console, stderr=console, check=False
        ).returncode
    if status != 0:
        raise SandboxError(f"host {host.name} could not be switched on: {_last_words(names, host)}")


def leader(names: Names, host: Host) -> int | None:
    """The host's PID 1 as this machine sees it."""
    for pid in cgroups.processes(names.cgroup, host.name):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
        if len(numbers) == len(_own_numbers()) + 1 and numbers[-1] == "1":
            return pid
    return None


def _own_numbers() -> list[str]:
    status = Path("/proc/self/status").read_text()
    return next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))


def _host_processes(names: Names, host: Host) -> set[int]:
    keepers = cgroups.processes(names.cgroup, cgroups.keeper_of(host.name))
    return keepers | cgroups.processes(names.cgroup, host.name)


def is_on(names: Names, host: Host) -> bool:
    """Whether the host runs or is between the two halves of a reboot."""
    return bool(_host_processes(names, host))


def stop(names: Names, host: Host, patience: float = 30.0) -> None:
    """Shut the host down in good order."""
    if not is_on(names, host):
        return
    init = leader(names, host)
    if init is not None:
        os.kill(init, SIGHALT)
        if _wait_off(names, host, patience):
            return
    kill(names, host)
    raise SandboxError(
        f"host {host.name} did not shut down within {patience:.0f} s and was switched off", f"see {names.console(host)}"
    )


def kill(names: Names, host: Host) -> None:
    """Power loss: PID 1 is killed and with it, by the kernel, all that ran on the host."""
    for pid in cgroups.processes(names.cgroup, cgroups.keeper_of(host.name)):
        _signal(pid, signal.SIGKILL)
    init = leader(names, host)
    if init is not None:
        _signal(init, signal.SIGKILL)
    deadline = time.monotonic() + 15
    while not _wait_off(names, host, 0.5):
        for pid in _host_processes(names, host):  # nspawn before it had started PID 1, or stuck
            _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise SandboxError(f"processes of host {host.name} do not end: {sorted(_host_processes(names, host))}")


def kill_everything(names: Names, patience: float = 15.0) -> None:
    """End every process of the sandbox, whatever its records say."""
    deadline = time.monotonic() + patience
    while processes := cgroups.processes(names.cgroup):
        keepers = {pid for pid in processes if _is_keeper(pid)}  # first, or they would start hosts again
        for pid in keepers or processes:
            _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise SandboxError(f"processes of the sandbox do not end: {sorted(processes)}")
        time.sleep(0.02)


def forget(names: Names) -> None:
    """Remove the directories that nspawn keeps per container name."""
    for place in (Path("/run/systemd/nspawn/propagate"), Path("/run/systemd/nspawn/unix-export")):
        for directory in place.glob(f"{names.netns_prefix}*"):
            with contextlib.suppress(OSError):
                directory.rmdir()


def _is_keeper(pid: int) -> bool:
    try:
        return "/keeper." in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wait_off(names: Names, host: Host, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while is_on(names, host):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def answers_ssh(address: str, timeout: float = 1.0) -> bool:
    """Whether sshd at the address says hello."""
    try:
        with socket.create_connection((address, 22), timeout) as connection:
            connection.settimeout(timeout)
            return connection.recv(8).startswith(b"SSH-2.0")
    except OSError:
        return False


def wait_ssh(names: Names, host: Host, patience: float = 120.0) -> None:
    deadline = time.monotonic() + patience
    while not answers_ssh(host.address):
        if not is_on(names, host):
            raise SandboxError(f"host {host.name} went off while starting: {_last_words(names, host)}")
        if time.monotonic() > deadline:
            raise SandboxError(
                f"host {host.name} ({host.address}) did not answer on SSH within {patience:.0f} s",
                f"see {names.console(host)}",
            )
        time.sleep(0.03)


def _last_words(names: Names, host: Host) -> str:
    lines = names.console(host).read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "its console is empty"


def inside(names: Names, host: Host, argv: Sequence[str]) -> str:
    """Run a command on a host past its network, in the namespaces of its PID 1."""
    return run(["nsenter", f"--target={require_leader(names, host)}", "--all", "--root", "--wd", "--", *argv])


def require_leader(names: Names, host: Host) -> int:
    init = leader(names, host)
    if init is None:
        raise SandboxError(f"host {host.name} is off", f"fleet sandbox power start {host.name}")
    return init
