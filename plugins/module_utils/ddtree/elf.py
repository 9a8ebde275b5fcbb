"""The few facts of a shared library that a bill of materials needs, read without running or loading it.

Files are taken as hostile: every offset is checked, and what cannot be read is a ValueError, never a crash.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 14, 15, 29
_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64"}
_MOST_ENTRIES = 100_000


@dataclasses.dataclass(frozen=True)
class Library:
    """Dynamic facts of an ELF file."""

    machine: str
    soname: str
    needed: tuple[str, ...]
    runpath: str


def is_elf(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"\x7fELF"
    except OSError:
        return False


def read(path: Path) -> Library:
    """Facts of one file. Raises ValueError where it is no readable ELF file, OSError where it cannot be opened."""
    with path.open("rb") as stream:
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(data)
        except (struct.error, OverflowError) as error:  # an offset beyond the file, or beyond any file
            raise ValueError(f"truncated or damaged: {error}") from error


def _parse(data: mmap.mmap) -> Library:
    if data[:4] != b"\x7fELF" or len(data) < 52:
        raise ValueError("not an ELF file")
    wide, order = data[4] == 2, {1: "<", 2: ">"}.get(data[5])
    if order is None or data[4] not in (1, 2):
        raise ValueError("neither 32 nor 64 bit, or of unknown byte order")
    (machine,) = struct.unpack_from(f"{order}H", data, 18)
    if wide:
        (table,) = struct.unpack_from(f"{order}Q", data, 32)
        entry_size, count = struct.unpack_from(f"{order}HH", data, 54)
    else:
        (table,) = struct.unpack_from(f"{order}I", data, 28)
        entry_size, count = struct.unpack_from(f"{order}HH", data, 42)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, offset, address, size = _segment(data, order, wide, table + index * entry_size)
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, size)
    name = _MACHINES.get(machine, str(machine))
    if dynamic is None:
        return Library(name, "", (), "")
    return _dynamic(data, order, wide, dynamic, loads, name)


def _segment(data: mmap.mmap, order: str, wide: bool, at: int) -> tuple[int, int, int, int]:
    if wide:
        kind, _, offset, address, _, size = struct.unpack_from(f"{order}IIQQQQ", data, at)
    else:
        kind, offset, address, _, size = struct.unpack_from(f"{order}IIIII", data, at)
    return kind, offset, address, size


def _dynamic(
    data: mmap.mmap,
    order: str,
    wide: bool,
    where: tuple[int, int],
    loads: list[tuple[int, int, int]],
    machine: str,
) -> Library:
    offset, size = where
    layout = f"{order}qQ" if wide else f"{order}iI"
    step = struct.calcsize(layout)
    values: list[tuple[int, int]] = []
    for at in range(offset, offset + min(size, _MOST_ENTRIES * step), step):
        tag, value = struct.unpack_from(layout, data, at)
        if tag == 0:
            break
        values.append((tag, value))
    found = dict(values)
    start = _file_offset(found.get(_DT_STRTAB, -1), loads)
    length = found.get(_DT_STRSZ, 0)

    def text(position: int) -> str:
        begin = start + position
        end = data.find(b"\0", begin, start + length)
        if position >= length or end < 0:
            raise ValueError("a name lies outside the string table")
        return data[begin:end].decode("utf-8", "replace")

    return Library(
        machine,
        text(found[_DT_SONAME]) if _DT_SONAME in found else "",
        tuple(text(value) for tag, value in values if tag == _DT_NEEDED),
        text(found[_DT_RUNPATH]) if _DT_RUNPATH in found else text(found[_DT_RPATH]) if _DT_RPATH in found else "",
    )


def _file_offset(address: int, loads: list[tuple[int, int, int]]) -> int:
    for begin, offset, size in loads:
        if begin <= address < begin + size:
            return offset + address - begin
    raise ValueError("the string table lies outside the file")
