"""What nvidia-smi says of a host's GPUs, and what it fails to say.

Only the tool's CSV is read; it needs no library, and an operator can repeat it by hand. A GPU that has been lost, a
driver that is not loaded and a tool that hangs are ordinary answers here, never exceptions.
"""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import io
import re
from collections.abc import Callable, Iterable
from typing import Any

from .process import Result, run

# Seconds until a query counts as hanging. The tool answers in 0.03 s with persistence mode, in a few seconds without.
TIMEOUT = 10.0
# Seconds per GPU when the common query hangs and each GPU is asked alone, to learn which one it is.
SINGLE_TIMEOUT = 3.0
MOST_GPUS = 16

GPU_FIELDS = (
    "uuid",
    "index",
    "name",
    "driver_version",
    "compute_cap",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "persistence_mode",
    "ecc.mode.current",
    "mig.mode.current",
    "compute_mode",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.total",
    "temperature.gpu",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
REMAP_FIELDS = (
    "gpu_uuid",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
)

Ask = Callable[..., Result]


@dataclasses.dataclass
class Gpu:
    """One GPU that answers. None stands for what the tool does not know ("[N/A]")."""

    uuid: str
    index: int | None = None
    name: str = ""
    compute_cap: str = ""
    bus_id: str = ""
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    mig: bool | None = None
    compute_mode: str = ""
    ecc_uncorrected: int | None = None
    ecc_uncorrected_lifetime: int | None = None
    temperature_c: int | None = None
    remapped_correctable: int | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    processes: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Lost:
    """A GPU that is known to be there and does not answer."""

    bus_id: str = ""
    index: int | None = None
    uuid: str = ""
    reason: str = ""


@dataclasses.dataclass
class Report:
    """One pass of queries. `state`: ok, absent (no nvidia-smi), no-driver, mismatch, hang or error."""

    state: str = "ok"
    detail: str = ""
    driver: str = ""
    library: str = ""
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    lost: list[Lost] = dataclasses.field(default_factory=list)

    def gpu(self, uuid: str) -> Gpu | None:
        return next((gpu for gpu in self.gpus if gpu.uuid.lower() == uuid.lower()), None)


_LOST = re.compile(
    r"Unable to determine the device handle for GPU\s*(?:(\d{1,3})\s*:\s+)?"
    r"([0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F])?\s*:?\s*(.+)",
    re.IGNORECASE,
)
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_LIBRARY = re.compile(r"NVML library version:\s*(\S+)")


def query(ask: Ask | None = None, timeout: float = TIMEOUT) -> Report:
    """Ask for GPUs, their processes and their remapped rows. `ask(*arguments, timeout=...)` runs nvidia-smi."""
    ask = ask or _nvidia_smi
    fields = list(GPU_FIELDS)
    first = _ask_fields(ask, "--query-gpu", fields, timeout)
    report = Report()
    if first.code == 124:
        return _one_by_one(ask, report)
    read_gpus(report, first, fields)
    if report.state != "ok" or not report.gpus:
        return report
    read_apps(report, _ask_fields(ask, "--query-compute-apps", list(APP_FIELDS), timeout).out)
    if "remapped_rows.pending" not in fields:  # older tools have a query of its own for these
        read_remaps(report, _ask_fields(ask, "--query-remapped-rows", list(REMAP_FIELDS), timeout).out)
    return report


def _nvidia_smi(*arguments: str, timeout: float) -> Result:
    return run("nvidia-smi", *arguments, check=False, timeout=timeout)


def _ask_fields(ask: Ask, what: str, fields: list[str], timeout: float, *more: str) -> Result:
    """Query `fields`, dropping (from the caller's list too) those that an older tool does not know."""
    while True:
        result = ask(*more, f"{what}={','.join(fields)}", "--format=csv,noheader,nounits", timeout=timeout)
        unknown = _UNKNOWN_FIELD.search(result.out + result.err)
        if not unknown or unknown.group(1) not in fields or len(fields) == 1:
            return result
        fields.remove(unknown.group(1))


def _one_by_one(ask: Ask, report: Report) -> Report:
    """The common query hangs: ask each GPU alone, at the same time, so that the healthy ones are known."""
    report.state, report.detail = "hang", "nvidia-smi does not answer"

    def single(index: int) -> tuple[int, Result, list[str]]:
        fields = list(GPU_FIELDS)
        return index, _ask_fields(ask, "--query-gpu", fields, SINGLE_TIMEOUT, "-i", str(index)), fields

    with concurrent.futures.ThreadPoolExecutor(MOST_GPUS) as pool:
        answers = list(pool.map(single, range(MOST_GPUS)))
    hanging = []
    for index, result, fields in answers:
        if result.code == 124:
            hanging.append(index)
        elif result.code != 6:
            part = Report()
            read_gpus(part, result, fields)
            report.gpus += part.gpus
            report.lost += part.lost
            report.driver = report.driver or part.driver
    if report.gpus:
        report.detail = f"nvidia-smi hangs on GPU {', '.join(map(str, hanging))}"
        report.lost += [Lost(index=index, reason="nvidia-smi hangs when it asks this GPU") for index in hanging]
    return report


def read_gpus(report: Report, result: Result, fields: Iterable[str]) -> None:
    """Take the answer to --query-gpu into `report`: rows, lost GPUs, or why there are none."""
    names = list(fields)
    rest = []
    for line in (result.out + "\n" + result.err).splitlines():
        lost = _LOST.search(line)
        if lost:
            index, bus, reason = lost.groups()
            report.lost.append(
                Lost(bus_id=bus or "", index=int(index) if index else None, reason=" ".join(reason.split()))
            )
            continue
        row = _row(line, names)
        if row and row.get("uuid", "").startswith("GPU-"):
            report.gpus.append(_gpu(row))
            report.driver = report.driver or row.get("driver_version", "")
        elif line.strip():
            rest.append(line.strip())
    text = " ".join(rest)
    library = _LIBRARY.search(text)
    report.library = library.group(1) if library else ""
    if report.gpus or report.lost:
        return
    report.detail = text[:300]
    if result.code == 127:
        report.state = "absent"
    elif "version mismatch" in text:
        report.state = "mismatch"
    elif result.code == 9 or "communicate with the NVIDIA driver" in text or "Driver Not Loaded" in text:
        report.state = "no-driver"
    elif "No devices were found" not in text:
        report.state = "error"
        report.detail = report.detail or f"nvidia-smi ended with status {result.code} and said nothing"


def _row(line: str, names: list[str]) -> dict[str, str] | None:
    values = next(csv.reader(io.StringIO(line), skipinitialspace=True), [])
    return dict(zip(names, (value.strip() for value in values), strict=True)) if len(values) == len(names) else None


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        uuid=row["uuid"],
        index=number(row.get("index")),
        name=row.get("name", ""),
        compute_cap=known(row.get("compute_cap")) or "",
        bus_id=row.get("pci.bus_id", ""),
        memory_total_mib=number(row.get("memory.total")),
        memory_used_mib=number(row.get("memory.used")),
        persistence=switch(row.get("persistence_mode")),
        ecc=switch(row.get("ecc.mode.current")),
        mig=switch(row.get("mig.mode.current")),
        compute_mode=known(row.get("compute_mode")) or "",
        ecc_uncorrected=number(row.get("ecc.errors.uncorrected.volatile.total")),
        ecc_uncorrected_lifetime=number(row.get("ecc.errors.uncorrected.aggregate.total")),
        temperature_c=number(row.get("temperature.gpu")),
        remapped_correctable=number(row.get("remapped_rows.correctable")),
        remapped_uncorrectable=number(row.get("remapped_rows.uncorrectable")),
        remap_pending=switch(row.get("remapped_rows.pending")),
        remap_failed=switch(row.get("remapped_rows.failure")),
    )


def read_apps(report: Report, text: str) -> None:
    for line in text.splitlines():
        row = _row(line, list(APP_FIELDS))
        gpu = report.gpu(row["gpu_uuid"]) if row else None
        pid = number(row["pid"]) if row else None
        if row and gpu and pid is not None:
            memory = number(row["used_gpu_memory"])
            gpu.processes.append({"pid": pid, "comm": row["process_name"], "memory_mib": memory})


def read_remaps(report: Report, text: str) -> None:
    for line in text.splitlines():
        row = _row(line, list(REMAP_FIELDS))
        gpu = report.gpu(row["gpu_uuid"]) if row else None
        if row and gpu:
            gpu.remapped_correctable = number(row["remapped_rows.correctable"])
            gpu.remapped_uncorrectable = number(row["remapped_rows.uncorrectable"])
            gpu.remap_pending = switch(row["remapped_rows.pending"])
            gpu.remap_failed = switch(row["remapped_rows.failure"])


def known(text: str | None) -> str | None:
    """The text, or None for what the tool writes where it knows nothing: [N/A], [Not Supported], N/A."""
    if text is None or text.strip("[] ").lower() in (
        "",
        "n/a",
        "not supported",
        "unknown error",
        "gpu is lost",
        "insufficient permissions",
    ):
        return None
    return text


def number(text: str | None) -> int | None:
    match = re.match(r"\d+", known(text) or "")
    return int(match.group()) if match else None


def switch(text: str | None) -> bool | None:
    return {"enabled": True, "yes": True, "1": True, "disabled": False, "no": False, "0": False}.get(
        (known(text) or "").lower()
    )


def normal_bus(bus_id: str) -> str:
    """One spelling for PCI addresses: nvidia-smi writes 00000000:1B:00.0, the kernel 0000:1b:00."""
    parts = bus_id.lower().split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    if len(parts) != 3:
        return bus_id.lower()
    try:
        return f"{int(parts[0], 16):04x}:{int(parts[1], 16):02x}:{parts[2].split('.')[0]}"
    except ValueError:
        return bus_id.lower()
