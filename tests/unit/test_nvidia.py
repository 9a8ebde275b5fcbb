"""nvidia-smi's answers, good and bad. The CSV was printed by the real tool (driver 580, an H200; UUID changed)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from ddtree import nvidia
from ddtree.process import Result

UUID = "GPU-23578e23-1111-4c1c-1e3d-b1c53fa3685d"
SECOND = "GPU-8affb72e-5275-5647-b991-e8868ab82c7d"
ROW = (
    f"{UUID}, 0, NVIDIA H200, 580.159.04, 9.0, 00000000:00:06.0, 143771, 639"
    ", Enabled, Enabled, Disabled, Default, 0, 0, 38"
    ", 0, 0, No, No"
)
APP = f"{UUID}, 420, python3, 630"
LOST = "Unable to determine the device handle for GPU0000:4B:00.0: GPU is lost.  Reboot the system to recover this GPU"


class Tool:
    """Stands for nvidia-smi: answers by what is queried, as the real one does, and remembers the calls."""

    def __init__(self, gpus: str = ROW, apps: str = APP, code: int = 0, unknown: tuple[str, ...] = ()) -> None:
        self.gpus, self.apps, self.code, self.unknown = gpus, apps, code, unknown
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, timeout: float) -> Result:
        self.calls.append(arguments)
        what, _, fields = next(argument for argument in arguments if argument.startswith("--query")).partition("=")
        for field in self.unknown:
            if field in fields.split(","):
                return Result(arguments, 2, f'Field "{field}" is not a valid field to query.\n\n', "")
        if what == "--query-compute-apps":
            return Result(arguments, 0, self.apps + "\n", "")
        if what == "--query-remapped-rows":
            return Result(arguments, 0, f"{UUID}, 1, 2, Yes, No\n", "")
        rows = []
        for line in self.gpus.splitlines():
            values = line.split(", ")
            known = dict(zip(nvidia.GPU_FIELDS, values, strict=False))
            rows.append(", ".join(known[field] for field in fields.split(",")) if len(values) > 10 else line)
        return Result(arguments, self.code, "\n".join(rows) + "\n", "")


def test_a_real_answer_is_read_in_full() -> None:
    report = nvidia.query(Tool())
    assert (report.state, report.driver, report.lost) == ("ok", "580.159.04", [])
    (gpu,) = report.gpus
    assert (gpu.uuid, gpu.index, gpu.name, gpu.compute_cap, gpu.bus_id) == (
        UUID,
        0,
        "NVIDIA H200",
        "9.0",
        "00000000:00:06.0",
    )
    assert (gpu.memory_total_mib, gpu.memory_used_mib, gpu.temperature_c) == (143_771, 639, 38)
    assert (gpu.persistence, gpu.ecc, gpu.mig, gpu.compute_mode) == (True, True, False, "Default")
    assert (gpu.ecc_uncorrected, gpu.remapped_uncorrectable, gpu.remap_pending, gpu.remap_failed) == (
        0,
        0,
        False,
        False,
    )
    assert gpu.processes == [{"pid": 420, "comm": "python3", "memory_mib": 630}]


def test_all_is_learned_with_two_calls() -> None:
    tool = Tool()
    nvidia.query(tool)
    assert len(tool.calls) == 2


def test_a_board_without_ecc_or_mig_says_so_with_unknown_values() -> None:
    row = ROW.replace(
        "Enabled, Enabled, Disabled, Default, 0, 0, 38, 0, 0, No, No", "Disabled, [N/A], [N/A], Default, [N/A]"
    )
    (gpu,) = nvidia.query(Tool(row + ", [N/A], 38, [N/A], [N/A], [N/A], [N/A]")).gpus
    assert gpu.persistence is False
    assert (gpu.ecc, gpu.mig, gpu.ecc_uncorrected, gpu.remap_pending) == (None, None, None, None)


def test_fields_that_an_older_tool_does_not_know_are_left_out_and_asked_for_the_old_way() -> None:
    remaps = tuple(field for field in nvidia.GPU_FIELDS if field.startswith("remapped_rows"))
    report = nvidia.query(Tool(unknown=("compute_cap", *remaps)))
    (gpu,) = report.gpus
    assert report.state == "ok"
    assert (gpu.name, gpu.compute_cap, gpu.temperature_c) == ("NVIDIA H200", "", 38)
    assert (gpu.remapped_uncorrectable, gpu.remap_pending, gpu.remap_failed) == (2, True, False)


@pytest.mark.parametrize(
    ("line", "index", "bus", "reason"),
    [
        (LOST, None, "0000:4B:00.0", "GPU is lost. Reboot the system to recover this GPU"),
        (
            LOST.replace("GPU0000", "GPU 0000"),
            None,
            "0000:4B:00.0",
            "GPU is lost. Reboot the system to recover this GPU",
        ),
        (
            "Unable to determine the device handle for GPU3: 00000000:4B:00.0: Unknown Error",
            3,
            "00000000:4B:00.0",
            "Unknown Error",
        ),
    ],
)
def test_a_lost_gpu_is_told_apart_and_the_others_stay(line: str, index: int | None, bus: str, reason: str) -> None:
    report = nvidia.query(Tool(f"{ROW}\n{line}", code=15))
    assert report.state == "ok"
    assert [gpu.uuid for gpu in report.gpus] == [UUID]
    assert report.lost == [nvidia.Lost(bus_id=bus, index=index, reason=reason)]


def test_only_lost_gpus_is_an_answer_too() -> None:
    report = nvidia.query(Tool(LOST, code=15))
    assert (report.state, report.gpus, len(report.lost)) == ("ok", [], 1)


@pytest.mark.parametrize(
    ("code", "text", "state"),
    [
        (127, "", "absent"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "no-driver"),
        (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95", "mismatch"),
        (6, "No devices were found", "ok"),
        (255, "Failed to initialize NVML: Unknown Error", "error"),
        (1, "", "error"),
    ],
)
def test_why_there_is_no_gpu_is_said(code: int, text: str, state: str) -> None:
    report = nvidia.query(lambda *arguments, timeout: Result(arguments, code, text, ""))
    assert (report.state, report.gpus) == (state, [])
    if state == "mismatch":
        assert report.library == "580.95"
    if state == "error":
        assert report.detail


def test_when_the_tool_hangs_each_gpu_is_asked_alone_and_the_hanging_one_named() -> None:
    def tool(*arguments: str, timeout: float) -> Result:
        if "-i" not in arguments or arguments[arguments.index("-i") + 1] == "1":
            return Result(arguments, 124, "", f"no answer within {timeout} s")
        if arguments[arguments.index("-i") + 1] == "0":
            return Tool()(*arguments, timeout=timeout)
        return Result(arguments, 6, "No devices were found", "")

    report = nvidia.query(tool)
    assert (report.state, report.detail) == ("hang", "nvidia-smi hangs on GPU 1")
    assert [gpu.uuid for gpu in report.gpus] == [UUID]
    assert [(item.index, "hangs" in item.reason) for item in report.lost] == [(1, True)]


def test_a_program_that_hangs_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nvidia, "SINGLE_TIMEOUT", 0.3)
    began = time.monotonic()
    report = nvidia.query(timeout=0.3)
    assert (report.state, report.gpus) == ("hang", [])
    assert time.monotonic() - began < 5


def test_processes_of_two_gpus_are_kept_apart() -> None:
    second = ROW.replace(UUID, SECOND)
    apps = f"{UUID}, 1, a, 10\n{SECOND}, 2, /usr/bin/b c, [N/A]\n{SECOND}, 3, [Not Found], 5"
    first, other = nvidia.query(Tool(f"{ROW}\n{second}", apps)).gpus
    assert [item["pid"] for item in first.processes] == [1]
    assert other.processes[0] == {"pid": 2, "comm": "/usr/bin/b c", "memory_mib": None}
    assert [item["pid"] for item in other.processes] == [2, 3]


@pytest.mark.parametrize("text", ["00000000:4B:00.0", "0000:4b:00.0", "0000:4B:00", "4b:00.0"])
def test_pci_addresses_are_the_same_in_every_spelling(text: str) -> None:
    assert nvidia.normal_bus(text) == "0000:4b:00"
