"""A host on which nothing is wrong, for tests that make one thing wrong at a time."""

from __future__ import annotations

import copy
from typing import Any

NOW = 1_800_000_000.0
UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-8888-7777-6666-555555555555"

STACK: dict[str, Any] = {
    "name": "cu130-test",
    "python": ["3.11", "3.12"],
    "arch": "x86_64",
    "cuda": 13,
    "min_driver": "580.65.06",
    "min_glibc": "2.35",
    "archs": ["9.0", "12.0"],
    "toolkits": {"12.": "12.9"},
    "libraries": ["libnuma.so.1"],
    "ships_toolkit": False,
    "needs_compiler": True,
    "min_memory_gib": 8.0,
    "engines": ["standalone"],
    "wheels_bytes": 3 << 30,
    "install_bytes": 6 << 30,
    "install_files": 40_000,
}

SLOT: dict[str, Any] = {
    "name": "gpu1",
    "gpu": UUID,
    "port": 30001,
    "bind": "127.0.0.1",
    "model": "/srv/models/target",
    "draft": "/srv/models/draft",
    "served_model": "target",
    "mode": "tree",
}

DESIRED: dict[str, Any] = {
    "host": "ct200",
    "stack": "cu130-test",
    "engine": "standalone",
    "root": "/opt/ddtree",
    "state": "/var/lib/ddtree",
    "cache": "/var/cache/ddtree",
    "user": "ddtree",
    "release": "",
    "force": False,
    "waivers": {},
    "disk_reserve_gib": 1.0,
    "xid_window_h": 24.0,
    "slots": [SLOT],
}

MODEL: dict[str, Any] = {"exists": True, "kind": "directory", "bytes": 9, "weights": 1, "missing": [], "denied": ""}
DISK: dict[str, Any] = {
    "mount": "/",
    "type": "ext4",
    "options": ["rw"],
    "free_bytes": 600 << 30,
    "total_bytes": 900 << 30,
    "free_inodes": 10_000_000,
    "total_inodes": 20_000_000,
}
GPU: dict[str, Any] = {
    "uuid": UUID,
    "index": 1,
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "compute_cap": "12.0",
    "bus_id": "00000000:29:00.0",
    "memory_total_mib": 97_887,
    "memory_used_mib": 4,
    "persistence": True,
    "ecc": True,
    "mig": False,
    "compute_mode": "Default",
    "ecc_uncorrected": 0,
    "ecc_uncorrected_lifetime": 0,
    "temperature_c": 34,
    "remapped_correctable": 0,
    "remapped_uncorrectable": 0,
    "remap_pending": False,
    "remap_failed": False,
    "processes": [],
    "faults": [],
}

FACTS: dict[str, Any] = {
    "schema": 1,
    "t": NOW,
    "root": True,
    "sandbox": False,
    "host": "ct200",
    "os": {"id": "debian", "version": "12", "name": "Debian GNU/Linux 12 (bookworm)"},
    "arch": "x86_64",
    "kernel": "6.1.0",
    "glibc": "2.36",
    "systemd": {"running": True, "version": "252"},
    "boot": {"t": NOW - 90_000, "uptime_s": 90_000},
    "python": {
        "path": "/usr/bin/python3",
        "version": "3.11.2",
        "minor": "3.11",
        "implementation": "cpython",
        "headers": True,
        "error": "",
    },
    "agent_python": {"path": "/usr/bin/python3", "version": "3.11.2", "minor": "3.11", "error": ""},
    "cpus": 64,
    "memory": {"total_mib": 512_000, "available_mib": 400_000},
    "users": {"ddtree": {"exists": True, "uid": 998, "gid": 998, "home": "/", "shell": "/usr/sbin/nologin"}},
    "compilers": {"gcc": "/usr/bin/gcc", "g++": "/usr/bin/g++"},
    "libraries": {"libnuma.so.1": True},
    "proxies": {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"},
    "gpu_source": "nvidia-smi",
    "gpu_state": "ok",
    "gpu_detail": "",
    "gpus": [GPU, {**GPU, "uuid": OTHER, "index": 2, "bus_id": "00000000:3A:00.0"}],
    "gpus_lost": [],
    "gpu_faults": [],
    "driver": {
        "kernel": "580.95.05",
        "library": "580.95.05",
        "nouveau": False,
        "uvm": True,
        "held": True,
        "unattended": True,
    },
    "toolkits": [{"path": "/usr/local/cuda", "version": "13.0"}],
    "disk": {path: {**DISK} for path in ("/opt/ddtree", "/var/lib/ddtree", "/var/cache/ddtree")},
    "ports": [
        {
            "port": 22,
            "addr": "0.0.0.0",
            "pid": 40,
            "comm": "sshd",
            "command": "sshd",
            "unit": "ssh.service",
            "slot": None,
            "ours": False,
        }
    ],
    "ephemeral": {"low": 32_768, "high": 60_999, "reserved": []},
    "addresses": ["127.0.0.1", "10.200.0.200"],
    "models": {path: {**MODEL} for path in ("/srv/models/target", "/srv/models/draft")},
    "access": {},
    "releases": [],
    "agent_version": "abc",
    "slots": {},
    "lock": None,
    "journal_tail": [{"t": NOW - 100, "event": "committed"}],
}

# A slot that serves, as facts["slots"] describes it.
SERVING: dict[str, Any] = {
    "slot": "gpu1",
    "release": "rel-1",
    "config_digest": "digest",
    "activation": "a1",
    "open": None,
    "refused": {},
    "down": None,
    "quarantined": None,
    "last": {"t": NOW - 100, "event": "committed"},
    "link": "rel-1",
    "unit": {"ActiveState": "active"},
    "unit_exists": True,
    "active": True,
    "activating": False,
    "health": {"status": 200, "error": ""},
    "port": 30001,
    "altered": [],
}


def facts() -> dict[str, Any]:
    return copy.deepcopy(FACTS)


def desired(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(DESIRED), **changes}


def stack(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(STACK), **changes}


def slot(**changes: Any) -> dict[str, Any]:
    return {**SLOT, **changes}


def process(pid: int = 4242, **changes: Any) -> dict[str, Any]:
    known = {"comm": "python3", "command": "python3 -m wrapper", "unit": "wrapper.service", "slot": None, "ours": False}
    return {"pid": pid, **known, **changes}
