"""Runs as root before each start of a slot: is its GPU there, free, and reachable for the unit?

GPUs are addressed by UUID; which `/dev/nvidiaN` that is may change with every boot, so it is looked up at each start,
missing device nodes are made, and only that node is opened to the unit.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from . import units
from .paths import Paths, slot_unit
from .process import Result, run

# After a stop the driver may need a moment to give memory back; a start into a full GPU would fail on it.
FREE_WAIT_S = 20.0


def prepare(paths: Paths, slot: str) -> int:
    """0: go. Otherwise prints one line with the cause; systemd then fails the start."""
    environment = read_env(paths.slot(slot) / "slot.env")
    uuid = environment.get("CUDA_VISIBLE_DEVICES", "")
    _make_cache(paths.cache / environment.get("DDTREE_RELEASE", "none"), slot)
    if not uuid:
        return 0
    found = _smi("--query-gpu=uuid,index,pci.bus_id")
    if found.code == 127:
        return _refuse(f"slot {slot} wants GPU {uuid}, but nvidia-smi is not installed on this host")
    rows = [[field.strip() for field in line.split(",")] for line in found.out.splitlines()]
    row = next((row for row in rows if row[0] == uuid and len(row) == 3), None)
    if row is None:
        return _refuse(f"GPU {uuid} of slot {slot} is lost: nvidia-smi does not list it ({found.explain()})")
    holders = _wait_free(uuid, slot)
    if holders:
        return _refuse(f"GPU {uuid} of slot {slot} is held by another process: {', '.join(holders)}")
    _open_device(slot, row[2])
    return 0


def _refuse(reason: str) -> int:
    print(f"ddtree-prestart: error: {reason}", flush=True)
    return 1


def _smi(query: str) -> Result:
    """nvidia-smi without the slot's own environment, which would make it one more user of the GPU."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    return run("nvidia-smi", query, "--format=csv,noheader", check=False, timeout=30, env=environment)


def _make_cache(directory: Path, slot: str) -> None:
    """The release's own compiler caches, writable by the service user alone."""
    directory.mkdir(parents=True, exist_ok=True)
    user = run("systemctl", "show", "-p", "User", "--value", slot_unit(slot)).out.strip()
    if user:
        shutil.chown(directory, user, user)
    directory.chmod(0o700)


def read_env(path: Path) -> dict[str, str]:
    """Variables of an EnvironmentFile as this project writes it: KEY="value" with backslash escapes."""
    values: dict[str, str] = {}
    for line in path.read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            if value.startswith('"') and value.endswith('"') and len(value) >= 2:
                value = value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
            values[key.strip()] = value
    return values


def _wait_free(uuid: str, slot: str) -> list[str]:
    """Compute processes on the GPU that are not the slot's own, after waiting a while for them to go."""
    end = time.monotonic() + FREE_WAIT_S
    while True:
        holders = []
        for line in _smi("--query-compute-apps=gpu_uuid,pid,process_name").out.splitlines():
            fields = [field.strip() for field in line.split(",")]
            if len(fields) == 3 and fields[0] == uuid and int(fields[1]) not in units.cgroup_pids(_cgroup(slot)):
                holders.append(f"pid {fields[1]} ({fields[2]})")
        if not holders or time.monotonic() > end:
            return holders
        time.sleep(0.5)


def _cgroup(slot: str) -> str:
    return units.show(slot_unit(slot)).cgroup


def _open_device(slot: str, bus_id: str) -> None:
    """Make the GPU's device node if udev has not, and open exactly this one to the unit."""
    minor = _minor(bus_id)
    if minor is None:
        return  # no real driver behind it (a simulated GPU): there is no device to open
    node = Path(f"/dev/nvidia{minor}")
    if not node.exists():
        os.mknod(node, 0o666 | 0o020000, os.makedev(195, minor))
    run("systemctl", "set-property", "--runtime", slot_unit(slot), f"DeviceAllow={node} rw")


def _minor(bus_id: str) -> int | None:
    """Device minor from the driver's own /proc entry of the PCI device."""
    domain, _, rest = bus_id.lower().partition(":")
    path = Path(f"/proc/driver/nvidia/gpus/{domain[-4:]}:{rest}/information")
    try:
        for line in path.read_text().splitlines():
            if line.startswith("Device Minor:"):
                return int(line.split(":", 1)[1])
    except (OSError, ValueError):
        return None
    return None
