"""What engines print when they fail, as data: pattern, cause, fix, and whose fault it is.

Sources name the rows of the project's history (H1 to H15) or the public report in which the text was seen.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Signature:
    """`verdict` is `fail` (the release or its configuration) or `host_fault` (no release could have helped).

    `fatal` patterns end a gate at once although the process still lives.
    """

    id: str
    pattern: str
    cause: str
    fix: str
    source: str
    verdict: str = "fail"
    fatal: bool = False

    @property
    def regex(self) -> re.Pattern[str]:
        return _compiled(self.pattern)


_cache: dict[str, re.Pattern[str]] = {}


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern not in _cache:
        _cache[pattern] = re.compile(pattern)
    return _cache[pattern]


# The order matters: the first that matches a line names it, so special cases stand before general ones.
SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "abi-mismatch",
        r"undefined symbol: \S*(c10|torch|at\d|_ZN2at|_ZN3c10)",
        "a native extension was built for another torch than the one that is installed",
        "deploy a release whose kernels and torch come from one stack lock; no library path can mend this",
        "H3, github.com/sgl-project/sglang/issues/36462",
        fatal=True,
    ),
    Signature(
        "undefined-symbol",
        r"undefined symbol: \S+",
        "a native extension does not fit the libraries that it was loaded with",
        "run `fleet preflight` and compare the release's BOM with its stack lock",
        "github.com/sgl-project/sglang/issues/29317",
        fatal=True,
    ),
    Signature(
        "missing-nvrtc",
        r"libnvrtc\.so[.\d]*: cannot open shared object file",
        "the NVRTC library of the CUDA major that a kernel was built for is not in the release",
        "the stack lock must hold nvidia-cuda-nvrtc of the same CUDA major as torch",
        "H7, github.com/sgl-project/sglang/issues/29646",
    ),
    Signature(
        "missing-cudart",
        r"libcudart\.so[.\d]*: cannot open shared object file",
        "packages built for two CUDA majors are mixed in one release",
        "use one CUDA major throughout the stack lock",
        "github.com/vllm-project/vllm/issues/52300",
    ),
    Signature(
        "missing-libcuda",
        r"libcuda\.so[.\d]*: cannot open shared object file",
        "the NVIDIA driver's user-space library is not on this host",
        "install the driver (580 or newer for CUDA 13) and check with nvidia-smi",
        "github.com/sgl-project/sglang/issues/3952",
        verdict="host_fault",
    ),
    Signature(
        "missing-numa",
        r"libnuma\.so[.\d]*: cannot open shared object file",
        "the system library libnuma is missing; kernels report it as a failed load",
        "install the package libnuma1 on the host",
        "github.com/sgl-project/sglang/pull/12119",
    ),
    Signature(
        "missing-library",
        r"(\S+\.so[.\d]*): cannot open shared object file",
        "a shared library that an extension needs is neither in the release nor on the host",
        "find what needs it in the release's BOM, then add it to the stack lock or install its system package",
        "github.com/sgl-project/sglang/pull/12119",
    ),
    Signature(
        "driver-mismatch",
        r"Driver/library version mismatch|NVML: Driver/library",
        "the NVIDIA kernel module and the user-space driver have different versions (an unattended upgrade)",
        "reboot the host or reload the modules; deploying again cannot help",
        "github.com/mozilla/translations/issues/1167",
        verdict="host_fault",
        fatal=True,
    ),
    Signature(
        "driver-too-old",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        "the NVIDIA driver is older than this release's CUDA needs",
        "upgrade the driver (580 or newer for CUDA 13)",
        "github.com/sgl-project/sglang/issues/11395",
        verdict="host_fault",
        fatal=True,
    ),
    Signature(
        "gpu-lost",
        r"fallen off the bus|GPU is lost|Unable to determine the device handle|no CUDA-capable device is detected"
        r"|is lost: nvidia-smi",
        "the GPU does not answer any more",
        "take the slot out of service, look at `dmesg` for Xid lines and reboot the host; the release is not to blame",
        "H13, github.com/NVIDIA/NVSentinel/issues/155",
        verdict="host_fault",
        fatal=True,
    ),
    Signature(
        "gpu-held",
        r"GPU \S+ of slot \S+ is held by another process",
        "another process uses the slot's GPU",
        "`fleet status` names it; stop it, or give the slot another GPU",
        "H14, github.com/vllm-project/vllm/issues/55510",
        verdict="host_fault",
    ),
    Signature(
        "gpu-xid",
        r"NVRM: Xid \(PCI:[^)]*\): (48|63|64|74|79|94|95|119|120|140|154|171)\b",
        "the GPU reported a hardware fault (Xid)",
        "take the slot out of service and have the GPU checked; the release is not to blame",
        "github.com/wtdcode/vllm-backport/issues/62",
        verdict="host_fault",
        fatal=True,
    ),
    Signature(
        "no-kernel-image",
        r"no kernel image is available for execution",
        "a kernel library holds no code for this GPU's architecture",
        "use a stack whose kernels cover the GPU (see its compute capability in `fleet status`)",
        "github.com/sgl-project/sglang/issues/38515",
        fatal=True,
    ),
    Signature(
        "sm12x-toolkit",
        r"SM 12\.x requires CUDA >= 12\.9",
        "a compiler at run time found the host's CUDA toolkit, which is too old for compute capability 12.x",
        "point CUDA_HOME at the release's own toolkit, or install CUDA 12.9 or newer",
        "H5, github.com/flashinfer-ai/flashinfer/pull/3633",
    ),
    Signature(
        "flashinfer-sm75",
        r"FlashInfer requires GPUs with sm75 or higher",
        "FlashInfer found no usable compiler for this GPU; the text blames the GPU",
        "install CUDA 12.9 or newer for compute capability 12.x, or ship prebuilt kernels",
        "github.com/flashinfer-ai/flashinfer/issues/3675",
    ),
    Signature(
        "no-nvcc",
        r"Could not find nvcc|cuda_home='?/usr/local/cuda'? doesn't exist",
        "a kernel has to be compiled at start and there is no CUDA compiler",
        "set CUDA_HOME to the release's toolkit in the slot's environment",
        "github.com/vllm-project/vllm/issues/19184",
    ),
    Signature(
        "cuda-oom",
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU has too little free memory for this configuration",
        "lower the memory fraction or the context length, and check that nothing else holds memory on the GPU",
        "H11, github.com/vllm-project/vllm/issues/55510",
    ),
    Signature(
        "graph-capture",
        r"Capture (cuda|CUDA) graph failed|CUDA graph capture failed|operation not permitted when stream is capturing",
        "capturing CUDA graphs failed",
        "try the slot without CUDA graphs, or with a smaller largest batch",
        "H11",
    ),
    Signature(
        "host-oom",
        r"^MemoryError\b|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: can't allocate memory",
        "the host or the unit's memory limit has too little memory",
        "raise the slot's memory limit or load fewer slots at once",
        "github.com/eugr/spark-vllm-docker/issues/257",
    ),
    Signature(
        "address-in-use",
        r"[Aa]ddress already in use|port \d+ is (already )?(in use|used by)|rpc_port .* is used by a process",
        "another process already listens on the slot's port",
        "`fleet status` names the process; choose another port or stop it",
        "H14, github.com/sgl-project/sglang/pull/31645",
    ),
    Signature(
        "cache-not-writable",
        r"(PermissionError|Permission denied).*(\.cache|/cache/|\.triton|flashinfer|huggingface)",
        "a cache directory is not writable for the service user",
        "the caches of a release must lie below fleet_cache and belong to fleet_user",
        "github.com/tenstorrent/tt-inference-server/issues/4574",
    ),
    Signature(
        "disk-full",
        r"No space left on device|Disk quota exceeded",
        "a file system of the host is full",
        "free space; `fleet status` shows the disks",
        "H15",
        verdict="host_fault",
    ),
    Signature(
        "missing-soundfile",
        r"No module named '(soundfile|_soundfile|torchcodec)'|sndfile library not found|libavutil\.so",
        "the server's audio routes import a package that the release does not hold",
        "add it to the stack lock; the import smoke run finds it before a slot is touched",
        "H8, github.com/huggingface/sentence-transformers/issues/3896",
    ),
    Signature(
        "kernels-revision",
        r"Either a revision or a version must be specified",
        "the installed `kernels` package is too new for the installed transformers",
        "constrain `kernels` in the stack lock",
        "github.com/sgl-project/sglang/issues/27654",
    ),
    Signature(
        "missing-module",
        r"ModuleNotFoundError: No module named '[^']+'",
        "the release lacks a Python package that the engine imports",
        "compare the release's BOM with its stack lock; a partial copy of packages looks like this",
        "H8",
    ),
    Signature(
        "import-name",
        r"ImportError: cannot import name '[^']+' from",
        "two packages of the release do not fit together",
        "rebuild the release from its stack lock",
        "H6",
    ),
    Signature(
        "start-timeout",
        r"start operation timed out|KeyboardInterrupt: terminated",
        "the engine was stopped by a start timeout while it was still loading",
        "raise fleet_gate.no_progress_s; the supervisor extends the timeout while loading makes progress",
        "github.com/vllm-project/vllm/issues/17386",
    ),
    Signature(
        "engine-hang",
        r"hangs: (requests ran|the engine has not answered)",
        "the engine hung: requests were running and no token came",
        "look at the stack dump and the GPU's Xid lines; a hang on every start is the release's fault",
        "github.com/vllm-project/vllm/issues/39863",
    ),
    Signature(
        "bad-proxy",
        r"InvalidURL: Invalid port|ProxyError",
        "a proxy variable of the host's environment reached the engine",
        "unset the proxy for the slot, or set NO_PROXY=127.0.0.1,localhost,0.0.0.0",
        "github.com/sgl-project/sglang/pull/28503",
    ),
    Signature(
        "model-missing",
        r"(model|draft|checkpoint|config\.json|safetensors)\S*.*(No such file or directory|does not exist|not found)|"
        r"(No such file or directory|does not exist).*(model|config\.json|safetensors)",
        "the model's files are not where the slot's configuration says",
        "check the path in fleet_slots and that fleet_user may read it",
        "H12",
    ),
    Signature(
        "bad-flag",
        r"error: unrecognized arguments|error: argument --?\S+: ",
        "the engine does not know a flag of the slot's configuration, or its value",
        "correct fleet_slots[].extra_args or the engine version",
        "H11",
    ),
)


def match(line: str) -> Signature | None:
    """The first signature that knows a line."""
    return next((signature for signature in SIGNATURES if signature.regex.search(line)), None)


def fatal(line: str) -> Signature | None:
    """The signature of a line after which waiting is pointless, else None."""
    for signature in SIGNATURES:
        if signature.fatal and signature.regex.search(line):
            return signature
    return None
