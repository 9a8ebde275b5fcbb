"""GPU faults in kernel messages: which are fatal, for which GPU, and since when."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ddtree import kernellog
from ddtree.process import Result

T = 1_800_000_000.0


@pytest.mark.parametrize("number", [48, 64, 74, 79, 94, 95, 119, 120, 140, 154, 171])
def test_hardware_and_driver_faults_are_fatal(number: int) -> None:
    fault = kernellog.fault(f"NVRM: Xid (PCI:0000:29:00): {number}, pid=1, name=python3, something", T)
    assert fault is not None
    assert (fault.xid, fault.bus_id, fault.fatal, bool(fault.meaning)) == (number, "0000:29:00", True, True)


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 69, 109])
def test_faults_of_a_program_and_repairs_are_not(number: int) -> None:
    fault = kernellog.fault(f"NVRM: Xid (PCI:0000:29:00): {number}, pid=1, name=python3", T)
    assert fault is not None and not fault.fatal


def test_a_recovery_action_that_is_over_is_not_fatal() -> None:
    line = "NVRM: Xid (PCI:0000:29:00): 154, GPU recovery action changed from {} to {}"
    asked = kernellog.fault(line.format("0x0 (None)", "0x1 (GPU Reset Required)"), T)
    over = kernellog.fault(line.format("0x1 (GPU Reset Required)", "0x0 (None)"), T)
    assert asked is not None and asked.fatal
    assert over is not None and not over.fatal


@pytest.mark.parametrize(
    ("line", "bus"),
    [
        ("NVRM: The NVIDIA GPU 0000:4b:00.0 has fallen off the bus and is not responding to commands.", "0000:4b:00"),
        ("NVRM: GPU at PCI:0000:4b:00: GPU has fallen off the bus.", "0000:4b:00"),
        ("NVRM: osHandleGpuLost: GPU is lost", ""),
    ],
)
def test_a_gpu_that_left_the_bus_without_an_xid_is_found(line: str, bus: str) -> None:
    fault = kernellog.fault(line, T)
    assert fault is not None
    assert (fault.xid, fault.fatal, fault.bus_id) == (None, True, bus)


@pytest.mark.parametrize("line", ["NVRM: loading NVIDIA UNIX Open Kernel Module", "usb 1-1: Xid 79", ""])
def test_other_lines_are_no_fault(line: str) -> None:
    assert kernellog.fault(line, T) is None


def test_the_journal_is_asked_for_kernel_lines_of_every_boot_since_then() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*argv: str, **options: Any) -> Result:
        asked.append(argv)
        lines = [
            {"__REALTIME_TIMESTAMP": str(int((T - 5) * 1e6)), "MESSAGE": "NVRM: Xid (PCI:0000:29:00.0): 79, lost"},
            {"__REALTIME_TIMESTAMP": str(int((T - 9) * 1e6)), "MESSAGE": "NVRM: Xid (PCI:0000:18:00): 13, pid=2"},
            {"__REALTIME_TIMESTAMP": str(int(T * 1e6)), "MESSAGE": [78, 86, 82, 77]},
            {"__REALTIME_TIMESTAMP": str(int(T * 1e6)), "MESSAGE": "eth0: link up"},
        ]
        return Result(argv, 0, "\n".join(map(json.dumps, lines)) + "\nNVRM not json\n", "")

    found = kernellog.faults(T - 3600, None, ask)
    assert [(item.xid, item.bus_id, item.t) for item in found] == [(13, "0000:18:00", T - 9), (79, "0000:29:00", T - 5)]
    assert "_TRANSPORT=kernel" in asked[0] and "-k" not in asked[0] and f"--since=@{T - 3600:.0f}" in asked[0]


def test_a_log_file_is_read_with_the_times_of_its_lines(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    stamp = datetime.datetime.fromtimestamp(T - 60, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S,123456+00:00")
    old = datetime.datetime.fromtimestamp(T - 7200, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S+00:00")
    log.write_text(
        f"{old} NVRM: Xid (PCI:0000:18:00): 48, pid=1\n{stamp} NVRM: Xid (PCI:0000:29:00): 79, off\n"
        "NVRM: Xid (PCI:0000:3a:00): 95, pid=1\n"
    )
    os.utime(log, (T, T))
    found = kernellog.faults(T - 3600, log, lambda *argv, **options: Result(argv, 0, "", ""))
    assert [item.xid for item in found] == [79, 95]
    assert found[0].t == pytest.approx(T - 60 + 0.123456)
