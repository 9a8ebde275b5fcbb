"""Checks of the set of distributions: is it the lock's, does it fit itself, is it for one Python and one CUDA."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from . import knowledge
from .case import Case, Finding, site_path

# What an installer leaves in an environment of its own accord; never imported by an engine.
_INSTALLERS = frozenset({"pip", "uv"})
_MOST_SHOWN = 12


def python(case: Case) -> Iterator[Finding]:
    minors = [str(item) for item in case.stack.get("python") or []]
    if minors and case.python and case.python not in minors:
        evidence = [f"Python {case.python} in {case.survey.get('root', '')}", f"the stack has {', '.join(minors)}"]
        yield case.finding("SET-PYTHON", f"Python {case.python}", evidence, needed=" or ".join(minors))


def tags(case: Case) -> Iterator[Finding]:
    if not case.python:
        return
    machine = case.target.machine or str(case.stack.get("arch") or "") or _host(case, "machine")
    for item in case.distributions:
        said: set[Tag] = set()
        for line in item.get("tags") or ():
            try:
                said |= set(parse_tag(str(line)))
            except ValueError:
                continue
        if said and not any(_fits(tag, case.python, machine) for tag in said):
            wanted = f"cp{case.python.replace('.', '')}" + (f", {machine}" if machine else "")
            listed = ", ".join(sorted(str(tag) for tag in said)[:4])
            yield case.finding("SET-TAGS", item["name"], [f"{item['version']} was made for {listed}"], needed=wanted)


def _host(case: Case, key: str) -> str:
    return str((case.survey.get("host") or {}).get(key) or "")


def _fits(tag: Tag, python_minor: str, machine: str) -> bool:
    digits = python_minor.replace(".", "")
    minor = int(python_minor.split(".")[1])
    interpreter = tag.interpreter
    if interpreter.startswith("cp"):
        number = interpreter[2:]
        if tag.abi == "abi3" or (tag.abi == "none" and number != digits):
            fits = number[:1] == "3" and number[1:].isdigit() and int(number[1:]) <= minor
        else:
            fits = number == digits and tag.abi in (f"cp{digits}", "none")
    elif interpreter.startswith("py"):
        fits = interpreter in ("py3", "py2.py3", f"py{digits}") or (
            interpreter.startswith("py3") and interpreter[3:].isdigit() and int(interpreter[3:]) <= minor
        )
    else:
        fits = False
    return fits and _platform_fits(tag.platform, machine)


def _platform_fits(platform: str, machine: str) -> bool:
    """The C library is left to HOST-GLIBC, which knows what is really needed of it."""
    if platform == "any":
        return True
    return platform.startswith(("manylinux", "linux_")) and (not machine or platform.endswith(f"_{machine}"))


def metadata(case: Case) -> Iterator[Finding]:
    for item in case.survey.get("problems") or ():
        if item["kind"] == "metadata":
            yield case.finding("SET-METADATA", item["distribution"], [f"{item['path']}: {item['detail']}"])
    for name, count in Counter(item["name"] for item in case.distributions).items():
        if count > 1:
            found = [item for item in case.distributions if item["name"] == name]
            evidence = [f"{item.get('folder', item['name'])}: version {item['version']}" for item in found]
            yield case.finding("SET-TWICE", name, evidence)


def lock(case: Case) -> Iterator[Finding]:
    if case.lock is None:
        return
    for name, wanted in case.lock.items():
        item = case.by_name.get(name)
        if item is None:
            old = next((old for old, new in knowledge.RENAMED.items() if new == name and old in case.by_name), "")
            hint = [f"{old} is installed: {name} under its former name, which does not count"] if old else []
            yield case.finding(
                "SET-MISSING", name, [f"the lock names {name} {wanted.version}", *hint], needed=wanted.version
            )
        elif not same_version(item["version"], wanted.version):
            evidence = [f"installed {item['version']}, the lock names {wanted.version}"]
            yield case.finding("SET-VERSION", name, evidence, needed=wanted.version)
    for item in case.distributions:
        if item["name"] not in case.lock and item["name"] not in case.also | _INSTALLERS:
            yield case.finding("SET-EXTRA", item["name"], [f"{item['version']} is installed"])


def same_version(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def requirements(case: Case) -> Iterator[Finding]:
    """What installed distributions ask of each other; extras that nobody asked for are left out."""
    environment = {
        "python_version": case.python or "3.11",
        "python_full_version": str((case.survey.get("python") or {}).get("version") or f"{case.python or '3.11'}.0"),
        "platform_system": "Linux",
        "sys_platform": "linux",
        "platform_machine": case.target.machine or str(case.stack.get("arch") or "x86_64"),
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_version": "",
        "implementation_version": "",
        "extra": "",
    }
    wanted: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in case.distributions:
        if _differs(case, item["name"]):
            continue  # SET-VERSION or SET-EXTRA says it, and what it requires is not what will be there
        for line in item.get("requires") or ():
            need = _requirement(line, environment)
            if need is None:
                continue
            name = str(canonicalize_name(need.name))
            found = case.by_name.get(name)
            if case.lock is not None and name in case.lock and _differs(case, name):
                continue  # SET-MISSING or SET-VERSION says it
            if found is None or not _satisfies(found["version"], need):
                state = f"{found['version']} is installed" if found else "is not installed"
                wanted[name, f"{name}{need.specifier}"].append(f"{item['name']} requires {line}; {name} {state}")
    for (name, needed), evidence in sorted(wanted.items()):
        old = next((old for old, new in knowledge.RENAMED.items() if new == name and old in case.by_name), "")
        if old:
            evidence.append(f"{old} {case.by_name[old]['version']} is {name} under its former name and does not count")
        yield case.finding("SET-REQUIREMENT", name, evidence[:_MOST_SHOWN], count=len(evidence), needed=needed)


def _differs(case: Case, name: str) -> bool:
    """There is a lock, and it says otherwise."""
    if case.lock is None or name in case.also | _INSTALLERS:
        return False
    wanted, found = case.lock.get(name), case.by_name.get(name)
    return wanted is None or found is None or not same_version(found["version"], wanted.version)


def _requirement(line: str, environment: Mapping[str, str]) -> Requirement | None:
    try:
        need = Requirement(str(line))
        if need.marker is not None and not need.marker.evaluate(dict(environment)):
            return None
    except (ValueError, RecursionError):  # each of packaging's errors is a ValueError
        return None
    return need


def _satisfies(found: str, need: Requirement) -> bool:
    try:
        return need.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        return True


def conflicts(case: Case) -> Iterator[Finding]:
    for item in case.survey.get("shared") or ():
        paths = [path for path in item["paths"] if _importable(path)]
        if not paths:
            continue
        names = list(item["distributions"])
        keep = next((knowledge.RENAMED[name] for name in names if knowledge.RENAMED.get(name) in names), names[-1])
        evidence = [f"{' and '.join(names)} both bring {path}" for path in paths[:3]]
        if item["count"] > len(evidence):
            evidence.append(f"and {item['count'] - len(evidence)} more files")
        yield case.finding("SET-CONFLICT", ", ".join(names), evidence, count=item["count"], keep=keep)


def _importable(path: str) -> bool:
    """Build scripts and tests that wheels drop at the top by mistake are overwritten daily, and nobody imports them."""
    inside = site_path(path)
    top = inside.partition("/")[0]
    return "/" in inside and top not in ("tests", "test", "docs", "examples", "benchmarks", "bin", "share")


def torch_build(case: Case) -> Iterator[Finding]:
    wanted = str(case.stack.get("torch") or "")
    if not wanted or "torch" not in case.by_name:
        return
    found = case.torch_version
    if found and not _same_build(found, wanted):
        cuda = case.torch.get("cuda") or "none"
        evidence = [f"torch/version.py says {found}, CUDA {cuda}; the stack is for {wanted}"]
        yield case.finding("TORCH-BUILD", "torch", evidence, needed=wanted)


def _same_build(found: str, wanted: str) -> bool:
    try:
        one, other = Version(found), Version(wanted)
    except InvalidVersion:
        return found == wanted
    return one.public == other.public and (other.local is None or one.local == other.local)


def one_cuda(case: Case) -> Iterator[Finding]:
    major = case.cuda
    builds = {
        item["name"]: number
        for item in case.distributions
        if (number := knowledge.distribution_cuda(item["name"], item["version"], item.get("local") or "")) is not None
    }
    local = str(case.torch.get("version") or "").partition("+")[2]
    said = str(case.torch.get("cuda") or "").partition(".")[0]
    if said.isdecimal() and "torch" in case.by_name:
        builds["torch"] = int(said)
    if major is None and builds:
        major = Counter(builds.values()).most_common(1)[0][0]
    others = {name: number for name, number in builds.items() if number != major}
    for number in sorted(set(others.values())):
        names = sorted(name for name, value in others.items() if value == number)
        evidence = [f"{name} {_shown(case.by_name[name], local)} is for CUDA {number}" for name in names[:_MOST_SHOWN]]
        reason = "the stack" if case.stack.get("cuda") else "torch"
        evidence.append(f"{reason} is for CUDA {major}")
        yield case.finding("CUDA-MIXED", ", ".join(names[:4]), evidence, count=len(names), needed=major)


def _shown(item: Mapping[str, Any], torch_local: str) -> str:
    text = str(item["version"])
    return f"{text}+{torch_local}" if item["name"] == "torch" and torch_local and "+" not in text else text


def toolchain(case: Case) -> Iterator[Finding]:
    found = {name: str(case.by_name[name]["version"]) for name in knowledge.TOOLCHAIN if name in case.by_name}
    if "nvidia-cuda-nvcc" not in found:
        return
    releases = {name: ".".join(text.split(".")[:2]) for name, text in found.items()}
    if len(set(releases.values())) > 1:
        evidence = [f"{name} {text}" for name, text in found.items()]
        yield case.finding("CUDA-TOOLCHAIN", ", ".join(found), evidence)


CHECKS = (python, tags, metadata, lock, requirements, conflicts, torch_build, one_cuda, toolchain)
