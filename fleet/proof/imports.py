"""Import everything that a server imports, in a process of the environment that is proven.

Twice: as on this machine, and with torch's questions about the GPU answered as an idle GPU would, because much of an
engine is imported only where there is one. No kernel is launched.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree_engine.supervisor import toolkit

from .environment import ProofError, Venv

_TIMEOUT_S = 1200
# Libraries of a toolkit that is installed on the machine: the environment has its own.
_TOOLKIT = re.compile(r"/cuda[^/]*/|lib(cudart|nvrtc|cublas|cublasLt|nvJitLink|cudnn\w*|nccl)\.so")
_SCRIPT = """
import importlib, json, pkgutil, sys, time, traceback

out = sys.argv[1]
capability, names, packages = map(json.loads, sys.argv[2:5])
if capability:
    import types
    import torch

    properties = types.SimpleNamespace(
        name="NVIDIA GPU", major=capability[0], minor=capability[1], total_memory=96 << 30, multi_processor_count=188,
        warp_size=32, max_threads_per_multi_processor=1536, regs_per_multiprocessor=65536, L2_cache_size=128 << 20,
        shared_memory_per_multiprocessor=102400, shared_memory_per_block_optin=101376, gcnArchName="",
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: tuple(capability)
    torch.cuda.get_device_name = lambda device=None: properties.name
    torch.cuda.get_device_properties = lambda device=None: properties

answer = {"modules": {}, "failed": "", "optional": {}, "walked": 0}


def load(name):
    began = time.monotonic()
    try:
        importlib.import_module(name)
    except BaseException:
        return traceback.format_exc()
    answer["modules"][name] = round(time.monotonic() - began, 2)
    return ""


for name in names:
    problem = load(name)
    if problem:
        answer["failed"] = f"{name}: {problem}"
        break
else:
    for package in packages:
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            answer["walked"] += 1
            try:
                importlib.import_module(found.name)
            except BaseException as error:
                answer["optional"][found.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]

files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
answer["imported"] = len(sys.modules)
answer["foreign"] = sorted(
    file for file in files if isinstance(file, str) and file.startswith("/")
    and not file.startswith((sys.prefix, sys.base_prefix))
)[:20]
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/") and ".so" in line}
answer["libraries"] = len(mapped)
answer["system"] = sorted(path for path in mapped if not path.startswith((sys.prefix, sys.base_prefix)))
import torch
answer["torch"] = {"version": torch.__version__, "cuda": torch.version.cuda or ""}
with open(out, "w") as stream:
    json.dump(answer, stream)
"""


@dataclasses.dataclass(frozen=True)
class Imports:
    """What an import run saw. `optional` are modules of walked packages that did not load, with the reason."""

    modules: dict[str, float]
    imported: int
    libraries: int
    system_libraries: list[str]
    walked: int
    optional: dict[str, str]
    torch: dict[str, str]


def run(
    venv: Venv,
    names: Sequence[str],
    *,
    packages: Sequence[str] = (),
    capability: tuple[int, int] | None = None,
    standin: Path | None = None,
) -> Imports:
    """Import `names`, then every module directly in `packages`. Raises ProofError where one of `names` fails."""
    with tempfile.TemporaryDirectory(prefix="ddtree-proof-") as home:
        out = Path(home, "answer.json")
        values = (json.dumps(capability), json.dumps(list(names)), json.dumps(list(packages)))
        environment = {"PATH": "/usr/bin:/bin", "HOME": home, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["XDG_CACHE_HOME"] = home
        environment |= toolkit.environment(environment, venv.site, venv.folder)  # as a slot has it
        if standin is not None:
            environment["LD_LIBRARY_PATH"] = str(standin.parent)
        done = subprocess.run(
            [str(venv.python), "-s", "-B", "-c", _SCRIPT, str(out), *values],
            env=environment,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        try:
            answer: dict[str, Any] = json.loads(out.read_text())
        except (OSError, ValueError) as error:
            ended = f"ended with status {done.returncode} before it was through"
            raise ProofError(f"the import run {ended}:\n{done.stderr.strip()[-3000:]}") from error
    if answer["failed"]:
        name, _, told = answer["failed"].strip().partition(": ")
        raise ProofError(f"import of {name} failed: {told.splitlines()[-1]}\n{told[-3000:]}")
    hosts = [path for path in answer["system"] if _TOOLKIT.search(path)]
    if hosts or answer["foreign"]:
        raise ProofError(f"files of the host took part in the imports: {', '.join([*hosts, *answer['foreign']][:5])}")
    return Imports(
        answer["modules"],
        answer["imported"],
        answer["libraries"],
        answer["system"],
        answer["walked"],
        answer["optional"],
        answer["torch"],
    )
