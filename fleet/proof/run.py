"""Prove a stack's lock: make a venv from it, import what a server imports, compile a kernel for the newest GPU."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet import content, engine_wheel
from fleet.stack import LockedWheel, Stack
from fleet.wheelhouse import Wheelhouse

from . import environment, imports, kernel, standin
from .environment import ProofError

Say = Callable[[str], None]
# Space for one venv, its unpacked wheels and what is compiled, per byte that stack.yml says that a release takes.
_RESERVE = 1.2


def default_folder() -> Path:
    return Wheelhouse().root.parent / "proof"


def prove(stack: Stack, minor: str, engine: str, house: Wheelhouse, folder: Path, say: Say) -> dict[str, Any]:
    """Figures of the proof. Raises ProofError. The venv is removed; `folder`/cache stays for the next minor."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < stack.install_bytes * _RESERVE:
        raise ProofError(
            f"{folder} needs {stack.install_bytes * _RESERVE / 1e9:.0f} GB, but has {free / 1e9:.0f} GB free"
        )
    wheels = stack.release_wheels(minor, engine)
    rendered = engine_wheel.render(engine_wheel.package_directory(""))
    own = LockedWheel("ddtree-engine", rendered.version, rendered.filename, rendered.sha256, rendered.size)
    house.add(own, rendered.data)
    target = folder / f"venv-{minor}"
    shutil.rmtree(target, ignore_errors=True)
    began = time.monotonic()
    try:
        say(f"Python {minor}: a venv of {len(wheels) + 1} wheels")
        venv = environment.make(house, (*wheels, own), minor, target, folder / "cache")
        answer = _look(stack, engine, venv, folder / f"build-{minor}", say)
    finally:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(folder / f"build-{minor}", ignore_errors=True)
    lock = stack.lock(minor)
    return {
        "stack": stack.name,
        "engine": engine,
        "python": venv.version,
        "lock": {"sha256": lock.sha256, "wheels": len(lock.wheels), "bytes": lock.size},
        "installed": [f"{wheel.name} {wheel.version}" for wheel in wheels if wheel.name in _SHOWN],
        "venv": {"seconds": round(venv.seconds, 1), "files": venv.files, "bytes": venv.bytes},
        **answer,
        "seconds": round(time.monotonic() - began, 1),
    }


_SHOWN = (
    *("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "flashinfer-cubin", "transformers"),
    *("kernels", "tokenizers", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"),
    *("nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "cuda-bindings"),
)


def _look(stack: Stack, engine: str, venv: environment.Venv, folder: Path, say: Say) -> dict[str, Any]:
    library: Path | None = None
    answer: dict[str, Any] = {}
    if stack.cuda and not standin.driver_present():
        functions = standin.wanted(venv.site)
        library = standin.make(folder / "driver", functions)
        answer["standin"] = {"library": standin.SONAME, "functions": len(functions)}
        say(f"  no driver here: a stand-in with {len(functions)} functions")
    names, packages = stack.smoke[engine], ["sglang.srt.models"] if engine == "sglang" else []
    views: list[tuple[str, tuple[int, int] | None]] = [("without a GPU", None)]
    if stack.cuda:
        views.append(("as on a GPU of 12.0", (12, 0)))
    answer["imports"] = {}
    for title, capability in views:
        began = time.monotonic()
        found = imports.run(venv, names, packages=packages, capability=capability, standin=library)
        seconds = round(time.monotonic() - began, 1)
        answer["imports"][title] = {"seconds": seconds, **dataclasses.asdict(found)}
        say(
            f"  imports {title}: {len(found.modules)} entry modules, {found.imported} modules, {found.libraries} "
            f"libraries, {found.walked - len(found.optional)} of {found.walked} models, torch "
            f"{found.torch['version']}, {seconds} s"
        )
        if found.torch["version"] != stack.torch:
            raise ProofError(f"torch says that it is {found.torch['version']}, the stack says {stack.torch}")
    if stack.ships_toolkit:
        made = kernel.compile_and_link(venv, folder / "kernel", standin=library)
        answer["kernel"] = dataclasses.asdict(made)
        say(f"  kernel for {made.architecture}: nvcc {made.nvcc}, holds {', '.join(made.contains)}, {made.bytes} bytes")
    return answer


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fleet": content.version(),
        "system": f"{platform.system()} {platform.machine()}, glibc {platform.libc_ver()[1]}",
        "driver": "present" if standin.driver_present() else "none",
    }
