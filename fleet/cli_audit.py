"""`fleet audit`, `fleet bom` and `fleet diff`: does an environment fit, what is in it, how do two of them differ."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import AnsibleOptions
from .cli_options import Json, takes_ansible_options
from .results import Status

_TARGET = "The host that it is to run on"
_WHAT = "What to audit"

Hosts = Annotated[
    list[str] | None, typer.Argument(metavar="[HOST]...", help="Hosts of the inventory; their slots' releases.")
]
Venv = Annotated[
    str | None,
    typer.Option(
        "--venv",
        help="An environment, whoever made it: on this machine, or on HOST where one is given.",
        metavar="PATH",
        rich_help_panel=_WHAT,
    ),
]
Wheels = Annotated[
    Path | None,
    typer.Option(
        "--wheels", help="A folder of wheels, before they are installed.", metavar="DIR", rich_help_panel=_WHAT
    ),
]
StackWheels = Annotated[
    str | None,
    typer.Option(
        "--wheelhouse",
        help="The wheels of this stack in the wheelhouse, before they are staged.",
        metavar="STACK",
        rich_help_panel=_WHAT,
    ),
]
StackName = Annotated[
    str | None,
    typer.Option("--stack", "-s", help="Compare with the lock and needs of this stack.", metavar="STACK"),
]
Python = Annotated[str, typer.Option("--python", help="Python minor of wheels, such as 3.11.", metavar="MINOR")]
Gpu = Annotated[
    list[str] | None,
    typer.Option("--gpu", help="Compute capability, such as 12.0; repeatable.", metavar="X.Y", rich_help_panel=_TARGET),
]
Driver = Annotated[
    str, typer.Option("--driver", help="NVIDIA driver, such as 580.65.06.", metavar="VERSION", rich_help_panel=_TARGET)
]
Glibc = Annotated[str, typer.Option("--glibc", help="C library, such as 2.35.", metavar="X.Y", rich_help_panel=_TARGET)]
Toolkit = Annotated[
    str,
    typer.Option(
        "--toolkit", help="CUDA toolkit of the system, or 'none'.", metavar="VERSION", rich_help_panel=_TARGET
    ),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Read every file again, changed or not.")]

AUDIT_EXAMPLES = (
    "fleet audit ct200 -i inventory.yml                       [dim]the releases that its slots serve[/dim]",
    "fleet audit ct129 -i inventory.yml --venv /opt/sglang/venv   [dim]somebody else's venv on a host[/dim]",
    "fleet audit --venv ./venv --gpu 12.0 --driver 580.65.06",
    "fleet audit --wheelhouse cpu                             [dim]before anything is sent[/dim]",
    "fleet audit --venv ./venv --stack cpu --json",
    "Exit statuses: 0 fits; 4 does not fit; 1 could not be read; 6 hosts unreachable; 64 wrong command line.",
)
BOM_EXAMPLES = (
    "fleet bom ct129 -i inventory.yml --venv /opt/sglang/venv --json > ct129.json",
    "fleet bom --venv ./venv",
    "fleet bom --stack cpu",
)
DIFF_EXAMPLES = (
    "fleet diff ct129.json ct200 -i inventory.yml             [dim]what would make ct200 like ct129[/dim]",
    "fleet diff cpu ./venv                                    [dim]a stack's lock and a venv[/dim]",
    "fleet diff /opt/a/venv /opt/b/venv --json",
    "Exit statuses: 0 the same; 4 something differs; 1 could not be read; 6 host unreachable; 64 wrong command line.",
)


@takes_ansible_options(changes=False)
def audit(
    options: AnsibleOptions,
    hosts: Hosts = None,
    venv: Venv = None,
    wheels: Wheels = None,
    wheelhouse: StackWheels = None,
    stack: StackName = None,
    python: Python = "",
    gpu: Gpu = None,
    driver: Driver = "",
    glibc: Glibc = "",
    toolkit: Toolkit = "",
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Check without a GPU that the parts of an environment fit each other, the stack's lock and the host.

    Reads files only: nothing is imported, installed or started. Finds other versions than the lock's, mixed CUDA
    builds, kernels compiled for another torch (the missing symbols by name), libraries that nobody brings, GPUs that
    kernels do not cover, a driver, toolkit or C library that is too old, and files that were edited after the
    installation. What to mend first stands first.
    """
    from fleet.audit import report, sources
    from fleet.audit.case import Target
    from fleet.audit.judge import judge

    what = [name for name, value in (("HOST", hosts), ("--wheels", wheels), ("--wheelhouse", wheelhouse)) if value]
    if len(what) > 1 or (venv and what and what != ["HOST"]) or not (what or venv):
        raise typer.BadParameter("name one of HOST, --venv, --wheels and --wheelhouse (--venv may go with HOST)")
    gpus = {f"a GPU of {value}": _capability(value) for value in gpu or ()}
    given = Target(glibc=glibc, driver=driver, gpus=gpus, toolkit=toolkit)
    found: list[tuple[str, dict[str, Any], Any]] = []
    try:
        if hosts:
            surveys, facts, unreachable = _survey_hosts(hosts, options, venv, as_json)
            for host, items in surveys.items():
                target = _merge(Target.of_facts(facts.get(host, {})), given)
                for item in items:
                    case = sources.case(
                        item["survey"], stack_name=stack or "", manifest=item["manifest"], target=target
                    )
                    found.append((f"{host}: {item['name']}", item["survey"], judge(case)))
        else:
            unreachable = Status.OK
            if venv:
                name, survey = venv, sources.venv(Path(venv), cached=not no_cache)
            elif wheels:
                name, survey = str(wheels), sources.folder_of_wheels(wheels, python)
            else:
                stack = stack or wheelhouse
                chosen, lock = sources.load_stack(str(wheelhouse), python)
                name, survey = f"stack {chosen.name}", sources.stack_wheels(chosen, lock.python)
            found.append((name, survey, judge(sources.case(survey, stack_name=stack or "", target=given))))
    except ValueError as error:
        _fail(str(error), as_json)
    if as_json:
        print(json.dumps({"audits": {name: report.document(survey, items) for name, survey, items in found}}, indent=1))
    else:
        colour = sys.stdout.isatty()
        print("\n\n".join(report.text(name, survey, items, colour=colour) for name, survey, items in found))
    stops = any(finding.stops for _, _, items in found for finding in items)
    raise typer.Exit(int(Status.REFUSED if stops else unreachable))


@takes_ansible_options(changes=False)
def bom(
    options: AnsibleOptions,
    hosts: Hosts = None,
    venv: Venv = None,
    stack: Annotated[str | None, typer.Option("--stack", "-s", help="A stack's lock.", metavar="STACK[:MINOR]")] = None,
    as_json: Json = False,
) -> None:
    """List what an environment holds: every distribution with its version, build and GPU architectures.

    Keep the JSON of a host that works: `fleet diff` compares any other with it, now and later.
    """
    from fleet.audit import gaps, sources

    if not hosts and bool(venv) == bool(stack):
        raise typer.BadParameter("name one of HOST, --venv and --stack (--venv may go with HOST)")
    status = Status.OK
    try:
        if hosts:
            surveys, _, status = _survey_hosts(hosts, options, venv, as_json)
            found = {
                f"{host}: {item['name']}": gaps.of_survey(item["survey"])
                for host, items in surveys.items()
                for item in items
            }
        else:
            source = str(venv or stack)
            bill = sources.bill(source)
            if bill is None:
                raise sources.SourceError(f"{source} is neither an environment nor a stack")
            found = dict([bill])
    except ValueError as error:
        _fail(str(error), as_json)
    if as_json:
        print(json.dumps({"boms": found}, indent=1))
    else:
        print("\n\n".join(_bom_text(name, value) for name, value in found.items()))
    raise typer.Exit(int(status))


@takes_ansible_options(changes=False)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="What it should be like.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is to be made like A.")],
    options: AnsibleOptions,
    venv: Venv = None,
    as_json: Json = False,
) -> None:
    """Compare two environments: what differs, what CUDA depends on first, and what would make B like A.

    A and B are each a file that `fleet bom --json` has written, a venv, a release or a folder of wheels on this
    machine, a stack (its lock), or a host of the inventory (the release of its first slot, or what lies at --venv).
    """
    from fleet.audit import gaps, sources

    bills: list[tuple[str, dict[str, Any]]] = []
    try:
        for source in (a, b):
            bill = sources.bill(source)
            if bill is None:
                if "/" in source or source.endswith(".json"):
                    raise sources.SourceError(f"{source} does not exist")
                surveys, _, _ = _survey_hosts([source], options, venv, as_json)
                items = surveys.get(source) or []
                if not items:
                    raise sources.SourceError(
                        f"{source} is no file, folder or stack, and no host gave an answer for it"
                    )
                bill = source, gaps.of_survey(items[0]["survey"])
            bills.append(bill)
    except ValueError as error:
        _fail(str(error), as_json)
    (a_name, one), (b_name, other) = bills
    rows = gaps.compare(one, other)
    if as_json:
        print(json.dumps(gaps.document(a_name, b_name, rows), indent=1))
    else:
        print(gaps.text(a_name, b_name, rows))
    raise typer.Exit(int(Status.REFUSED if rows else Status.OK))


def _survey_hosts(
    hosts: list[str], options: AnsibleOptions, venv: str | None, as_json: bool
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]], Status]:
    """(surveys, facts, status) by host, through playbooks/audit.yml."""
    from . import summary
    from .session import Session

    limited = dataclasses.replace(options, limit=(",".join(hosts), *options.limit))
    session = Session("audit", limited, as_json=as_json, quiet=True)
    results = session.run("audit", {"audit_venv": venv or ""})
    found = {
        name: list(result["ddtree_surveys"]) for name, result in results.outputs.items() if result.get("ddtree_surveys")
    }
    summary.explain_inventory(session.err, results)
    for host in [] if results.inventory_problems else results.hosts.values():
        if host.host not in found:
            summary.explain(session.err, host)
    status = results.status()
    if not found:
        raise SystemExit(int(status or Status.ERROR))
    return found, results.facts, status


def _merge(host: Any, given: Any) -> Any:
    """What the command line says goes before what was observed."""
    changes = {field.name: value for field in dataclasses.fields(given) if (value := getattr(given, field.name))}
    return dataclasses.replace(host, **changes)


def _capability(text: str) -> str:
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r} is no compute capability such as 12.0", param_hint="--gpu")
    return text


def _bom_text(name: str, value: dict[str, Any]) -> str:
    torch, python = value.get("torch") or {}, value.get("python") or {}
    head = f"{name}: {len(value['distributions'])} distributions, Python {python.get('minor') or 'unknown'}"
    if torch.get("version"):
        head += f", torch {torch['version']} (CUDA {torch.get('cuda') or 'unknown'})"
    width = max((len(item["name"]) for item in value["distributions"]), default=0)
    lines = [
        f"  {item['name']:{width}}  {item['version']:24}  {' '.join(item.get('archs') or ())}".rstrip()
        for item in value["distributions"]
    ]
    return "\n".join([head, *lines])


def _fail(message: str, as_json: bool) -> Any:
    if as_json:
        print(json.dumps({"error": message}, indent=1))
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(int(Status.ERROR))
