"""The Ansible inventory of the sandbox: how to reach each host, and what a first deployment puts there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import SandboxError
from .layout import Host, Layout, Names
from .onhost.nvidia_smi import gpu_uuid

# (slot name, GPU index, port). GPU 0 of ct200 belongs to a foreign service.
SLOTS = {"ct200": (("gpu1", 1, 30001), ("gpu2", 2, 30002)), "ct129": (("gpu2", 2, 30001),)}
SLOTS_ELSEWHERE = (("gpu1", 1, 30001),)


def slots(host: Host) -> list[dict[str, Any]]:
    return [
        {"name": name, "gpu": gpu_uuid(host.name, gpu), "port": port, "model": "embedded", "draft": "embedded"}
        for name, gpu, port in SLOTS.get(host.name, SLOTS_ELSEWHERE)
    ]


def document(names: Names, layout: Layout) -> dict[str, Any]:
    ssh = {
        "UserKnownHostsFile": names.known_hosts,
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "IdentitiesOnly": "yes",
    }
    return {
        "all": {
            "children": {
                "sandbox": {
                    "hosts": {
                        host.name: {"ansible_host": host.address, "fleet_slots": slots(host)} for host in layout.hosts
                    },
                    "vars": {
                        "ansible_user": "root",
                        "ansible_ssh_private_key_file": str(names.key),
                        "ansible_ssh_common_args": " ".join(f"-o {key}={value}" for key, value in ssh.items()),
                        "ansible_control_path_dir": str(names.control_sockets),
                        "ansible_python_interpreter": "/usr/bin/python3",
                        "fleet_stack": "cpu",
                        "fleet_engine": "standalone",
                    },
                }
            }
        }
    }


def _mark(names: Names) -> str:
    return f"# Written by `fleet sandbox up` for the sandbox in {names.state}; `fleet sandbox down` removes it.\n"


def check(path: Path, names: Names) -> None:
    """Refuse to overwrite an inventory that somebody wrote, or that belongs to another sandbox."""
    if not path.exists() or path.read_text().startswith(_mark(names)):
        return
    first = path.read_text().splitlines()[:1]
    if first and first[0].startswith("# Written by `fleet sandbox up` for the sandbox in "):
        other = Path(first[0].split(" for the sandbox in ", 1)[1].rsplit(";", 1)[0])
        if not (other / "sandbox.json").exists():
            return
        raise SandboxError(
            f"{path} is the inventory of another sandbox, in {other}", "give this one its own with --inventory PATH"
        )
    raise SandboxError(f"{path} exists and was not written by the sandbox", "give another path with --inventory PATH")


def write(path: Path, names: Names, layout: Layout) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    body = yaml.safe_dump(document(names, layout), sort_keys=False, width=200)
    unfinished.write_text(_mark(names) + body)
    unfinished.replace(path)


def remove(path: Path, names: Names) -> None:
    if path.exists() and path.read_text().startswith(_mark(names)):
        path.unlink()
