"""The CUDA toolkit of the engine's own environment, in the shape that just-in-time compilers expect.

Engines compile kernels at run time and look for a toolkit in CUDA_HOME, then on PATH, then in /usr/local/cuda: a host's
toolkit of another version would be taken without a word. The wheels of an environment hold a whole toolkit, but no
lib64 and no libcudart.so to link against; a folder of links in the cache directory adds these.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Where the driver's library lies, for those that link against it.
_DRIVER = ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib64/libcuda.so.1", "/usr/lib/libcuda.so.1")


def environment(environ: Mapping[str, str], site: Path | None = None, prefix: Path | None = None) -> dict[str, str]:
    """Variables that lead compilers and build tools to the engine's own environment; the rest stays as it is."""
    programs = (prefix or Path(sys.prefix)) / "bin"
    paths = [str(programs)]
    found = {}
    own = find(site or Path(sysconfig.get_path("purelib")))
    if own is not None:
        home = own
        with contextlib.suppress(OSError):  # without a cache directory: good for all that do not link
            home = view(own, _cache(environ) / "cuda")
        found = {"CUDA_HOME": str(home), "CUDA_PATH": str(home)}
        paths.append(str(home / "bin"))
    rest = [part for part in environ.get("PATH", os.defpath).split(":") if part and part not in paths]
    return {**found, "PATH": ":".join([*paths, *rest])}


def find(site: Path) -> Path | None:
    """The toolkit that the environment's wheels make up: the folder that holds bin/nvcc."""
    found = sorted(site.glob("nvidia/*/bin/nvcc"))
    return found[-1].parent.parent if found else None


def view(toolkit: Path, folder: Path) -> Path:
    """`folder` as a toolkit: links to `toolkit`, with lib64 and names to link against. Made once, safe to race for."""
    if _right(folder, toolkit):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".cuda-", dir=folder.parent))
    try:
        for part in sorted(toolkit.iterdir()):
            if part.name not in ("lib", "lib64"):
                (making / part.name).symlink_to(part)
        libraries = making / "lib64"
        (libraries / "stubs").mkdir(parents=True)
        (making / "lib").symlink_to("lib64")
        for library in sorted((toolkit / "lib").iterdir()):
            (libraries / library.name).symlink_to(library)
            plain = re.sub(r"\.so[.\d]+\Z", ".so", library.name)
            if plain != library.name and not (toolkit / "lib" / plain).exists():
                (libraries / plain).unlink(missing_ok=True)
                (libraries / plain).symlink_to(library)
        driver = next((path for path in _DRIVER if Path(path).exists()), None)
        if driver is not None:
            (libraries / "stubs" / "libcuda.so").symlink_to(driver)
        making.chmod(0o755)
        if folder.is_symlink() or folder.exists():
            folder.rename(making.with_name(f"{making.name}.old"))
        making.rename(folder)
    except OSError:
        if not _right(folder, toolkit):  # unless another slot of the release was faster
            raise
    finally:
        for leftover in (making, making.with_name(f"{making.name}.old")):
            shutil.rmtree(leftover, ignore_errors=True)
    return folder


def _right(folder: Path, toolkit: Path) -> bool:
    names = ("bin/nvcc", "lib64/libcudart.so")
    try:
        return (folder / "bin").resolve() == (toolkit / "bin").resolve() and all((folder / n).exists() for n in names)
    except OSError:
        return False


def _cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".cache")
