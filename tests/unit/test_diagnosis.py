"""The line that says why is found, whichever process printed it and whatever was printed after it."""

from __future__ import annotations

import pytest
from ddtree.diagnosis import diagnose
from ddtree.signatures import SIGNATURES, fatal

HEALTHY = """\
Started ddtree-gpu1.service - DDTree engine, slot gpu1.
/venv/lib/python3.11/site-packages/x.py:3: DeprecationWarning: `python -m sglang.launch_server` is deprecated
[2026-10-01 10:00:00] server_args=ServerArgs(model_path='/models/qwen', fail_fast=False, log_level='error')
[2026-10-01 10:00:02 TP0] Init torch distributed begin.
[2026-10-01 10:00:04 TP0] Load weight begin. avail mem=94.20 GB
Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:09<00:00, 2.31s/it]
[2026-10-01 10:00:20 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=22.01 GB
[2026-10-01 10:00:31] INFO:     Uvicorn running on http://127.0.0.1:30001 (Press CTRL+C to quit)
[2026-10-01 10:00:32] The server is fired up and ready to roll!
""".splitlines()

CASES = {
    "abi-mismatch": "ImportError: /v/sgl_kernel/common_ops.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
    "undefined-symbol": "ImportError: /v/x.so: undefined symbol: PyLong_AsDoubleX",
    "missing-nvrtc": "ImportError: libnvrtc.so.13: cannot open shared object file: No such file or directory",
    "missing-cudart": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "missing-libcuda": "OSError: libcuda.so.1: cannot open shared object file: No such file or directory",
    "missing-numa": "OSError: libnuma.so.1: cannot open shared object file: No such file or directory",
    "missing-library": "OSError: libavdevice.so.60: cannot open shared object file: No such file or directory",
    "driver-mismatch": "Failed to initialize NVML: Driver/library version mismatch",
    "driver-too-old": "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).",
    "gpu-lost": "NVRM: GPU at PCI:0000:29:00: GPU has fallen off the bus and is not responding",
    "gpu-xid": "NVRM: Xid (PCI:0000:29:00): 94, pid=77, Contained memory error",
    "no-kernel-image": "CUDA error: no kernel image is available for execution on the device",
    "sm12x-toolkit": "RuntimeError: SM 12.x requires CUDA >= 12.9",
    "flashinfer-sm75": "RuntimeError: FlashInfer requires GPUs with sm75 or higher",
    "no-nvcc": "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
    "cuda-oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "graph-capture": "Exception: Capture cuda graph failed: unknown error",
    "host-oom": "MemoryError",
    "address-in-use": "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
    "cache-not-writable": "PermissionError: [Errno 13] Permission denied: '/root/.cache/huggingface'",
    "disk-full": "OSError: [Errno 28] No space left on device",
    "missing-soundfile": "ModuleNotFoundError: No module named 'soundfile'",
    "kernels-revision": "ValueError: Either a revision or a version must be specified.",
    "missing-module": "ModuleNotFoundError: No module named 'orjson'",
    "import-name": "ImportError: cannot import name 'Qwen3Config' from 'transformers'",
    "start-timeout": "ddtree-gpu1.service: start operation timed out. Terminating.",
    "engine-hang": "ddtree-launch: error: the engine of slot gpu1 hangs: requests ran 30 s without a token: 2 running",
    "gpu-held": "ddtree-prestart: error: GPU GPU-1 of slot gpu1 is held by another process: pid 7 (python3)",
    "bad-proxy": "httpx.InvalidURL: Invalid port: ':'",
    "model-missing": "FileNotFoundError: [Errno 2] No such file or directory: '/models/qwen/config.json'",
    "bad-flag": "launch_server.py: error: unrecognized arguments: --speculative-tree 3",
}


def test_every_signature_has_a_case_here() -> None:
    assert set(CASES) == {signature.id for signature in SIGNATURES}
    assert all(signature.cause and signature.fix and signature.source for signature in SIGNATURES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_known_line_is_named_among_others(name: str) -> None:
    log = [*HEALTHY[:5], "Traceback (most recent call last):", '  File "a.py", line 3, in <module>', CASES[name]]
    log += ["Traceback (most recent call last):", "ConnectionResetError: scheduler gone", "engine ended: status 1"]
    found = diagnose(log)
    assert found.signature is not None and found.signature.id == name
    assert CASES[name].endswith(found.root[-20:])


@pytest.mark.parametrize("line", HEALTHY)
def test_no_signature_fires_on_a_healthy_start(line: str) -> None:
    assert diagnose([line], default="nothing").signature is None
    assert fatal(line) is None


def test_a_chained_traceback_gives_its_origin() -> None:
    log = """\
Traceback (most recent call last):
  File "engine.py", line 10, in load
    value = table["k"]
KeyError: 'k'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "server.py", line 99, in main
    raise SystemExit(1) from None
RuntimeError: server failed to start
""".splitlines()
    assert diagnose(log).root == "KeyError: 'k'"


def test_a_child_process_is_heard_through_its_logger_prefix() -> None:
    log = [
        "[2026-10-01 10:00:04 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "scheduler.py", line 7, in run',
        "    raise ValueError('bad page size')",
        "ValueError: bad page size",
        "",
        "Received sigquit from a child process. It usually means the child failed.",
        "KeyboardInterrupt",
    ]
    assert diagnose(log).root == "ValueError: bad page size"


def test_a_mere_consequence_is_not_the_root() -> None:
    log = ["Traceback (most recent call last):", '  File "x"', "KeyboardInterrupt", "OSError: the disk went away"]
    assert diagnose(log).root == "OSError: the disk went away"


def test_without_any_traceback_the_first_bad_line_is_shown() -> None:
    assert diagnose(["loading", "fatal: tokenizer is cut off", "cleanup failed"]).root == "fatal: tokenizer is cut off"


def test_a_cut_off_log_falls_back_to_what_the_unit_says() -> None:
    log = ["x.py:3: DeprecationWarning: launch_server is old", "ddtree-gpu1.service: Failed with result 'exit-code'."]
    assert diagnose(log, default="exited with status 1").root == "exited with status 1"


def test_a_hardware_fault_does_not_blame_the_release() -> None:
    assert diagnose([CASES["gpu-lost"]]).verdict == "host_fault"
    assert diagnose([CASES["cuda-oom"]]).verdict == "fail"
    assert fatal(CASES["gpu-xid"]) is not None
    assert fatal("NVRM: Xid (PCI:0000:29:00): 45, pid=1, Ch 00000001") is None
