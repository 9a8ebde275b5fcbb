"""The production stack: one CUDA 13 throughout, its own compiler, and kernels tied to the torch they were built for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from fleet import stack, wheelfile
from fleet.stack import LockedWheel, Stack, StackError
from fleet.stack_lock import supported

NAME = "cu130-sglang0.5.11"
MINORS = ("3.11", "3.12")
# What makes and feeds a compiler: parts of different toolkits do not understand each other.
COMPILER = {"nvcc", "crt", "cccl", "runtime", "nvrtc"}


def wheels(minor: str) -> dict[str, LockedWheel]:
    return {wheel.name: wheel for wheel in stack.load(NAME).lock(minor).wheels}


@pytest.mark.parametrize("minor", MINORS)
def test_the_versions_that_have_to_match_are_locked_together(minor: str) -> None:
    locked = {name: wheel.version for name, wheel in wheels(minor).items()}
    wanted = {
        "torch": "2.11.0",
        "triton": "3.6.0",
        "sglang": "0.5.11",
        "sglang-kernel": "0.4.2",
        "flashinfer-python": "0.6.8.post1",
        "flashinfer-cubin": "0.6.8.post1",
        "transformers": "5.6.0",
        "soundfile": "0.13.1",
    }
    assert {name: locked.get(name) for name in wanted} == wanted
    assert Version(locked["kernels"]) < Version("0.13")
    assert Version(locked["tokenizers"]) <= Version("0.23.0")
    assert "sgl-kernel" not in locked


@pytest.mark.parametrize("minor", MINORS)
def test_there_is_one_cuda_and_its_whole_compiler(minor: str) -> None:
    locked = wheels(minor)
    assert not [name for name in locked if re.search(r"-cu1[12]\Z", name)]
    parts = {f"nvidia-cuda-{part}" for part in COMPILER} | {"nvidia-nvvm", "cuda-python", "cuda-bindings"}
    assert {name: ".".join(locked[name].version.split(".")[:2]) for name in parts} == dict.fromkeys(parts, "13.0")


@pytest.mark.parametrize("minor", MINORS)
def test_every_wheel_fits_the_python_and_the_oldest_host(minor: str) -> None:
    found = stack.load(NAME)
    fitting = set(supported(minor, found.arch, found.min_glibc))
    assert not [w.filename for w in wheels(minor).values() if not fitting & wheelfile.name_parts(w.filename)[2]]


def test_the_stack_asks_hosts_for_what_cuda_13_and_its_kernels_need() -> None:
    found = stack.load(NAME)
    assert (found.cuda, found.torch) == (13, "2.11.0+cu130")
    assert Version(found.min_driver) >= Version("580")
    assert "12.0" in found.archs
    assert found.toolkits["12."] == "12.9"
    assert found.ships_toolkit and found.needs_compiler
    assert "libnuma.so.1" in found.libraries


def test_every_constraint_says_why() -> None:
    lines = (stack.load(NAME).directory / "requirements.in").read_text().splitlines()
    groups = "\n".join(lines).split("\n\n")[1:]
    assert groups and all(group.startswith("#") for group in groups)


def replaced(name: str, **changes: object) -> Callable[[dict[str, LockedWheel]], None]:
    def act(found: dict[str, LockedWheel]) -> None:
        found[name] = LockedWheel(**{**found[name].as_dict(), **changes})

    return act


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced("sglang-kernel", sha256="0" * 64), r"sglang_kernel-0\.4\.2.* is not tied to a torch"),
        (replaced("torch", sha256="0" * 64), r"torch-2\.11\.0.* is not the 2\.11\.0\+cu130 build"),
        (
            replaced("torch", version="2.9.1", filename="torch-2.9.1-cp311-cp311-manylinux_2_28_x86_64.whl"),
            r"was built for torch 2\.11\.0 and CUDA 13, the lock has torch 2\.9\.1",
        ),
    ],
)
def test_a_kernel_beside_another_torch_is_refused_from_the_lock_alone(
    tmp_path: Path, change: Callable[[dict[str, LockedWheel]], None], words: str
) -> None:
    found = wheels("3.11")
    change(found)
    folder = Path(shutil.copytree(stack.load(NAME).directory, tmp_path / NAME))
    (folder / "requirements-py311.lock").write_text(stack.format_lock("changed", tuple(found.values())))
    spoiled: Stack = stack.load_directory(folder)
    with pytest.raises(StackError, match=words):
        spoiled.lock("3.11")
