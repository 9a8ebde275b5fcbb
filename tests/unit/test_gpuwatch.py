"""A GPU's fault is found while a gate runs, and another GPU's is not taken for it."""

from __future__ import annotations

import time

import pytest
from ddtree import gpuwatch
from ddtree.gpuwatch import GpuWatch
from ddtree.process import Result

UUID = "GPU-1"
LISTED = f"{UUID}, 00000000:29:00.0\nGPU-2, 00000000:3A:00.0\n"


def machine(monkeypatch: pytest.MonkeyPatch, listing: str, kernel: list[str], delay: float = 0.0) -> None:
    def run(*argv: str, **settings: object) -> Result:
        time.sleep(delay)
        return Result(argv, 0, listing, "")

    monkeypatch.setattr(gpuwatch, "run", run)
    monkeypatch.setattr(gpuwatch, "kernel_gpu_lines", lambda since: kernel)


def look(skip: int = 0) -> str | None:
    return GpuWatch(UUID, 0.0, skip).fault(look=True)


def test_a_healthy_gpu_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, LISTED, [])
    assert look() is None


def test_a_gpu_that_is_not_listed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "GPU-2, 00000000:3A:00.0\n", [])
    assert UUID in str(look())


def test_a_fatal_xid_of_this_gpu_counts_and_of_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, LISTED, ["NVRM: Xid (PCI:0000:29:00): 79, GPU has fallen off the bus."])
    assert "fallen off the bus" in str(look())
    machine(monkeypatch, LISTED, ["NVRM: Xid (PCI:0000:3a:00): 79, GPU has fallen off the bus."])
    assert look() is None


def test_lines_from_before_the_start_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, LISTED, ["NVRM: Xid (PCI:0000:29:00): 94, Contained memory error"])
    assert look(skip=1) is None


def test_a_slow_answer_does_not_hold_up_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "", [], delay=3.0)
    began = time.monotonic()
    assert look() is None
    assert time.monotonic() - began < 2.0
