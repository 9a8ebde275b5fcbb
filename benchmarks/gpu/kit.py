#!/usr/bin/env python3
"""The GPU test kit, run on the GPU machine from the repository's root after `assemble.py` has filled .cache/gpu:

    python3 benchmarks/gpu/kit.py --out $OUT [--arms ar,dflash,b7,b15,b31,b63] [--stages identity,leak,...]

Starts one server per arm (together, on one GPU: results do not depend on who else computes, only times do), compares
greedy tokens at several concurrencies, hammers a tree server with random requests and reads its counters, asks the
shadow server what trees would have gained, times the arms one after another, and writes OUT/result.json and
OUT/tokens.json.
Exit status 0: every stage passed its own bar (`passed` in the result).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import servers  # noqa: E402
from client import Batch, Prompt, Server, run_prompts  # noqa: E402
from compare import compare  # noqa: E402
from leak import hammer  # noqa: E402

CARRIED = ROOT / ".cache" / "gpu"
SITE = Path("/tmp/ddtree-site")
CACHES = [".cache/flashinfer", ".cache/tvm-ffi", ".triton"]  # below $HOME; compiled kernels worth bringing back
MODEL = ROOT / "ddtree_engine" / "models" / "demo-code"


def unpack() -> None:
    if not (SITE / ".ok").exists():
        SITE.mkdir(parents=True, exist_ok=True)
        zstd = CARRIED / "zstd"
        env = {**os.environ, "LD_LIBRARY_PATH": str(zstd)}
        command = f"'{zstd}/zstd' -dc --long=27 '{CARRIED}/site.tar.zst' | tar x -C '{SITE}'"
        subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, env=env)
        (SITE / ".ok").touch()
    cache = CARRIED / "jit.tar.xz"
    if cache.exists():
        with tarfile.open(cache) as archive:
            archive.extractall(Path.home(), filter="data")


def environment() -> None:
    nvcc = subprocess.run(["bash", "-c", "command -v nvcc"], capture_output=True, text=True).stdout.strip()
    cuda = Path(os.environ.get("CUDA_HOME") or Path(nvcc).resolve().parent.parent)
    os.environ.update(
        PYTHONPATH=f"{SITE}:{ROOT}",
        PYTHONUNBUFFERED="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        SGLANG_HOST_IP="127.0.0.1",
        HOST_IP="127.0.0.1",
        CUDA_HOME=str(cuda),
        PATH=f"{cuda}/bin:{os.environ['PATH']}",
        FLASHINFER_DISABLE_VERSION_CHECK="1",
        TVM_FFI_CUDA_ARCH_LIST="9.0a",
    )


def versions() -> dict[str, Any]:
    code = (
        "import json, torch, triton, sglang, transformers; print(json.dumps(dict(torch=torch.__version__, "
        "cuda=torch.version.cuda, triton=triton.__version__, sglang=sglang.__version__, "
        "transformers=transformers.__version__, gpu=torch.cuda.get_device_name(0))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    found: dict[str, Any] = (
        json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"error": run.stderr[-800:]}
    )
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    found["python"] = platform.python_version()
    found["manifest"] = {k: v for k, v in json.loads((CARRIED / "manifest.json").read_text()).items() if k != "wheels"}
    return found


def make_hybrid() -> Path:
    folder = Path("/tmp/ddtree-hybrid")
    command = [sys.executable, str(HERE / "make_hybrid.py"), str(folder), str(MODEL)]
    subprocess.run(command, check=True)
    return folder


def make_arm(name: str, draft: Path) -> servers.Arm:
    """ar, dflash, shadow, bN (tree of N nodes), bN-check (self-checks every step), bN-fi (FlashInfer attention)."""
    if name == "ar":
        return servers.ar()
    if name == "leaky":
        arm = servers.ddtree(draft, 15, name=name)
        return servers.Arm(name, arm.flags, {"PYTHONPATH": f"{HERE / 'leaky'}:{{PYTHONPATH}}"})
    if name == "dflash":
        return servers.dflash(draft)
    if name == "shadow":
        return servers.ddtree(draft, 15, name="shadow", extra=["--speculative-ddtree-shadow"])
    budget, _, variant = name.removeprefix("b").partition("-")
    extra = {"": [], "check": [], "fi": ["--attention-backend", "flashinfer"], "eager": ["--disable-cuda-graph"]}
    return servers.ddtree(
        draft, int(budget), name=name, topk=min(int(budget), 8), extra=extra[variant], check=variant == "check"
    )


class Kit:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.logs = Path("/tmp/ddtree-logs")
        self.prompts: list[Prompt] = json.loads((CARRIED / "prompts.json").read_text())[: args.prompts]
        if args.hybrid:
            rng = random.Random(5)
            self.prompts = [[rng.randrange(4, 64) for _ in range(rng.randint(8, 80))] for _ in range(args.prompts)]
            # the server's own warm-up text has token ids beyond this vocabulary
            servers.COMMON.extend(["--disable-radix-cache", "--skip-server-warmup"])
            os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float16"
            args.model = make_hybrid()
        self.running = servers.Running(self.logs, args.model / "target")
        self.servers: dict[str, Server] = {}
        self.tokens: dict[str, dict[str, list[list[int]]]] = {}
        self.result: dict[str, Any] = {
            "command": " ".join(sys.argv),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": versions(),
            "model": args.model.name,
            "dtype": servers.EXACT,
            "prompts": len(self.prompts),
            "max_new_tokens": args.tokens,
            "stages": {},
            "passed": {},
        }

    def write(self) -> None:
        (self.out / "result.json").write_text(json.dumps(self.result, indent=1))
        (self.out / "tokens.json").write_text(json.dumps({"prompts": self.prompts, "tokens": self.tokens}))

    def stage(self, name: str, run: Callable[[], bool]) -> None:
        start = time.monotonic()
        try:
            passed = run()
        except Exception:
            traceback.print_exc()
            self.result["stages"].setdefault(name, {})["error"] = traceback.format_exc()[-2000:]
            passed = False
        self.result["passed"][name] = passed
        print(f"stage {name}: {'passed' if passed else 'FAILED'} after {time.monotonic() - start:.0f} s", flush=True)
        self.write()

    def start(self) -> bool:
        arms = [make_arm(name, self.args.model / "draft") for name in self.args.arms.split(",")]
        for arm in arms:
            self.servers[arm.name] = self.running.start(arm)
        outcome = self.running.wait_ready(list(self.servers), self.args.start_timeout)
        for name, problem in outcome.items():
            if problem:
                print(f"{name}: {problem[:200]} ... {problem[-900:]}", flush=True)
                del self.servers[name]
        self.result["stages"]["start"] = {name: problem or "ready" for name, problem in outcome.items()}
        return not any(outcome.values())

    def identity(self) -> bool:
        """Tokens of every arm at every concurrency, beside what AR does to itself when only the batch changes."""
        found: dict[str, Any] = {}

        def measure(name: str, server: Server) -> None:
            server.generate(self.prompts[0], temperature=0, max_new_tokens=16)
            rows: dict[str, Any] = {}
            ids: dict[str, list[list[int]]] = {}
            for concurrency in self.args.concurrency:
                batch: Batch = run_prompts(server, self.prompts, self.args.tokens, concurrency)
                rows[str(concurrency)], ids[str(concurrency)] = batch.as_dict(), batch.token_ids
                print(f"{name} at {concurrency}: {batch.tokens} tokens, acceptance {batch.acceptance:.3f}", flush=True)
            with contextlib.suppress(KeyError):
                rows["state"] = server.internal_state()["ddtree"]
            found[name], self.tokens[name] = rows, ids

        # Servers share the GPU here: it stretches times, which are taken elsewhere, and cannot change tokens.
        with ThreadPoolExecutor(max_workers=self.args.parallel) as pool:
            for task in [pool.submit(measure, name, server) for name, server in self.servers.items()]:
                task.result()
        self.result["stages"]["identity"] = found
        self.result["comparison"] = compare(self.tokens)
        for line in self.result["comparison"]["lines"]:
            print(line, flush=True)
        if self.args.margins:
            self.margins()
        return bool(self.result["comparison"]["within_ar"])

    def margins(self) -> None:
        """AR's own top-1/top-2 log-probability gap where each prompt first differs: the judge where there is no CPU
        reference. A difference at a large gap is a wrong token, one at a tiny gap is rounding."""
        found: dict[str, list[float]] = {}
        asked: dict[tuple[int, ...], float] = {}
        for name, differ in self.result["comparison"]["pairs"].items():
            arm, concurrency = name.split("@")
            for number, position in differ:
                prompt = self.prompts[number]
                assert isinstance(prompt, list)
                context = tuple(prompt + self.tokens[arm][concurrency][number][:position])
                if context not in asked:
                    asked[context] = self.servers["ar"].margin(list(context))
                found.setdefault(name, []).append(round(asked[context], 5))
        for name, gaps in found.items():
            print(f"  margins where {name} differs: {sorted(gaps)}", flush=True)
        self.result["comparison"]["margins"] = found

    def leak(self) -> bool:
        found = {}
        for name in self.args.leak_arms.split(","):
            found[name] = hammer(self.servers[name], self.prompts, self.args.leak_requests, seed=7)
            print(f"{name}: {found[name]}", flush=True)
        self.result["stages"]["leak"] = found
        return bool(found) and all(f["alive"] and not f["leaked"] for f in found.values())

    def shadow(self) -> bool:
        state = self.servers["shadow"].internal_state()["ddtree"]
        self.result["stages"]["shadow"] = state
        print(f"shadow: {state}", flush=True)
        return bool(state["shadow"]["steps"] > 0)

    def timing(self) -> bool:
        """Tokens per second, one arm at a time while the others idle: n passes, the arms interleaved."""
        found: dict[str, Any] = {name: {} for name in self.servers}
        for _ in range(self.args.passes):
            for name, server in self.servers.items():
                for concurrency in (1, 8):
                    count = 4 if concurrency == 1 else 16
                    batch = run_prompts(server, self.prompts[:count], self.args.tokens, concurrency)
                    found[name].setdefault(str(concurrency), []).append(round(batch.tokens / batch.seconds, 1))
        self.result["stages"]["timing"] = found
        for name, rates in found.items():
            print(f"{name}: tokens/s {rates}", flush=True)
        return True

    def finish(self) -> None:
        self.running.stop_all()
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "logs")
        if self.args.bring_caches:
            with tarfile.open(self.out / "jit.tar.xz", "w:xz", preset=3) as archive:
                for name in CACHES:
                    if (Path.home() / name).exists():
                        archive.add(Path.home() / name, name)
        self.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with target/ and draft/")
    parser.add_argument("--arms", default="ar,dflash,b7,b15,b31,b63")
    parser.add_argument("--stages", default="identity,leak,timing")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--leak-requests", type=int, default=1000)
    parser.add_argument("--leak-arms", default="b15")
    parser.add_argument("--parallel", type=int, default=4, help="servers that are asked at the same time")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument(
        "--hybrid", action="store_true", help="a random hybrid pair, made on the spot; token-id prompts"
    )
    parser.add_argument("--margins", action="store_true", help="ask AR how decided it was where an arm differs")
    parser.add_argument("--bring-caches", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    unpack()
    environment()
    kit = Kit(args)
    try:
        kit.stage("start", kit.start)
        if kit.servers:
            for name in args.stages.split(","):
                kit.stage(name, getattr(kit, name))
    finally:
        kit.finish()
    return 0 if all(kit.result["passed"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
