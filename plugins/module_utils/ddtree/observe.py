"""One look at a host, read-only: everything that later steps decide from. Runs on the host, as root, in under a second.

`observe(request)` returns plain JSON data ("the facts"):

  schema          version of this layout (1)
  host, t         host name; the host's clock (epoch seconds)
  root, sandbox   seen as root?; a host of the sandbox fleet (/etc/sandbox-host)?
  os              {id, version, name}
  arch, kernel    as uname says
  glibc           "2.36"; "" where the C library is another one
  systemd         {running, version}
  boot            {t, uptime_s}
  python          {path, version, minor, implementation, headers, error}   the interpreter that releases are made from
  agent_python    {path, version, error}                                   /usr/bin/python3, which runs the agent
  cpus, memory    number; {total_mib, available_mib}
  users           {NAME: {exists, uid, gid, home, shell, group_exists}}    the service user
  compilers       {gcc, g++}: path or ""
  libraries       {SONAME: present}                                        those asked for
  proxies         {NAME: value}     proxy settings that services inherit; passwords are masked
  gpu_source      nvidia-smi | simulated | none
  gpu_state       ok | absent | no-driver | mismatch | hang | error, and gpu_detail: what the tool said
  gpus            [{uuid, index, name, compute_cap, bus_id, memory_total_mib, memory_used_mib, persistence, ecc, mig,
                  compute_mode, ecc_uncorrected, ecc_uncorrected_lifetime, temperature_c, remapped_correctable,
                  remapped_uncorrectable, remap_pending, remap_failed,
                  processes: [{pid, comm, command, unit, slot, ours, memory_mib}],
                  faults: [{t, bus_id, xid, text, fatal, meaning}]}]
  gpus_lost       [{bus_id, index, uuid, reason}]
  gpu_faults      faults of the kernel log that belong to no GPU in `gpus`
  driver          {kernel, library, nouveau, uvm, held, unattended}         versions "580.95.05" or ""
  toolkits        [{path, version}]                                         CUDA toolkits of the system
  disk            {PATH: {mount, type, options, free_bytes, total_bytes, free_inodes, total_inodes}}
                  inodes are None where they are unlimited
  ports           [{port, addr, pid, comm, command, unit, slot, ours}]      listening TCP sockets
  ephemeral       {low, high, reserved: [[low, high]]}
  addresses       IP addresses of the host
  models          {PATH: {exists, kind, bytes, weights, missing: [...], denied}}
  access          {PATH: why the service user may not use it}
  releases        [{id, stack, engine, engine_version, python, created_t}]
  agent_version   "" where there is no agent
  agent_units     {NAME: sha256}            the toolkit's own units, as they are on the host
  slots           {NAME: {release, config_digest, activation, since, good, open, refused, down, quarantined, last,
                  link, unit: {...systemd properties...}, unit_exists, active, activating, port, bind, gpu,
                  health: {status, error} | None, altered: [...]}}
  lock            what the host's lock says, or None
  journal_tail    last entries
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from . import files, hostfacts, journal, kernellog, netports, nvidia, slotfacts
from .access import denied, user_ids
from .paths import RECOVER_UNIT, Paths

SCHEMA = 1
SANDBOX_MARK = Path("/etc/sandbox-host")
SANDBOX_KERNEL_LOG = Path("/run/sandbox-kernel.log")
JOURNAL_TAIL = 10
ACTIVATE_TEMPLATE = "ddtree-activate@.service"


@dataclasses.dataclass
class Request:
    """What to look at beside the host itself."""

    paths: Paths = dataclasses.field(default_factory=Paths)
    user: str = "ddtree"
    python: str = "/usr/bin/python3"
    slots: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    models: list[str] = dataclasses.field(default_factory=list)
    libraries: list[str] = dataclasses.field(default_factory=list)
    xid_window_h: float = 24.0
    health_timeout_s: float = 5.0


def observe(request: Request) -> dict[str, Any]:
    now = time.time()
    sandbox = SANDBOX_MARK.exists()
    ids = user_ids(request.user)
    # before any thread is started: this one forks
    blocked = denied(ids, hostfacts.access_wanted(request.paths, request.models))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        gpus = pool.submit(nvidia.query)
        since = now - request.xid_window_h * 3600
        faults = pool.submit(kernellog.faults, since, SANDBOX_KERNEL_LOG if sandbox else None)
        python = pool.submit(hostfacts.interpreter, request.python)
        agent_python = pool.submit(hostfacts.interpreter, "/usr/bin/python3")
        systemd = pool.submit(hostfacts.systemd)
        proxies = pool.submit(hostfacts.proxies)
        libraries = pool.submit(hostfacts.libraries, request.libraries)
        slots = pool.submit(slotfacts.slots, request.paths, request.slots, request.health_timeout_s)
        facts: dict[str, Any] = {
            "schema": SCHEMA,
            "t": now,
            "root": os.geteuid() == 0,
            "sandbox": sandbox,
            **hostfacts.system(),
            "users": {request.user: hostfacts.account(request.user)},
            "compilers": hostfacts.compilers(),
            "toolkits": hostfacts.toolkits(),
            "disk": hostfacts.disks(request.paths),
            "ports": netports.ports(),
            "ephemeral": hostfacts.ephemeral(),
            "addresses": hostfacts.addresses(),
            "models": {path: hostfacts.model(path, blocked.get(path, "")) for path in request.models},
            "access": blocked,
            "releases": releases(request.paths),
            "agent_version": agent_version(request.paths),
            "agent_units": agent_units(request.paths),
            "lock": lock(request.paths),
            "journal_tail": journal.Journal(request.paths.journal).entries()[-JOURNAL_TAIL:],
        }
        facts["python"], facts["agent_python"] = python.result(), agent_python.result()
        facts["systemd"], facts["proxies"], facts["libraries"] = systemd.result(), proxies.result(), libraries.result()
        facts["slots"] = slots.result()
        facts.update(gpu_facts(gpus.result(), faults.result(), sandbox))
    facts["seconds"] = round(time.time() - now, 3)
    return facts


def gpu_facts(report: nvidia.Report, faults: list[kernellog.Fault], sandbox: bool) -> dict[str, Any]:
    """GPUs with their faults and with who runs on them; lost ones with the UUID that the driver remembers."""
    known = hostfacts.driver_gpus()
    listed = {nvidia.normal_bus(gpu.bus_id): gpu for gpu in report.gpus}
    gpus = []
    for gpu in report.gpus:
        bus = nvidia.normal_bus(gpu.bus_id)
        processes = [
            {**netports.process(item["pid"]), "memory_mib": item["memory_mib"]}
            if Path(f"/proc/{item['pid']}").exists()
            else {**netports.process(None), **item, "command": "(not visible on this host)"}
            for item in gpu.processes
        ]
        mine = [fault.as_dict() for fault in faults if fault.bus_id == bus]
        gpus.append({**dataclasses.asdict(gpu), "processes": processes, "faults": mine})
    lost = []
    for item in report.lost:
        uuid = item.uuid or known.get(nvidia.normal_bus(item.bus_id), "")
        lost.append({**dataclasses.asdict(item), "uuid": uuid})
    if report.state == "ok" and report.gpus:
        seen = {nvidia.normal_bus(item.bus_id) for item in report.lost}
        for bus, uuid in known.items():
            if bus not in listed and bus not in seen:
                lost.append(
                    {
                        "bus_id": bus,
                        "index": None,
                        "uuid": uuid,
                        "reason": "the driver knows it, nvidia-smi does not list it",
                    }
                )
    return {
        "gpu_source": "none" if report.state == "absent" else "simulated" if sandbox else "nvidia-smi",
        "gpu_state": report.state,
        "gpu_detail": report.detail,
        "gpus": gpus,
        "gpus_lost": lost,
        "gpu_faults": [fault.as_dict() for fault in faults if fault.bus_id not in listed],
        "driver": hostfacts.driver(report),
    }


def releases(paths: Paths) -> list[dict[str, Any]]:
    """Complete releases, newest first. One that is being built has a name that begins with a dot."""
    found: list[dict[str, Any]] = []
    for manifest in paths.releases.glob("[!.]*/manifest.json"):
        try:
            value = files.read_json(manifest) or {}
        except (OSError, ValueError) as error:
            found.append({"id": manifest.parent.name, "damaged": str(error)})
            continue
        keys = ("stack", "engine", "engine_version", "python", "created_t")
        found.append({"id": manifest.parent.name, **{key: value.get(key) for key in keys}})
    return sorted(found, key=lambda item: (-float(item.get("created_t") or 0), item["id"]))


def agent_version(paths: Paths) -> str:
    try:
        return (paths.agent / "current").readlink().name
    except OSError:
        return ""


def agent_units(paths: Paths) -> dict[str, str]:
    """Digest of each of the toolkit's own units that is there."""
    found = {}
    for name in (ACTIVATE_TEMPLATE, RECOVER_UNIT):
        with contextlib.suppress(OSError):
            found[name] = hashlib.sha256((paths.units / name).read_bytes()).hexdigest()
    return found


def lock(paths: Paths) -> dict[str, Any] | None:
    """What the holder of the host's lock has written of itself."""
    found: dict[str, Any] = {}
    candidates = sorted(paths.lock.glob("*.json")) if paths.lock.is_dir() else [paths.lock]
    for file in candidates:
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.update(json.loads(file.read_text()))
    return found or None
