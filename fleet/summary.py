"""What is shown once a run has ended: outcomes, causes, times, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .render import duration
from .results import HostResult, Results, SlotResult, Status

WORDS = {
    "noop": ("nothing to do", "green"),
    "deployed": ("deployed", "green"),
    "rolled_back": ("rolled back as asked", "green"),
    "checked": ("checked, nothing changed", "green"),
    "done": ("done", "green"),
    "refused": ("refused", "yellow"),
    "locked": ("locked by another run", "yellow"),
    "unreachable": ("unreachable", "red"),
    "failed_rolled_back": ("failed, rolled back", "red"),
    "returned": ("returned, another slot failed", "yellow"),
    "failed_not_rolled_back": ("failed, NOT rolled back", "bold red"),
    "failed": ("failed", "red"),
    "not_tried": ("not tried", "yellow"),
    "not_reached": ("not reached", "yellow"),
}

NEXT = {
    Status.ROLLED_BACK: "The slots serve their last known good release. Mend the cause above and deploy again; the "
    "failed release is refused until then, unless forced (--force).",
    Status.NOT_ROLLED_BACK: "Some slot does not serve. Look at `fleet status` and `fleet logs HOST:SLOT`, then "
    "`fleet rollback -l HOST`.",
    Status.REFUSED: "No slot was touched. Mend what is listed above and run the command again; `fleet preflight` "
    "repeats the checks alone.",
    Status.LOCKED: "Another run is at work there. Wait for it, or look who it is with `fleet status`.",
    Status.UNREACHABLE: "Nothing is known of the hosts that could not be reached. Check address, key and known_hosts "
    "with `ssh`, then run the command again: hosts that are done take seconds.",
}


def words(outcome: str) -> Text:
    text, style = WORDS.get(outcome, (outcome.replace("_", " "), ""))
    return Text(text, style=style)


def show(console: Console, command: str, results: Results, seconds: float, artifacts: str) -> None:
    """The end of deploy, rollback and preflight."""
    status = results.status()
    if results.hosts and not results.inventory_problems:
        console.print(_table(results.hosts.values()))
    explain_inventory(console, results)
    for host in [] if results.inventory_problems else results.hosts.values():
        explain(console, host)
    problem = results.problem()
    if status is Status.ERROR and problem:
        console.print(Text(problem, style="red"), soft_wrap=True)
    verdict = Text("ok" if status is Status.OK else "not ok", style="green" if status is Status.OK else "bold red")
    rest = f" after {duration(seconds)}, exit status {int(status)}. Run kept in {artifacts}"
    console.print(Text.assemble(f"{command}: ", verdict, rest), soft_wrap=True)
    hint = NEXT.get(status) or _next_when_ok(command, results)
    if hint:
        console.print(Text(f"Next: {hint}"), soft_wrap=True)


def _next_when_ok(command: str, results: Results) -> str:
    outcomes = {host.outcome for host in results.hosts.values()}
    if results.status() is not Status.OK:
        return ""
    if "deployed" in outcomes:
        return "`fleet status` shows what serves; `fleet rollback` returns to the release before."
    if command == "preflight" and "checked" not in outcomes:
        return "`fleet deploy` with the same arguments."
    if "checked" in outcomes:
        return "the same command without --check."
    return ""


def _table(hosts: Iterable[HostResult]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("host", "slot", "outcome", "release", "time"):
        table.add_column(name, justify="right" if name == "time" else "left", overflow="fold")
    for host in sorted(hosts, key=lambda host: host.host):
        slots: list[SlotResult | None] = [*host.slots.values()] if host.slots else [None]
        for slot in slots:
            table.add_row(
                host.host,
                slot.slot if slot else "",
                _outcome(host, slot),
                "" if slot and slot.outcome == "not_tried" else (slot and slot.release) or host.release or "",
                duration(slot.seconds) if slot and slot.seconds is not None else "",
            )
    return table


def _outcome(host: HostResult, slot: SlotResult | None) -> Text:
    if slot is None:
        return words(host.outcome)
    if not slot.outcome and slot.details.get("action"):  # a plan, not yet carried out
        planned = slot.details["action"] != "none"
        return Text(f"ready: {slot.details.get('why')}", style="cyan") if planned else words("noop")
    return words(slot.outcome or host.outcome)


def explain_inventory(console: Console, results: Results) -> None:
    for problem in results.inventory_problems:
        _problem(console, "inventory", problem)
    if results.inventory_problems:
        console.print("The inventory has problems; no host has been contacted.")


def explain(console: Console, host: HostResult) -> None:
    """Why a host did not end well: every violated rule, every failed slot's cause and fix, else Ansible's message."""
    if host.status is Status.OK and not host.violations and host.outcome != "not_reached":
        return
    said = False
    for problem in host.violations:
        _problem(console, host.host, problem)
        said = True
    for slot in host.slots.values():
        if slot.cause:
            _slot(console, host.host, slot)
            said = True
    if host.outcome == "not_reached":
        _line(console, f"{host.host}: not reached: the run ended before its turn", "yellow")
    elif not said and host.message:
        where = f" (task: {host.task})" if host.task else ""
        _line(console, f"{host.host}: {host.message}{where}", "red")


def _slot(console: Console, host: str, slot: SlotResult) -> None:
    _line(console, f"{host}/{slot.slot}: {slot.cause}", "red")
    if slot.root and slot.root != slot.cause:
        _line(console, f"root line: {slot.root}", "bold", 4)
    if slot.hint:
        _line(console, f"fix: {slot.hint}", "", 4)
    if slot.serves:
        _line(console, f"serves: {slot.serves}", "", 4)
    for note in slot.notes:
        _line(console, f"note: {note}", "", 4)


def _problem(console: Console, host: str, problem: Mapping[str, Any]) -> None:
    """One violated preflight rule, or one problem of the inventory."""
    if "rule" in problem:
        text = f"{host}: {problem['rule']}: {problem.get('subject')}: {problem.get('title')}"
        text += f". Found {problem.get('found')}; needed {problem.get('needed')}"
    else:
        origin = f" [{problem['origin']}]" if problem.get("origin") else ""
        text = f"{problem.get('path')}{origin}: {problem.get('cause')}"
    stops = problem.get("stops", True)
    if problem.get("waived"):
        text += f" (waived: {problem['waived']})"
    _line(console, text if stops else f"warning: {text}", "red" if stops else "yellow")
    if problem.get("fix"):
        _line(console, f"fix: {problem['fix']}", "", 4)


def _line(console: Console, text: str, style: str, indent: int = 0) -> None:
    console.print(Text(" " * indent + text, style=style), soft_wrap=True)
