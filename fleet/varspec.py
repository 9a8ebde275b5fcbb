"""Operator variables as roles/*/meta/argument_specs.yml describe them: the only place with their types and defaults.

Ansible's own validation converts (a string to a number, a number to a boolean) and stops at the first problem of a
role. An operator wants neither: this checks strictly, against all roles at once, and collects every problem.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

PREFIX = "fleet_"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something wrong with the inventory: where, what, and how to mend it."""

    path: str
    cause: str
    fix: str
    origin: str = ""

    def __str__(self) -> str:
        where = f" [{self.origin}]" if self.origin else ""
        return f"{self.path}{where}: {self.cause}. Fix: {self.fix}"

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Option:
    """One variable or one key of a nested one."""

    name: str
    type: str = "str"
    required: bool = False
    default: Any = None
    choices: tuple[Any, ...] = ()
    elements: str = ""
    secret: bool = False
    description: str = ""
    role: str = ""
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)

    def default_value(self) -> Any:
        """The default, with the defaults of nested keys filled in."""
        value = copy.deepcopy(self.default)
        if self.type == "dict" and self.options and isinstance(value, dict):
            return {key: value.get(key, option.default_value()) for key, option in self.options.items()}
        return value


class SpecError(Exception):
    """A role's argument_specs.yml is not as this package needs it (a fault of the package, not of the inventory)."""


def load(roles: Path) -> dict[str, Option]:
    """Every operator variable of every role below `roles`, by name. Each belongs to exactly one role."""
    found: dict[str, Option] = {}
    files = sorted(roles.glob("*/meta/argument_specs.yml"))
    if not files:
        raise SpecError(f"no role with meta/argument_specs.yml below {roles}: the installation is incomplete")
    for file in files:
        role = file.parent.parent.name
        try:
            entry_points = yaml.safe_load(file.read_text())["argument_specs"]
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise SpecError(f"{file} is not an argument specification: {error}") from error
        for entry_point in entry_points.values():
            for name, raw in (entry_point.get("options") or {}).items():
                if name in found:
                    raise SpecError(f"{file}: {name} is described by role {found[name].role} already")
                found[name] = _option(name, raw, role)
    return found


def _option(name: str, raw: Mapping[str, Any], role: str) -> Option:
    description = raw.get("description", "")
    return Option(
        name=name,
        type=raw.get("type", "str"),
        required=bool(raw.get("required", False)),
        default=raw.get("default"),
        choices=tuple(raw.get("choices") or ()),
        elements=raw.get("elements", ""),
        secret=bool(raw.get("no_log", False)),
        description=" ".join(description) if isinstance(description, list) else str(description),
        role=role,
        options={key: _option(key, value, role) for key, value in (raw.get("options") or {}).items()},
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return near[0] if near else ""


TYPE_WORDS = {
    "str": "a string",
    "path": "a path (string)",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping",
}


def kind_of(value: Any) -> str:
    """What a value is, in the words of YAML."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else type(value).__name__


class Checker:
    """Checks values against options and collects problems.

    `origin` says in which file and line a value stands; `hints` gives, by option name, the fix for a wrong type.
    """

    def __init__(self, origin: Callable[[Any], str] | None = None, hints: Mapping[str, str] | None = None) -> None:
        self.problems: list[Problem] = []
        self._origin = origin
        self._hints = hints or {}

    def report(self, path: str, cause: str, fix: str, value: Any = None) -> None:
        where = self._origin(value) if self._origin is not None and value is not None else ""
        self.problems.append(Problem(path, cause, fix, where or ""))

    def value(self, value: Any, option: Option, path: str, from_text: bool = False) -> tuple[bool, Any]:
        """(is it right?, the plain value or what could be read of it).

        `from_text`: a scalar of `-e name=value`, which is always text.
        """
        if from_text and isinstance(value, str) and option.type in ("int", "float", "bool"):
            converted = _from_text(value, option.type)
            if converted is None:
                self.report(
                    path, f"{value!r} is not {TYPE_WORDS[option.type]}", f"give {TYPE_WORDS[option.type]}", value
                )
                return False, None
            value = converted
        if not self._right_type(value, option, path):
            return False, None
        if option.type == "dict":
            return self._mapping(value, option, path)
        if option.type == "list":
            return self._list(value, option, path)
        plain = _plain(value, option.type)
        if option.choices and plain not in option.choices:
            near = did_you_mean(str(plain), map(str, option.choices))
            hint = f" (did you mean {near}?)" if near else ""
            shown = "the value" if option.secret else repr(plain)
            self.report(
                path, f"{shown} is not a choice{hint}", f"use one of {', '.join(map(str, option.choices))}", value
            )
            return False, None
        return True, plain

    def _right_type(self, value: Any, option: Option, path: str) -> bool:
        wanted = option.type
        if wanted == "raw":
            return True
        number = isinstance(value, int | float) and not isinstance(value, bool)
        right = {
            "str": isinstance(value, str),
            "path": isinstance(value, str),
            "int": number and isinstance(value, int),
            "float": number and math.isfinite(value),
            "bool": isinstance(value, bool),
            "list": isinstance(value, list | tuple),
            "dict": isinstance(value, Mapping),
        }
        if wanted not in right:
            raise SpecError(f"{option.name}: type {wanted} of its argument specification is not supported")
        if right[wanted]:
            return True
        words = TYPE_WORDS[wanted]
        shown = kind_of(value) + (
            "" if option.secret or isinstance(value, Mapping | list) or value is None else f" ({value!r})"
        )
        fix = f"give {words}"
        if wanted in ("int", "float") and isinstance(value, str) and _from_text(value, wanted) is not None:
            fix = f"write it without quotes: {value.strip()}"
        elif wanted == "str" and number:
            fix = f'put it in quotes: "{value}"'
        elif value is None:
            fix = f"give {words}, or leave the key out" if not option.required else f"give {words}"
        self.report(path, f"must be {words}, but is {shown}", self._hints.get(option.name, fix), value)
        return False

    def _mapping(self, value: Mapping[Any, Any], option: Option, path: str) -> tuple[bool, Any]:
        if not option.options:
            return True, {_plain(key, ""): _plain(item, "") for key, item in value.items()}
        before = len(self.problems)
        plain: dict[str, Any] = {}
        for key, item in value.items():
            if key not in option.options:
                near = did_you_mean(str(key), option.options)
                fix = f"did you mean {near}?" if near else f"known keys are {', '.join(option.options)}"
                self.report(f"{path}.{key}", "unknown key", fix, key)
                continue
            good, checked = self.value(item, option.options[key], f"{path}.{key}")
            if good:
                plain[str(key)] = checked
        for key, nested in option.options.items():
            if key in value:
                continue
            if nested.required:
                self.report(
                    f"{path}.{key}", "is missing", f"add {key}: {nested.description or TYPE_WORDS[nested.type]}", value
                )
            else:
                plain[key] = nested.default_value()
        return len(self.problems) == before, plain

    def _list(self, value: Iterable[Any], option: Option, path: str) -> tuple[bool, Any]:
        before = len(self.problems)
        item_option = dataclasses.replace(option, type=option.elements or "raw", choices=(), required=True)
        plain = []
        for index, item in enumerate(value):
            _, checked = self.value(item, item_option, f"{path}[{index}]")
            plain.append(checked)  # what could be read of it, so that further checks find what else is wrong
        return len(self.problems) == before, plain


def _from_text(text: str, wanted: str) -> Any:
    text = text.strip()
    if wanted == "bool":
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower())
    if not re.fullmatch(r"[+-]?\d{1,18}" if wanted == "int" else r"[+-]?\d{1,18}(\.\d+)?", text):
        return None
    return int(text) if wanted == "int" else float(text)


def _plain(value: Any, wanted: str) -> Any:
    """The value without what Ansible attaches to it (tags with file and line), ready for JSON."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return str.__str__(value) if type(value) is str else "".join(value)
    if isinstance(value, int):
        return float(int(value)) if wanted == "float" else int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key, ""): _plain(item, "") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, "") for item in value]
    return value
