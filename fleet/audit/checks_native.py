"""Checks of compiled code: does it fit the torch that is there, does it find its libraries, does it cover the GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from . import knowledge
from .case import Case, Finding, site_path, version
from .checks_set import same_version
from .demangle import demangle

_MOST_SHOWN = 12


def cuda_libraries(case: Case) -> Iterator[Finding]:
    """No library may need the runtime of another CUDA major; the file names say which that is."""
    major = case.cuda
    if major is None:
        return
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for library in case.loaded():
        if case.optional(str(library["path"])):
            continue
        for soname in library.get("needed") or ():
            number = knowledge.cuda_major(soname)
            if number is not None and number != major:
                found[case.owner(library["path"]), number].append(f"{site_path(library['path'])} needs {soname}")
    for (name, number), lines in sorted(found.items()):
        evidence = [*_few(lines), f"this environment is for CUDA {major}"]
        yield case.finding("CUDA-LIBRARY", name, evidence, count=len(lines), needed=major, found=number)


def ties(case: Case) -> Iterator[Finding]:
    """Kernels that declare no torch of their own are tied to one by their digest."""
    known = [*knowledge.TIES, *(knowledge.Tie(**value) for value in case.stack.get("ties") or ())]
    installed = case.torch_version
    for item in case.distributions:
        wanted = (case.lock or {}).get(item["name"])
        if item["name"] not in knowledge.NEED_TIE | {tie.name for tie in known}:
            continue
        digests = {item.get("content_sha256"), item.get("sha256"), wanted.sha256 if wanted else ""} - {"", None}
        mine = [tie for tie in known if {tie.sha256, tie.content_sha256} & digests]
        if not mine:
            evidence = [f"{item['name']} {item['version']}, content sha256 {str(item.get('content_sha256'))[:16]}..."]
            yield case.finding("ABI-UNTIED", item["name"], evidence)
        elif installed and not any(_fits(tie, installed, case.cuda) for tie in mine):
            tie = mine[0]
            evidence = [
                f"{item['name']} {item['version']} (content sha256 {str(item.get('content_sha256'))[:16]}...) "
                f"was built for torch {tie.torch}, CUDA {tie.cuda}",
                f"torch {installed} is installed",
            ]
            yield case.finding(
                "ABI-TIE", item["name"], evidence, needed=f"{tie.torch} (CUDA {tie.cuda})", found=installed
            )


def _fits(tie: knowledge.Tie, torch: str, cuda: int | None) -> bool:
    return same_version(tie.torch, torch.partition("+")[0]) and (cuda is None or cuda == tie.cuda)


def symbols(case: Case) -> Iterator[Finding]:
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for path, names in (case.survey.get("unresolved") or {}).items():
        if not case.set_aside(path):
            found[case.owner(path)][path] = names
    for name, files in sorted(found.items()):
        missing: dict[str, list[str]] = defaultdict(list)
        for path, mangled in files.items():
            for symbol in mangled:
                missing[symbol].append(site_path(path))
        installed = case.torch_version
        evidence = [f"torch {installed}" if installed else "torch is not installed"]
        for symbol, paths in sorted(missing.items(), key=lambda item: (-len(item[1]), item[0]))[:_MOST_SHOWN]:
            name_shown = demangle(symbol)
            mangled_too = f"  [{symbol}]" if name_shown != symbol else ""
            evidence.append(f"{name_shown}{mangled_too} wanted by {', '.join(sorted(paths)[:3])}")
        if len(missing) > _MOST_SHOWN:
            evidence.append(f"and {len(missing) - _MOST_SHOWN} more symbols")
        yield case.finding("ABI-SYMBOLS", name, evidence, count=len(missing), torch=installed or "(none)")


def damaged(case: Case) -> Iterator[Finding]:
    found: dict[str, list[str]] = defaultdict(list)
    for item in case.survey.get("problems") or ():
        if item["kind"] == "damaged":
            owner = item["distribution"] or case.owner(item["path"])
            found[owner].append(f"{site_path(item['path'])}: {item['detail']}")
    for name, lines in sorted(found.items()):
        yield case.finding("LIB-DAMAGED", name, _few(lines), count=len(lines))


def libraries(case: Case) -> Iterator[Finding]:
    """Every needed library is in the environment, or one that the host has and the stack asks hosts for."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for library in case.loaded():
        path = str(library["path"])
        for soname in library.get("missing") or ():
            if soname not in knowledge.ALWAYS_THERE | knowledge.DRIVER and not case.optional(path):
                rule = _rule_of_missing(case, soname)
                if rule:
                    found[rule, soname].append(site_path(path))
    for (rule, soname), paths in sorted(found.items()):
        wheel, package = knowledge.wheel_of(soname, case.cuda), knowledge.debian_package(soname)
        evidence = [f"{soname} is needed by {path}" for path in sorted(paths)]
        needed = f"{wheel}, which brings {soname}, from the stack's lock" if wheel else f"what brings {soname}"
        yield case.finding(
            rule,
            soname,
            _few(evidence),
            count=len(paths),
            needed=soname if rule == "LIB-SYSTEM" else needed,
            library=soname,
            package=package or "unknown",
        )


def _rule_of_missing(case: Case, soname: str) -> str:
    """The rule that a library outside the environment violates; empty where the host may be trusted to have it."""
    host = (case.survey.get("host") or {}).get("libraries")
    has = None if host is None else host.get(soname) is not None
    if knowledge.wheel_of(soname, case.cuda):
        return "LIB-MISSING"  # the system's own copy would be of another release
    package = knowledge.debian_package(soname)
    if case.has_stack and soname not in {str(name) for name in case.stack.get("libraries") or ()}:
        return "LIB-SYSTEM" if package else "LIB-MISSING"
    if has is False:
        return "HOST-LIBRARY" if package else "LIB-MISSING"
    return ""


def versions(case: Case) -> Iterator[Finding]:
    """Symbol versions asked of libraries inside the environment."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, soname, wanted in case.survey.get("unversioned") or ():
        if not case.set_aside(path):
            found[soname].append(f"{site_path(path)} needs {wanted} of {soname}")
    for soname, lines in sorted(found.items()):
        needed = knowledge.wheel_of(soname, case.cuda) or soname
        yield case.finding("LIB-VERSION", soname, _few(lines), count=len(lines), needed=needed)


def architectures(case: Case) -> Iterator[Finding]:
    """Torch and its extensions have code for every GPU, each distribution as a whole.

    A distribution may hold a file for one architecture only, beside others; NVIDIA's own libraries bring forms of
    device code that do not show here, and are forward compatible.
    """
    wanted = dict(case.target.gpus) or {f"GPUs of {item}": str(item) for item in case.stack.get("archs") or ()}
    if not wanted:
        return
    code: dict[str, set[str]] = defaultdict(set)
    for library in case.loaded():
        is_kernel = library.get("torch") or site_path(library["path"]).startswith("torch/lib/")
        if library.get("archs") and is_kernel and not case.optional(str(library["path"])):
            code[case.owner(library["path"])].update(library["archs"])
    for capability in sorted(set(wanted.values()), key=version):
        for name, archs in sorted(code.items()):
            if not covers(archs, capability):
                gpus = sorted(gpu for gpu, value in wanted.items() if value == capability)
                evidence = [f"{name} has code for {', '.join(_by_number(archs))}", f"wanted by {', '.join(gpus[:4])}"]
                yield case.finding("ARCH-UNCOVERED", name, evidence, needed=f"compute capability {capability}")


def covers(archs: set[str], capability: str) -> bool:
    """Code for sm_XY runs on X.Z with Z >= Y, as sm_XYf does; sm_XYa on X.Y only; PTX for compute_XY on everything from
    X.Y on, but marked with a or f on as little as code is."""
    major, minor = version(capability)[:2]
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")
        code_major, code_minor = int(digits[:-1]), int(digits[-1])
        if number.endswith("a"):
            fits = (code_major, code_minor) == (major, minor)
        elif kind == "sm" or number.endswith("f"):
            fits = code_major == major and code_minor <= minor
        else:
            fits = (code_major, code_minor) <= (major, minor)
        if fits:
            return True
    return False


def _by_number(archs: set[str]) -> list[str]:
    return sorted(archs, key=lambda arch: (not arch.startswith("sm"), version(arch), arch))


def _few(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 6 else [*lines[:5], f"and {len(lines) - 5} more"]


CHECKS = (cuda_libraries, ties, symbols, damaged, libraries, versions, architectures)
