"""Preflight checks of driver, toolkit and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .case import Case, Check, Violation, mib, version

# Least driver that a CUDA major needs, where the stack does not say.
CUDA_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
# Compute capability prefix to the least toolkit that can compile for it, where the stack does not say.
TOOLKITS = {"12.": "12.9"}
# Memory that the driver itself keeps on an idle GPU is below this share.
IDLE_MEMORY_SHARE = 0.05


def driver(case: Case) -> Iterator[Violation]:
    facts, stack = case.facts, case.stack
    state, detail, found = facts.get("gpu_state"), facts.get("gpu_detail") or "", facts.get("driver") or {}
    named = [slot for slot in case.slots if slot["gpu"] != "none"]
    cuda = stack.get("cuda")
    if not cuda and not named:
        return
    if state == "hang":
        yield case.violation("DRIVER-HANG", "driver", detail, "an answer")
    elif state in ("no-driver", "error") or (state == "absent" and (cuda or named)):
        yield case.violation("DRIVER-MISSING", "driver", detail or str(state), "a driver that nvidia-smi can talk to")
    kernel, library = found.get("kernel", ""), found.get("library", "")
    if state == "mismatch" or (kernel and library and _release(kernel) != _release(library)):
        yield case.violation(
            "DRIVER-MISMATCH",
            "driver",
            f"kernel module {kernel or 'unknown'}, libraries {library or 'unknown'}",
            "the same version",
        )
    if not cuda:
        return
    major = int(str(cuda).split(".")[0])
    least = str(stack.get("min_driver") or CUDA_DRIVERS.get(major, ""))
    if kernel and least and version(kernel) < version(least):
        yield case.violation("DRIVER-OLD", "driver", kernel, least, cuda=cuda)
    if found.get("nouveau"):
        yield case.violation("DRIVER-NOUVEAU", "driver", "nouveau", "nvidia")
    if facts.get("gpu_source") == "simulated":
        if facts.get("gpus"):
            yield case.violation("GPU-SIMULATED", "GPUs", "simulated GPUs", "real GPUs")
        return
    if state == "ok" and not found.get("uvm"):
        yield case.violation("DRIVER-UVM", "/dev/nvidia-uvm", "missing", "present")
    if found.get("unattended") and found.get("held") is False:
        yield case.violation("DRIVER-UPGRADES", "driver", "packages not held, unattended upgrades on", "packages held")


def _release(text: str) -> tuple[int, ...]:
    """Tools shorten 580.159.04 to 580.159."""
    return version(text)[:2]


def presence(case: Case) -> Iterator[Violation]:
    """Every slot's GPU is on the host and answers."""
    facts = case.facts
    if facts.get("gpu_state") not in ("ok", "hang") or (facts.get("gpu_state") == "hang" and not facts.get("gpus")):
        return  # the driver's own violation says it
    lost = {str(item.get("uuid", "")).lower(): item for item in facts.get("gpus_lost") or [] if item.get("uuid")}
    unnamed = [item for item in facts.get("gpus_lost") or [] if not item.get("uuid")]
    explained: set[str | int] = set()
    for index, slot in enumerate(case.slots):
        uuid = str(slot["gpu"]).lower()
        if uuid == "none" or case.gpu(slot) is not None:
            continue
        if uuid in lost:
            explained.add(uuid)
            yield case.violation("GPU-LOST", slot["gpu"], _lost(lost[uuid]), "a GPU that answers", slot)
            continue
        present = len(facts.get("gpus") or [])
        found = f"{present} GPUs, not this one" + (
            f"; lost: {'; '.join(_lost(item) for item in unnamed)}" if unnamed else ""
        )
        # a GPU that is gone is in no list any more; the kernel may have said why
        logged = _recent(case, [item for item in facts.get("gpu_faults") or [] if item.get("fatal")])
        found += f"; kernel log: {logged[-1].get('text', '')[:160]}" if logged else ""
        explained.update(id(item) for item in unnamed)
        path = f"hosts.{case.desired.get('host', '')}.fleet_slots[{index}].gpu"
        yield case.violation("GPU-ABSENT", slot["gpu"], found, f"GPU {slot['gpu']}", slot, path=path)
    for item in facts.get("gpus_lost") or []:
        if str(item.get("uuid", "")).lower() not in explained and id(item) not in explained:
            yield case.violation(
                "GPU-OTHER-LOST", item.get("uuid") or item.get("bus_id") or "a GPU", _lost(item), "all GPUs answering"
            )


def _lost(item: Mapping[str, Any]) -> str:
    where = f"GPU {item['index']} " if item.get("index") is not None else ""
    bus = f"at {item['bus_id']} " if item.get("bus_id") else ""
    return f"{where}{bus}({item.get('reason') or 'lost'})"


def holders(case: Case) -> Iterator[Violation]:
    for slot, gpu in case.gpus():
        processes = gpu.get("processes") or []
        for process in processes:
            pid = process.get("pid")
            if process.get("slot") == slot["name"]:
                continue
            if process.get("ours"):
                yield case.violation(
                    "GPU-OTHER-SLOT",
                    gpu["uuid"],
                    f"slot {process['slot']} (pid {pid})",
                    "a free GPU",
                    slot,
                    other=process["slot"],
                )
                continue
            yield case.violation("GPU-FOREIGN", gpu["uuid"], describe(process), "a free GPU", slot, who=who(process))
        used, total = gpu.get("memory_used_mib"), gpu.get("memory_total_mib")
        if not processes and used and total and used > total * IDLE_MEMORY_SHARE:
            yield case.violation(
                "GPU-MEMORY", gpu["uuid"], f"{mib(used)} in use", "an empty GPU", slot, uuid=gpu["uuid"]
            )


def who(process: Mapping[str, Any]) -> str:
    return f"pid {process['pid']}" if process.get("pid") is not None else "that process"


def describe(process: Mapping[str, Any]) -> str:
    """A process as people would look for it: pid, command, unit."""
    if process.get("pid") is None:
        return "a process that cannot be seen from the host"
    command = process.get("command") or process.get("comm") or "?"
    unit = f", unit {process['unit']}" if process.get("unit") else ""
    memory = f", {mib(process['memory_mib'])} of GPU memory" if process.get("memory_mib") else ""
    return f"pid {process['pid']} ({command[:120]}{unit}{memory})"


def coverage(case: Case) -> Iterator[Violation]:
    """The stack has kernels for the GPU, and what compiles at run time can compile for it."""
    stack = case.stack
    if not stack.get("cuda"):
        return
    archs = [str(item) for item in stack.get("archs") or []]
    for slot, gpu in case.gpus():
        capability = gpu.get("compute_cap") or ""
        if not capability:
            continue
        if archs and capability not in archs:
            yield case.violation("GPU-ARCH", gpu["uuid"], capability, ", ".join(archs), slot)
        if stack.get("ships_toolkit"):
            continue
        for prefix, least in dict(stack.get("toolkits") or TOOLKITS).items():
            if not capability.startswith(str(prefix)):
                continue
            # compilers take the first one: a newer toolkit elsewhere does not help
            first = next(iter(case.facts.get("toolkits") or []), None)
            if first is None or version(first["version"]) < version(least):
                found = f"{first['version']} in {first['path']}" if first else "none"
                yield case.violation("GPU-TOOLKIT", gpu["uuid"], f"toolkit {found}", str(least), slot)


def condition(case: Case) -> Iterator[Violation]:
    """Faults of the GPU itself, and settings that keep an engine from using it."""
    for slot, gpu in case.gpus():
        uuid = gpu["uuid"]
        if gpu.get("ecc_uncorrected"):
            yield case.violation("GPU-ECC", uuid, f"{gpu['ecc_uncorrected']} uncorrectable errors", "none", slot)
        if gpu.get("remap_failed"):
            yield case.violation("GPU-REMAP-FAILED", uuid, "failure", "none", slot)
        if gpu.get("remap_pending"):
            yield case.violation("GPU-REMAP-PENDING", uuid, "a row pending", "none pending", slot, uuid=uuid)
        if gpu.get("mig"):
            yield case.violation("GPU-MIG", uuid, "MIG on", "MIG off", slot, uuid=uuid)
        if str(gpu.get("compute_mode", "")).lower() == "prohibited":
            yield case.violation("GPU-PROHIBITED", uuid, "Prohibited", "Default", slot, uuid=uuid)
        if gpu.get("persistence") is False and case.stack.get("cuda"):
            yield case.violation("GPU-PERSISTENCE", uuid, "off", "on", slot)
        yield from _faults(case, slot, gpu.get("faults") or [], uuid)
    # a line without a usable address may be about any GPU: tell it once
    stray = [item for item in case.facts.get("gpu_faults") or [] if not item.get("bus_id")]
    first = next((slot for slot, _ in case.gpus()), None)
    if first is not None:
        yield from _faults(case, first, stray, "a GPU that the log does not name")


def _window_h(case: Case) -> float:
    return float(case.desired.get("xid_window_h", 24.0))


def _recent(case: Case, faults: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    now = float(case.facts.get("t") or 0)
    return [item for item in faults if now - float(item.get("t", now)) <= _window_h(case) * 3600]


def _faults(case: Case, slot: Mapping[str, Any], faults: list[Mapping[str, Any]], subject: str) -> Iterator[Violation]:
    recent = _recent(case, faults)
    fatal = [item for item in recent if item.get("fatal")]
    if fatal:
        newest = fatal[-1]
        what = f"Xid {newest['xid']}" if newest.get("xid") is not None else "no Xid"
        more = f" (and {len(fatal) - 1} more)" if len(fatal) > 1 else ""
        found = f"{what}, {newest.get('meaning') or 'fatal'}{more}: {newest.get('text', '')[:160]}"
        yield case.violation("GPU-XID", subject, found, f"none in {_window_h(case):g} h", slot)
    noted = [item for item in recent if not item.get("fatal") and item.get("meaning") and item.get("xid") == 63]
    if noted:
        yield case.violation("GPU-XID-NOTE", subject, f"Xid 63, {len(noted)} times", "none", slot)


CHECKS: tuple[Check, ...] = (driver, presence, holders, coverage, condition)
