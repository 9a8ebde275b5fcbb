"""Listening ports and who holds them, on this machine and from /proc trees as other hosts have them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from ddtree import netports

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(address: str, state: str, inode: int) -> str:
    return (
        f"   0: {address} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0 100\n"
    )


def make_process(proc: Path, pid: int, inode: int, cgroup: str, comm: str = "python3") -> None:
    directory = proc / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (directory / "fd" / "4").symlink_to("/dev/null")
    (directory / "cgroup").write_text(cgroup)
    (directory / "comm").write_text(comm + "\n")
    (directory / "cmdline").write_text("python3\0-m\0engine\0")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        HEADER
        + line("0100007F:7531", "0A", 100)  # 127.0.0.1:30001
        + line("00000000:7530", "0A", 200)  # 0.0.0.0:30000
        + line("0100007F:7532", "01", 300)  # established, not listening
        + line("0100007F:1F90", "0A", 400)
    )
    (tmp_path / "net" / "tcp6").write_text(
        HEADER
        + line("00000000000000000000000000000000:0016", "0A", 500)
        + line("0000000000000000FFFF00000100007F:0017", "0A", 600)
    )
    make_process(tmp_path, 11, 100, "0::/system.slice/ddtree-gpu1.service\n")
    make_process(tmp_path, 12, 200, "1:name=systemd:/sandbox/system.slice/wrapper.service\n4:cpu:/x.scope\n0::/\n")
    make_process(tmp_path, 13, 500, "0::/user.slice/user-0.slice/session-3.scope/sub\n", "sshd")
    return tmp_path


def test_each_listening_port_is_named_with_address_process_unit_and_owner(proc: Path) -> None:
    found = {item["port"]: item for item in netports.ports(proc)}
    assert set(found) == {30001, 30000, 8080, 22, 23}
    ours, foreign = found[30001], found[30000]
    assert (ours["addr"], ours["pid"], ours["unit"], ours["slot"], ours["ours"]) == (
        "127.0.0.1",
        11,
        "ddtree-gpu1.service",
        "gpu1",
        True,
    )
    assert (foreign["addr"], foreign["comm"], foreign["command"], foreign["unit"], foreign["ours"]) == (
        "0.0.0.0",
        "python3",
        "python3 -m engine",
        "wrapper.service",
        False,
    )
    assert (found[22]["addr"], found[22]["unit"]) == ("::", "session-3.scope")
    assert found[23]["addr"] == "127.0.0.1"  # an IPv4 address in IPv6 clothes


def test_a_port_whose_process_cannot_be_seen_is_foreign(proc: Path) -> None:
    hidden = next(item for item in netports.ports(proc) if item["port"] == 8080)
    assert (hidden["pid"], hidden["ours"]) == (None, False)


@pytest.mark.parametrize(
    ("unit", "slot"),
    [
        ("ddtree-gpu1.service", "gpu1"),
        ("ddtree-activate@gpu1.service", None),
        ("ddtree-recover.service", None),
        ("ddtree-router.service", None),
        ("ddtree-.service", None),
        ("my-ddtree-gpu1.service", None),
        ("ddtree-gpu1.service.evil", None),
        ("", None),
    ],
)
def test_only_engines_of_slots_are_ours(unit: str, slot: str | None) -> None:
    assert netports.our_slot(unit) == slot


def test_a_real_listener_of_this_machine_is_found_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = [item for item in netports.ports() if item["port"] == port]
    assert (found["addr"], found["pid"], found["ours"]) == ("127.0.0.1", os.getpid(), False)


def test_reserved_ports_are_read_as_the_kernel_prints_them() -> None:
    assert netports.port_ranges("8080,9000-9100\n") == [(8080, 8080), (9000, 9100)]
    assert netports.port_ranges("\n") == []
