"""What a sandbox consists of and how its parts are called on the machine.

Every name (bridge, network namespaces, cgroup) is derived from the state directory, so `down` finds all of a sandbox
even when its records are lost, and two sandboxes never share a name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from .errors import SandboxError

DEFAULT_SUBNET = "10.200.0.0/24"
DEFAULT_HOSTS = ("ct129", "ct200")
GPUS_PER_HOST = 8


def default_state() -> Path:
    """$DDTREE_SANDBOX_DIR, or the user's state directory."""
    named = os.environ.get("DDTREE_SANDBOX_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ddtree-fleet" / "sandbox"


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ddtree-fleet"


def parse_subnet(text: str) -> IPv4Network:
    try:
        subnet = IPv4Network(text)
    except ValueError as error:
        raise SandboxError(
            f"--subnet {text!r} is not an IPv4 network: {error}", "give one like 10.201.0.0/24"
        ) from None
    if subnet.prefixlen != 24 or not subnet.is_private:
        raise SandboxError(f"--subnet {text} is not a private /24 network", "give one like 10.201.0.0/24")
    return subnet


@dataclass(frozen=True)
class Host:
    name: str
    address: str

    @property
    def octet(self) -> int:
        return int(self.address.rsplit(".", 1)[1])


def place_hosts(names: Sequence[str], subnet: IPv4Network) -> tuple[Host, ...]:
    """Addresses: the number in the name where it fits (ct200 -> .200), else the next free one from .11."""
    if not names:
        raise SandboxError("a sandbox needs at least one host", "give --hosts ct129,ct200")
    taken: dict[str, int] = {}
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
            raise SandboxError(f"host name {name!r} is not usable", "use a-z, 0-9 and -, beginning with a letter")
        if name in taken:
            raise SandboxError(f"host {name} is listed twice")
        number = re.search(r"(\d+)$", name)
        octet = int(number.group(1)) if number else 0
        taken[name] = octet if 2 <= octet <= 254 and octet not in taken.values() else 0
    free = (octet for octet in range(11, 255) if octet not in taken.values())
    hosts = []
    for name, octet in taken.items():
        place = octet or next(free, 0)
        if not place:
            raise SandboxError(f"{subnet} has no address left for host {name}")
        hosts.append(Host(name, str(IPv4Address(int(subnet.network_address) + place))))
    return tuple(hosts)


@dataclass(frozen=True)
class Names:
    """How the parts of the sandbox in `state` are called on this machine."""

    state: Path

    @property
    def id(self) -> str:
        return hashlib.sha256(str(self.state.resolve()).encode()).hexdigest()[:6]

    @property
    def bridge(self) -> str:
        return f"sbx-{self.id}"

    @property
    def cgroup(self) -> str:
        return f"ddtree-sandbox-{self.id}"

    @property
    def netns_prefix(self) -> str:
        return f"sbx-{self.id}-"

    def netns(self, host: Host) -> str:
        return self.netns_prefix + host.name

    def machine(self, host: Host) -> str:
        """The host's name among all containers of this machine; two sandboxes may both have a ct200."""
        return self.netns_prefix + host.name

    def link(self, host: Host) -> str:
        """The machine's end of the host's cable (interface names end at 15 characters)."""
        return f"sbx{self.id}-{host.octet}"

    @property
    def record(self) -> Path:
        return self.state / "sandbox.json"

    @property
    def key(self) -> Path:
        return self.state / "key"

    @property
    def known_hosts(self) -> Path:
        return self.state / "known_hosts"

    @property
    def control_sockets(self) -> Path:
        """Where SSH connections are shared: short, as socket paths end at 107 characters."""
        return Path("/run") / self.cgroup

    def home(self, host: Host) -> Path:
        return self.state / "hosts" / host.name

    def root(self, host: Host) -> Path:
        return self.home(host) / "root"

    def console(self, host: Host) -> Path:
        return self.home(host) / "console.log"


@dataclass(frozen=True)
class Layout:
    """The record of a sandbox: written before the first of its parts is made."""

    subnet: str
    hosts: tuple[Host, ...]
    image: Path
    inventory: Path

    @property
    def gateway(self) -> str:
        """The control node's address on the bridge."""
        return str(IPv4Network(self.subnet)[1])

    def host(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise SandboxError(f"the sandbox has no host {name!r}; it has {', '.join(h.name for h in self.hosts)}")

    def save(self, path: Path) -> None:
        document = {
            "subnet": self.subnet,
            "hosts": {host.name: host.address for host in self.hosts},
            "image": str(self.image),
            "inventory": str(self.inventory),
        }
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(document, indent=2) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Layout | None:
        """The recorded sandbox, or None where there is none."""
        try:
            document = json.loads(path.read_text())
            return cls(
                subnet=document["subnet"],
                hosts=tuple(Host(name, address) for name, address in document["hosts"].items()),
                image=Path(document["image"]),
                inventory=Path(document["inventory"]),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SandboxError(f"{path} is damaged", "run `fleet sandbox down`, then `fleet sandbox up`") from None
