"""What a shared library says of itself: names, needs, symbols, symbol versions and GPU architectures.

Files are taken as hostile: nothing is loaded or mapped, every offset and every size is checked against the file before
it is used, every loop has an end of its own, and what cannot be read is a BadLibrary, never a crash or a hang.
"""

from __future__ import annotations

import array
import dataclasses
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"\x7fELF"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_SHT_DYNSYM = 11
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT = 1, 4, 5, 6, 10, 11
_DT_SONAME, _DT_RPATH, _DT_RUNPATH, _DT_GNU_HASH = 14, 15, 29, 0x6FFFFEF5
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 190: "cuda"}
_FATBIN_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN_PTX, _FATBIN_CUBIN = 1, 2
# code that uses features of exactly one architecture (sm_90a), or of one family (sm_120f); as nvcc 13.0 marks them
_FATBIN_EXACT, _FATBIN_FAMILY = 0x0010_0000, 0x0020_0000
_MOST_ENTRIES = 1_000_000
_MOST_HEADERS = 65_536
_MOST_BYTES = 512 << 20


class BadLibrary(ValueError):
    """No ELF file, or one that is damaged; the message says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Native:
    """Facts of one file. `needs` are the symbol versions asked of each library, `defines` those that it offers.

    `archs` are the GPU architectures of embedded device code: `sm_90`, `sm_90a` (exactly that one), `sm_120f` (that
    family), and `compute_90` likewise (PTX).
    """

    machine: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    runpath: str = ""
    needs: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    defines: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Only what there is, so that a thousand of them stay small; lists, as JSON has no tuples."""
        found: dict[str, Any] = {"needs": {library: list(names) for library, names in self.needs.items()}}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found.setdefault(field.name, list(value) if isinstance(value, tuple) else value)
        return {name: value for name, value in found.items() if value}


@dataclasses.dataclass(frozen=True)
class Symbols:
    """Dynamic symbols by name: what must come from elsewhere (weak ones may stay away, so they are not listed), and
    what others can use."""

    undefined: frozenset[bytes]
    exported: frozenset[bytes]


def is_elf(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def read(path: Path) -> Native:
    """Facts of one file. Raises BadLibrary, or OSError where it cannot be opened."""
    with path.open("rb", buffering=0) as stream:
        return Image(stream).facts()


class Image:
    """One ELF file, open for reading at any place. Raises BadLibrary from every method."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = stream.seek(0, 2)
        header = self._bytes(0, min(self._size, 64))
        if header[:4] != MAGIC:
            raise BadLibrary("not an ELF file")
        if len(header) < 52 or header[4] not in (1, 2) or header[5] not in (1, 2):
            raise BadLibrary("neither 32 nor 64 bit, or of unknown byte order, or cut off in its header")
        self._wide = header[4] == 2
        self._order = "<" if header[5] == 1 else ">"
        if self._wide and len(header) < 64:
            raise BadLibrary("cut off in its header")
        self._machine, *_ = struct.unpack_from(f"{self._order}H", header, 18)
        layout = f"{self._order}{'QQQ' if self._wide else 'III'}I6H"
        values = struct.unpack_from(layout, header, 24)
        _, self._program, self._sections, _, _, self._ph_size, self._ph_count, *rest = values
        self._sh_size, self._sh_count, self._sh_names = rest
        self._loads, self._dynamic = self._segments()
        self._strings: bytes | None = None

    def facts(self) -> Native:
        machine = _MACHINES.get(self._machine, f"machine {self._machine}")
        archs = tuple(sorted(self._archs(), key=_arch_order))
        if not self._dynamic:
            return Native(machine, archs=archs)
        found = dict(self._dynamic)
        path = found.get(_DT_RUNPATH, found.get(_DT_RPATH))
        return Native(
            machine,
            soname=self._text(found[_DT_SONAME]) if _DT_SONAME in found else "",
            needed=tuple(self._text(value) for tag, value in self._dynamic if tag == _DT_NEEDED),
            runpath=self._text(path) if path is not None else "",
            needs=self._version_needs(found),
            defines=self._version_definitions(found),
            archs=archs,
        )

    def symbols(self) -> Symbols:
        found = dict(self._dynamic)
        if _DT_SYMTAB not in found:
            return Symbols(frozenset(), frozenset())
        layout = struct.Struct(f"{self._order}IBBHQQ" if self._wide else f"{self._order}IIIBBH")
        if found.get(_DT_SYMENT, layout.size) != layout.size:
            raise BadLibrary(f"symbols of {found[_DT_SYMENT]} bytes")
        table = self._bytes(self._offset(found[_DT_SYMTAB]), self._symbol_count(found) * layout.size)
        strings = self._string_table()
        undefined, exported = set(), set()
        for entry in layout.iter_unpack(table):
            if self._wide:
                at, info, other, section = entry[:4]
            else:
                at, _, _, info, other, section = entry
            bind = info >> 4
            if at == 0 or bind == 0:
                continue
            end = strings.find(b"\0", at)
            if end < 0:
                raise BadLibrary("a symbol's name lies outside the string table")
            if section:
                if other & 3 in (0, 3):  # default or protected: visible to others
                    exported.add(strings[at:end])
            elif bind != 2:
                undefined.add(strings[at:end])
        return Symbols(frozenset(undefined), frozenset(exported))

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _bytes(self, at: int, count: int) -> bytes:
        if at < 0 or count < 0 or at + count > self._size:
            raise BadLibrary(f"truncated: {count} bytes at {at} lie outside its {self._size} bytes")
        if count > _MOST_BYTES:
            raise BadLibrary(f"a table of {count} bytes")
        self._stream.seek(at)
        data = b""
        while len(data) < count:
            chunk = self._stream.read(count - len(data))
            if not chunk:
                raise BadLibrary(f"truncated while it was read, at {at + len(data)}")
            data = data + chunk if data else chunk
        return data

    def _segments(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        loads: list[tuple[int, int, int]] = []
        dynamic: list[tuple[int, int]] = []
        layout = struct.Struct(f"{self._order}IIQQQQ" if self._wide else f"{self._order}IIIII")
        if self._ph_count and self._ph_size < layout.size:
            raise BadLibrary(f"program headers of {self._ph_size} bytes")
        table = self._bytes(self._program, self._ph_count * self._ph_size)
        for index in range(self._ph_count):
            values = layout.unpack_from(table, index * self._ph_size)
            if self._wide:
                kind, _, offset, address, _, size = values
            else:
                kind, offset, address, _, size = values
            if kind == _PT_LOAD:
                loads.append((address, offset, size))
            elif kind == _PT_DYNAMIC and not dynamic:
                dynamic = self._dynamic_entries(offset, size)
        return loads, dynamic

    def _dynamic_entries(self, offset: int, size: int) -> list[tuple[int, int]]:
        layout = struct.Struct(f"{self._order}qQ" if self._wide else f"{self._order}iI")
        size = min(size, _MOST_HEADERS * layout.size)
        found = []
        for tag, value in layout.iter_unpack(self._bytes(offset, size - size % layout.size)):
            if tag == 0:
                break
            found.append((tag, value))
        return found

    def _offset(self, address: int) -> int:
        for begin, offset, size in self._loads:
            if begin <= address < begin + size:
                return offset + address - begin
        raise BadLibrary(f"address {address:#x} lies outside the file")

    def _string_table(self) -> bytes:
        if self._strings is None:
            found = dict(self._dynamic)
            if _DT_STRTAB not in found:
                raise BadLibrary("has no string table")
            self._strings = self._bytes(self._offset(found[_DT_STRTAB]), found.get(_DT_STRSZ, 0))
        return self._strings

    def _text(self, at: int) -> str:
        strings = self._string_table()
        end = strings.find(b"\0", at) if at < len(strings) else -1
        if end < 0:
            raise BadLibrary("a name lies outside the string table")
        if end - at > 4096:
            raise BadLibrary(f"a name of {end - at} bytes")
        return strings[at:end].decode("utf-8", "replace")

    # -- symbols and their versions ------------------------------------------------------------------------------------

    def _symbol_count(self, found: dict[int, int]) -> int:
        if _DT_HASH in found:
            _, count = struct.unpack(f"{self._order}II", self._bytes(self._offset(found[_DT_HASH]), 8))
            return int(count)
        if _DT_GNU_HASH in found:
            return self._gnu_hash_count(self._offset(found[_DT_GNU_HASH]))
        for kind, _, size, step in self._section_headers():
            if kind == _SHT_DYNSYM and step:
                return size // step
        raise BadLibrary("symbols that nothing counts")

    def _gnu_hash_count(self, at: int) -> int:
        """The table has no count: the highest bucket's chain ends with the last symbol."""
        buckets, first, bloom, _ = struct.unpack(f"{self._order}4I", self._bytes(at, 16))
        at += 16 + bloom * (8 if self._wide else 4)
        highest = max(self._numbers(at, buckets), default=0)
        if highest < first:
            return int(first)
        at += buckets * 4 + (highest - first) * 4
        count = highest
        while True:
            for value in self._numbers(at, min(4096, (self._size - at) // 4)):
                count += 1
                if value & 1:
                    return int(count)
            if at + 4 > self._size:
                raise BadLibrary("a chain of symbols without end")
            at += 4096 * 4

    def _numbers(self, at: int, count: int) -> array.array[int]:
        numbers = array.array("I")
        numbers.frombytes(self._bytes(at, count * 4))
        if (self._order == "<") != (sys.byteorder == "little"):
            numbers.byteswap()
        return numbers

    def _version_needs(self, found: dict[int, int]) -> dict[str, tuple[str, ...]]:
        if _DT_VERNEED not in found:
            return {}
        needs: dict[str, tuple[str, ...]] = {}
        for at in self._chain(found, _DT_VERNEED, _DT_VERNEEDNUM, 16):
            _, count, file, first, _ = struct.unpack(f"{self._order}HHIII", self._bytes(at, 16))
            names = []
            at += first
            for _ in range(count):
                _, _, _, name, following = struct.unpack(f"{self._order}IHHII", self._bytes(at, 16))
                names.append(self._text(name))
                if not following:
                    break
                at += following
            library = self._text(file)
            needs[library] = tuple(sorted({*needs.get(library, ()), *names}))
        return needs

    def _version_definitions(self, found: dict[int, int]) -> tuple[str, ...]:
        if _DT_VERDEF not in found:
            return ()
        names = []
        for at in self._chain(found, _DT_VERDEF, _DT_VERDEFNUM, 20):
            first = struct.unpack(f"{self._order}I", self._bytes(at + 12, 4))[0]
            names.append(self._text(struct.unpack(f"{self._order}I", self._bytes(at + first, 4))[0]))
        return tuple(names)

    def _chain(self, found: dict[int, int], table: int, number: int, size: int) -> Iterator[int]:
        """Places of the records of a chain whose last word is the distance to the next one. It only goes forward."""
        at = self._offset(found[table])
        for _ in range(min(found.get(number, 0), _MOST_HEADERS)):
            yield at
            (following,) = struct.unpack(f"{self._order}I", self._bytes(at + size - 4, 4))
            if not following:
                return
            at += following

    # -- sections and device code --------------------------------------------------------------------------------------

    def _section_headers(self, names: list[int] | None = None) -> Iterator[tuple[int, int, int, int]]:
        """(type, offset, size, entry size) of each section; fills `names` with the places of their names."""
        layout = struct.Struct(f"{self._order}{'IIQQQQIIQQ' if self._wide else '10I'}")
        if not self._sections or not self._sh_count:
            return
        if self._sh_size < layout.size:
            raise BadLibrary(f"section headers of {self._sh_size} bytes")
        table = self._bytes(self._sections, self._sh_count * self._sh_size)
        for index in range(self._sh_count):
            name, kind, _, _, offset, size, _, _, _, step = layout.unpack_from(table, index * self._sh_size)
            if names is not None:
                names.append(name)
            yield kind, offset, size, step

    def _archs(self) -> set[str]:
        names: list[int] = []
        headers = list(self._section_headers(names))
        if self._sh_names >= len(headers):
            return set()
        _, offset, size, _ = headers[self._sh_names]
        texts = self._bytes(offset, size)
        found: set[str] = set()
        for at, (_, offset, size, _) in zip(names, headers, strict=True):
            if any(texts.startswith(section + b"\0", at) for section in _FATBIN_SECTIONS):
                found |= self._device_code(offset, size)
        return found

    def _device_code(self, at: int, size: int) -> set[str]:
        """Architectures in a section of fat binaries: containers, each with images behind headers of their own."""
        end = at + size
        if end > self._size:
            raise BadLibrary("truncated: its device code lies outside the file")
        found: set[str] = set()
        budget = _MOST_ENTRIES
        while at + 16 <= end and budget > 0:
            budget -= 1
            magic, _, header, length = struct.unpack("<IHHQ", self._bytes(at, 16))
            if magic != _FATBIN_MAGIC:
                at += 8  # padding between containers
                continue
            if header < 16 or at + header + length > end:
                raise BadLibrary("truncated: a fat binary lies outside its section")
            image, at = at + header, at + header + length
            while image + 32 <= at and budget > 0:
                budget -= 1
                entry = self._bytes(image, min(64, at - image))
                kind, _, header, length = struct.unpack_from("<HHIQ", entry, 0)
                (arch,) = struct.unpack_from("<I", entry, 28)
                flags = struct.unpack_from("<Q", entry, 40)[0] if len(entry) >= 48 else 0
                if header < 32:
                    raise BadLibrary("a fat binary's image has no header")
                mark = "a" if flags & _FATBIN_EXACT else "f" if flags & _FATBIN_FAMILY else ""
                if kind in (_FATBIN_PTX, _FATBIN_CUBIN) and 10 <= arch < 1000:
                    found.add(f"{'sm' if kind == _FATBIN_CUBIN else 'compute'}_{arch}{mark}")
                image += header + length
        return found


def _arch_order(arch: str) -> tuple[str, int, str]:
    kind, _, number = arch.partition("_")
    digits = number.rstrip("af")
    return kind, int(digits or 0), number
