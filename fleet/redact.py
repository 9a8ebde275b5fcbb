"""Keeps secrets out of what a run leaves on disk and on the screen.

Ansible's `no_log` is the first line; this is the second: a value is a secret when its *name* says so, and once a secret
is known it is replaced wherever else it turns up (a command line, an error message, verbose output).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

HIDDEN = "********"

_NAME = re.compile(r"(^|[_.-])(api_?key|token|pass|password|passwd|passphrase|secret|credentials?|private_key)$", re.I)
_SHORTEST = 6  # replacing shorter strings everywhere would garble output and protect nothing
_KEPT_ENVIRONMENT = re.compile(r"^(ANSIBLE_\w+|DDTREE_\w+|FLEET_\w+|PATH|HOME|USER|LANG|LC_\w+|TERM|TZ|VIRTUAL_ENV)$")


def is_secret_name(name: str) -> bool:
    return _NAME.search(name) is not None


class Redactor:
    """Knows the secrets of one run."""

    def __init__(self, environment: Mapping[str, str] | None = None, extra_vars: Iterable[str] = ()) -> None:
        self._values: list[str] = []
        for name, value in (environment or {}).items():
            if is_secret_name(name):
                self.learn(value)
        for text in extra_vars:
            self._learn_extra(text)

    def learn(self, value: object) -> None:
        if isinstance(value, str) and len(value) >= _SHORTEST and value not in self._values and value != HIDDEN:
            self._values.append(value)
            self._values.sort(key=len, reverse=True)  # the longest first: one secret may contain another

    def text(self, text: str) -> str:
        for value in self._values:
            if value in text:
                text = text.replace(value, HIDDEN)
        return text

    def data(self, data: Any) -> Any:
        """A copy of JSON-like data without secrets; values under secret names are learnt on the way."""
        self._learn_from(data)
        return self._clean(data)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What is worth recording of an environment: never all of it, a shell holds everybody's tokens."""
        return {
            name: HIDDEN if is_secret_name(name) else self.text(value)
            for name, value in sorted(environment.items())
            if _KEPT_ENVIRONMENT.match(name)
        }

    def _learn_extra(self, text: str) -> None:
        """Secrets in one -e argument: `k=v k2=v2`, JSON or YAML, or @file."""
        data: Any = None
        try:
            if text.startswith("@"):
                data = yaml.safe_load(Path(text[1:]).expanduser().read_text())
            elif text.lstrip().startswith(("{", "[")):
                data = yaml.safe_load(text)
            else:
                data = dict(part.split("=", 1) for part in shlex.split(text) if "=" in part)
        except (OSError, ValueError, yaml.YAMLError):
            return  # an encrypted or broken file: Ansible will speak for itself, and there is no plain secret to learn
        self._learn_from(data)

    def _learn_from(self, data: Any) -> None:
        if isinstance(data, Mapping):
            for name, value in data.items():
                if isinstance(value, str) and is_secret_name(str(name)):
                    self.learn(value)
                else:
                    self._learn_from(value)
        elif isinstance(data, list | tuple):
            for value in data:
                self._learn_from(value)

    def _clean(self, data: Any) -> Any:
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, Mapping):
            return {
                name: HIDDEN if value and isinstance(value, str) and is_secret_name(str(name)) else self._clean(value)
                for name, value in data.items()
            }
        if isinstance(data, list | tuple):
            return [self._clean(value) for value in data]
        return data


def dump(data: Any) -> str:
    return json.dumps(data, indent=2, default=str, ensure_ascii=False)
