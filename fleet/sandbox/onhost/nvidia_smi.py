#!/usr/bin/python3 -IS
"""SIMULATED nvidia-smi of a sandbox host. No GPU, no driver and no NVML is behind it.

It answers the queries of the real tool that deployments use, in the same formats and with the same exit statuses:
-L, --query-gpu, --query-compute-apps (CSV, with noheader and nounits), -q with -d, each with -i INDEX|UUID|BUS-ID.
The GPUs come from /etc/sandbox-host, without which it refuses to run; what is wrong with them from
/etc/sandbox-gpu-faults.json, which `fleet sandbox fault` writes. A process of the host uses a GPU when its environment
has CUDA_VISIBLE_DEVICES with the GPU's UUID, so processes, their numbers and their ends are real.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = Path("/etc/sandbox-host")
FAULTS = Path("/etc/sandbox-gpu-faults.json")
BASE_MEMORY_MIB = 4
OK, BAD_ARGUMENT, NOT_FOUND, NO_DRIVER, GPU_LOST = 0, 2, 6, 9, 15
NO_DRIVER_TEXT = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)


def gpu_uuid(host: str, number: int) -> str:
    """The UUID of the host's GPU; the same on every run, so that inventories can be written before the host is up."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'sandbox-gpu://{host}/{number}')}"


def bus_id(number: int) -> str:
    return f"00000000:{0x18 + 0x11 * number:02X}:00.0"


class Machine:
    """The simulated GPUs of one host with their faults."""

    def __init__(self, description: dict[str, Any], faults: dict[str, Any]) -> None:
        self.host: str = description["host"]
        self.description = description
        everywhere = faults.get("all", {})
        self.faults: list[dict[str, Any]] = [
            {**everywhere, **faults.get(str(number), {})} for number in range(description["gpus"])
        ]
        self.has_driver = not everywhere.get("nodriver")
        self.driver: str = everywhere.get("driver", description["driver"])
        # A GPU that is gone is not enumerated, and the indices of those behind it move up.
        self.present = [number for number in range(description["gpus"]) if not self.faults[number].get("gone")]
        self.processes = compute_processes({gpu_uuid(self.host, number) for number in self.present})

    def fault(self, number: int, name: str, default: Any = None) -> Any:
        return self.faults[number].get(name, default)

    def fields(self, number: int) -> dict[str, Any]:
        """All fields of --query-gpu; a value with a unit is a pair."""
        total = self.description["memory_mib"]
        own = gpu_uuid(self.host, number)
        used = BASE_MEMORY_MIB + sum(process["memory"] for process in self.processes if process["gpu"] == own)
        temperature = self.fault(number, "temp", 34)
        uncorrected = self.fault(number, "ecc", 0)
        name = self.description["model"]
        busy = 100 if self.fault(number, "busy") else 0
        values: dict[str, Any] = {
            "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
            "driver_version": self.driver,
            "count": len(self.present),
            "name": name,
            "serial": f"SIMULATED{number:04d}",
            "uuid": own,
            "index": self.present.index(number),
            "pci.bus_id": bus_id(number),
            "pci.domain": "0x0000",
            "pci.bus": f"0x{0x18 + 0x11 * number:02X}",
            "pci.device": "0x00",
            "pcie.link.gen.current": 5,
            "pcie.link.gen.max": 5,
            "pcie.link.width.current": 16,
            "pcie.link.width.max": 16,
            "display_active": "Disabled",
            "persistence_mode": "Enabled",
            "vbios_version": "SIMULATED",
            "compute_mode": "Default",
            "compute_cap": self.fault(number, "cap", self.description["compute_cap"]),
            "pstate": "P8",
            "memory.total": (total, "MiB"),
            "memory.reserved": (0, "MiB"),
            "memory.used": (min(used, total), "MiB"),
            "memory.free": (max(total - used, 0), "MiB"),
            "utilization.gpu": (busy, "%"),
            "utilization.memory": (0, "%"),
            "ecc.mode.current": "Enabled",
            "ecc.mode.pending": "Enabled",
            "ecc.errors.corrected.volatile.total": 0,
            "ecc.errors.uncorrected.volatile.total": uncorrected,
            "ecc.errors.corrected.aggregate.total": 0,
            "ecc.errors.uncorrected.aggregate.total": uncorrected,
            "retired_pages.single_bit_ecc.count": "[N/A]",
            "retired_pages.double_bit.count": "[N/A]",
            "retired_pages.pending": "[N/A]",
            "remapped_rows.correctable": 0,
            "remapped_rows.uncorrectable": 1
            if self.fault(number, "remap") or self.fault(number, "remap-failure")
            else 0,
            "remapped_rows.pending": "Yes" if self.fault(number, "remap") else "No",
            "remapped_rows.failure": "Yes" if self.fault(number, "remap-failure") else "No",
            "temperature.gpu": temperature,
            "temperature.memory": "N/A",
            "power.draw": ("42.00", "W"),
            "power.limit": ("600.00", "W"),
            "power.max_limit": ("600.00", "W"),
            "clocks.current.sm": (180, "MHz"),
            "clocks.current.memory": (405, "MHz"),
            "clocks.max.sm": (2617, "MHz"),
            "clocks.max.memory": (12481, "MHz"),
            "clocks_throttle_reasons.active": "0x0000000000000040" if temperature >= 90 else "0x0000000000000001",
            "mig.mode.current": "Enabled" if self.fault(number, "mig") else "Disabled",
            "mig.mode.pending": "Enabled" if self.fault(number, "mig") else "Disabled",
        }
        aliases = {
            "gpu_name": "name",
            "gpu_serial": "serial",
            "gpu_uuid": "uuid",
            "gpu_bus_id": "pci.bus_id",
            "clocks.sm": "clocks.current.sm",
            "clocks.mem": "clocks.current.memory",
            "clocks_event_reasons.active": "clocks_throttle_reasons.active",
        }
        return values | {alias: values[field] for alias, field in aliases.items()}


def compute_processes(uuids: set[str]) -> list[dict[str, Any]]:
    """Processes of this host whose environment gives them one of the GPUs (only root sees those of other users)."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            raw = (directory / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(item.split("=", 1) for item in raw if "=" in item)
            visible = uuids.intersection(environment.get("CUDA_VISIBLE_DEVICES", "").split(","))
            if not visible:
                continue
            program = (directory / "exe").readlink()
            pages = int((directory / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # it ended while we looked, or belongs to somebody else
            continue
        resident = max(1, pages * os.sysconf("SC_PAGE_SIZE") >> 20)
        claimed = environment.get("SANDBOX_GPU_MEMORY_MIB", "")
        memory = int(claimed) if claimed.isdigit() else resident
        found += [{"gpu": gpu, "pid": int(directory.name), "name": str(program), "memory": memory} for gpu in visible]
    return sorted(found, key=lambda process: (process["gpu"], process["pid"]))


class Refused(Exception):
    """The call cannot be answered: the text and exit status of the real tool."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


def parse(argv: list[str]) -> dict[str, str]:
    """The options that are simulated; any other is refused as the real tool refuses what it does not know."""
    short = {"-i": "id", "-d": "display", "-q": "query", "-L": "list-gpus", "-h": "help"}
    takes_value = {"id", "display", "query-gpu", "query-compute-apps", "format"}
    known = takes_value | {"query", "list-gpus", "help", "version"}
    options: dict[str, str] = {}
    arguments = iter(argv)
    for argument in arguments:
        name, has_value, value = argument.partition("=")
        name = short.get(name, name.removeprefix("--") if name.startswith("--") else name)
        if name not in known:
            raise Refused(
                f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"
                f"(SIMULATED nvidia-smi: {argument} is not simulated)", BAD_ARGUMENT
            )  # fmt: skip
        if name in takes_value and not has_value:
            value = next(arguments, "")
        options[name] = value
    return options


def selected(machine: Machine, wanted: str | None) -> list[int]:
    """The GPUs that -i names by index, UUID or bus id; all without it."""
    if wanted is None:
        return machine.present
    names: dict[str, int] = {}
    for index, number in enumerate(machine.present):
        names |= {str(index): number, gpu_uuid(machine.host, number): number, bus_id(number): number}
        names |= {bus_id(number)[4:]: number, bus_id(number)[4:].lower(): number}
    chosen = []
    for name in wanted.split(","):
        if name.strip() not in names:
            raise Refused("No devices were found", NOT_FOUND)
        chosen.append(names[name.strip()])
    return chosen


def csv(rows: list[dict[str, Any]], fields: list[str], layout: str, titles: dict[str, str]) -> list[str]:
    options = layout.split(",")
    if options[0] != "csv":
        raise Refused("Output format is not valid: --format=csv[,noheader][,nounits] is required.", BAD_ARGUMENT)
    lines = []
    if "noheader" not in options:
        units = {field: "" if "nounits" in options else titles.get(field, "") for field in fields}
        for field in fields:
            if rows and isinstance(rows[0][field], tuple):
                units[field] = f" [{rows[0][field][1]}]"
        lines.append(", ".join(HEADINGS.get(field, field) + units[field] for field in fields))
    for row in rows:
        cells = []
        for field in fields:
            value = row[field]
            if isinstance(value, tuple):
                value = str(value[0]) if "nounits" in options else f"{value[0]} {value[1]}"
            cells.append(str(value))
        lines.append(", ".join(cells))
    return lines


# The real tool's headings of fields that have two names.
HEADINGS = {
    "used_memory": "used_gpu_memory",
    "name": "name",
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
}


def wanted_fields(text: str, known: dict[str, Any]) -> list[str]:
    fields = [field.strip() for field in text.split(",")]
    for field in fields:
        if field not in known:
            raise Refused(f'Field "{field}" is not a valid field to query.\n', BAD_ARGUMENT)
    return fields


def query_gpus(machine: Machine, numbers: list[int], options: dict[str, str]) -> list[str]:
    fields = wanted_fields(options["query-gpu"], machine.fields(machine.present[0]))
    return csv([machine.fields(number) for number in numbers], fields, options.get("format", ""), {})


def query_processes(machine: Machine, numbers: list[int], options: dict[str, str]) -> list[str]:
    rows = []
    for number in numbers:
        gpu = machine.fields(number)
        for process in machine.processes:
            if process["gpu"] == gpu["uuid"]:
                memory = (process["memory"], "MiB")
                rows.append(
                    {
                        "timestamp": gpu["timestamp"], "gpu_name": gpu["name"], "gpu_bus_id": gpu["pci.bus_id"],
                        "gpu_serial": gpu["serial"], "gpu_uuid": gpu["uuid"], "pid": process["pid"],
                        "process_name": process["name"], "name": process["name"],
                        "used_gpu_memory": memory, "used_memory": memory,
                    }
                )  # fmt: skip
    known = dict.fromkeys(
        ("timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid", "pid", "process_name", "name",
         "used_gpu_memory", "used_memory")
    )  # fmt: skip
    fields = wanted_fields(options["query-compute-apps"], known)
    units = {"used_gpu_memory": " [MiB]", "used_memory": " [MiB]"}
    lines = csv(rows, fields, options.get("format", ""), units)
    if "noheader" not in options.get("format", ""):  # here the real tool keeps the long names
        lines[0] = ", ".join(
            ("used_gpu_memory" if field == "used_memory" else "process_name" if field == "name" else field)
            + ("" if "nounits" in options["format"] and not rows else units.get(field, ""))
            for field in fields
        )
    return lines


def sections(gpu: dict[str, Any], processes: list[dict[str, Any]]) -> dict[str, list[tuple[str, Any]]]:
    """What `-q` prints for one GPU, by the names that -d takes."""
    return {
        "MEMORY": [
            ("FB Memory Usage", None), ("  Total", gpu["memory.total"]), ("  Reserved", gpu["memory.reserved"]),
            ("  Used", gpu["memory.used"]), ("  Free", gpu["memory.free"]),
        ],
        "UTILIZATION": [
            ("Utilization", None), ("  GPU", gpu["utilization.gpu"]), ("  Memory", gpu["utilization.memory"]),
        ],
        "ECC": [
            ("ECC Mode", None), ("  Current", gpu["ecc.mode.current"]), ("  Pending", gpu["ecc.mode.pending"]),
            ("ECC Errors", None), ("  Volatile", None),
            ("    SRAM Correctable", gpu["ecc.errors.corrected.volatile.total"]),
            ("    DRAM Uncorrectable", gpu["ecc.errors.uncorrected.volatile.total"]),
        ],
        "TEMPERATURE": [("Temperature", None), ("  GPU Current Temp", (gpu["temperature.gpu"], "C"))],
        "POWER": [
            ("GPU Power Readings", None), ("  Average Power Draw", gpu["power.draw"]),
            ("  Current Power Limit", gpu["power.limit"]),
        ],
        "CLOCK": [("Clocks", None), ("  SM", gpu["clocks.current.sm"]), ("  Memory", gpu["clocks.current.memory"])],
        "COMPUTE": [("Compute Mode", gpu["compute_mode"])],
        "ROW_REMAPPER": [
            ("Remapped Rows", None), ("  Correctable Error", gpu["remapped_rows.correctable"]),
            ("  Uncorrectable Error", gpu["remapped_rows.uncorrectable"]), ("  Pending", gpu["remapped_rows.pending"]),
            ("  Remapping Failure Occurred", gpu["remapped_rows.failure"]),
        ],
        "PIDS": [
            ("Processes", None if processes else "None"),
            *((f"  Process ID {item['pid']}", f"{item['name']}, {item['memory']} MiB") for item in processes),
        ],
    }  # fmt: skip


def report(machine: Machine, numbers: list[int], options: dict[str, str]) -> list[str]:
    lines = ["", "==============NVSMI LOG==============", ""]
    for title, value in (
        ("Timestamp", time.strftime("%a %b %d %H:%M:%S %Y")),
        ("Driver Version", machine.driver),
        ("CUDA Version", machine.description["cuda"]),
        ("Attached GPUs", len(machine.present)),
    ):
        lines.append(f"{title:<42}: {value}")
    wanted = [name.strip().upper() for name in options["display"].split(",")] if "display" in options else None
    for number in numbers:
        gpu = machine.fields(number)
        parts = sections(gpu, [process for process in machine.processes if process["gpu"] == gpu["uuid"]])
        if wanted and (unknown := [name for name in wanted if name not in parts]):
            raise Refused(f"Invalid display type: {unknown[0]} (SIMULATED: one of {', '.join(parts)})", BAD_ARGUMENT)
        lines.append(f"GPU {gpu['pci.bus_id']}")
        if not wanted:
            for title, field in (("Product Name", "name"), ("GPU UUID", "uuid"), ("Serial Number", "serial")):
                lines.append(f"    {title:<38}: {gpu[field]}")
        for part, rows in parts.items():
            for title, value in rows if wanted is None or part in wanted else []:
                depth = (len(title) - len(title.lstrip())) // 2 + 1
                name = " " * 4 * depth + title.lstrip()
                text = f"{value[0]} {value[1]}" if isinstance(value, tuple) else value
                lines.append(name if value is None else f"{name:<42}: {text}")
    return lines


def summary(machine: Machine, numbers: list[int]) -> list[str]:
    lines = [
        f"| SIMULATED NVIDIA-SMI {machine.driver}   Driver Version: {machine.driver}   "
        f"CUDA Version: {machine.description['cuda']} |"
    ]
    for number in numbers:
        gpu = machine.fields(number)
        used, total = gpu["memory.used"][0], gpu["memory.total"][0]
        lines.append(f"| {gpu['index']:>3}  {gpu['name']}  {gpu['pci.bus_id']}  {used}MiB / {total}MiB |")
    lines += [f"| {p['gpu']}  {p['pid']}  C  {p['name']}  {p['memory']}MiB |" for p in machine.processes]
    return lines


def answer(machine: Machine, options: dict[str, str]) -> tuple[list[str], int]:
    if "help" in options:
        return ["SIMULATED nvidia-smi (sandbox)", *(__doc__ or "").splitlines()[2:]], OK
    if not machine.has_driver:
        raise Refused(NO_DRIVER_TEXT, NO_DRIVER)
    if "version" in options:
        version = machine.driver
        lines = [f"NVIDIA-SMI version  : {version} (SIMULATED)", f"DRIVER version      : {version}"]
        return [*lines, f"CUDA Version        : {machine.description['cuda']}"], OK
    if not machine.present:
        raise Refused("No devices were found", NOT_FOUND)
    numbers = selected(machine, options.get("id"))
    if any(machine.fault(number, "hang") for number in numbers):
        while True:  # as the real tool does in the driver: until it is killed
            time.sleep(3600)
    lost = [number for number in numbers if machine.fault(number, "lost")]
    rows = [number for number in numbers if number not in lost]
    lines = [
        f"Unable to determine the device handle for GPU{machine.present.index(number)}: {bus_id(number)}: "
        "GPU is lost.  Reboot the system to recover this GPU"
        for number in lost
    ]
    ways: dict[str, Callable[[], list[str]]] = {
        "list-gpus": lambda: [
            f"GPU {machine.present.index(n)}: {machine.description['model']} (UUID: {gpu_uuid(machine.host, n)})"
            for n in rows
        ],
        "query-gpu": lambda: query_gpus(machine, rows, options),
        "query-compute-apps": lambda: query_processes(machine, rows, options),
        "query": lambda: report(machine, rows, options),
    }
    chosen = [way for way in ways if way in options]
    if len(chosen) > 1:
        raise Refused("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", BAD_ARGUMENT)
    lines += ways[chosen[0]]() if chosen else summary(machine, rows)
    return lines, GPU_LOST if lost else OK


def main(argv: list[str]) -> int:
    try:
        description = json.loads(MARK.read_text())
        if os.uname().nodename != description["host"]:
            raise ValueError("this machine has another name")
    except (OSError, ValueError, KeyError) as error:
        print(f"SIMULATED nvidia-smi: refused: this is not a sandbox host ({MARK}: {error})", file=sys.stderr)
        return BAD_ARGUMENT
    try:
        faults = json.loads(FAULTS.read_text()) if FAULTS.exists() else {}
        lines, status = answer(Machine(description, faults), parse(argv))
    except Refused as refusal:
        print(refusal.text)
        return refusal.status
    if lines:
        print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
