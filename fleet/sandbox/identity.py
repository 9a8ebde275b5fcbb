"""What makes the shared image one particular host: its name, keys, neighbours, simulated GPUs and foreign service."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

from . import image
from .commands import run
from .layout import GPUS_PER_HOST, Host, Layout, Names
from .onhost import nvidia_smi
from .power import INIT

ONHOST = Path(__file__).with_name("onhost")
MODEL = {
    "model": "SIMULATED RTX PRO 6000 Blackwell Server Edition",
    "memory_mib": 97887,
    "compute_cap": "12.0",
    "driver": "580.95.05",
    "cuda": "13.0",
}
# The host whose GPU 0 and port 30000 belong to a service that the fleet has to leave alone.
FOREIGN_HOST, FOREIGN_PORT, FOREIGN_MEMORY_MIB = "ct200", 30000, 18432

INIT_SCRIPT = """#!/bin/sh
# The host's PID 1 until systemd takes over. On cgroup v1 the controllers come read-only and systemd needs to write.
for group in /sys/fs/cgroup/*/; do
    case $group in
        */systemd/ | */unified/) ;;
        *) [ -e "${group}cgroup.procs" ] && mount -o remount,bind,rw "$group" 2>/dev/null ;;
    esac
done
exec /lib/systemd/systemd
"""

WRAPPER_UNIT = """[Unit]
Description=Foreign inference wrapper, not part of any fleet
After=network.target

[Service]
ExecStart=/opt/wrapper/wrapper.py
Environment=PORT={port} CUDA_VISIBLE_DEVICES={gpu} SANDBOX_GPU_MEMORY_MIB={memory}
DynamicUser=yes
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""


def create(names: Names, layout: Layout, host: Host) -> None:
    """Write the host's identity into its root, which is mounted; once, so that it stays over every boot."""
    root = names.root(host)
    if (root / "etc/sandbox-host").exists():
        return
    neighbours = "".join(f"{other.address} {other.name}\n" for other in layout.hosts)
    _write(root / "etc/hostname", f"{host.name}\n")
    _write(root / "etc/machine-id", f"{uuid.uuid4().hex}\n")
    _write(root / "etc/hosts", f"127.0.0.1 localhost\n{layout.gateway} control\n{neighbours}")
    _write(root / "etc/resolv.conf", "")
    _write(root / "etc/systemd/journald.conf.d/sandbox.conf", "[Journal]\nStorage=persistent\nSystemMaxUse=64M\n")
    _write(root / INIT.lstrip("/"), INIT_SCRIPT, 0o755)
    _install(nvidia_smi.__file__, root / "usr/local/bin/nvidia-smi")
    _ssh(names, layout, host)
    if host.name == FOREIGN_HOST:
        _foreign_service(root, host)
    # Last: a host whose preparation was interrupted has no mark and is prepared again.
    _write(root / "etc/sandbox-host", json.dumps({"host": host.name, "gpus": GPUS_PER_HOST, **MODEL}, indent=2) + "\n")


def make_key(file: Path, comment: str) -> None:
    """An SSH key pair; made under another name first, so that half a pair is never taken for a whole one."""
    if file.exists():
        return
    unfinished = file.with_name(f".{file.name}.new")
    for half in (unfinished, unfinished.with_name(unfinished.name + ".pub")):
        half.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(unfinished)])
    unfinished.with_name(unfinished.name + ".pub").rename(file.with_name(file.name + ".pub"))
    unfinished.rename(file)


def _ssh(names: Names, layout: Layout, host: Host) -> None:
    root = names.root(host)
    _write(root / "root/.ssh/authorized_keys", names.key.with_name("key.pub").read_text(), 0o600)
    (root / "root/.ssh").chmod(0o700)
    key = root / "etc/ssh/ssh_host_ed25519_key"
    make_key(key, host.name)
    settings = [
        f"HostKey /{key.relative_to(root)}",
        "PasswordAuthentication no",
        "MaxSessions 64",
        "MaxStartups 64:30:128",
    ]
    if image.package_version(layout.image, "openssh-server") >= (9, 8):
        settings.append("PerSourcePenalties no")  # tests knock at the door more often than sshd likes
    _write(root / "etc/ssh/sshd_config.d/sandbox.conf", "\n".join(settings) + "\n")


def _foreign_service(root: Path, host: Host) -> None:
    _install(str(ONHOST / "wrapper.py"), root / "opt/wrapper/wrapper.py")
    unit = WRAPPER_UNIT.format(
        port=FOREIGN_PORT, gpu=nvidia_smi.gpu_uuid(host.name, 0), memory=FOREIGN_MEMORY_MIB
    )  # fmt: skip
    _write(root / "etc/systemd/system/wrapper.service", unit)
    wanted = root / "etc/systemd/system/multi-user.target.wants/wrapper.service"
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if not wanted.is_symlink():
        wanted.symlink_to("/etc/systemd/system/wrapper.service")


def known_hosts(names: Names, layout: Layout) -> str:
    """One pinned line per host, from the keys that were made for it."""
    lines = []
    for host in layout.hosts:
        kind, key = (names.root(host) / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
        lines.append(f"{host.address},{host.name} {kind} {key}\n")
    return "".join(lines)


def _write(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink():  # a link of the host may lead to a file of this machine
        file.unlink()
    file.write_text(text)
    file.chmod(mode)


def _install(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755)
