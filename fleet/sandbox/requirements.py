"""What the machine must offer; everything that is missing is said at once, with the command that provides it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from . import image
from .errors import SandboxError

PACKAGE_OF = {
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
}
IMAGE_TOOLS = {"mmdebstrap": "mmdebstrap", "apt-get": "apt"}
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_CHROOT": 18, "CAP_SYS_ADMIN": 21, "CAP_MKNOD": 27}


def check_privileges() -> None:
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux and this is {sys.platform}", "use a Linux virtual machine")
    if os.geteuid() != 0:
        raise SandboxError(
            "the sandbox boots systemd hosts on this machine, for which it must be root",
            "run the same command with sudo, or in a virtual machine where you are root",
        )
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    mask = int(effective.split()[1], 16)
    lacking = [name for name, bit in CAPABILITIES.items() if not mask >> bit & 1]
    if lacking:
        raise SandboxError(
            f"root lacks {', '.join(lacking)} here (an unprivileged container?)",
            "run it on a machine or virtual machine, or start the container with --privileged",
        )


def check_packages(cache: Path | None = None) -> None:
    needed = PACKAGE_OF | (IMAGE_TOOLS if image.missing_tool(cache) else {})
    packages = sorted({package for tool, package in needed.items() if shutil.which(tool) is None})
    if packages:
        raise SandboxError(f"packages are missing: {', '.join(packages)}", f"apt-get install -y {' '.join(packages)}")


def check_kernel() -> None:
    lacking = [
        kind for kind in ("cgroup", "ipc", "mnt", "net", "pid", "uts") if not Path(f"/proc/self/ns/{kind}").exists()
    ]
    if lacking:
        raise SandboxError(f"this kernel has no {', '.join(lacking)} namespaces", "use a distribution kernel")
    if "\toverlay\n" not in Path("/proc/filesystems").read_text() and os.system("modprobe -q overlay 2>/dev/null") != 0:
        raise SandboxError("this kernel has no overlayfs", "modprobe overlay, or use a distribution kernel")


def check_all(cache: Path | None = None) -> None:
    check_privileges()
    check_packages(cache)
    check_kernel()
