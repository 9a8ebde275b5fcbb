"""From the options of `fleet` to the command line of `ansible-playbook`: one pure function, no side effects."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class AnsibleOptions:
    """Ansible's own flags, as the operator gave them."""

    inventory: tuple[str, ...] = ()
    limit: tuple[str, ...] = ()
    extra_vars: tuple[str, ...] = ()
    check: bool = False
    diff: bool = False
    verbose: int = 0
    vault_password_file: tuple[str, ...] = ()
    vault_id: tuple[str, ...] = ()
    ask_vault_pass: bool = False
    ask_become_pass: bool = False
    forks: int | None = None
    user: str | None = None


def build_args(playbook: Path | str, options: AnsibleOptions, variables: Mapping[str, Any] | None = None) -> list[str]:
    """Arguments for `ansible-playbook` (without the program itself).

    `variables` are the command's own extra variables. They come last, because Ansible lets the last -e win and an
    option such as `--to` must not lose against a variable given beside it.
    """
    args: list[str] = []
    for source in options.inventory:
        args += ["-i", source]
    if options.limit:
        args += ["-l", ",".join(options.limit)]
    for extra in options.extra_vars:
        args += ["-e", extra]
    if variables:
        args += ["-e", json.dumps(dict(variables), sort_keys=True)]
    if options.check:
        args.append("--check")
    if options.diff:
        args.append("--diff")
    for file in options.vault_password_file:
        args += ["--vault-password-file", file]
    for identity in options.vault_id:
        args += ["--vault-id", identity]
    if options.ask_vault_pass:
        args.append("--ask-vault-pass")
    if options.ask_become_pass:
        args.append("--ask-become-pass")
    if options.forks is not None:
        args += ["--forks", str(options.forks)]
    if options.user is not None:
        args += ["-u", options.user]
    if options.verbose:
        args.append("-" + "v" * min(options.verbose, 6))
    return [*args, str(playbook)]
