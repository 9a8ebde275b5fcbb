"""Checks of files (are they what their distribution brought) and of the host that they are to run on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ddtree.checks_gpu import CUDA_DRIVERS, TOOLKITS

from . import knowledge
from .case import Case, Finding, site_path, version

_RULES = {
    "escapes": "FILE-ESCAPES",
    "edited": "FILE-EDITED",
    "unreadable": "FILE-EDITED",
    "missing": "FILE-MISSING",
    "unowned": "FILE-UNOWNED",
}
_MOST_SHOWN = 8


def files(case: Case) -> Iterator[Finding]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in case.survey.get("problems") or ():
        rule = _RULES.get(item["kind"])
        if rule:
            subject = item["distribution"] or site_path(item["path"])
            found[rule, subject].append(f"{site_path(item['path'])} {item['detail']}")
    for (rule, subject), lines in sorted(found.items()):
        more = [f"and {len(lines) - _MOST_SHOWN} more files"] if len(lines) > _MOST_SHOWN else []
        yield case.finding(rule, subject, [*lines[:_MOST_SHOWN], *more], count=len(lines))


def glibc(case: Case) -> Iterator[Finding]:
    """Symbol versions asked of the system's libraries, against this host or the oldest one that the stack allows."""
    here = case.survey.get("host") or {}
    libc = case.target.glibc or str(case.stack.get("min_glibc") or "") or str(here.get("glibc") or "")
    elsewhere = bool(case.target.glibc) and case.target.glibc != here.get("glibc")
    too_new: dict[str, list[str]] = defaultdict(list)
    lacking: dict[str, list[str]] = defaultdict(list)
    for library in case.loaded():
        path = str(library["path"])
        if case.optional(path):
            continue
        for soname, names in (library.get("needs") or {}).items():
            if soname not in (library.get("missing") or ()):
                continue
            offered = (here.get("libraries") or {}).get(soname)
            for name in names:
                if name.startswith("GLIBC_") and name[6:7].isdigit():
                    if libc and version(name[6:]) > version(libc):
                        too_new[name].append(site_path(path))
                elif offered and not elsewhere and name not in offered:
                    lacking[soname].append(f"{site_path(path)} needs {name} of {soname}, which this host's lacks")
    if too_new:
        newest = max(too_new, key=lambda name: version(name[6:]))
        ranked = sorted(too_new, key=lambda name: version(name[6:]), reverse=True)[:_MOST_SHOWN]
        evidence = [f"{name} is needed by {', '.join(sorted(set(too_new[name]))[:3])}" for name in ranked]
        evidence.append(f"found glibc {libc}")
        count = len({path for paths in too_new.values() for path in paths})
        yield case.finding("HOST-GLIBC", f"glibc {newest[6:]}", evidence, count=count, found=libc, needed=newest[6:])
    for soname, lines in sorted(lacking.items()):
        package = knowledge.debian_package(soname) or "libstdc++6" if soname.startswith("libstdc++") else soname
        yield case.finding("LIB-VERSION", soname, lines[:_MOST_SHOWN], count=len(lines), needed=package)


def driver(case: Case) -> Iterator[Finding]:
    major = case.cuda
    found = case.target.driver
    if major is None or not found:
        return
    least = str(case.stack.get("min_driver") or CUDA_DRIVERS.get(major, ""))
    if least and version(found) < version(least):
        evidence = [f"driver {found}; CUDA {major} needs {least}"]
        yield case.finding("DRIVER-OLD", f"driver {found}", evidence, found=found, needed=least, cuda=major)


def toolkit(case: Case) -> Iterator[Finding]:
    """GPUs that need a recent compiler, where kernels are compiled at run time by the system's toolkit."""
    found = case.target.toolkit
    if not found or case.cuda is None or _brings_compiler(case):
        return
    for prefix, least in dict(case.stack.get("toolkits") or TOOLKITS).items():
        gpus = sorted(name for name, capability in case.target.gpus.items() if capability.startswith(str(prefix)))
        if gpus and (found == "none" or version(found) < version(str(least))):
            capability = case.target.gpus[gpus[0]]
            evidence = [
                f"toolkit found: {found}; compute capability {capability} needs {least} or newer",
                f"GPUs: {', '.join(gpus[:4])}",
            ]
            yield case.finding("GPU-TOOLKIT", f"toolkit {found}", evidence, found=found, needed=str(least))


def _brings_compiler(case: Case) -> bool:
    """The stack says that its environment compiles with its own toolkit, and it holds one."""
    return bool(case.stack.get("ships_toolkit")) or {"nvidia-cuda-nvcc", "nvidia-nvvm"} <= case.by_name.keys()


CHECKS = (files, glibc, driver, toolkit)
