"""`fleet sandbox`: real systemd hosts with simulated GPUs on this machine, to try deployments on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from . import content
from .sandbox import DEFAULT_HOSTS, DEFAULT_SUBNET, Sandbox, SandboxError
from .sandbox import faults as gpu_faults
from .sandbox.layout import default_state

app = typer.Typer(
    name="sandbox",
    no_args_is_help=True,
    help="""A fleet of real hosts on this machine: systemd, sshd and eight simulated GPUs each.

    Whatever you do to a production host you can do to these: deploy, break, reboot, cut off. They have addresses on a
    private bridge and no way out. Needs root on Debian or Ubuntu; the first `up` makes a base image (about a minute),
    every later one takes about a second.

    Try:  fleet sandbox up  &&  fleet deploy -l ct200  &&  fleet sandbox down
    """,
)
power_app = typer.Typer(no_args_is_help=True, help="Switch hosts on and off, orderly or by pulling the plug.")
link_app = typer.Typer(no_args_is_help=True, help="Cut a host off the network, which runs on, and bring it back.")
fault_app = typer.Typer(
    no_args_is_help=True,
    help="Break the simulated GPUs of a host, and mend them. Faults stay over reboots until they are cleared.",
)
app.add_typer(power_app, name="power")
app.add_typer(link_app, name="link")
app.add_typer(fault_app, name="fault")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
HostName = Annotated[str, typer.Argument(metavar="HOST", help="Name of a sandbox host, e.g. ct200.")]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except SandboxError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def _sandbox() -> Sandbox:
    return Sandbox(say=_say)


def _default_inventory() -> Path:
    """In a checkout where ansible.cfg looks; elsewhere, and for a sandbox of one's own, its state directory."""
    if content.in_checkout() and "DDTREE_SANDBOX_DIR" not in os.environ:
        return content.default_inventory()
    return default_state() / "hosts.yml"


def _document(sandbox: Sandbox) -> dict[str, Any]:
    if not sandbox.exists():
        return {"exists": False, "state": str(sandbox.names.state), "hosts": []}
    layout = sandbox.layout
    return {
        "exists": True,
        "state": str(sandbox.names.state),
        "subnet": layout.subnet,
        "gateway": layout.gateway,
        "bridge": sandbox.names.bridge,
        "inventory": str(layout.inventory),
        "image": str(layout.image),
        "hosts": [dataclasses.asdict(host) for host in sandbox.status()],
    }


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


@app.command()
def up(
    hosts: Annotated[
        str | None,
        typer.Option(
            help=f"Names, separated by commas; a final number becomes the address. [{','.join(DEFAULT_HOSTS)}]"
        ),
    ] = None,
    subnet: Annotated[str | None, typer.Option(help=f"Private /24 network of the hosts. [{DEFAULT_SUBNET}]")] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(help="Where to write the Ansible inventory. [inventory/sandbox/hosts.yml in a checkout]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring the hosts up and write their Ansible inventory.

    Running it again brings up what is off and otherwise changes nothing. A first `up` that fails or is interrupted
    takes back what it made. Several sandboxes fit on one machine: give each its own DDTREE_SANDBOX_DIR and --subnet.
    """
    with _plain_errors():
        sandbox = _sandbox()
        path = inventory or (None if sandbox.exists() else _default_inventory())
        made = sandbox.up(
            [name.strip() for name in hosts.split(",")] if hosts else None, subnet=subnet, inventory_path=path
        )
        document = _document(sandbox)
    if as_json:
        _print_json({"changed": made, **document})
        return
    names = ", ".join(f"{host['name']} ({host['address']})" for host in document["hosts"])
    typer.echo(f"{'up' if made else 'already up'}: {names}")
    typer.echo(f"inventory: {document['inventory']}")


@app.command()
def down(as_json: Json = False) -> None:
    """Remove the hosts and every trace of them: processes, mounts, network, cgroups, state and inventory.

    Works on a half-made or damaged sandbox too. The cached base image stays (in ~/.cache/ddtree-fleet).
    """
    with _plain_errors():
        removed = _sandbox().down()
    if as_json:
        _print_json({"changed": removed})
    else:
        typer.echo("the sandbox is gone" if removed else "there was no sandbox")


@app.command()
def status(as_json: Json = False) -> None:
    """Show the hosts: power, network, SSH, GPU faults. Status 1: no sandbox, or a host does not answer."""
    with _plain_errors():
        sandbox = _sandbox()
        document = _document(sandbox)
    if as_json:
        _print_json(document)
    elif not document["exists"]:
        typer.echo(f"no sandbox in {document['state']}; make one with `fleet sandbox up`")
    else:
        for host in document["hosts"]:
            words = [
                f"power {host['power']}",
                f"link {host['link']}",
                "ssh answers" if host["ssh"] else "ssh does not answer",
            ]
            words += [f"fault {line}" for line in _fault_lines(host["faults"])]
            typer.echo(f"{host['name']:<10} {host['address']:<15} {', '.join(words)}")
        typer.echo(f"inventory: {document['inventory']}")
    if not document["exists"] or not all(host["ssh"] for host in document["hosts"]):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def ssh(
    host: HostName,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Command to run; none gives a shell.")
    ] = None,
) -> None:
    """Log in to a host as root, or run a command there: fleet sandbox ssh ct200 systemctl status

    One argument is a shell line ('journalctl -n 5 | cat'); several are passed on exactly as they are.
    """
    words = command or []
    with _plain_errors():
        argv = _sandbox().ssh_command(
            host, words[0] if len(words) == 1 else words, terminal=not command and sys.stdin.isatty()
        )
    os.execvp(argv[0], argv)


@power_app.command("kill")
def power_kill(host: HostName) -> None:
    """Power loss: everything on the host ends at once, nothing is written any more. `start` brings it back."""
    with _plain_errors():
        _sandbox().kill(host)
    typer.echo(f"{host} lost power")


@power_app.command("stop")
def power_stop(host: HostName) -> None:
    """Shut the host down in good order. For a reboot: fleet sandbox ssh HOST reboot"""
    with _plain_errors():
        _sandbox().stop(host)
    typer.echo(f"{host} is off")


@power_app.command("start")
def power_start(host: HostName) -> None:
    """Switch the host on and wait for SSH. Address, keys and disk are what they were."""
    with _plain_errors():
        _sandbox().start(host)
    typer.echo(f"{host} is up")


@link_app.command("cut")
def link_cut(host: HostName) -> None:
    """Pull the host's network cable."""
    with _plain_errors():
        _sandbox().cut(host)
    typer.echo(f"{host} is cut off")


@link_app.command("restore")
def link_restore(host: HostName) -> None:
    """Plug the host's network cable back in."""
    with _plain_errors():
        _sandbox().restore(host)
    typer.echo(f"{host} is connected")


# Typer shows a paragraph as it is written when it begins with \b.
@fault_app.command(
    "set", help=f"Break GPUs of a host: fleet sandbox fault set ct200 3=gone 1=xid:48\n\n\b\n{gpu_faults.explain()}"
)
def fault_set(
    host: HostName,
    faults: Annotated[list[str], typer.Argument(metavar="GPU=KIND[:VALUE]...", help="What breaks, see above.")],
) -> None:
    with _plain_errors():
        sandbox = _sandbox()
        for spec in faults:
            gpu_faults.parse(spec)
        for spec in faults:
            sandbox.fault(host, spec)
    typer.echo(f"{host}: {', '.join(faults)}")


@fault_app.command("clear")
def fault_clear(
    host: HostName,
    gpus: Annotated[list[int] | None, typer.Argument(metavar="[GPU]...", help="GPUs to mend; none means all.")] = None,
) -> None:
    """Take the faults away. Kernel lines that were written stay until the host reboots, as in life."""
    with _plain_errors():
        sandbox = _sandbox()
        for spec in [f"{gpu}=clear" for gpu in gpus or []] or ["clear"]:
            sandbox.fault(host, spec)
    typer.echo(f"{host}: {'GPU ' + ', '.join(map(str, gpus)) if gpus else 'all GPUs'} mended")


@fault_app.command("list")
def fault_list(as_json: Json = False) -> None:
    """Show the faults that are set, host by host."""
    with _plain_errors():
        sandbox = _sandbox()
        found = {host.name: host.faults for host in (sandbox.status() if sandbox.exists() else [])}
    if as_json:
        _print_json(found)
        return
    for host, faults in found.items():
        typer.echo(f"{host}: {', '.join(_fault_lines(faults)) or 'none'}")


def _fault_lines(faults: dict[str, Any]) -> list[str]:
    return [
        f"{gpu}={kind}" + ("" if value is True else f":{value}")
        for gpu, kinds in faults.items()
        for kind, value in kinds.items()
    ]
