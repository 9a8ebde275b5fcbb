"""Compile and link a small CUDA kernel with nothing but what an environment's wheels bring; only g++ is the host's."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

from ddtree_engine.supervisor import toolkit as engine_toolkit
from fleet import content

from .environment import ProofError, Venv

content.add_host_code()

from ddtree import native  # noqa: E402

_TIMEOUT_S = 600
# Headers of three wheels (cccl, crt, runtime), device code that nvvm and ptxas have to agree on, and a launch.
_SOURCE = """
#include <cub/block/block_reduce.cuh>
#include <cuda/std/array>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

__global__ void total(const __nv_bfloat16 *in, float *out, int n) {
    using Reduce = cub::BlockReduce<float, 128>;
    __shared__ typename Reduce::TempStorage storage;
    cuda::std::array<float, 2> part = {0.f, 0.f};
    for (int i = threadIdx.x; i < n; i += blockDim.x) part[i & 1] += __bfloat162float(in[i]);
    float sum = Reduce(storage).Sum(part[0] + part[1]);
    if (threadIdx.x == 0) *out = sum;
}

extern "C" int proof_launch() {
    void *memory = nullptr;
    cudaError_t error = cudaMalloc(&memory, 4096);
    if (error != cudaSuccess) return error;
    total<<<1, 128>>>(static_cast<const __nv_bfloat16 *>(memory), static_cast<float *>(memory) + 512, 1024);
    error = cudaDeviceSynchronize();
    cudaFree(memory);
    return error;
}
"""
_LOAD = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); print(ctypes.CDLL(sys.argv[2]).proof_launch())"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What came out, and what it was made with."""

    architecture: str
    bytes: int
    contains: tuple[str, ...]
    needs: tuple[str, ...]
    nvcc: str
    tools: tuple[str, ...]
    cuda_headers: int
    # what the launch answered: 0 where there is a GPU for it, a cudaError where there is none
    launch: int


def compile_and_link(venv: Venv, folder: Path, architecture: str = "sm_120", standin: Path | None = None) -> Kernel:
    """Raises ProofError, also where a tool, a header or a library of the host's own toolkit took part."""
    folder.mkdir(parents=True, exist_ok=True)
    toolkit = engine_toolkit.view(_toolkit(venv.site), folder / "cuda")  # as the engine's own compilers get it
    source, out = folder / "kernel.cu", folder / "kernel.so"
    source.write_text(_SOURCE)
    # no CUDA_HOME and no toolkit on PATH: where nvcc lacks a part it has to fail, not to find the host's
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C.UTF-8"}
    nvcc = [str(toolkit / "bin" / "nvcc"), f"-arch={architecture}", "-std=c++17", "-Xcompiler", "-fPIC"]
    link = ["-shared", "-cudart", "none", f"-L{toolkit / 'lib64'}", "-lcudart", "-o", str(out), str(source)]
    said = _run([*nvcc, "--dryrun", *link], environment)
    tools = sorted(set(re.findall(r"(?<![\w+])(cicc|ptxas|fatbinary|cudafe\+\+|nvlink)(?![\w])", said)))
    foreign = sorted(set(re.findall(r"/usr/(?:local/)?[^\s\"']*cuda[^\s\"']*", said)))
    headers = _run([*nvcc, "-M", str(source)], environment).replace("\\\n", " ").split()
    cuda = [name for name in headers if re.search(r"cub/|cuda|crt/|nvidia", name)]
    foreign += [name for name in cuda if not Path(name).resolve().is_relative_to(venv.folder.resolve())
                and not Path(name).resolve().is_relative_to(folder.resolve())]  # fmt: skip
    if foreign:
        raise ProofError(f"the host's own CUDA toolkit takes part in the compilation: {', '.join(foreign[:5])}")
    _run([*nvcc, *link], environment)
    facts = native.read(out)
    if not any(item.rstrip("af") == architecture for item in facts.archs):
        raise ProofError(f"the kernel holds code for {', '.join(facts.archs) or 'no GPU'}, not for {architecture}")
    if "libcudart.so.13" not in facts.needed:
        raise ProofError(f"the kernel is linked against {', '.join(facts.needed)} instead of libcudart.so.13")
    if standin is not None:
        environment["LD_LIBRARY_PATH"] = str(standin.parent)
    runtime = toolkit / "lib" / "libcudart.so.13"
    answer = _run([str(venv.python), "-s", "-B", "-c", _LOAD, str(runtime), str(out)], environment)
    version = _run([nvcc[0], "--version"], environment)
    match = re.search(r"V(\d+\.\d+\.\d+)", version)
    return Kernel(
        architecture,
        out.stat().st_size,
        facts.archs,
        facts.needed,
        match.group(1) if match else version.strip()[-80:],
        tuple(tools),
        len(cuda),
        int(answer),
    )


def _toolkit(site: Path) -> Path:
    found = [path.parent.parent for path in sorted(site.glob("nvidia/*/bin/nvcc"))]
    if len(found) != 1:
        raise ProofError(f"the environment holds {len(found)} nvcc, it has to hold one: lock nvidia-cuda-nvcc")
    return found[0]


def _run(argv: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environment)
    if done.returncode != 0:
        raise ProofError(f"{' '.join(argv[:3])} ... failed:\n{(done.stderr or done.stdout).strip()[-3000:]}")
    return done.stdout + done.stderr
