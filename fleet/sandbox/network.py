"""The sandbox's network: one bridge for the control node, one namespace per host, no way out.

The bridge has an address in the machine's own namespace, so that Ansible and browsers reach the hosts without ceremony.
Hosts get no default route, and forwarding is off on the bridge: a host reaches its neighbours and the control node.
"""

from __future__ import annotations

import json
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from .commands import run
from .errors import SandboxError
from .layout import Host, Layout, Names

NETNS = Path("/run/netns")


def _ip_json(*args: str) -> list[dict[str, Any]]:
    answer = run(["ip", "-json", *args])
    return [entry for entry in json.loads(answer or "[]") if entry]


def _batch(lines: list[str], netns: str | None = None) -> None:
    """Carry out several `ip` commands in one process."""
    argv = ["ip", *(["-n", netns] if netns else []), "-batch", "-"]
    try:
        run(argv, stdin="\n".join(lines) + "\n")
    except SandboxError as error:
        if "Unknown device type" in error.problem or "not supported" in error.problem:
            raise SandboxError(
                f"this kernel cannot make a bridge or veth link: {error.problem}",
                "load the modules (`modprobe bridge veth`) or use a kernel that has them",
            ) from None
        raise


def check_free(names: Names, subnet: IPv4Network) -> None:
    """Refuse a subnet that something else on this machine uses, and name it."""
    aliases = {entry["ifname"]: entry.get("ifalias", "") for entry in _ip_json("link", "show")}
    uses: list[tuple[str, str]] = []
    for entry in _ip_json("-4", "addr", "show"):
        uses += [(entry["ifname"], f"{info['local']}/{info['prefixlen']}") for info in entry.get("addr_info", [])]
    for route in _ip_json("-4", "route", "show"):
        if route["dst"] != "default":
            uses.append((route.get("dev", "?"), route["dst"]))
    for interface, network in uses:
        if interface == names.bridge or not subnet.overlaps(IPv4Network(network, strict=False)):
            continue
        alias = aliases.get(interface, "")
        owner = f" ({alias})" if alias else ""
        raise SandboxError(
            f"the subnet {subnet} is in use: interface {interface}{owner} has {network}",
            "choose another with `--subnet 10.201.0.0/24`, or take the other sandbox down",
        )


def create_bridge(names: Names, layout: Layout) -> None:
    if not Path(f"/sys/class/net/{names.bridge}").exists():
        # One batch: an interrupted `up` leaves either no bridge or one that the next `up` completes.
        _batch([f"link add {names.bridge} type bridge", f'link set {names.bridge} alias "sandbox in {names.state}"'])
    prefix = IPv4Network(layout.subnet).prefixlen
    _set_sysctl(f"ipv6/conf/{names.bridge}/disable_ipv6", "1")
    _batch([f"addr replace {layout.gateway}/{prefix} dev {names.bridge}", f"link set {names.bridge} up"])
    _set_sysctl(f"ipv4/conf/{names.bridge}/forwarding", "0")


def _set_sysctl(name: str, value: str) -> None:
    file = Path("/proc/sys/net") / name
    if file.exists() and file.read_text().strip() != value:
        file.write_text(value)


def connect(names: Names, layout: Layout, host: Host) -> None:
    """Give the host its namespace, cable and address; all of it outlives the host's reboots."""
    netns, link = names.netns(host), names.link(host)
    if not (NETNS / netns).exists():
        run(["ip", "netns", "add", netns])
    if not Path(f"/sys/class/net/{link}").exists():
        _batch([f"link add {link} type veth peer name eth0 netns {netns}"])
    _set_sysctl(f"ipv6/conf/{link}/disable_ipv6", "1")
    _batch([f"link set {link} master {names.bridge} up"])
    no_ipv6 = "f=/proc/sys/net/ipv6/conf/all/disable_ipv6; [ ! -e $f ] || echo 1 > $f"
    run(["ip", "netns", "exec", netns, "sh", "-c", no_ipv6])
    prefix = IPv4Network(layout.subnet).prefixlen
    _batch(["link set lo up", f"addr replace {host.address}/{prefix} dev eth0", "link set eth0 up"], netns)


def set_link(names: Names, host: Host, up: bool) -> None:
    """Plug the host's cable in or pull it out."""
    run(["ip", "link", "set", names.link(host), "up" if up else "down"])


def is_linked(names: Names, host: Host) -> bool:
    flags = Path(f"/sys/class/net/{names.link(host)}/flags")
    return flags.exists() and bool(int(flags.read_text(), 16) & 1)


def remove_all(names: Names) -> None:
    """Remove every link, namespace and bridge of the sandbox, found by name."""
    links = [entry.name for entry in Path("/sys/class/net").iterdir() if entry.name.startswith(f"sbx{names.id}-")]
    for link in links:
        run(["ip", "link", "del", link], check=False)
    if NETNS.is_dir():
        for netns in [entry.name for entry in NETNS.iterdir() if entry.name.startswith(names.netns_prefix)]:
            run(["ip", "netns", "del", netns], check=False)
    if Path(f"/sys/class/net/{names.bridge}").exists():
        run(["ip", "link", "del", names.bridge], check=False)


def remains(names: Names) -> list[str]:
    """What of the sandbox's network is still there."""
    left = [entry.name for entry in Path("/sys/class/net").iterdir() if names.id in entry.name]
    if NETNS.is_dir():
        left += [str(entry) for entry in NETNS.iterdir() if entry.name.startswith(names.netns_prefix)]
    return left
