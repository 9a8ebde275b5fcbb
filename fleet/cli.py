"""`fleet`: deploy engines to a fleet of GPU hosts, see what serves, and go back.

Every command runs a playbook that plain `ansible-playbook` can run too; this adds progress, summary and exit statuses.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from . import cli_audit, cli_sandbox, cli_stack, cli_wheelhouse, content
from .arguments import AnsibleOptions
from .cli_options import Json, Reason, takes_ansible_options
from .results import Status

# click leaves with 2 on a wrong command line, but 2 means "failed and rolled back" here
for _class in typer.BadParameter.__mro__:
    if _class.__name__ == "UsageError":
        _class.exit_code = int(Status.USAGE)  # type: ignore[attr-defined]

STATUSES = """Exit statuses: 0 done or nothing to do; 2 failed and rolled back everywhere it was tried; 3 failed and not
fully rolled back; 4 refused by inventory validation, preflight or audit; 5 lock held by another run; 6 hosts
unreachable; 1 any other error; 64 wrong command line; 130 interrupted."""

app = typer.Typer(
    name="fleet",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=STATUSES.replace("\n", " "),
)


def _examples(*lines: str) -> str:
    """An epilog of commands to copy; each stands in a paragraph of its own, so that no terminal width joins them."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  {line}" for line in lines)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fleet {content.version()} (content: {content.root()})")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Deploy LLM engines to a fleet of GPU hosts: gated, and taken back by the hosts when the gate says no."""


@app.command(
    epilog=_examples(
        "fleet deploy -i inventory.yml -l ct200",
        "fleet deploy -i inventory.yml -l ct200 --check --diff    [dim]what would change[/dim]",
        "fleet deploy -i inventory.yml --json > result.json       [dim]for scripts; exit status as below[/dim]",
        "fleet deploy -i inventory.yml -e fleet_stack=cpu --reason 'new draft model'",
        STATUSES.replace("\n", " "),
    )
)
@takes_ansible_options(changes=True)
def deploy(
    options: AnsibleOptions,
    reason: Reason = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Activate again although nothing differs, or although it failed here before."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring every slot to the release and configuration that the inventory describes.

    Checks first (nothing is copied to a host that cannot take it), builds the release on the host, then moves slot by
    slot, each under its health gate. A slot whose gate says no is taken back by its host, with the cause named. Running
    it again when nothing differs changes nothing and takes seconds.
    """
    _change("deploy", options, as_json, {"fleet_force": True if force else None, "fleet_reason": reason})


@app.command(
    epilog=_examples(
        "fleet rollback -i inventory.yml -l ct200                 [dim]each slot to its previous good release[/dim]",
        "fleet releases -i inventory.yml -l ct200                 [dim]what there is to go back to[/dim]",
        "fleet rollback -i inventory.yml -l ct200 --to cpu-standalone-0.1.0-0123456789ab",
    )
)
@takes_ansible_options(changes=True)
def rollback(
    options: AnsibleOptions,
    to: Annotated[
        str | None,
        typer.Option("--to", help="A release kept on the host, instead of the previous good one.", metavar="RELEASE"),
    ] = None,
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Return every slot to an earlier good release, under the same gate as a deployment.

    A host that has nothing to go back to refuses, and nothing is touched there.
    """
    _change("rollback", options, as_json, {"fleet_release": to, "fleet_reason": reason})


@app.command(
    epilog=_examples(
        "fleet preflight -i inventory.yml",
        "fleet preflight -i inventory.yml -l ct200 --json",
    )
)
@takes_ansible_options(changes=False)
def preflight(options: AnsibleOptions, as_json: Json = False) -> None:
    """Ask of every host whether it could take the deployment, and list every rule that it violates, with the fix.

    Reads only. Violations give exit status 4.
    """
    _change("preflight", options, as_json, {})


@app.command(
    epilog=_examples(
        "fleet status -i inventory.yml",
        "fleet status -i inventory.yml --json | jq '.facts.ct200.slots'",
    )
)
@takes_ansible_options(changes=False)
def status(options: AnsibleOptions, as_json: Json = False) -> None:
    """Show what serves: each slot's release, state, health, GPU and time since its last change."""
    from . import views

    _look("status", options, as_json, views.status)


@app.command(
    epilog=_examples(
        "fleet history -i inventory.yml -l ct200",
        "fleet history -i inventory.yml -l ct200 --slot gpu1 -n 50",
    )
)
@takes_ansible_options(changes=False)
def history(
    options: AnsibleOptions,
    slot: Annotated[str | None, typer.Option("--slot", help="Only this slot.", metavar="NAME")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Activations per host.", metavar="N")] = 20,
    as_json: Json = False,
) -> None:
    """Show what happened: every activation from the journal of each host, newest last, with its cause if it failed."""
    from . import views

    session = _session("history", options, as_json, quiet=True)
    results = session.run("history", {"history_slot": slot or "", "history_newest": lines})
    found = {name: list(result.get("ddtree_activations") or []) for name, result in results.outputs.items()}
    if as_json:
        session.end(results.status(), session.document(results.status(), activations=found))
    _explain_failures(session)
    if found:
        views.history(session.out, found)
    session.end(results.status())


@app.command(epilog=_examples("fleet releases -i inventory.yml -l ct200"))
@takes_ansible_options(changes=False)
def releases(options: AnsibleOptions, as_json: Json = False) -> None:
    """Show the releases kept on each host, and which slots serve or could return to them."""
    from . import views

    _look("releases", options, as_json, views.releases)


@app.command(
    epilog=_examples(
        "fleet logs ct200 -i inventory.yml                        [dim]all slots of the host[/dim]",
        "fleet logs ct200:gpu1 -i inventory.yml -n 200",
    )
)
@takes_ansible_options(changes=False)
def logs(
    where: Annotated[str, typer.Argument(metavar="HOST[:SLOT]", help="A host of the inventory, and a slot of it.")],
    options: AnsibleOptions,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=10000, help="Lines.", metavar="N")] = 50,
    as_json: Json = False,
) -> None:
    """Show the last log lines of a host's slots, and of the activations that moved them."""
    import dataclasses

    from . import views

    match = re.fullmatch(r"([^:\s]+)(?::([a-z0-9][a-z0-9-]{0,31}))?", where)
    if match is None:
        raise typer.BadParameter(f"{where!r} is not HOST or HOST:SLOT", param_hint="HOST[:SLOT]")
    host, slot = match.groups()
    session = _session("logs", dataclasses.replace(options, limit=(host, *options.limit)), as_json, quiet=True)
    results = session.run("logs", {"logs_slot": slot or "", "logs_lines": lines})
    found = {name: views.log_lines(result) for name, result in results.outputs.items()}
    if as_json:
        session.end(results.status(), session.document(results.status(), logs=found))
    _explain_failures(session)
    views.logs(session.out, found)
    session.end(results.status())


def _session(command: str, options: AnsibleOptions, as_json: bool, quiet: bool = False) -> Any:
    from .session import Session  # rich tables and ansible-runner: --help does without

    return Session(command, options, as_json=as_json, quiet=quiet)


def _change(command: str, options: AnsibleOptions, as_json: bool, variables: dict[str, Any]) -> None:
    from . import summary

    session = _session(command, options, as_json)
    results = session.run(command, {name: value for name, value in variables.items() if value is not None})
    summary.show(session.err if as_json else session.out, command, results, session.seconds, str(session.folder))
    session.end(results.status())


def _look(command: str, options: AnsibleOptions, as_json: bool, view: Any) -> None:
    session = _session(command, options, as_json, quiet=True)
    results = session.run("status")
    outcome = results.status()
    if as_json:
        session.end(outcome, session.document(outcome, facts=results.facts))
    _explain_failures(session)
    if results.facts:
        view(session.out, results.facts)
    session.end(outcome)


def _explain_failures(session: Any) -> None:
    from . import summary

    summary.explain_inventory(session.err, session.results)
    for host in [] if session.results.inventory_problems else session.results.hosts.values():
        summary.explain(session.err, host)
    if session.results.status() is Status.ERROR and session.results.problem():
        session.err.print(session.results.problem(), style="red", markup=False, soft_wrap=True)


for _command, _lines in (
    (cli_audit.audit, cli_audit.AUDIT_EXAMPLES),
    (cli_audit.bom, cli_audit.BOM_EXAMPLES),
    (cli_audit.diff, cli_audit.DIFF_EXAMPLES),
):
    app.command(epilog=_examples(*_lines))(_command)
app.add_typer(cli_sandbox.app, name="sandbox")
app.add_typer(cli_wheelhouse.app, name="wheelhouse")
app.add_typer(cli_stack.app, name="stack")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
