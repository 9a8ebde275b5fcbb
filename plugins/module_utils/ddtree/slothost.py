"""The real host behind a gate: the slot's unit, its journal, its control group and its GPU."""

from __future__ import annotations

from collections.abc import Sequence

from . import units
from .gpuwatch import GpuWatch, kernel_gpu_lines
from .units import LogLine, UnitState


class SlotHost:
    """`started`: when the start that is judged began (epoch seconds); `gpu`: the slot's GPU by UUID, or empty."""

    def __init__(self, unit: str, started: float, gpu: str) -> None:
        self._unit = unit
        self._started = started
        self._follower = units.LogFollower(unit, started)
        self._gpu = GpuWatch(gpu, started, before=len(kernel_gpu_lines(started)))
        self._gpu.start()

    def unit(self) -> UnitState:
        return units.show(self._unit)

    def new_log(self) -> Sequence[LogLine]:
        return self._follower.poll()

    def log(self) -> Sequence[str]:
        return [line.text for line in units.log(self._unit, since=self._started)]

    def cpu_seconds(self, state: UnitState) -> float | None:
        return units.cgroup_cpu_seconds(state.cgroup)

    def gpu_fault(self, look: bool = False) -> str | None:
        return self._gpu.fault(look)

    def close(self) -> None:
        self._follower.close()
        self._gpu.stop()
