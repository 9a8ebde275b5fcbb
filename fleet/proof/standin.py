"""A stand-in for the driver's libcuda.so.1: what links against it can be loaded on a machine without a driver.

It has every function that the environment's libraries want from the driver, and each answers that there is no device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from fleet import content

content.add_host_code()

from ddtree import native  # noqa: E402

SONAME = "libcuda.so.1"
_FUNCTION = re.compile(r"cu[A-Z]\w*\Z")
# CUDA_ERROR_NO_DEVICE
_NO_DEVICE = 100


class StandinError(RuntimeError):
    """The library could not be made; the message says what is missing."""


def driver_present() -> bool:
    """Does the dynamic linker of this machine know the real one?"""
    ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if ldconfig is None:
        return False
    done = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False, timeout=30)
    return any(line.split()[0] == SONAME for line in done.stdout.splitlines() if "=>" in line)


def wanted(site: Path) -> set[str]:
    """Driver functions that the libraries below `site` are linked against."""
    found: set[str] = set()
    for path in sorted(site.rglob("*.so*")):
        if path.is_symlink() or not path.is_file() or not native.is_elf(path):
            continue
        try:
            with path.open("rb", buffering=0) as stream:
                image = native.Image(stream)
                if SONAME in image.facts().needed:
                    names = (name.decode("ascii", "replace") for name in image.symbols().undefined)
                    found.update(name for name in names if _FUNCTION.match(name))
        except native.BadLibrary:
            continue  # the audit reports damaged files; here only what can be loaded matters
    return found


def make(folder: Path, functions: Iterable[str]) -> Path:
    """Write libcuda.so.1 into `folder`. Raises StandinError."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise StandinError("a stand-in for the driver needs a C compiler: install gcc")
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({*functions, "cuInit", "cuDeviceGetCount"})
    source = folder / "standin.c"
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names))
    library = folder / SONAME
    argv = [compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{SONAME}", "-o", str(library), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise StandinError(f"{compiler} cannot make a stand-in for {SONAME}: {done.stderr.strip()[-500:]}")
    return library
