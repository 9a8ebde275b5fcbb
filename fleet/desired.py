"""What the inventory asks for, checked as a whole before any host is contacted.

`check_fleet` looks at all hosts of a play and returns every problem, each named by its path among the variables such
as `hosts.ct200.fleet_slots[1].port`. `resolve` gives the desired state of one host. Types, defaults, choices and
descriptions come from roles/*/meta/argument_specs.yml alone; what single values may look like stands in fieldrules.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pydantic

from fleet import content, engine_wheel, fieldrules, stack, varspec
from fleet.varspec import Checker, Option, Problem, did_you_mean

content.add_host_code()

from ddtree import rules  # noqa: E402  # importable only once the hosts' code is on the path

Origin = Callable[[Any], str]


class Slot(pydantic.BaseModel):
    """One serving unit: one GPU, one port, one systemd unit."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str
    gpu: str
    port: int
    bind: str
    model: str
    draft: str
    served_model: str
    context_length: int
    mode: str
    budget: int
    topk: int
    max_concurrent: int
    threads: int
    env: dict[str, str]
    extra_args: list[str]


class Gate(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    no_progress_s: float
    cap_s: float
    probe_timeout_s: float
    completions: int
    soak_s: float
    min_acceptance: float


class Desired(pydantic.BaseModel):
    """Desired state of one host. Fields are the operator variables without their prefix; the API key is left out."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    host: str
    stack: str
    engine: str
    engine_path: str
    wheelhouse: str
    root: str
    state: str
    cache: str
    user: str
    python: str
    keep_releases: int
    release: str
    force: bool
    waves: list[int | str]
    max_unavailable: int
    reason: str
    waivers: dict[str, str]
    disk_reserve_gib: float
    xid_window_h: float
    gate: Gate
    api_key_set: bool
    slots: list[Slot]


class InvalidInventory(ValueError):
    """The inventory asks for something that cannot be; `problems` names all of it."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the inventory:\n" + "\n".join(f"  - {problem}" for problem in problems))


@functools.cache
def options() -> Mapping[str, Option]:
    """Every operator variable, by name."""
    return varspec.load(content.root() / "roles")


def operator_variables(hostvars: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in hostvars if isinstance(name, str) and name.startswith(varspec.PREFIX))


def resolve(
    hostvars: Mapping[str, Any], host: str = "", extra: Iterable[str] = (), *, slots_required: bool = True
) -> Desired:
    """Desired state of one host from its (templated) variables. Raises InvalidInventory with every problem.

    `extra` names the variables given with `-e name=value`: their scalars are text and are converted, others never are.
    """
    desired, problems = check_host(
        hostvars, host or str(hostvars.get("inventory_hostname", "host")), extra, slots_required=slots_required
    )
    if problems or desired is None:
        raise InvalidInventory(problems)
    return desired


def check_fleet(
    hosts: Mapping[str, Mapping[str, Any]],
    extra: Iterable[str] = (),
    origin: Origin | None = None,
    *,
    slots_required: bool = True,
) -> tuple[dict[str, Desired], list[Problem]]:
    """Desired state of every host that is right, and all problems; the same problem of many hosts is told once."""
    found: dict[str, Desired] = {}
    problems: list[Problem] = []
    extra = frozenset(extra)
    for host, hostvars in hosts.items():
        desired, wrong = check_host(hostvars, host, extra, origin, slots_required=slots_required)
        problems += wrong
        if desired is not None:
            found[host] = desired
    problems += _shared_gpus(found)
    return found, _merge(problems)


def check_host(
    hostvars: Mapping[str, Any],
    host: str,
    extra: Iterable[str] = (),
    origin: Origin | None = None,
    *,
    slots_required: bool = True,
) -> tuple[Desired | None, list[Problem]]:
    known = options()
    checker = Checker(origin, fieldrules.TYPE_HINTS)
    base = f"hosts.{host}"
    values: dict[str, Any] = {}
    for name in operator_variables(hostvars):
        if name not in known:
            near = did_you_mean(name, known)
            fix = f"did you mean {near}?" if near else "remove it; docs/variables.md lists all variables"
            checker.report(f"{base}.{name}", "unknown variable", fix, name)
            continue
        try:
            raw = hostvars[name]
        except Exception as error:  # Ansible has no common class for "this template or vault value has no value"
            reason = " ".join(str(error).split())[:300]
            checker.report(
                f"{base}.{name}", f"cannot be evaluated: {reason}", "mend the expression, or give the value itself"
            )
            continue
        _, values[name] = checker.value(raw, known[name], f"{base}.{name}", from_text=name in extra)
    wrong_type = {problem.path for problem in checker.problems}
    for name, option in known.items():
        if name not in values and f"{base}.{name}" not in wrong_type and not (option.required and slots_required):
            values[name] = option.default_value()
        elif option.required and name not in hostvars:
            checker.report(f"{base}.{name}", "is missing", f"set it for the host or its group: {option.description}")
    _check_scalars(checker, base, values)
    _check_directories(checker, base, values)
    _check_stack(checker, base, values)
    _check_engine_path(checker, f"{base}.fleet_engine_path", values.get("fleet_engine_path"))
    _check_waves(checker, f"{base}.fleet_waves", values.get("fleet_waves"))
    _check_waivers(checker, f"{base}.fleet_waivers", values.get("fleet_waivers"))
    _check_gate(checker, f"{base}.fleet_gate", values)
    slots = values.get("fleet_slots") if isinstance(values.get("fleet_slots"), list) else []
    if slots == [] and slots_required and f"{base}.fleet_slots" not in {p.path for p in checker.problems}:
        checker.report(
            f"{base}.fleet_slots",
            "is empty: nothing is to serve on this host",
            "list at least one slot, or leave the host out of the run with --limit",
        )
    for index, slot in enumerate(slots or []):
        if isinstance(slot, dict):
            _check_slot(checker, f"{base}.fleet_slots[{index}]", slot)
    _check_duplicates(checker, f"{base}.fleet_slots", slots or [])
    if checker.problems:
        return None, checker.problems
    return _desired(host, values), []


def _desired(host: str, values: Mapping[str, Any]) -> Desired:
    plain = {name.removeprefix(varspec.PREFIX): value for name, value in values.items()}
    key = plain.pop("api_key", "")
    slots = [
        dict(slot, served_model=slot["served_model"] or _model_name(slot["model"])) for slot in plain.pop("slots") or []
    ]
    plain = {
        name: "" if value is None and name in ("engine_path", "wheelhouse") else value for name, value in plain.items()
    }
    for name in ("engine_path", "wheelhouse"):
        if plain.get(name):
            plain[name] = str(Path(plain[name]).expanduser())
    return Desired(
        host=host,
        api_key_set=bool(key),
        slots=[Slot(**slot) for slot in slots],
        **{name: plain[name] for name in plain if name in Desired.model_fields},
    )


def _model_name(model: str) -> str:
    return "demo-code" if model == "embedded" else PurePosixPath(model).name


def _check_scalars(checker: Checker, base: str, values: Mapping[str, Any]) -> None:
    for name, rule in fieldrules.HOST_RULES.items():
        value = values.get(name)
        if isinstance(value, str):
            complaint = rule(value)
            if complaint:
                checker.report(f"{base}.{name}", *complaint, value=value)
    for name, bounds in fieldrules.HOST_RANGES.items():
        _check_range(checker, f"{base}.{name}", values.get(name), bounds)


def _check_range(checker: Checker, path: str, value: Any, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if isinstance(value, int | float) and not isinstance(value, bool) and not low <= value <= high:
        checker.report(path, f"{value} is out of range", f"choose between {low} and {high}", value)


def _check_directories(checker: Checker, base: str, values: Mapping[str, Any]) -> None:
    """One directory inside another would be pruned, measured or given to the service user together with it."""
    names = [
        name
        for name in ("fleet_root", "fleet_state", "fleet_cache")
        if isinstance(values.get(name), str) and values[name]
    ]
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            one, other = PurePosixPath(values[first]), PurePosixPath(values[second])
            if one.is_relative_to(other) or other.is_relative_to(one):
                checker.report(
                    f"{base}.{second}",
                    f"{other} and {first} ({one}) lie inside one another",
                    "give each a directory of its own",
                    values[second],
                )


def _check_stack(checker: Checker, base: str, values: Mapping[str, Any]) -> None:
    name = values.get("fleet_stack")
    if not isinstance(name, str):
        return
    known = stack.available()
    if name not in known:
        near = did_you_mean(name, known)
        fix = f"did you mean {near}?" if near else f"choose one of {', '.join(known) or 'none: no stack is installed'}"
        checker.report(f"{base}.fleet_stack", f"unknown stack {name[:60]!r}", fix, name)
        return
    try:
        chosen = stack.load(name)
    except stack.StackError as error:
        checker.report(f"{base}.fleet_stack", str(error), "mend the stack's folder, or use another stack", name)
        return
    engine = values.get("fleet_engine")
    if engine and engine not in chosen.engines:
        fix = f"use {' or '.join(chosen.engines)}, or another stack"
        checker.report(f"{base}.fleet_engine", f"stack {name} does not hold engine {engine}", fix, engine)
    slots = values.get("fleet_slots")
    for index, slot in enumerate(slots if chosen.cuda and isinstance(slots, list) else []):
        if isinstance(slot, dict) and slot.get("gpu") == "none":
            fix = "give a GPU's UUID, or use a stack without CUDA"
            path = f"{base}.fleet_slots[{index}].gpu"
            checker.report(path, f"is none, but stack {name} needs a GPU", fix, slot["gpu"])


def _check_engine_path(checker: Checker, path: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        return
    try:
        engine_wheel.package_directory(value)
    except engine_wheel.EngineError as error:
        checker.report(path, str(error), "give the folder of a ddtree_engine package on the control node", value)


def _check_waves(checker: Checker, path: str, waves: Any) -> None:
    if not isinstance(waves, list):
        return
    if not waves:
        checker.report(path, "is empty: no host would ever be reached", 'give at least one wave, such as ["100%"]')
    for index, wave in enumerate(waves):
        where = f"{path}[{index}]"
        if isinstance(wave, bool) or not isinstance(wave, int | str):
            checker.report(
                where, f"{wave!r} is not a wave", 'give a number of hosts such as 1, or a share such as "25%"', wave
            )
        elif isinstance(wave, int):
            if wave < 1:
                checker.report(where, f"a wave of {wave} hosts", "use a whole number of at least 1", wave)
        elif wave.isdigit():
            checker.report(
                where, f"must be a whole number, but is a string ({wave!r})", f"write it without quotes: {wave}", wave
            )
        elif not (wave.endswith("%") and wave[:-1].isdigit() and 1 <= int(wave[:-1]) <= 100):
            checker.report(where, f"{wave[:20]!r} is not a share of the hosts", 'use "1%" to "100%"', wave)


def _check_waivers(checker: Checker, path: str, waivers: Any) -> None:
    if not isinstance(waivers, dict):
        return
    for rule_id, reason in waivers.items():
        where = f"{path}.{rule_id}"
        rule = rules.RULES.get(str(rule_id))
        if rule is None:
            near = did_you_mean(str(rule_id).upper(), rules.RULES)
            checker.report(
                where,
                "no rule has this id",
                f"did you mean {near}?" if near else "`fleet preflight` shows rule ids",
                rule_id,
            )
        elif not rule.waivable:
            checker.report(
                where,
                "this rule cannot be waived: a deployment would fail",
                "remove the waiver and mend the cause",
                rule_id,
            )
        if not isinstance(reason, str) or not reason.strip():
            checker.report(
                where, "a waiver needs a reason", "write as its value why this is safe on this host", rule_id
            )


def _check_gate(checker: Checker, path: str, values: Mapping[str, Any]) -> None:
    gate = values.get("fleet_gate")
    if not isinstance(gate, dict):
        return
    for key, bounds in fieldrules.GATE_RANGES.items():
        _check_range(checker, f"{path}.{key}", gate.get(key), bounds)
    cap, pause = gate.get("cap_s"), gate.get("no_progress_s")
    if cap is not None and pause is not None and cap < pause:
        checker.report(
            f"{path}.cap_s",
            f"{cap:g} is less than no_progress_s ({pause:g})",
            "raise cap_s or lower no_progress_s",
            cap,
        )
    timeout = gate.get("probe_timeout_s")
    if values.get("fleet_engine") == "sglang" and timeout is not None and 0.5 <= timeout < 5:
        checker.report(
            f"{path}.probe_timeout_s",
            f"{timeout:g} s is too short: SGLang waits a second before it looks at itself",
            "use at least 5",
            timeout,
        )


def _check_slot(checker: Checker, path: str, slot: Mapping[str, Any]) -> None:
    for key, rule in fieldrules.SLOT_RULES.items():
        value = slot.get(key)
        if isinstance(value, str) and (value or key != "served_model"):
            complaint = rule(value)
            if complaint:
                checker.report(f"{path}.{key}", *complaint, value=value)
    for key, bounds in fieldrules.SLOT_RANGES.items():
        _check_range(checker, f"{path}.{key}", slot.get(key), bounds)
    _check_drafter(checker, path, slot)
    environment = slot.get("env")
    for name, value in (environment if isinstance(environment, dict) else {}).items():
        complaint = fieldrules.environment_name(str(name))
        if complaint:
            checker.report(f"{path}.env.{str(name)[:60]}", *complaint, value=name)
        if not isinstance(value, str):
            checker.report(
                f"{path}.env.{name}",
                f"must be a string, but is {varspec.kind_of(value)}",
                f'put it in quotes: "{value}"',
                value,
            )
            continue
        complaint = fieldrules.environment_value(value)
        if complaint:
            checker.report(f"{path}.env.{name}", *complaint, value=value)
    for index, argument in enumerate(slot.get("extra_args") or []):
        complaint = fieldrules.argument(argument) if isinstance(argument, str) else None
        if complaint:
            checker.report(f"{path}.extra_args[{index}]", *complaint, value=argument)


def _check_drafter(checker: Checker, path: str, slot: Mapping[str, Any]) -> None:
    model, draft, mode = slot.get("model"), slot.get("draft"), slot.get("mode")
    if draft == "none" and mode in ("tree", "linear"):
        checker.report(
            f"{path}.draft", f"is none, but mode {mode} needs a drafter", "name a drafter, or set mode: ar", draft
        )
    if isinstance(model, str) and model.startswith("/") and draft == "embedded":
        checker.report(
            f"{path}.draft",
            "the embedded drafter belongs to the embedded model and cannot draft for another",
            "give the path of this model's drafter, or `none` with mode: ar",
            draft,
        )
    if model == "embedded" and isinstance(draft, str) and draft.startswith("/"):
        checker.report(
            f"{path}.draft", "the embedded model goes with the embedded drafter only", "set draft: embedded", draft
        )


def _check_duplicates(checker: Checker, path: str, slots: list[Any]) -> None:
    words = {"name": "name", "port": "port", "gpu": "GPU"}
    for key, word in words.items():
        seen: dict[Any, int] = {}
        for index, slot in enumerate(slots):
            value = slot.get(key) if isinstance(slot, dict) else None
            if value is None or isinstance(value, bool) or value == "none":
                continue
            value = value.lower() if isinstance(value, str) else value
            if value in seen:
                checker.report(
                    f"{path}[{index}].{key}",
                    f"{word} {value} is taken by fleet_slots[{seen[value]}] already",
                    f"give each slot a {word} of its own",
                    slot[key],
                )
            else:
                seen[value] = index


def _shared_gpus(hosts: Mapping[str, Desired]) -> list[Problem]:
    """A UUID is unique in the world: two hosts with the same one mean a copied line."""
    owner: dict[str, str] = {}
    problems = []
    for host, desired in hosts.items():
        for index, slot in enumerate(desired.slots):
            uuid = slot.gpu.lower()
            if uuid != "none" and owner.setdefault(uuid, host) != host:
                problems.append(
                    Problem(
                        f"hosts.{host}.fleet_slots[{index}].gpu",
                        f"GPU {slot.gpu} is listed for host {owner[uuid]} too",
                        "list each GPU on the host that holds it (`nvidia-smi -L`)",
                    )
                )
    return problems


def _merge(problems: list[Problem]) -> list[Problem]:
    """A group variable that is wrong is wrong on each of its hosts: say it once, with the number of hosts."""
    groups: dict[tuple[str, str, str], list[tuple[str, Problem]]] = {}
    for problem in problems:
        host, mark, tail = problem.path.removeprefix("hosts.").partition(f".{varspec.PREFIX}")
        groups.setdefault((mark + tail, problem.cause, problem.fix), []).append((host, problem))
    merged = []
    for same in groups.values():
        first = same[0][1]
        if len(same) > 1:
            others = ", ".join(host for host, _ in same[1:4])
            more = f" and {len(same) - 4} more" if len(same) > 4 else ""
            first = dataclasses.replace(first, cause=f"{first.cause} (also on {others}{more})")
        merged.append(first)
    return merged
