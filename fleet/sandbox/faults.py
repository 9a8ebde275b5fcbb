"""Faults of the simulated GPUs: how they are written (`3=ecc:5`), kept on the host and shown."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .errors import SandboxError
from .layout import GPUS_PER_HOST

# kind: (what its value looks like, or None; whether it belongs to the whole host; what it does)
KINDS: dict[str, tuple[str | None, bool, str]] = {
    "gone": (None, False, "the GPU is not listed any more; indices behind it move up"),
    "lost": (None, False, "off the bus: Xid 79 is logged, queries end with status 15"),
    "xid": (r"\d{1,3}", False, "a kernel line with this Xid, e.g. xid:48"),
    "ecc": (r"\d+", False, "so many uncorrected ECC errors since boot, e.g. ecc:2"),
    "remap": (None, False, "a row remapping is pending"),
    "remap-failure": (None, False, "a row remapping failed"),
    "foreign": (None, False, "a process of somebody else runs on the GPU"),
    "cap": (r"\d{1,2}\.\d", False, "another compute capability, e.g. cap:8.9"),
    "temp": (r"\d{1,3}", False, "temperature in degrees, e.g. temp:95"),
    "mig": (None, False, "MIG mode is on"),
    "hang": (None, False, "nvidia-smi does not return when it asks this GPU"),
    "driver": (r"\d+(\.\d+)+", True, "another driver version, e.g. all=driver:570.86.15"),
    "nodriver": (None, True, "no driver is loaded"),
}


@dataclass(frozen=True)
class Fault:
    """One request: which GPU (None is all), what, and with which value."""

    gpu: int | None
    kind: str
    value: str | None = None

    @property
    def key(self) -> str:
        return "all" if self.gpu is None else str(self.gpu)

    def gpus(self) -> list[int]:
        return list(range(GPUS_PER_HOST)) if self.gpu is None else [self.gpu]


def explain() -> str:
    """The grammar, for help texts."""
    lines = [f"  {kind + (':VALUE' if pattern else ''):<16}{text}" for kind, (pattern, _, text) in KINDS.items()]
    return "GPU=KIND with GPU a number from 0 to 7 or `all`, KIND one of:\n" + "\n".join(lines)


def parse(text: str) -> Fault:
    fix = explain() + "\n  clear           takes the faults of the GPU away; `clear` alone those of the host"
    if text == "clear":
        return Fault(None, "clear")
    match = re.fullmatch(r"(?:gpu)?(all|\d+)=([a-z-]+)(?::(.+))?", text)
    if not match:
        raise SandboxError(f"fault {text!r} is not understood", fix)
    place, kind, value = match.groups()
    gpu = None if place == "all" else int(place)
    if gpu is not None and gpu >= GPUS_PER_HOST:
        raise SandboxError(f"fault {text!r}: there is no GPU {gpu}, they are numbered 0 to {GPUS_PER_HOST - 1}")
    if kind == "clear" and value is None:
        return Fault(gpu, kind)
    if kind not in KINDS:
        raise SandboxError(f"fault {text!r}: {kind} is not a fault", fix)
    pattern, whole_host, _ = KINDS[kind]
    if (pattern is None) != (value is None) or (pattern and not re.fullmatch(pattern, value or "")):
        wanted = "takes no value" if pattern is None else f"needs a value like in {KINDS[kind][2].rsplit(', ', 1)[-1]}"
        raise SandboxError(f"fault {text!r}: {kind} {wanted}", fix)
    if whole_host and gpu is not None:
        raise SandboxError(f"fault {text!r}: {kind} concerns the whole host", f"write all={text.split('=', 1)[1]}")
    return Fault(gpu, kind, value)


def apply(current: dict[str, Any], fault: Fault) -> dict[str, Any]:
    """The host's faults after one more request. Xid lines and processes are not state of a GPU and not kept here."""
    faults = {key: dict(value) for key, value in current.items()}
    if fault.kind == "clear":
        return {} if fault.gpu is None else {key: value for key, value in faults.items() if key != fault.key}
    if fault.kind in ("xid", "foreign"):
        return faults
    value: Any = True if fault.value is None else int(fault.value) if fault.kind in ("ecc", "temp") else fault.value
    faults.setdefault(fault.key, {})[fault.kind] = value
    return faults


def kernel_lines(fault: Fault, bus_ids: list[str]) -> list[str]:
    """What the driver writes to the kernel log, marked as simulated."""
    if fault.kind == "xid":
        return [f"NVRM: Xid (PCI:{bus}): {fault.value}, pid='<unknown>', name=<unknown> [SIMULATED]" for bus in bus_ids]
    if fault.kind == "lost":
        lines = []
        for bus in bus_ids:
            text = "GPU has fallen off the bus."
            lines.append(f"NVRM: Xid (PCI:{bus}): 79, pid='<unknown>', name=<unknown>, {text} [SIMULATED]")
            lines.append(f"NVRM: GPU {bus}.0: {text} [SIMULATED]")
        return lines
    return []


def dump(faults: dict[str, Any]) -> str:
    return json.dumps(faults, indent=2, sort_keys=True) + "\n"
