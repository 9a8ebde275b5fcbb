"""ELF facts are read without loading anything, and hostile files are findings."""

from __future__ import annotations

import _ctypes
import random
from pathlib import Path

import pytest
from ddtree import elf


def library() -> Path:
    """A shared library that every Python installation has."""
    return Path(_ctypes.__file__)


def libc() -> Path:
    return next(path for path in (Path("/lib/x86_64-linux-gnu/libc.so.6"), Path("/lib64/libc.so.6")) if path.exists())


def test_needs_and_names_are_read() -> None:
    found = elf.read(library())
    assert found.machine == "x86_64" and "libc.so.6" in found.needed and found.soname == ""
    assert elf.read(libc()).soname == "libc.so.6"


def test_what_is_no_elf_file_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    for content in (b"", b"#!/bin/sh\n", b"\x7fELF"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"ELF|empty"):
            elf.read(path)
        assert elf.is_elf(path) == (content == b"\x7fELF")


def test_cut_and_damaged_files_are_errors_and_never_crashes(tmp_path: Path) -> None:
    good = library().read_bytes()[:200_000]
    dice = random.Random(11)
    path = tmp_path / "x.so"
    problems = 0
    for number in range(600):
        data = bytearray(good[: dice.randint(1, len(good))] if number % 2 else good)
        for _ in range(dice.randint(1, 12)):
            data[dice.randrange(min(len(data), 800))] = dice.randrange(256)
        path.write_bytes(bytes(data))
        try:
            elf.read(path)
        except ValueError:
            problems += 1
    assert problems > 100
