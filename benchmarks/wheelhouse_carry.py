"""Fill a wheelhouse from nothing, killed half-way; carry it to an empty one as a file, killed half-way; verify it.

    python -m benchmarks.wheelhouse_carry cu130-sglang0.5.11 --work /var/tmp/carry

Needs the network and about three times the size of the stack's wheels (12 GB for the production stack), all of which is
removed at the end. Figures go to benchmarks/results/wheelhouse-carry-<stack>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FLEET = [sys.executable, "-m", "fleet.cli", "wheelhouse"]


def fleet(*argv: str) -> dict[str, Any]:
    """One `fleet wheelhouse` command to its end: its document, and how long it took."""
    began = time.monotonic()
    done = subprocess.run([*FLEET, *argv, "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"fleet wheelhouse {' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    return {**json.loads(done.stdout), "wall_s": round(time.monotonic() - began, 1)}


def killed(folder: Path, size: int, *argv: str) -> dict[str, Any]:
    """The same, killed without warning as soon as `folder` has `size` bytes."""
    began = time.monotonic()
    with subprocess.Popen([*FLEET, *argv, "--json"], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and held(folder) < size:
            time.sleep(0.2)
        if process.poll() is not None:
            sys.exit(f"fleet wheelhouse {' '.join(argv)} ended with {process.returncode} before it could be killed")
        process.kill()
    return {"killed_after_s": round(time.monotonic() - began, 1), "bytes": held(folder)}


def held(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # renamed meanwhile
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/ddtree-carry"))
    options = parser.parse_args()
    stack, work = options.stack, options.work
    shutil.rmtree(work, ignore_errors=True)
    here, there, out = work / "here", work / "there", work / "out"
    for folder in (here, there, out):
        folder.mkdir(parents=True)
    try:
        listed = fleet("list", "--stack", stack, "-w", str(here))["wheels"]
        size = sum(wheel["size"] for wheel in listed)
        report: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": f"python -m benchmarks.wheelhouse_carry {stack}",
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "stack": stack,
            "wheels": len(listed),
            "bytes": size,
        }
        report["build_killed"] = killed(here, size // 2, "build", "--stack", stack, "-w", str(here))
        had = {path.name for path in here.glob("?" * 64 + "/*.whl")}
        report["build_killed"]["complete"] = len(had)
        report["build_killed"]["partial_bytes"] = held(here / "partial")
        done = fleet("build", "--stack", stack, "-w", str(here))
        fetched = [name for item in done["done"] for name in item["fetched"]]
        again = sorted(had & set(fetched))
        made = [name for item in done["done"] for name in item["made"]]
        report["build_again"] = {"wall_s": done["wall_s"], "fetched": len(fetched), "made": made, "twice": again}
        checked = fleet("verify", "--stack", stack, "-w", str(here))
        report["verify"] = {key: checked[key] for key in ("checked", "problems", "wall_s")}
        file = out / "stack.tar"
        report["export_killed"] = killed(out, size // 2, "export", str(file), "--stack", stack, "-w", str(here))
        done = fleet("export", str(file), "--stack", stack, "-w", str(here))
        report["export_again"] = {key: done[key] for key in ("wheels", "continued", "bytes", "wall_s")}
        shutil.rmtree(here)
        report["import_killed"] = killed(there, size // 2, "import", str(file), "-w", str(there))
        done = fleet("import", str(file), "-w", str(there))
        report["import_again"] = {"added": len(done["added"]), "present": done["present"], "missing": done["missing"]}
        report["import_again"]["wall_s"] = done["wall_s"]
        file.unlink()
        checked = fleet("verify", "--stack", stack, "-w", str(there))
        report["verify_imported"] = {key: checked[key] for key in ("checked", "problems", "wall_s")}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report["right"] = not again and not checked["problems"] and checked["checked"] == len(listed)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"wheelhouse-carry-{stack}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    print(f"written to {path}")
    sys.exit(0 if report["right"] else 1)


if __name__ == "__main__":
    main()
