"""What has to stand on a host beside releases: the agent's files and the two static units, as rendered here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jinja2

from fleet import content

UNITS = ("ddtree-activate@.service", "ddtree-recover.service")


@functools.cache
def agent_files() -> dict[str, str]:
    """The host code of this installation by file name."""
    return {path.name: path.read_text() for path in sorted((content.host_code() / "ddtree").glob("*.py"))}


@functools.cache
def agent_version() -> str:
    content.add_host_code()
    from ddtree import install

    return install.agent_version(agent_files())


def units(desired: Mapping[str, Any]) -> dict[str, str]:
    """The static units for a host's directories."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    values = {name: desired[name] for name in ("root", "state", "cache", "user")}
    return {
        name: environment.from_string((content.root() / "templates" / f"{name}.j2").read_text()).render(values)
        for name in UNITS
    }


def spec(desired: Mapping[str, Any], sender: str = "root", *, with_agent: bool = False) -> dict[str, Any]:
    """Arguments for the host; the agent's files travel only where they are needed."""
    return {
        "user": desired["user"],
        "sender": sender,
        "agent_version": agent_version(),
        "agent": agent_files() if with_agent else {},
        "units": units(desired),
    }
