"""The reader of shared libraries: right about real ones, and unharmed by damaged ones."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from audit_toys import CUBIN, PTX, elf, fatbin
from ddtree import native
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection


def write(folder: Path, data: bytes) -> Path:
    path = folder / "lib.so"
    path.write_bytes(data)
    return path


def symbols(path: Path) -> native.Symbols:
    with path.open("rb", buffering=0) as stream:
        return native.Image(stream).symbols()


def test_names_needs_and_run_path_are_read(tmp_path: Path) -> None:
    data = elf("libx.so.1", needed=["liba.so", "libb.so.2"], runpath="$ORIGIN/lib", defines=["libx.so.1", "X_2"])
    facts = native.read(write(tmp_path, data))
    assert (facts.machine, facts.soname, facts.runpath) == ("x86_64", "libx.so.1", "$ORIGIN/lib")
    assert facts.needed == ("liba.so", "libb.so.2")
    assert facts.defines == ("libx.so.1", "X_2")


def test_versions_are_read_for_each_library(tmp_path: Path) -> None:
    needs = {"libc.so.6": ["GLIBC_2.14", "GLIBC_2.34"], "libm.so.6": ["GLIBC_2.29"]}
    facts = native.read(write(tmp_path, elf(needs=needs)))
    assert facts.needs == {name: tuple(versions) for name, versions in needs.items()}


@pytest.mark.parametrize("gnu_hash", [False, True])
def test_weak_symbols_are_not_wanted_and_hidden_ones_not_offered(tmp_path: Path, gnu_hash: bool) -> None:
    data = elf(undefined=["need"], weak=["may"], exported=["offer", "more"], hidden=["mine"], gnu_hash=gnu_hash)
    found = symbols(write(tmp_path, data))
    assert found.undefined == {b"need"}
    assert found.exported == {b"offer", b"more"}


def test_architectures_of_device_code_are_told_apart(tmp_path: Path) -> None:
    device = (
        b"\0" * 8
        + fatbin((CUBIN, 90, True), (CUBIN, 80, False))
        + fatbin((PTX, 120, False), (CUBIN, 120, "f"), (7, 75, False))
    )
    assert native.read(write(tmp_path, elf(device=device))).archs == ("compute_120", "sm_80", "sm_90a", "sm_120f")


def test_a_library_without_device_code_has_no_architectures(tmp_path: Path) -> None:
    assert native.read(write(tmp_path, elf())).archs == ()


def test_every_cut_is_told_as_damage_or_read_without_it(tmp_path: Path) -> None:
    data = elf("libx.so", ["liba.so"], undefined=["a"], exported=["b"], needs={"libc.so.6": ["GLIBC_2.14"]})
    path = tmp_path / "lib.so"
    told = 0
    for length in range(len(data)):
        path.write_bytes(data[:length])
        try:
            native.read(path)
            symbols(path)
        except native.BadLibrary:
            told += 1
    assert told == len(data)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x02\x01" + b"\xff" * 200])
def test_what_is_no_library_is_told_so(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(native.BadLibrary):
        native.read(write(tmp_path, data))


def test_real_libraries_are_read_as_pyelftools_reads_them() -> None:
    folder = Path(sysconfig.get_paths()["platlib"])
    paths = sorted(folder.rglob("*.so*"), key=lambda path: path.stat().st_size)[:60]
    paths = [path for path in paths if native.is_elf(path)]
    assert len(paths) >= 10
    for path in paths:
        assert _mine(path) == _theirs(path), path


def _mine(path: Path) -> tuple[object, ...]:
    facts, found = native.read(path), symbols(path)
    needs = {library: set(versions) for library, versions in facts.needs.items()}
    return facts.soname, facts.needed, needs, found.undefined, found.exported


def _theirs(path: Path) -> tuple[object, ...]:
    soname, needed, needs = "", [], {}
    undefined, exported = set(), set()
    with path.open("rb") as stream:
        for section in ELFFile(stream).iter_sections():
            if isinstance(section, DynamicSection):
                for tag in section.iter_tags():
                    if tag.entry.d_tag == "DT_NEEDED":
                        needed.append(tag.needed)
                    elif tag.entry.d_tag == "DT_SONAME":
                        soname = tag.soname
            elif isinstance(section, GNUVerNeedSection):
                needs = {need.name: {item.name for item in items} for need, items in section.iter_versions()}
            elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                for symbol in section.iter_symbols():
                    bind, other = symbol["st_info"]["bind"], symbol["st_other"]["visibility"]
                    if not symbol.name or bind == "STB_LOCAL":
                        continue
                    if symbol["st_shndx"] == "SHN_UNDEF":
                        if bind != "STB_WEAK":
                            undefined.add(symbol.name.encode())
                    elif other in ("STV_DEFAULT", "STV_PROTECTED"):
                        exported.add(symbol.name.encode())
    return soname, tuple(needed), needs, undefined, exported
