"""Secrets stay out of artefacts and off the screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.redact import HIDDEN, Redactor, is_secret_name


@pytest.mark.parametrize("name", ["fleet_api_key", "HF_TOKEN", "api_key", "ansible_become_password", "client-secret"])
def test_secret_names_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "api_key_set", "api_key_file", "config_digest", "keep_releases", "token_ids"]
)
def test_harmless_names_are_left_alone(name: str) -> None:
    assert not is_secret_name(name)


def test_a_secret_is_hidden_under_its_name_and_wherever_else_it_turns_up() -> None:
    clean = Redactor().data(
        {"fleet_api_key": "s3cret-value", "msg": ["curl -H s3cret-value", {"deep": "xs3cret-valuex"}]}
    )
    assert clean == {"fleet_api_key": HIDDEN, "msg": [f"curl -H {HIDDEN}", {"deep": f"x{HIDDEN}x"}]}


def test_data_that_is_not_secret_is_unchanged() -> None:
    data = {
        "max_tokens": 5,
        "usage": {"generated_tokens_total": 9},
        "list": [1, None, True, "text"],
        "fleet_api_key": "",
    }
    assert Redactor().data(data) == data


@pytest.mark.parametrize("extra", ["fleet_api_key=s3cret-value a=b", '{"fleet_api_key": "s3cret-value"}', "@FILE"])
def test_secrets_given_on_the_command_line_are_learnt(extra: str, tmp_path: Path) -> None:
    file = tmp_path / "vars.yml"
    file.write_text("fleet_api_key: s3cret-value\n")
    assert Redactor(extra_vars=[extra.replace("FILE", str(file))]).text("x s3cret-value y") == f"x {HIDDEN} y"


def test_the_longer_of_two_secrets_is_replaced_whole() -> None:
    redactor = Redactor({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefghij"})
    assert redactor.text("abcdefghij") == HIDDEN


def test_short_values_are_not_replaced_everywhere() -> None:
    assert Redactor({"A_TOKEN": "on"}).text("on and on") == "on and on"


def test_of_an_environment_only_what_belongs_to_a_run_is_recorded() -> None:
    environment = {"ANSIBLE_CONFIG": "/c", "AWS_SECRET": "zzzzzz", "EDITOR": "vi", "ANSIBLE_VAULT_PASSWORD": "hunter22"}
    kept = Redactor(environment).environment(environment)
    assert kept == {"ANSIBLE_CONFIG": "/c", "ANSIBLE_VAULT_PASSWORD": HIDDEN}
