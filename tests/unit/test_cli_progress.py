"""The board of a run under way, and its two ways of being shown."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from fleet.progress import Board
from fleet.render import PlainReporter, board_table, duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(
    stage: str, message: str = "", host: str = "ct200", slot: str | None = "gpu1", t: float = 1000.0
) -> dict[str, Any]:
    return {"t": t, "host": host, "slot": slot, "stage": stage, "message": message}


def text_of(board: Board, now: float, height: int = 10, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(board_table(board, now, height))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_row_shows_host_slot_stage_elapsed_and_last_line() -> None:
    board = Board(Clock())
    board.add_progress(record("activate/port", "nothing listens yet", t=1000.0))
    row = text_of(board, 1012.5).splitlines()[1].split()
    assert row == ["ct200", "gpu1", "activate/port", "12.5", "s", "nothing", "listens", "yet"]


def test_a_finished_row_stops_its_clock() -> None:
    board = Board(Clock())
    board.add_progress(record("activate", t=1000.0))
    board.add_progress(record("done", t=1004.0))
    assert "4.0 s" in text_of(board, 1060.0).splitlines()[1]


def test_hosts_that_say_nothing_themselves_show_the_role_that_runs() -> None:
    board = Board(Clock())
    board.add_event(
        {"event": "runner_on_start", "event_data": {"host": "ct129", "task": "release : Build the release"}}
    )
    assert board.rows[("ct129", "")].stage == "release"


def test_a_stage_of_the_host_itself_is_not_overwritten_by_task_names() -> None:
    board = Board(Clock())
    board.add_progress(record("build", slot=None))
    board.add_event({"event": "runner_on_start", "event_data": {"host": "ct200", "task": "release : Build"}})
    assert board.rows[("ct200", "")].stage == "build"


def test_failed_and_unreachable_hosts_show_why() -> None:
    board = Board(Clock())
    data = {"host": "ct200", "task": "x", "res": {"msg": "no route\nto host"}}
    board.add_event({"event": "runner_on_unreachable", "event_data": data})
    assert (board.rows[("ct200", "")].stage, board.rows[("ct200", "")].message) == ("unreachable", "no route")


def test_a_large_fleet_fits_the_screen_with_what_matters_first() -> None:
    board = Board(Clock())
    for number in range(50):
        board.add_progress(record("done" if number else "failed", host=f"h{number:02d}", slot=None))
    board.add_progress(record("build", host="h99", slot=None))
    text = text_of(board, 1001.0, height=5)
    assert "h00" in text and "h99" in text
    assert "46 more rows, 46 of them finished" in text


def test_plain_output_has_one_line_per_stage_and_few_for_mere_messages() -> None:
    clock = Clock()
    board, out = Board(clock), io.StringIO()
    reporter = PlainReporter(Console(file=out, width=200), clock)
    for stage, message, later in [
        ("wheelhouse", "1/9", 0),
        ("wheelhouse", "2/9", 1),
        ("wheelhouse", "9/9", 9),
        ("build", "", 9),
    ]:
        clock.now = 1000.0 + later
        change = board.add_progress(record(stage, message))
        assert change is not None
        reporter.changed(change)
    assert [line.split()[1:] for line in out.getvalue().splitlines()] == [
        ["ct200/gpu1", "wheelhouse", "1/9"],
        ["ct200/gpu1", "wheelhouse", "9/9"],
        ["ct200/gpu1", "build"],
    ]


def test_the_same_record_twice_is_no_change() -> None:
    board = Board(Clock())
    assert board.add_progress(record("build", "x")) is not None
    assert board.add_progress(record("build", "x")) is None


def test_durations_read_like_durations() -> None:
    assert [duration(value) for value in (0.04, 59.9, 187, 7500)] == ["0.0 s", "59.9 s", "3 min 07 s", "2 h 05 min"]
