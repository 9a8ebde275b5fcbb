"""The fleet that tests run on: their own sandbox, with a state directory and subnet that nobody else uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fleet.sandbox import Sandbox, SandboxError

# Not in pytest's temporary directory: /tmp may be memory, and releases on the hosts are large.
PARENT = Path("/var/tmp")
PREFIX = "ddtree-sandbox-test-"


def _require_root() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("boots systemd hosts, for which it needs root on Linux: run the tests with sudo")


def _bring_up(sandbox: Sandbox, hosts: Sequence[str]) -> None:
    """On the first subnet that is free; parallel test runs take different ones."""
    for number in range(20):
        try:
            sandbox.up(hosts, subnet=f"10.{220 + (os.getpid() + number) % 20}.77.0/24")
            return
        except SandboxError as error:
            if "is in use" not in error.problem:
                raise
    pytest.fail("none of twenty subnets is free for a sandbox")


def _forget_the_dead() -> None:
    """Take down what test runs left that were killed."""
    for state in PARENT.glob(f"{PREFIX}*"):
        owner = state.name.removeprefix(PREFIX).split("-")[0]
        if not Path(f"/proc/{owner}").exists():
            Sandbox(state).down()


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """Two hosts, ct129 and ct200, for the whole session. Leave them as you found them: on, linked, without faults."""
    _require_root()
    _forget_the_dead()
    made = Sandbox(PARENT / f"{PREFIX}{os.getpid()}", say=print)
    _bring_up(made, ["ct129", "ct200"])
    try:
        yield made
    finally:
        made.down()


@pytest.fixture
def new_sandbox() -> Iterator[Callable[[Sequence[str]], Sandbox]]:
    """Makes sandboxes that a test may treat badly; they end with it. Without hosts it is not brought up."""
    _require_root()
    made: list[Sandbox] = []

    def make(hosts: Sequence[str]) -> Sandbox:
        sandbox = Sandbox(PARENT / f"{PREFIX}{os.getpid()}-{len(made)}", say=print)
        made.append(sandbox)
        if hosts:
            _bring_up(sandbox, hosts)
        return sandbox

    yield make
    for sandbox in made:
        sandbox.down()
