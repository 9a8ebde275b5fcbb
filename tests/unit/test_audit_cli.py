"""fleet audit, bom and diff: answers, JSON and exit statuses that scripts can rely on."""

from __future__ import annotations

import json
from pathlib import Path

import audit_toys as toys
import pytest
import typer
from typer.testing import CliRunner

from fleet import cli, cli_audit

app = typer.Typer()
assert cli.app is not app  # but importing it makes wrong command lines leave with 64, as in `fleet`
for command in (cli_audit.audit, cli_audit.bom, cli_audit.diff):
    app.command()(command)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(argv))
    return result.exit_code, result.stdout


def test_an_environment_that_fits_leaves_with_0(tmp_path: Path) -> None:
    venv = toys.venv(tmp_path / "venv", toys.good())
    status, text = run("audit", "--venv", str(venv), "--gpu", "12.0", "--driver", "580.95.05")
    assert (status, text.strip().splitlines()[-1]) == (0, "Fits.")


def test_an_environment_that_does_not_fit_leaves_with_4_and_says_why(tmp_path: Path) -> None:
    venv = toys.venv(tmp_path / "venv", toys.good())
    argv = ("audit", "--venv", str(venv), "--gpu", "7.5", "--driver", "570.1", "--toolkit", "12.8", "--glibc", "2.12")
    status, text = run(*argv)
    assert status == 4
    for word in ("ARCH-UNCOVERED", "DRIVER-OLD", "HOST-GLIBC", "Fix: ", "Why: "):
        assert word in text
    status, text = run(*argv, "--json")
    (document,) = json.loads(text)["audits"].values()
    assert (status, document["ok"]) == (4, False)
    assert {"rule", "severity", "evidence", "fix", "stops"} <= set(document["findings"][0])


def test_a_venv_is_compared_with_the_lock_of_a_stack(tmp_path: Path) -> None:
    venv = toys.venv(tmp_path / "venv", [toys.Dist("numpy", "1.0")])
    status, text = run("audit", "--venv", str(venv), "--stack", "cpu", "--json")
    (document,) = json.loads(text)["audits"].values()
    rules = {(item["rule"], item["subject"]) for item in document["findings"]}
    assert status == 4
    assert {("SET-VERSION", "numpy"), ("SET-MISSING", "torch")} <= rules


def test_wheels_are_audited_before_they_are_installed(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    for dist in toys.good():
        dist.wheel(tmp_path / "wheels")
    assert run("audit", "--wheels", str(tmp_path / "wheels"), "--python", "3.11")[0] == 0
    assert run("audit", "--wheels", str(tmp_path / "wheels"), "--python", "3.12")[0] == 4


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["audit"], 64),
        (["audit", "--venv", "x", "--wheels", "y"], 64),
        (["audit", "--venv", "x", "--gpu", "twelve"], 64),
        (["audit", "--venv", "/nonexistent"], 1),
        (["audit", "--wheels", "/nonexistent"], 1),
        (["audit", "--venv", "/nonexistent", "--stack", "nope"], 1),
        (["bom", "--stack", "nope"], 1),
        (["diff", "/nonexistent", "cpu"], 1),
        (["diff", "cpu", "missing.json"], 1),
    ],
)
def test_wrong_command_lines_and_unreadable_things_are_told_apart(argv: list[str], status: int) -> None:
    assert run(*argv)[0] == status


def test_a_saved_bill_of_materials_can_be_compared_later(tmp_path: Path) -> None:
    venv = toys.venv(tmp_path / "venv", toys.good())
    status, text = run("bom", "--venv", str(venv), "--json")
    saved = tmp_path / "reference.json"
    saved.write_text(text)
    assert status == 0
    assert run("diff", str(saved), str(venv)) == (0, f"{saved} and {venv} hold the same.\n")
    other = toys.venv(tmp_path / "other", [toys.torch(build="cu128"), *toys.good()[1:]])
    status, text = run("diff", str(saved), str(other), "--json")
    document = json.loads(text)
    assert (status, document["same"], document["significant"]) == (4, False, 1)
    assert document["rows"][0]["action"].startswith("install torch==2.11.0+cu130")


def test_a_stack_is_compared_by_its_lock(tmp_path: Path) -> None:
    assert run("diff", "cpu", "cpu:3.11")[0] == 0
    venv = toys.venv(tmp_path / "venv", [toys.torch("2.13.0", "cu130")])
    status, text = run("diff", "cpu", str(venv))
    assert status == 4
    assert "2.13.0+cpu" in text


def test_a_file_that_is_no_bill_of_materials_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert run("diff", str(tmp_path / "x.json"), "cpu")[0] == 1


def test_a_second_audit_reads_nothing_again_unless_told_to(tmp_path: Path) -> None:
    venv = toys.venv(tmp_path / "venv", toys.good())
    assert run("audit", "--venv", str(venv))[0] == 0
    assert len(list((tmp_path / "cache/ddtree-fleet/audit").glob("*.json"))) == 1
    assert run("audit", "--venv", str(venv), "--no-cache")[0] == 0
