"""The options that several commands share. The names are Ansible's own, so that nobody has to learn two sets."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .arguments import AnsibleOptions

_ANSIBLE = "Ansible"

Inventory = Annotated[
    list[str] | None,
    typer.Option(
        "-i", "--inventory", help="Inventory file, folder or host list.", metavar="FILE", rich_help_panel=_ANSIBLE
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option("-l", "--limit", help="Only these hosts (pattern).", metavar="PATTERN", rich_help_panel=_ANSIBLE),
]
ExtraVars = Annotated[
    list[str] | None,
    typer.Option(
        "-e", "--extra-vars", help="Variables: k=v, JSON, or @file.", metavar="VARS", rich_help_panel=_ANSIBLE
    ),
]
Check = Annotated[
    bool, typer.Option("--check", "-C", help="Say what would change; change nothing.", rich_help_panel=_ANSIBLE)
]
Diff = Annotated[bool, typer.Option("--diff", "-D", help="Show the differences.", rich_help_panel=_ANSIBLE)]
Verbose = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, help="Show Ansible's own output; repeat for more.", rich_help_panel=_ANSIBLE
    ),
]
VaultFile = Annotated[
    list[str] | None,
    typer.Option(
        "--vault-password-file",
        help="File or script with the vault password.",
        metavar="FILE",
        rich_help_panel=_ANSIBLE,
    ),
]
VaultId = Annotated[
    list[str] | None,
    typer.Option("--vault-id", help="Vault identity, as Ansible takes it.", metavar="ID", rich_help_panel=_ANSIBLE),
]
AskVault = Annotated[
    bool, typer.Option("--ask-vault-pass", "-J", help="Ask for the vault password.", rich_help_panel=_ANSIBLE)
]
AskBecome = Annotated[
    bool,
    typer.Option("--ask-become-pass", "-K", help="Ask for the sudo password of the hosts.", rich_help_panel=_ANSIBLE),
]
Forks = Annotated[
    int | None,
    typer.Option("--forks", "-f", min=1, help="Hosts at the same time.", metavar="N", rich_help_panel=_ANSIBLE),
]
User = Annotated[
    str | None, typer.Option("-u", "--user", help="User to connect as.", metavar="NAME", rich_help_panel=_ANSIBLE)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Why, for the journal of each host.", metavar="TEXT")]


def _gather(
    inventory: Inventory = None,
    limit: Limit = None,
    extra_vars: ExtraVars = None,
    check: Check = False,
    diff: Diff = False,
    verbose: Verbose = 0,
    vault_password_file: VaultFile = None,
    vault_id: VaultId = None,
    ask_vault_pass: AskVault = False,
    ask_become_pass: AskBecome = False,
    forks: Forks = None,
    user: User = None,
) -> AnsibleOptions:
    return AnsibleOptions(
        inventory=tuple(inventory or ()),
        limit=tuple(limit or ()),
        extra_vars=tuple(extra_vars or ()),
        check=check,
        diff=diff,
        verbose=verbose,
        vault_password_file=tuple(vault_password_file or ()),
        vault_id=tuple(vault_id or ()),
        ask_vault_pass=ask_vault_pass,
        ask_become_pass=ask_become_pass,
        forks=forks,
        user=user,
    )


def takes_ansible_options(*, changes: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command Ansible's flags; it receives them as one value, `options`.

    `changes` says whether the command can change a host, and so has --check and --diff.
    """
    hints = typing.get_type_hints(_gather, include_extras=True)
    shared = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(_gather).parameters.items()
        if changes or name not in ("check", "diff")
    ]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own_hints = typing.get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(annotation=own_hints[name])
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "options"
        ]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            options = _gather(**{parameter.name: values.pop(parameter.name) for parameter in shared})
            function(options=options, **values)

        command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
        command.__doc__ = _paragraphs(function.__doc__ or "")
        del command.__wrapped__  # type: ignore[attr-defined]
        return command

    return decorate


def _paragraphs(text: str) -> str:
    """Source lines are not output lines: join those of a paragraph, so that the terminal's width decides."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))
