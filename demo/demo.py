"""The whole path on this machine: real systemd hosts, a deployment, a rollout that fails and takes itself back.

Run by `make demo` as root. Every command shown is the one that is run; every claim is checked, and the first that does
not hold ends the demo with status 1.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from demo import broken_engines  # noqa: E402
from fleet import content  # noqa: E402
from fleet.sandbox import DEFAULT_SUBNET, Sandbox, SandboxError  # noqa: E402

HOST = "ct200"
PORT = 30001
FOREIGN = "wrapper.service"
PROMPT = "def main("

# Runs on the host, where the slot listens on the loopback address.
ASK = """
import json, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(opener.open(request, timeout=30).read().decode())
"""

console = Console(highlight=False)
timings: list[tuple[str, float]] = []


def fail(text: str) -> NoReturn:
    console.print(Text(f"demo: {text}", style="bold red"), soft_wrap=True)
    raise SystemExit(1)


@contextmanager
def step(title: str) -> Iterator[None]:
    console.print()
    console.rule(Text(title, style="bold"), align="left")
    began = time.monotonic()
    place = len(timings)
    yield
    timings.insert(place, (title, time.monotonic() - began))


def command(*argv: str, expect: int | None = 0) -> int:
    """Show a command, run it in sight, and insist on its exit status."""
    console.print(Text(f"$ {shlex.join(argv)}", style="cyan"), soft_wrap=True)
    program = Path(sys.executable).parent / argv[0]
    status = subprocess.run([str(program), *argv[1:]], cwd=ROOT, check=False).returncode
    if expect is not None and status != expect:
        fail(f"{argv[0]} ended with status {status}, expected {expect}")
    return status


def on_host(sandbox: Sandbox, *argv: str) -> str:
    done = sandbox.ssh(HOST, argv)
    if done.returncode != 0:
        fail(f"{shlex.join(argv)} on {HOST}: {done.stdout}{done.stderr}")
    return str(done.stdout).strip()


def complete(sandbox: Sandbox) -> dict[str, Any]:
    """Fetch one completion from the slot and show it; speculation must have paid."""
    body = json.dumps({"model": "demo-code", "prompt": PROMPT, "max_tokens": 32, "temperature": 0})
    answer: dict[str, Any] = json.loads(
        on_host(sandbox, "python3", "-c", ASK, f"http://127.0.0.1:{PORT}/v1/completions", body)
    )
    usage = answer["usage"]
    console.print(Text(PROMPT, style="dim"), Text(answer["choices"][0]["text"], style="green"), sep="", soft_wrap=True)
    length = usage["ddtree"]["acceptance_length"]
    console.print(
        f"{usage['completion_tokens']} tokens in {usage['ddtree']['verify_steps']} verify steps: "
        f"acceptance length {length:.2f} (plain decoding has 1)"
    )
    if length <= 1:
        fail("speculation did not pay: acceptance length is not above 1")
    return answer


def property_of(sandbox: Sandbox, unit: str, name: str) -> str:
    return on_host(sandbox, "systemctl", "show", "--property", name, "--value", unit)


def verdict(sandbox: Sandbox) -> dict[str, Any]:
    """The last verdict in the host's own journal."""
    lines = on_host(sandbox, "cat", "/var/lib/ddtree/journal.jsonl").splitlines()
    entries = [json.loads(line) for line in lines]
    return dict([entry for entry in entries if entry["event"] == "verdict"][-1])


def run(sandbox: Sandbox, engines: Path) -> None:
    """All steps, on fresh hosts: what was deployed to a sandbox before would make the first deployment another one."""
    with step("1. Two hosts with systemd, sshd and simulated GPUs"):
        subnet = sandbox.layout.subnet if sandbox.exists() else DEFAULT_SUBNET
        if sandbox.exists():
            console.print("a sandbox is there already; its hosts are replaced by new ones")
            command("fleet", "sandbox", "down")
        command("fleet", "sandbox", "up", *(() if subnet == DEFAULT_SUBNET else ("--subnet", subnet)))
        if sandbox.inventory != content.default_inventory():  # a sandbox of one's own, by DDTREE_SANDBOX_DIR
            console.print(Text(f"$ export ANSIBLE_INVENTORY={sandbox.inventory}", style="cyan"), soft_wrap=True)
            os.environ["ANSIBLE_INVENTORY"] = str(sandbox.inventory)
        foreign = property_of(sandbox, FOREIGN, "InvocationID")
        console.print(f"{HOST} runs a foreign service on GPU 0 and port 30000; it has to stay untouched")

    with step("2. First deployment"):
        command("ansible-playbook", "deploy.yml", "-l", HOST)
    with step("3. A completion from a slot"):
        before = complete(sandbox)

    with step("4. The same again: nothing to do"):
        unit = property_of(sandbox, "ddtree-gpu1.service", "InvocationID")
        command("ansible-playbook", "deploy.yml", "-l", HOST)
        if property_of(sandbox, "ddtree-gpu1.service", "InvocationID") != unit:
            fail("a deployment without a difference restarted the slot")

    with step("5. A broken release: its engine dies after three seconds"):
        broken = broken_engines.make("crash-after-3s", engines)
        command("fleet", "deploy", "-l", HOST, "-e", f"fleet_engine_path={broken}", expect=2)
        found = verdict(sandbox)
        console.print(Text(f"root cause: {found.get('root') or found.get('cause')}", style="bold"), soft_wrap=True)
        if "dead after three seconds" not in f"{found.get('root')} {found.get('cause')}":
            fail(f"the verdict does not name the cause: {found}")
        if found.get("death_to_verdict_s") is not None:
            timings.append(("   of that, from the engine's death to the verdict", found["death_to_verdict_s"]))

    with step("6. The last known good release serves again"):
        after = complete(sandbox)
        if after["choices"] != before["choices"]:
            fail("the slot answers differently from before")
        if property_of(sandbox, FOREIGN, "InvocationID") != foreign:
            fail("the foreign service was restarted")
        console.print(f"the foreign service on port 30000 is the same process as before ({foreign[:8]})")
        command("fleet", "status", "-l", HOST)
        command("fleet", "history", "-l", HOST)


def show_timings() -> None:
    table = Table(title="Times", title_justify="left", box=None, pad_edge=False)
    table.add_column("step", no_wrap=True)
    table.add_column("seconds", justify="right")
    for title, seconds in timings:
        table.add_row(title, f"{seconds:.1f}")
    table.add_row("all steps", f"{sum(seconds for title, seconds in timings if not title.startswith(' ')):.1f}")
    console.print()
    console.print(table)


def main() -> None:
    os.chdir(ROOT)
    try:
        with tempfile.TemporaryDirectory(prefix="ddtree-demo-") as engines:
            run(Sandbox(), Path(engines))
    except SandboxError as error:
        fail(str(error))
    show_timings()
    console.print()
    console.print("The sandbox is still up, serving. Look around, then remove all of it:")
    for line in ("fleet status", "fleet logs ct200:gpu1", "fleet sandbox ssh ct200", "fleet sandbox down"):
        console.print(f"    .venv/bin/{line}")


if __name__ == "__main__":
    main()
