"""Shows a run while it goes on: a live table on a terminal, one plain line per change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .progress import Board, Change, Row

MESSAGE_EVERY_S = 5.0  # plain output: a stage that only changes its message is not worth a line more often
LONGEST_LINE = 200
_STYLES = {
    "done": "green",
    "noop": "green",
    "failed": "bold red",
    "unreachable": "bold red",
    "refused": "bold yellow",
    "rollback": "yellow",
}


def duration(seconds: float) -> str:
    """45.2 s, 3 min 07 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _clip(line: str) -> str:
    """A line of a log is a line: the whole message is in the run's progress stream."""
    line = line.replace("\n", " ")
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 3] + "..."


def stage_style(stage: str) -> str:
    return _STYLES.get(stage.split("/", 1)[0], "cyan")


class Reporter:
    """How a run under way is shown; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def changed(self, change: Change) -> None:
        return None

    def tick(self) -> None:
        return None


class PlainReporter(Reporter):
    """One line per change: for pipes, logs and CI."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._clock = clock
        self._last: dict[str, float] = {}

    def changed(self, change: Change) -> None:
        row, now = change.row, self._clock()
        if not change.stage_changed and now - self._last.get(row.name, 0.0) < MESSAGE_EVERY_S:
            return
        self._last[row.name] = now
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        line = _clip(f"{clock} {row.name:<16} {row.stage:<20} {row.message}".rstrip())
        self._console.print(Text(line), soft_wrap=True)


class LiveReporter(Reporter):
    """A table that redraws itself: host, slot, stage, elapsed, last line."""

    def __init__(self, console: Console, board: Board) -> None:
        self._board = board
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def _render(self) -> RenderableType:
        return board_table(self._board, time.time(), max(4, self._console.size.height - 6))


def board_table(board: Board, now: float, height: int) -> RenderableType:
    """At most `height` rows: what is under way or failed first, then what is finished."""
    rows = sorted(board.rows.values(), key=_urgency)
    shown = sorted(rows[:height], key=lambda row: (row.host, row.slot))
    table = Table(box=None, pad_edge=False, expand=False)
    table.add_column("host", no_wrap=True)
    table.add_column("slot", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("elapsed", justify="right", no_wrap=True)
    table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in shown:
        table.add_row(
            row.host,
            row.slot,
            Text(row.stage, style=stage_style(row.stage)),
            duration(max(0.0, row.elapsed(now))),
            Text(row.message.replace("\n", " ")),
        )
    foot = Text(f"{board.play or 'starting Ansible'}, {duration(now - board.started)}", style="dim")
    if len(rows) > height:
        left = rows[height:]
        finished = sum(row.finished for row in left)
        foot.append(f"; {len(left)} more rows, {finished} of them finished")
    return Group(table, foot) if rows else foot


def _urgency(row: Row) -> tuple[int, str, str]:
    if row.stage in ("failed", "unreachable", "refused"):
        return (0, row.host, row.slot)
    return (2 if row.finished else 1, row.host, row.slot)
