"""The board of a run under way: for each host and slot, which stage it is in, since when, and what was said last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

FINISHED = ("done", "failed", "refused", "unreachable", "noop")
_FAILED_EVENTS = {"runner_on_failed": "failed", "runner_on_unreachable": "unreachable"}


@dataclasses.dataclass
class Row:
    """One line of the board. `slot` is empty for what concerns the host as a whole."""

    host: str
    slot: str = ""
    stage: str = "waiting"
    message: str = ""
    started: float = 0.0
    stage_since: float = 0.0
    ended: float | None = None

    @property
    def name(self) -> str:
        return f"{self.host}/{self.slot}" if self.slot else self.host

    @property
    def finished(self) -> bool:
        return self.ended is not None

    def elapsed(self, now: float) -> float:
        return (self.ended if self.ended is not None else now) - self.started


@dataclasses.dataclass(frozen=True)
class Change:
    """Something worth a line where there is no live table."""

    row: Row
    stage_changed: bool


class Board:
    """Fed with progress records and Ansible events; holds no opinion on how it is shown."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.started = clock()
        self.rows: dict[tuple[str, str], Row] = {}
        self.play = ""
        self._spoken: set[str] = set()  # hosts that tell their stages themselves

    def add_progress(self, record: Mapping[str, Any]) -> Change | None:
        host = str(record.get("host") or "")
        if not host:
            return None
        self._spoken.add(host)
        return self._set(
            host,
            str(record.get("slot") or ""),
            str(record.get("stage") or ""),
            str(record.get("message") or ""),
            float(record.get("t") or self._clock()),
        )

    def add_event(self, event: Mapping[str, Any]) -> Change | None:
        kind = event.get("event")
        data = event.get("event_data") or {}
        if kind == "playbook_on_play_start":
            self.play = str(data.get("name") or data.get("play") or "")
        host = str(data.get("host") or "")
        if not host:
            return None
        if kind == "runner_on_start" and host not in self._spoken:
            return self._set(host, "", _short(str(data.get("task") or "")), "", self._clock())
        if kind in _FAILED_EVENTS and not data.get("ignore_errors"):
            report = (data.get("res") or {}).get("ddtree") or {}
            stage = "refused" if report.get("outcome") == "refused" else _FAILED_EVENTS[str(kind)]
            text = str(report.get("message") or (data.get("res") or {}).get("msg") or "").strip()
            return self._set(host, "", stage, text.splitlines()[0] if text else "", self._clock())
        return None

    def finish(self, host: str, outcome: str) -> None:
        """The run is over: close what is still open."""
        now = self._clock()
        for row in self.rows.values():
            if row.host == host and row.ended is None:
                row.stage, row.ended = (row.stage if row.stage in FINISHED else outcome), now

    def _set(self, host: str, slot: str, stage: str, message: str, t: float) -> Change | None:
        row = self.rows.get((host, slot))
        new = row is None
        if row is None:
            row = self.rows[(host, slot)] = Row(host, slot, started=t, stage_since=t)
        stage_changed = new or (bool(stage) and stage != row.stage)
        if not stage_changed and message in ("", row.message):
            return None
        if stage_changed:
            row.stage, row.stage_since = stage or row.stage, t
            row.ended = t if row.stage in FINISHED else None
        row.message = message
        return Change(row, stage_changed)


def _short(task: str) -> str:
    """Ansible names a role's task `role : task`; the role alone says which stage this is."""
    return task.split(" : ", 1)[0] if " : " in task else task
