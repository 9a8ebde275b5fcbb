"""The hosts' root file systems, overlays on the base image; and removing trees but never what is mounted in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .commands import run
from .errors import SandboxError
from .layout import Host, Names


def mounted_below(directory: Path) -> list[Path]:
    """Mount points at or below a directory, deepest first."""
    top = str(directory.resolve())
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == top or point.startswith(top + "/"):
            points.append(Path(point))
    return sorted(points, key=lambda point: len(point.parts), reverse=True)


def unmount_below(directory: Path) -> None:
    for point in mounted_below(directory):
        try:
            run(["umount", str(point)])
        except SandboxError:  # somebody's shell stands in it: detach it, the kernel frees it when they leave
            run(["umount", "--lazy", str(point)])


def remove_tree(directory: Path) -> None:
    """Remove a tree; never anything that is mounted in it."""
    if not directory.exists():
        return
    unmount_below(directory)
    if mounted_below(directory):
        raise SandboxError(f"something is mounted below {directory} and stays", f"umount -R {directory}")
    shutil.rmtree(directory)


def mount_root(names: Names, host: Host, image: Path) -> None:
    """Mount the host's root: what the host writes goes to its own upper layer, the image stays as it is."""
    root = names.root(host)
    if os.path.ismount(root):
        return
    layers = {"upperdir": names.home(host) / "upper", "workdir": names.home(host) / "work", "lowerdir": image}
    for directory in (root, *layers.values()):
        directory.mkdir(parents=True, exist_ok=True)
    layers["upperdir"].chmod(0o755)
    options = ",".join(f"{key}={value}" for key, value in layers.items())
    try:
        run(["mount", "-t", "overlay", f"{names.netns_prefix}{host.name}", "-o", options, str(root)])
    except SandboxError as error:
        raise SandboxError(
            f"cannot mount an overlay below {names.state}: {error.problem}",
            "put the sandbox on a plain disk file system (not on another overlay, NFS or similar): "
            "DDTREE_SANDBOX_DIR=/some/disk/directory fleet sandbox up",
        ) from None
