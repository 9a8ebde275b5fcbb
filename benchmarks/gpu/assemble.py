#!/usr/bin/env python3
"""Assemble what a GPU machine without network needs to run the patched server, as one archive of about 45 MB.

    python benchmarks/gpu/assemble.py [--out .cache/gpu]

Downloads the pinned wheels (once), patches SGLang's, unpacks all side by side without what an H200 does not need, and
writes OUT/site.tar.zst, a zstd binary with its libraries in OUT/zstd/, the prompts and a manifest. The engine package
itself travels with the repository. On the GPU machine: `benchmarks/gpu/kit.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from fleet import patched_wheel  # noqa: E402

STACK = ROOT / "stacks" / "cu130-sglang0.5.11"
SGLANG_SHA256 = {"cp312": "0cdf73e8d463df53010c33017c7baa68ce5f2d0bf7d015923d6b37b809ca7c50"}
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 27, 28, 31, 34, 35, 39)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2014_x86_64"]
# Kernels for other GPUs and FA3 (1 GB unpacked) stay out; so do tests and what only compilers read.
LEAVE_OUT = re.compile(
    r"(^|/)(__pycache__|tests?|benchmarks?)/|\.pyc$|\.a$|^lib/|^include/|\.data/"
    r"|sgl_kernel/(sm100|flash_ops|flashmla_ops)|^_?mscclpp|^deep_gemm"
)
KEEP = re.compile(r"^sglang/test/|^sglang/.*benchmark")  # imported by the server
PROMPTS, PROMPT_CHARACTERS = 64, 640


def download(wheels: Path) -> None:
    wheels.mkdir(parents=True, exist_ok=True)
    wanted = [line for line in (HERE / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    if len(list(wheels.glob("*.whl"))) == len(wanted):
        return
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "-d", str(wheels)]
    command += ["-r", str(HERE / "requirements.txt")]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command, check=True)


def unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            # what a wheel keeps under NAME.data/{purelib,platlib}/ belongs at the top
            top = re.match(r"[^/]+\.data/(purelib|platlib)/(.+)$", member)
            target = top.group(2) if top else member
            if target.endswith("/") or ".." in target or (LEAVE_OUT.search(target) and not KEEP.search(target)):
                continue
            path = site / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(member))


def strip_symbols(site: Path) -> None:
    """Symbol tables are a seventh of the archive; no kernel libraries are touched."""
    if shutil.which("strip") is None:
        return
    for package in ("xgrammar", "openai_harmony", "tokenizers", "pydantic_core"):
        for library in (site / package).rglob("*.so"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


def pack(site: Path, out: Path) -> None:
    with subprocess.Popen(
        ["tar", "-C", str(site), "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "-c", "."],
        stdout=subprocess.PIPE,
    ) as tar:
        command = ["zstd", "-19", "--long=27", "-T0", "-q", "-f", "-o", str(out)]
        subprocess.run(command, stdin=tar.stdout, check=True)
    if tar.returncode:
        raise RuntimeError(f"tar of {site} failed with status {tar.returncode}")


def carry_zstd(folder: Path) -> None:
    """The GPU machine may have no zstd: take this machine's, with the libraries it names."""
    binary = shutil.which("zstd")
    if binary is None:
        raise RuntimeError("zstd is missing here; install it (it packs the archive)")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(binary, folder / "zstd")
    for line in subprocess.run(["ldd", binary], check=True, capture_output=True, text=True).stdout.splitlines():
        if (match := re.search(r"=> (/\S+)", line)) and not re.search(r"/lib(c|m|pthread|dl)\.so", match.group(1)):
            shutil.copy(match.group(1), folder)


def prompts() -> list[str]:
    """Excerpts of this interpreter's standard library (PSF licence), the same ones on every run."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [p for p in sorted(library.glob("*.py")) if p.stat().st_size > 20_000][:PROMPTS]
    texts = []
    for number, source in enumerate(sources):
        text = source.read_text(errors="replace")
        start = (len(text) // 3 + 997 * number) % (len(text) - PROMPT_CHARACTERS)
        texts.append(text[start : start + PROMPT_CHARACTERS])
    if len(texts) < PROMPTS:
        raise RuntimeError(f"{library} holds only {len(texts)} sources that are long enough")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "gpu")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "gpu-work", help="wheels and the unpacked site")
    args = parser.parse_args()
    wheels, site = args.work / "wheels", args.work / "site"
    download(wheels)
    upstream = next(wheels.glob("sglang-0.5.11-*.whl"))
    patches = sorted((STACK / "patches").glob("*.patch"))
    patched = patched_wheel.build(upstream, SGLANG_SHA256["cp312"], patches, args.work / "patched")
    shutil.rmtree(site, ignore_errors=True)
    chosen = [w for w in sorted(wheels.glob("*.whl")) if w != upstream] + [patched]
    for wheel in chosen:
        unpack(wheel, site)
    strip_symbols(site)
    args.out.mkdir(parents=True, exist_ok=True)
    pack(site, args.out / "site.tar.zst")
    carry_zstd(args.out / "zstd")
    (args.out / "prompts.json").write_text(json.dumps(prompts()))
    manifest = {
        "sglang_wheel": patched.name,
        "sglang_wheel_sha256": hashlib.sha256(patched.read_bytes()).hexdigest(),
        "patch_set": patched_wheel.patch_set_digest(patches),
        "wheels": [w.name for w in chosen],
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB from {len(chosen)} wheels")


if __name__ == "__main__":
    main()
