"""Running another program: ends, missing programs, and those that never end."""

from __future__ import annotations

import time

import pytest
from ddtree.process import CommandError, run


def test_output_and_status_are_returned() -> None:
    result = run("sh", "-c", "cat; echo err >&2; exit 3", stdin="in", check=False)
    assert (result.code, result.out, result.err) == (3, "in", "err\n")


def test_a_failing_command_that_had_to_succeed_raises_with_its_last_words() -> None:
    with pytest.raises(CommandError, match="status 4: reason"):
        run("sh", "-c", "echo reason >&2; exit 4")


def test_a_missing_program_is_status_127() -> None:
    assert run("no-such-program-here", check=False).code == 127


def test_a_file_that_is_no_program_is_status_126() -> None:
    result = run("/etc/passwd", check=False)
    assert (result.code, "cannot be run" in result.err) == (126, True)


def test_a_program_that_does_not_end_is_given_up_with_what_it_said_so_far() -> None:
    began = time.monotonic()
    # its child keeps the pipe open after the shell was killed
    result = run("sh", "-c", "trap '' TERM INT; echo started; sleep 30", check=False, timeout=0.5)
    assert (result.code, result.out) == (124, "started\n")
    assert "no answer within 0.5 s" in result.err
    assert time.monotonic() - began < 4
