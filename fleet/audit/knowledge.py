"""What the world outside an environment is like, as data: system libraries, NVIDIA's wheels, files chosen at run time.

Everything that the audit knows and cannot read from files stands here, with the reason.
"""

from __future__ import annotations

import dataclasses
import re

# The C library, compiler runtimes and zlib: every host that runs a CPython has them.
ALWAYS_THERE = frozenset(
    {
        "libc.so.6",
        "libm.so.6",
        "libmvec.so.1",
        "libdl.so.2",
        "libpthread.so.0",
        "librt.so.1",
        "libutil.so.1",
        "libresolv.so.2",
        "libnsl.so.1",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
        "libgcc_s.so.1",
        "libstdc++.so.6",
        "libz.so.1",
        "libcrypt.so.1",
    }
)
# They come with the driver, and preflight looks after that.
DRIVER = frozenset(
    {
        "libcuda.so.1",
        "libnvidia-ml.so.1",
        "libnvidia-ptxjitcompiler.so.1",
        "libcudadebugger.so.1",
    }
)

# Which Debian package holds a library that wheels leave to the system.
DEBIAN = {
    "libnuma.so.1": "libnuma1",
    "libgomp.so.1": "libgomp1",
    "libgfortran.so.5": "libgfortran5",
    "libquadmath.so.0": "libquadmath0",
    "libopenblas.so.0": "libopenblas0",
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libmlx5.so.1": "ibverbs-providers",
    "libfabric.so.1": "libfabric1",
    "libucp.so.0": "libucx0",
    "libucs.so.0": "libucx0",
    "libmpi.so.40": "libopenmpi3",
    "liboshmem.so.40": "libopenmpi3",
    "libpmix.so.2": "libpmix2",
    "libsndfile.so.1": "libsndfile1",
    "libsox.so.3": "libsox3",
    "libGL.so.1": "libgl1",
    "libEGL.so.1": "libegl1",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libX11.so.6": "libx11-6",
    "libXext.so.6": "libxext6",
    "libSM.so.6": "libsm6",
    "libICE.so.6": "libice6",
    "libexpat.so.1": "libexpat1",
    "libbz2.so.1.0": "libbz2-1.0",
    "liblzma.so.5": "liblzma5",
    "libzstd.so.1": "libzstd1",
    "libssl.so.3": "libssl3",
    "libcrypto.so.3": "libssl3",
    "libffi.so.8": "libffi8",
    "libffi.so.7": "libffi7",
    "libtinfo.so.6": "libtinfo6",
    "libncurses.so.6": "libncurses6",
    "libreadline.so.8": "libreadline8",
    "libsqlite3.so.0": "libsqlite3-0",
    "libxml2.so.2": "libxml2",
    "libedit.so.2": "libedit2",
    "libunwind.so.8": "libunwind8",
    "libtcmalloc.so.4": "libgoogle-perftools4",
    "libjemalloc.so.2": "libjemalloc2",
    "libhwloc.so.15": "libhwloc15",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libcurl.so.4": "libcurl4",
    "libprotobuf.so.32": "libprotobuf32",
}
_FFMPEG = re.compile(r"lib(avutil|avcodec|avformat|avdevice|avfilter|swscale|swresample)\.so\.(\d+)\Z")


def debian_package(soname: str) -> str:
    match = _FFMPEG.match(soname)
    if match:
        return f"lib{match.group(1)}{match.group(2)} (ffmpeg)"
    if re.match(r"libpython3\.\d+\.so", soname):
        return soname.partition(".so")[0]
    return DEBIAN.get(soname, "")


# NVIDIA's libraries whose soname carries the CUDA major, and the wheel that brings each. cufft, cusolver, cusparse and
# curand number themselves differently and are left out: libcufft.so.12 is CUDA 13's.
CUDA_SONAMES = {
    "libcudart": "nvidia-cuda-runtime",
    "libnvrtc": "nvidia-cuda-nvrtc",
    "libnvrtc-builtins": "nvidia-cuda-nvrtc",
    "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas",
    "libnvblas": "nvidia-cublas",
    "libnvJitLink": "nvidia-nvjitlink",
    "libcupti": "nvidia-cuda-cupti",
    "libnvfatbin": "nvidia-nvfatbin",
}
# The others, with the wheel that brings them by the major in their soname.
OTHER_SONAMES = {
    "libcufft.so.11": "nvidia-cufft-cu12",
    "libcufft.so.12": "nvidia-cufft",
    "libcusolver.so.11": "nvidia-cusolver-cu12",
    "libcusolver.so.12": "nvidia-cusolver",
    "libcusparse.so.12": "nvidia-cusparse",
    "libcurand.so.10": "nvidia-curand",
    "libcufile.so.0": "nvidia-cufile",
    "libcudnn.so.9": "nvidia-cudnn-cu{major}",
    "libcusparseLt.so.0": "nvidia-cusparselt-cu{major}",
    "libnccl.so.2": "nvidia-nccl-cu{major}",
    "libnvshmem_host.so.3": "nvidia-nvshmem-cu{major}",
    "libnvToolsExt.so.1": "nvidia-nvtx-cu12",
    "libc10.so": "torch",
    "libc10_cuda.so": "torch (a CUDA build)",
    "libtorch.so": "torch",
    "libtorch_cpu.so": "torch",
    "libtorch_cuda.so": "torch (a CUDA build)",
    "libtorch_python.so": "torch",
}
_VERSIONED = re.compile(r"(lib[A-Za-z-]+)\.so\.(\d+)(?:\.\d+)*\Z")


def cuda_major(soname: str) -> int | None:
    """CUDA major that a soname stands for, where it stands for one."""
    match = _VERSIONED.match(soname)
    return int(match.group(2)) if match and match.group(1) in CUDA_SONAMES else None


def wheel_of(soname: str, major: int | None) -> str:
    """The distribution that brings an NVIDIA or torch library; empty if it is no such library."""
    match = _VERSIONED.match(soname)
    if match and match.group(1) in CUDA_SONAMES:
        name, number = CUDA_SONAMES[match.group(1)], int(match.group(2))
        return f"{name}-cu{number}" if number < 13 else name
    return OTHER_SONAMES.get(soname, "").format(major=major or 13)


# Distributions whose version is that of their CUDA release (the newer ones carry no -cuNN in their name).
VERSIONED_BY_CUDA = frozenset(
    {
        "cuda-toolkit",
        "cuda-bindings",
        "cuda-python",
        "nvidia-cublas",
        "nvidia-cuda-cccl",
        "nvidia-cuda-crt",
        "nvidia-cuda-cupti",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-runtime",
        "nvidia-cuda-profiler-api",
        "nvidia-nvfatbin",
        "nvidia-nvjitlink",
        "nvidia-nvtx",
        "nvidia-nvvm",
        "nvidia-cuda-opencl",
    }
)
# Parts of the compiler: all of one release, or nothing compiles.
TOOLCHAIN = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_SUFFIX = re.compile(r"-cu(\d{2})(?:\d)?\Z|-cuda(\d{2})x\Z")
_LOCAL = re.compile(r"(?:\A|\.)cu(\d{2})\d\Z")


def distribution_cuda(name: str, version: str, local: str = "") -> int | None:
    """CUDA major that a distribution was built for, told from its name and version; None if they do not tell."""
    for match in (_SUFFIX.search(name), _LOCAL.search(local)):
        if match:
            return int(next(group for group in match.groups() if group))
    if name in VERSIONED_BY_CUDA:
        head = re.match(r"\d+", version)
        return int(head.group()) if head else None
    return None


# Distributions that were renamed: both bring the same module, and only the new one is maintained.
RENAMED = {"sgl-kernel": "sglang-kernel", "flashinfer": "flashinfer-python", "pynvml": "nvidia-ml-py"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Files of which a package loads one, or none, as it finds the system at run time.

    A group `torch` (two digits and more: 29, 210), `cuda` or `python` in the pattern says for which one a file is made.
    """

    pattern: re.Pattern[str]
    why: str


CHOICES = (
    Choice(re.compile(r"torchcodec/libtorchcodec_\w+?\d+\.so"), "taken for the FFmpeg that is found"),
    Choice(
        re.compile(r"torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch(?P<torch>\d+)-\w+\.so"),
        "taken for the torch that is found",
    ),
    Choice(
        re.compile(r"torch_memory_saver_hook_mode_(?:preload|torch)(?:_cu(?P<cuda>\d+))?\.abi3\.so"),
        "taken for the CUDA that is found",
    ),
    Choice(re.compile(r"torchao/_C_cutlass_\d+a\.abi3\.so"), "taken on the architecture of its name only"),
    Choice(
        re.compile(r"nvidia/nvshmem/lib/nvshmem_(?:bootstrap|transport)_\w+\.so.*"),
        "transports and launchers, loaded as configured",
    ),
    Choice(re.compile(r"nvidia/[^/]+/lib/libcufile_rdma\.so.*"), "loaded for GPUDirect Storage over RDMA only"),
    Choice(re.compile(r"nvidia/[^/]+/(?:bin|extras|nsight)[^/]*/.*"), "developer tools, not loaded by the engine"),
    Choice(re.compile(r".*\.cpython-(?P<python>\d+)-[\w-]+\.so"), "Python loads the one for its own version"),
)


def choice(path: str, torch: str, cuda: int | None, python: str) -> tuple[Choice | None, bool]:
    """(the choice that the file at `path`, from site-packages, is part of; whether it is surely not the chosen one)."""
    for item in CHOICES:
        match = item.pattern.fullmatch(path)
        if not match:
            continue
        groups = {key: value for key, value in match.groupdict().items() if value}
        numbers = "".join(torch.split("+")[0].split(".")[:2])
        other = (
            ("torch" in groups and bool(torch) and groups["torch"] != numbers)
            or ("cuda" in groups and cuda is not None and groups["cuda"] != str(cuda))
            or ("python" in groups and bool(python) and groups["python"] != python.replace(".", ""))
        )
        if set(groups) == {"python"} and not other:
            return None, False  # an ordinary extension
        return item, other
    return None, False


@dataclasses.dataclass(frozen=True)
class Tie:
    """A kernel build and the one torch that it was built for. No metadata says so; it was found by trying."""

    name: str
    version: str
    torch: str
    cuda: int
    # of the wheel, and of what RECORD lists once it is installed
    sha256: str
    content_sha256: str


TIES = (
    Tie(
        "sglang-kernel",
        "0.4.2",
        "2.11.0",
        13,
        "11e8198d6f6ff47df2ff445e3add666897d7d75fddbed9ff862e7b42fd75530c",
        "ef1f3c150dc1ddfa5a3a5d5012fa4264b0e976ad959675f27d3d760b4111c43e",
    ),
)
# Distributions that need a tie: extensions of torch that declare no dependency on it.
NEED_TIE = frozenset({"sglang-kernel", "sgl-kernel"})
