"""The command line that `fleet` gives to ansible-playbook."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fleet.arguments import AnsibleOptions, build_args

PLAYBOOK = Path("/content/playbooks/deploy.yml")


def test_without_options_only_the_playbook_is_named() -> None:
    assert build_args(PLAYBOOK, AnsibleOptions()) == [str(PLAYBOOK)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"inventory": ("a.yml", "b.yml")}, ["-i", "a.yml", "-i", "b.yml"]),
        ({"limit": ("ct200", "!ct129")}, ["-l", "ct200,!ct129"]),
        ({"extra_vars": ("a=1", "@more.yml")}, ["-e", "a=1", "-e", "@more.yml"]),
        ({"check": True}, ["--check"]),
        ({"diff": True}, ["--diff"]),
        ({"verbose": 3}, ["-vvv"]),
        ({"vault_password_file": ("one", "two")}, ["--vault-password-file", "one", "--vault-password-file", "two"]),
        ({"vault_id": ("prod@prompt",)}, ["--vault-id", "prod@prompt"]),
        ({"ask_vault_pass": True}, ["--ask-vault-pass"]),
        ({"ask_become_pass": True}, ["--ask-become-pass"]),
        ({"forks": 5}, ["--forks", "5"]),
        ({"user": "ops"}, ["-u", "ops"]),
    ],
)
def test_each_flag_passes_through(options: dict[str, object], expected: list[str]) -> None:
    assert build_args(PLAYBOOK, AnsibleOptions(**options)) == [*expected, str(PLAYBOOK)]  # type: ignore[arg-type]


def test_every_option_reaches_the_command_line() -> None:
    """A field added to the options and forgotten in build_args would be silently ignored."""
    samples: dict[str, object] = {"bool": True, "int": 2, "int | None": 2, "str | None": "x", "tuple[str, ...]": ("x",)}
    for field in dataclasses.fields(AnsibleOptions):
        options = dataclasses.replace(AnsibleOptions(), **{field.name: samples[str(field.type)]})  # type: ignore[arg-type]
        assert build_args(PLAYBOOK, options) != [str(PLAYBOOK)], field.name


def test_the_commands_own_variables_win_over_the_operators() -> None:
    args = build_args(PLAYBOOK, AnsibleOptions(extra_vars=("fleet_release=old",)), {"fleet_release": "new"})
    assert args[:2] == ["-e", "fleet_release=old"]
    assert json.loads(args[3]) == {"fleet_release": "new"}


def test_values_reach_ansible_as_they_are_and_never_through_a_shell() -> None:
    reason = "why; rm -rf / $(id) 'quoted'"
    args = build_args(PLAYBOOK, AnsibleOptions(), {"fleet_reason": reason, "fleet_force": True})
    assert json.loads(args[1]) == {"fleet_force": True, "fleet_reason": reason}
