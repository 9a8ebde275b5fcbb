"""The parts of a host that are no GPU, port or slot: system, interpreters, disks, users, models."""

from __future__ import annotations

import contextlib
import grp
import ipaddress
import json
import os
import platform
import pwd
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import nvidia
from .netports import port_ranges
from .paths import Paths
from .process import run

_PROBE = (
    "import json,platform,sys,sysconfig,os;"
    "i=sysconfig.get_paths().get('include','');"
    "print(json.dumps({'version':platform.python_version(),'minor':'%d.%d'%sys.version_info[:2],"
    "'implementation':sys.implementation.name,'headers':os.path.exists(os.path.join(i,'Python.h'))}))"
)
_PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
)


def system() -> dict[str, Any]:
    release: dict[str, str] = {}
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
    glibc = ""
    with contextlib.suppress(OSError, ValueError):
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    memory = {}
    for line in _read("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        memory[key] = int(value.split()[0]) // 1024 if value.split() and value.split()[0].isdigit() else 0
    uptime = float(_read("/proc/uptime").split()[0] or 0) if _read("/proc/uptime") else 0.0
    return {
        "host": platform.node(),
        "os": {
            "id": release.get("ID", ""),
            "version": release.get("VERSION_ID", ""),
            "name": release.get("PRETTY_NAME", ""),
        },
        "arch": platform.machine(),
        "kernel": platform.release(),
        "glibc": glibc,
        "boot": {"t": round(time.time() - uptime, 1), "uptime_s": uptime},
        "cpus": len(os.sched_getaffinity(0)),
        "memory": {"total_mib": memory.get("MemTotal", 0), "available_mib": memory.get("MemAvailable", 0)},
    }


def systemd() -> dict[str, Any]:
    if not Path("/run/systemd/system").is_dir():
        return {"running": False, "version": ""}
    found = re.search(r"systemd (\d+)", run("systemctl", "--version", check=False, timeout=10).out)
    return {"running": True, "version": found.group(1) if found else ""}


def interpreter(path: str) -> dict[str, Any]:
    """Version of a Python interpreter, and whether extensions could be compiled for it."""
    result = run(path, "-I", "-c", _PROBE, check=False, timeout=15)
    facts: dict[str, Any] = {
        "path": path,
        "version": "",
        "minor": "",
        "implementation": "",
        "headers": False,
        "error": "",
    }
    try:
        facts.update(json.loads(result.out))
    except ValueError:
        words = (result.err.strip() or result.out.strip()).splitlines()
        facts["error"] = words[-1][:300] if words else f"it ended with status {result.code}"
    return facts


def account(name: str) -> dict[str, Any]:
    """A user as the system knows it."""
    facts: dict[str, Any] = {"exists": False, "uid": None, "gid": None, "home": "", "shell": "", "group_exists": False}
    with contextlib.suppress(KeyError):
        facts["group_exists"] = bool(grp.getgrnam(name))
    with contextlib.suppress(KeyError):
        entry = pwd.getpwnam(name)
        facts.update(exists=True, uid=entry.pw_uid, gid=entry.pw_gid, home=entry.pw_dir, shell=entry.pw_shell)
    return facts


def compilers() -> dict[str, str]:
    return {name: shutil.which(name, path="/usr/local/bin:/usr/bin:/bin") or "" for name in ("gcc", "g++")}


def libraries(names: Iterable[str]) -> dict[str, bool]:
    """Whether the dynamic linker finds these libraries."""
    wanted = list(names)
    if not wanted:
        return {}
    ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin:/bin") or "ldconfig"
    cached = {line.split()[0] for line in run(ldconfig, "-p", check=False, timeout=10).out.splitlines() if "=>" in line}
    return {
        name: name in cached or any(Path(folder, name).exists() for folder in _LIBRARY_DIRECTORIES) for name in wanted
    }


def proxies() -> dict[str, str]:
    """Proxy settings that a service of this host may inherit: systemd's own environment and /etc/environment."""
    text = _read("/etc/environment") + "\n" + run("systemctl", "show-environment", check=False, timeout=10).out
    found = {}
    for line in text.splitlines():
        name, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and name.lower() in _PROXY_NAMES:
            found[name] = re.sub(r"//[^/@]*@", "//***@", value.strip("\"'"))
    return found


def toolkits(root: Path = Path("/")) -> list[dict[str, str]]:
    """CUDA toolkits of the system, each once; the one that compilers find first (/usr/local/cuda) stands first."""
    found: dict[str, dict[str, str]] = {}
    candidates = [root / "usr/local/cuda", *sorted((root / "usr/local").glob("cuda-*")), root / "usr/lib/cuda"]
    for path in candidates:
        real = os.path.realpath(path)
        version = _toolkit_version(path)
        if version and real not in found:
            found[real] = {"path": str(path), "version": version}
    nvcc = root / "usr/bin/nvcc"
    if nvcc.exists() and not found:
        match = re.search(r"release (\d+\.\d+)", run(str(nvcc), "--version", check=False, timeout=10).out)
        if match:
            found[str(nvcc)] = {"path": str(nvcc), "version": match.group(1)}
    return list(found.values())


def _toolkit_version(path: Path) -> str:
    """From version.json, version.txt, the header of the runtime, or else the directory's name."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((path / "version.json").read_text())["cuda"]["version"])
    match = re.search(r"CUDA Version (\d+\.\d+(?:\.\d+)?)", _read(path / "version.txt"))
    if match:
        return match.group(1)
    for header in (path / "include/cuda.h", *path.glob("targets/*/include/cuda.h")):
        match = re.search(r"#define CUDA_VERSION (\d+)", _read(header))
        if match:
            return f"{int(match.group(1)) // 1000}.{int(match.group(1)) % 1000 // 10}"
    name = re.search(r"cuda-(\d+\.\d+)$", os.path.realpath(path))
    return name.group(1) if name and (path / "bin/nvcc").exists() else ""


def driver(report: nvidia.Report, proc: Path = Path("/proc")) -> dict[str, Any]:
    """The NVIDIA driver: version of the loaded kernel module and of the libraries beside it, and what threatens it."""
    text = _read(proc / "driver/nvidia/version").partition("\n")[0]
    kernel = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    modules = _read(proc / "modules")
    held, unattended = _packages()
    return {
        "kernel": kernel.group(1) if kernel else report.driver,
        "library": report.library or _library_version(),
        "nouveau": any(line.startswith("nouveau ") for line in modules.splitlines()),
        "uvm": Path("/dev/nvidia-uvm").exists(),
        "held": held,
        "unattended": unattended,
    }


def _library_version() -> str:
    versions = []
    for folder in _LIBRARY_DIRECTORIES:
        for file in Path(folder).glob("libnvidia-ml.so.*.*"):
            version = file.name.removeprefix("libnvidia-ml.so.")
            if re.fullmatch(r"\d+\.\d+(\.\d+)?", version) and not file.is_symlink():
                versions.append(version)
    return max(versions, key=numbers, default="")


def _packages() -> tuple[bool | None, bool]:
    """(are the driver's Debian packages held back? None without any, are packages upgraded unattended?)"""
    status = _read("/var/lib/dpkg/status")
    held: bool | None = None
    for match in re.finditer(
        r"^Package: (?:nvidia-(?:driver|kernel|dkms)|libnvidia-compute)\S*\nStatus: (\S+) ok installed", status, re.M
    ):
        held = match.group(1) == "hold" and held is not False
    periodic = "".join(_read(file) for file in sorted(Path("/etc/apt/apt.conf.d").glob("*")) if file.is_file())
    unattended = re.search(r'^\s*APT::Periodic::Unattended-Upgrade\s+"([^"]*)"', periodic, re.M)
    return held, bool(unattended and unattended.group(1) not in ("", "0"))


def driver_gpus(proc: Path = Path("/proc")) -> dict[str, str]:
    """PCI address to UUID of every GPU that the driver has ever initialised since it was loaded."""
    found = {}
    for file in proc.glob("driver/nvidia/gpus/*/information"):
        match = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", _read(file), re.M)
        if match:
            found[nvidia.normal_bus(file.parent.name)] = match.group(1)
    return found


def numbers(version: str) -> tuple[int, ...]:
    """A dotted version as numbers, so that 580.9 comes before 580.65."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def disks(paths: Paths) -> dict[str, Any]:
    """Space below root, state and cache: of the file system that each lies on or will be made on."""
    mounts = _mounts()
    found = {}
    for path in (paths.root, paths.state, paths.cache):
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        info = os.statvfs(existing)
        real = Path(os.path.realpath(existing))
        mount = next((parent for parent in (real, *real.parents) if str(parent) in mounts), Path("/"))
        kind, options = mounts.get(str(mount), ("", []))
        found[str(path)] = {
            "mount": str(mount),
            "type": kind,
            "options": options,
            "free_bytes": info.f_bavail * info.f_frsize,
            "total_bytes": info.f_blocks * info.f_frsize,
            "free_inodes": info.f_favail if info.f_files else None,
            "total_inodes": info.f_files or None,
        }
    return found


def _mounts() -> dict[str, tuple[str, list[str]]]:
    found = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) > 5 and len(rest) > 2:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
            found[point] = (
                rest[0],
                sorted({*fields[5].split(","), *rest[2].split(",")} & {"ro", "rw", "noexec", "nosuid", "nodev"}),
            )
    return found


def ephemeral(proc: Path = Path("/proc")) -> dict[str, Any]:
    values = _read(proc / "sys/net/ipv4/ip_local_port_range").split()
    low, high = (int(values[0]), int(values[1])) if len(values) == 2 else (32768, 60999)
    reserved = port_ranges(_read(proc / "sys/net/ipv4/ip_local_reserved_ports"))
    return {"low": low, "high": high, "reserved": [list(item) for item in reserved]}


def addresses(proc: Path = Path("/proc")) -> list[str]:
    """IP addresses of the host, IPv4 ones first."""
    found: dict[str, None] = {}
    address = ""
    for line in _read(proc / "net/fib_trie").splitlines():
        text = line.strip()
        if text.startswith(("|-- ", "+-- ")):
            address = text[4:].split()[0]
        elif text == "/32 host LOCAL":
            found[address] = None
    for line in _read(proc / "net/if_inet6").splitlines():
        found[str(ipaddress.IPv6Address(int(line.split()[0], 16)))] = None
    return list(found)


def access_wanted(paths: Paths, models: Iterable[str]) -> list[tuple[str, int]]:
    """What the service user must be able to use, of that which is there: model files to read, caches to write."""
    wanted = [(str(path), os.W_OK | os.X_OK) for path in sorted(paths.cache.glob("[!.]*")) if path.is_dir()]
    for model_path in models:
        path = Path(model_path)
        if path.is_dir():
            wanted.append((model_path, os.R_OK | os.X_OK))
            wanted += [(str(file), os.R_OK) for file in sorted(path.glob("*")) if file.is_file()]
        else:
            wanted.append((model_path, os.R_OK))
    return wanted


def model(path: str, blocked: str) -> dict[str, Any]:
    """A model directory: is it there, and are all its parts? `missing` names what a loader would not find."""
    folder = Path(path)
    facts: dict[str, Any] = {
        "exists": folder.exists(),
        "kind": "",
        "bytes": 0,
        "weights": 0,
        "missing": [],
        "denied": blocked,
    }
    if not facts["exists"]:
        return facts
    facts["kind"] = "directory" if folder.is_dir() else "file"
    if facts["kind"] == "file":
        facts["bytes"] = folder.stat().st_size
        return facts
    entries = {entry.name: entry for entry in os.scandir(folder)}
    sizes = {}
    for name, entry in entries.items():
        if entry.is_file() or entry.is_dir():  # neither: a dangling link of a model cache
            sizes[name] = entry.stat().st_size if entry.is_file() else 0
    weights = [name for name in sizes if name.endswith((".safetensors", ".bin", ".gguf")) and sizes[name] > 0]
    facts["bytes"], facts["weights"] = sum(sizes.values()), len(weights)
    if "config.json" not in sizes:
        facts["missing"].append("config.json")
    if not weights:
        facts["missing"].append("weights (*.safetensors)")
    for name in entries:
        if name.endswith(".index.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                shards = set(json.loads((folder / name).read_text()).get("weight_map", {}).values())
                facts["missing"] += sorted(shard for shard in shards if not sizes.get(shard))
    facts["missing"] += sorted(
        name for name in entries if name not in sizes or (name.endswith(".safetensors") and sizes[name] == 0)
    )
    facts["missing"] = sorted(set(facts["missing"]))[:20]
    return facts


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
