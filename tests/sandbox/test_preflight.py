"""Preflight on a real host: what is wrong is found by really looking, named, and nothing is sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from fleet import content
from fleet.sandbox import Sandbox

Make = Callable[[Sequence[str]], Sandbox]
HOST = "ct200"


def preflight(sandbox: Sandbox, *arguments: str) -> subprocess.CompletedProcess[str]:
    ansible = str(Path(sys.executable).with_name("ansible-playbook"))
    argv = [ansible, "-v", "-i", str(sandbox.inventory), "playbooks/preflight.yml", *arguments]
    return subprocess.run(argv, cwd=content.root(), capture_output=True, text=True, timeout=120, check=False)


def change_slot(sandbox: Sandbox, **values: object) -> None:
    """Change the first slot of the host in the sandbox's own inventory."""
    document = yaml.safe_load(sandbox.inventory.read_text())
    document["all"]["children"]["sandbox"]["hosts"][HOST]["fleet_slots"][0].update(values)
    sandbox.inventory.write_text(yaml.safe_dump(document))


def refused(done: subprocess.CompletedProcess[str]) -> str:
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "outcome: refused" in text and "nothing was sent to the host" in text
    return " ".join(text.split())


def untouched(sandbox: Sandbox) -> bool:
    shell = "ls -d /opt/ddtree /var/lib/ddtree /var/cache/ddtree /etc/systemd/system/ddtree-* 2>/dev/null | wc -l"
    return sandbox.ssh(HOST, shell).stdout.strip() == "0"


def test_a_fresh_host_passes_and_looking_leaves_no_trace(new_sandbox: Make) -> None:
    sandbox = new_sandbox([HOST])
    done = preflight(sandbox)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout and "nothing has been activated on it yet" in done.stdout
    assert untouched(sandbox)


def test_a_slot_on_somebodys_gpu_and_port_is_refused_with_the_process_named_and_left_alone(new_sandbox: Make) -> None:
    sandbox = new_sandbox([HOST])
    show = "systemctl show -p MainPID -p InvocationID wrapper.service"
    before = sandbox.ssh(HOST, show).stdout
    pid = next(line.partition("=")[2] for line in before.splitlines() if line.startswith("MainPID="))
    change_slot(sandbox, gpu=sandbox.gpu_uuid(HOST, 0), port=30000)
    text = refused(preflight(sandbox))
    for rule in ("GPU-FOREIGN", "PORT-FOREIGN"):
        assert f"{rule} error" in text
    assert f"pid {pid} (/usr/bin/python3 -I /opt/wrapper/wrapper.py, unit wrapper.service" in text
    assert sandbox.ssh(HOST, show).stdout == before
    assert untouched(sandbox)


@pytest.mark.parametrize(
    ("fault", "rule", "says"),
    [
        ("1=gone", "GPU-ABSENT", "7 GPUs, not this one"),
        ("1=lost", "GPU-ABSENT", "GPU is lost"),
        ("1=xid:79", "GPU-XID", "Xid 79"),
        ("1=ecc:3", "GPU-ECC", "3 uncorrectable errors"),
        ("1=remap", "GPU-REMAP-PENDING", "--gpu-reset"),
        ("1=mig", "GPU-MIG", "-mig 0"),
        ("1=foreign", "GPU-FOREIGN", "pid "),
        ("1=hang", "DRIVER-HANG", "nvidia-smi hangs on GPU 1"),
        ("all=nodriver", "DRIVER-MISSING", "NVIDIA-SMI has failed"),
    ],
)
def test_a_fault_of_the_slots_gpu_is_found_and_named(new_sandbox: Make, fault: str, rule: str, says: str) -> None:
    sandbox = new_sandbox([HOST])
    sandbox.fault(HOST, fault)
    text = refused(preflight(sandbox))
    assert f"{rule} error" in text and says in text
    if not fault.startswith("all="):
        assert sandbox.gpu_uuid(HOST, 1) in text
    assert untouched(sandbox)


def test_a_fault_of_a_gpu_that_no_slot_uses_stops_nothing(new_sandbox: Make) -> None:
    sandbox = new_sandbox([HOST])
    for fault in ("5=gone", "6=ecc:3", "7=xid:79"):
        sandbox.fault(HOST, fault)
    done = preflight(sandbox)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_waiver_with_a_reason_lets_a_known_fault_pass(new_sandbox: Make) -> None:
    sandbox = new_sandbox([HOST])
    sandbox.fault(HOST, "1=ecc:3")
    done = preflight(sandbox, "-e", '{"fleet_waivers": {"GPU-ECC": "the card is being replaced on Monday"}}')
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, text
    assert "GPU-ECC waived (the card is being replaced on Monday)" in text


def test_a_model_that_the_service_user_cannot_read_is_named(new_sandbox: Make) -> None:
    sandbox = new_sandbox([HOST])
    make = "mkdir -p /srv/m/draft && cd /srv/m && echo {} | tee config.json draft/config.json >/dev/null"
    sandbox.ssh(HOST, f"{make} && echo x | tee model.safetensors draft/model.safetensors && chmod 700 /srv/m/draft")
    change_slot(sandbox, model="/srv/m", draft="/srv/m/draft")
    text = refused(preflight(sandbox))
    assert "MODEL-UNREADABLE error: /srv/m/draft" in text
    assert "MODEL-UNREADABLE error: /srv/m:" not in text
    change_slot(sandbox, model="/srv/none", draft="/srv/m/draft")
    assert "MODEL-MISSING error: /srv/none" in refused(preflight(sandbox))
