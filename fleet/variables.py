"""Operator variables as Ansible holds them while a play runs: templated when they are asked for, with their origin."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.utils.vars import load_extra_vars

from fleet.varspec import PREFIX


class Templated(Mapping[str, Any]):
    """The fleet_* variables of one host; a value that cannot be templated raises when it is read."""

    def __init__(self, task_vars: Mapping[str, Any], templar: Any) -> None:
        self._vars = task_vars
        self._templar = templar
        self._names = [name for name in task_vars if isinstance(name, str) and name.startswith(PREFIX)]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._templar.template(self._vars[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def extra_names(loader: Any) -> frozenset[str]:
    """Names of the variables given with -e; their scalars are always text."""
    return frozenset(load_extra_vars(loader))


def origin(value: Any) -> str:
    """File and line in which a value of the inventory stands; empty where Ansible does not know it."""
    try:
        from ansible._internal._datatag._tags import Origin
    except ImportError:  # private to ansible-core: without it, problems are named by their path alone
        return ""
    tag = Origin.get_tag(value)
    if tag is None or not tag.path:
        return ""
    path = Path(tag.path)
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    return f"{shown}:{tag.line_num}" if tag.line_num else shown
