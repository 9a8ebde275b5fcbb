"""The sandbox as a whole: up, down, and everything that can be done to its hosts in between."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import cgroups, faults, identity, image, inventory, mounts, network, power, requirements
from .errors import SandboxError
from .layout import DEFAULT_HOSTS, DEFAULT_SUBNET, Host, Layout, Names, default_state, parse_subnet, place_hosts
from .onhost import nvidia_smi

KERNEL_LOG = "run/sandbox-kernel.log"


@dataclass(frozen=True)
class HostStatus:
    """One host as it is now."""

    name: str
    address: str
    power: str  # on | off
    link: str  # up | cut
    ssh: bool
    faults: dict[str, Any]
    slots: list[dict[str, Any]]


def _silent(_: str) -> None:
    """The progress of nobody who listens."""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the cleaning up is done, here and in the tools that are called."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Sandbox:
    """A fleet of systemd hosts on this machine; all there is to know about it lies in its state directory."""

    def __init__(
        self, state: Path | None = None, *, cache: Path | None = None, say: Callable[[str], None] = _silent
    ) -> None:
        self.names = Names((state or default_state()).absolute())
        self.cache = cache
        self.say = say

    # -- life ------------------------------------------------------------------------------------------------------

    def up(
        self, hosts: Sequence[str] | None = None, *, subnet: str | None = None, inventory_path: Path | None = None
    ) -> bool:
        """Bring the fleet up; returns False when all of it was up already. A first `up` that fails takes all back."""
        requirements.check_all(self.cache)
        with self._lock():
            before = Layout.load(self.names.record)
            layout = self._planned(before, hosts, subnet, inventory_path)
            if before == layout and self._is_up(layout):
                return False
            try:
                self._build(layout)
            except BaseException:
                if before is None:
                    self.say("taking back what was made so far")
                    with _uninterrupted():
                        self._remove(layout)
                raise
        return True

    def _planned(
        self, before: Layout | None, hosts: Sequence[str] | None, subnet: str | None, inventory_path: Path | None
    ) -> Layout:
        if before is not None:
            asked = (
                tuple(hosts or [host.name for host in before.hosts]),
                subnet or before.subnet,
                inventory_path.absolute() if inventory_path else before.inventory,
            )
            current = (tuple(host.name for host in before.hosts), before.subnet, before.inventory)
            if (set(asked[0]), asked[1]) != (set(current[0]), current[1]):
                raise SandboxError(
                    f"a sandbox with hosts {','.join(current[0])} on {current[1]} exists already in {self.names.state}",
                    "run `fleet sandbox down` first, or use another state directory (DDTREE_SANDBOX_DIR)",
                )
            inventory.check(asked[2], self.names)
            if not (before.image / "etc").is_dir():
                raise SandboxError(
                    f"the base image of this sandbox, {before.image}, is gone", "fleet sandbox down, then up"
                )
            return Layout(before.subnet, before.hosts, before.image, asked[2])
        wanted = parse_subnet(subnet or DEFAULT_SUBNET)
        placed = place_hosts(hosts or DEFAULT_HOSTS, wanted)
        network.check_free(self.names, wanted)
        path = (inventory_path or self.names.state / "hosts.yml").absolute()
        inventory.check(path, self.names)
        return Layout(str(wanted), placed, image.ensure(self.say, self.cache), path)

    def _is_up(self, layout: Layout) -> bool:
        states = self.status()
        return layout.inventory.exists() and all(host.ssh and host.power == "on" for host in states)

    def _build(self, layout: Layout) -> None:
        names = self.names
        started = time.monotonic()
        layout.save(names.record)
        identity.make_key(names.key, names.cgroup)
        names.control_sockets.mkdir(mode=0o700, exist_ok=True)
        network.create_bridge(names, layout)
        for host in layout.hosts:
            mounts.mount_root(names, host, layout.image)
            identity.create(names, layout, host)
            network.connect(names, layout, host)
        names.known_hosts.write_text(identity.known_hosts(names, layout))
        inventory.write(layout.inventory, names, layout)
        for host in layout.hosts:
            power.boot(names, layout, host)
        for host in layout.hosts:
            power.wait_ssh(names, host)
            self.say(f"{host.name} is up at {host.address} ({time.monotonic() - started:.1f} s)")

    def down(self) -> bool:
        """Remove every trace of the sandbox, however incomplete it is; returns False when there was none."""
        requirements.check_privileges()
        if not self.remains():
            return False
        with self._lock():
            try:
                layout = Layout.load(self.names.record)
            except SandboxError:
                layout = None
            with _uninterrupted():
                self._remove(layout)
        left = self.remains()
        if left:
            raise SandboxError(f"not everything could be removed: {', '.join(left)}", "run `fleet sandbox down` again")
        return True

    def _remove(self, layout: Layout | None) -> None:
        names = self.names
        power.kill_everything(names)
        self._close_connections()
        mounts.unmount_below(names.state)
        network.remove_all(names)
        cgroups.remove(names.cgroup)
        power.forget(names)
        if layout is not None:
            inventory.remove(layout.inventory, names)
        mounts.remove_tree(names.state / "hosts")
        mounts.remove_tree(names.state)

    def _close_connections(self) -> None:
        """End the SSH connections that Ansible keeps open to hosts that are no more."""
        sockets = self.names.control_sockets
        if not sockets.is_dir():
            return
        for socket in sockets.iterdir():
            subprocess.run(
                ["ssh", "-F", "/dev/null", "-o", f"ControlPath={socket}", "-O", "exit", "sandbox"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=10, check=False,
            )  # fmt: skip
        shutil.rmtree(sockets, ignore_errors=True)

    def remains(self) -> list[str]:
        """Everything of this sandbox that exists on the machine."""
        names = self.names
        left = [f"process {pid}" for pid in sorted(cgroups.processes(names.cgroup))]
        left += [f"mount {point}" for point in mounts.mounted_below(names.state)]
        left += [f"network {name}" for name in network.remains(names)]
        left += [f"cgroup {path}" for top in cgroups.hierarchies() if (path := top / names.cgroup).exists()]
        left += [f"directory {path}" for path in (names.state, names.control_sockets) if path.exists()]
        return left

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One command at a time changes a sandbox. The lock is the state directory itself: nothing more to clean up."""
        while True:
            self.names.state.mkdir(parents=True, exist_ok=True, mode=0o755)
            descriptor = os.open(self.names.state, os.O_RDONLY | os.O_DIRECTORY)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.say("another command is at work on this sandbox; waiting for it")
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                # While we waited a `down` may have removed the directory: then what we locked is nobody's.
                if not self.names.state.exists() or not os.path.samestat(os.fstat(descriptor), self.names.state.stat()):
                    continue
                yield
                if self.names.state.is_dir() and not any(self.names.state.iterdir()):
                    self.names.state.rmdir()
                return
            except BaseException:
                if self.names.state.is_dir() and not any(self.names.state.iterdir()):
                    self.names.state.rmdir()
                raise
            finally:
                os.close(descriptor)

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        layout = Layout.load(self.names.record)
        if layout is None:
            raise SandboxError(f"there is no sandbox in {self.names.state}", "fleet sandbox up")
        return layout

    def exists(self) -> bool:
        return self.names.record.exists()

    def hosts(self) -> list[str]:
        return [host.name for host in self.layout.hosts]

    @property
    def inventory(self) -> Path:
        return self.layout.inventory

    def address(self, name: str) -> str:
        return self.layout.host(name).address

    @staticmethod
    def gpu_uuid(name: str, number: int) -> str:
        """The UUID of a host's simulated GPU."""
        return nvidia_smi.gpu_uuid(name, number)

    def root(self, name: str) -> Path:
        """The host's root file system as this machine sees it (without /run, /tmp and other mounts of the host)."""
        return self.names.root(self.layout.host(name))

    def status(self) -> list[HostStatus]:
        states = []
        for host in self.layout.hosts:
            on = power.is_on(self.names, host)
            states.append(
                HostStatus(
                    name=host.name,
                    address=host.address,
                    power="on" if on else "off",
                    link="up" if network.is_linked(self.names, host) else "cut",
                    ssh=on and power.answers_ssh(host.address),
                    faults=self._faults(host),
                    slots=inventory.slots(host),
                )
            )
        return states

    # -- reaching hosts --------------------------------------------------------------------------------------------

    def ssh_command(self, name: str, argv: Sequence[str] | str = (), *, terminal: bool = False) -> list[str]:
        """The ssh call for a command of exact arguments or, given as text, a shell line; none of both logs in."""
        line = argv if isinstance(argv, str) else shlex.join(argv)
        host = self.layout.host(name)
        options = {
            "UserKnownHostsFile": self.names.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            "ConnectTimeout": 5,
            "LogLevel": "ERROR",
        }
        command = [
            "ssh",
            "-F",
            "/dev/null",
            "-i",
            str(self.names.key),
            *(f"-o{key}={value}" for key, value in options.items()),
        ]
        command += ["-t"] if terminal else ["-oBatchMode=yes"]
        return [*command, f"root@{host.address}", *([line] if line else [])]

    def ssh(
        self,
        name: str,
        argv: Sequence[str] | str,
        *,
        stdin: str | None = None,
        check: bool = False,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (exact arguments, or a shell line given as text) on a host over SSH."""
        return subprocess.run(
            self.ssh_command(name, argv), input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True, text=True, check=check, timeout=timeout,
        )  # fmt: skip

    # -- misfortune ------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Power loss: nothing on the host gets to finish anything."""
        with self._lock():
            power.kill(self.names, self.layout.host(name))

    def stop(self, name: str) -> None:
        """Orderly shutdown."""
        with self._lock():
            power.stop(self.names, self.layout.host(name))

    def start(self, name: str, *, wait: bool = True) -> None:
        """Power on, with the address, keys and disk that the host had; waits until it answers on SSH."""
        with self._lock():
            layout = self.layout
            host = layout.host(name)
            mounts.mount_root(self.names, host, layout.image)
            network.connect(self.names, layout, host)
            power.boot(self.names, layout, host)
            if wait:
                power.wait_ssh(self.names, host)

    def wait(self, name: str, patience: float = 60.0) -> None:
        """Wait until the host answers on SSH, e.g. after it was told to reboot."""
        power.wait_ssh(self.names, self.layout.host(name), patience)

    def cut(self, name: str) -> None:
        """Pull the host's network cable; it runs on, unreachable."""
        network.set_link(self.names, self.layout.host(name), up=False)

    def restore(self, name: str) -> None:
        network.set_link(self.names, self.layout.host(name), up=True)

    def fault(self, name: str, spec: str) -> None:
        """Set or clear a fault of a simulated GPU, e.g. `3=gone`, `1=xid:79`, `all=driver:570.86.15`, `clear`."""
        fault = faults.parse(spec)
        host = self.layout.host(name)
        with self._lock():
            file = self.names.root(host) / "etc/sandbox-gpu-faults.json"
            if not (file.parent / "sandbox-host").exists():
                raise SandboxError(f"the disk of host {name} is not mounted", "fleet sandbox up")
            file_before = self._faults(host)
            lines = faults.kernel_lines(fault, [nvidia_smi.bus_id(gpu)[4:-2] for gpu in fault.gpus()])
            if fault.kind in ("xid", "lost", "foreign"):
                power.require_leader(self.names, host)
            self._foreign_processes(host, fault)
            unfinished = file.with_suffix(".new")
            unfinished.write_text(faults.dump(faults.apply(file_before, fault)))
            unfinished.replace(file)
            self._log_kernel_lines(host, lines)

    def _faults(self, host: Host) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.names.root(host) / "etc/sandbox-gpu-faults.json").read_text())
            return found
        except FileNotFoundError:
            return {}

    def _log_kernel_lines(self, host: Host, lines: list[str]) -> None:
        """Append to the file that stands for the kernel log, with times as `dmesg --time-format=iso` has them."""
        if not lines:
            return
        log = Path(f"/proc/{power.require_leader(self.names, host)}/root") / KERNEL_LOG
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace(".", ",")
        with log.open("a") as file:
            file.write("".join(f"{stamp} {line}\n" for line in lines))

    def _foreign_processes(self, host: Host, fault: faults.Fault) -> None:
        """Processes on GPUs are real: transient units on the host, which end with it or when the fault is cleared."""
        if fault.kind not in ("foreign", "clear") or power.leader(self.names, host) is None:
            return
        for gpu in fault.gpus():
            unit = f"sandbox-foreign-gpu{gpu}.service"
            if fault.kind == "clear":
                power.inside(self.names, host, ["sh", "-c", f"systemctl stop {unit} 2>/dev/null || :"])
                continue
            uuid = nvidia_smi.gpu_uuid(host.name, gpu)
            environment = {"CUDA_VISIBLE_DEVICES": uuid, "SANDBOX_GPU_MEMORY_MIB": "2048"}
            settings = [f"--setenv={key}={value}" for key, value in environment.items()]
            program = ["/usr/bin/python3", "-c", "import signal; signal.pause()"]
            power.inside(
                self.names, host, ["systemd-run", "--quiet", "--collect", f"--unit={unit}", *settings, *program]
            )  # fmt: skip
