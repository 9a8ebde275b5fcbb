"""`fleet` with a real Ansible behind it: a local connection and an action plugin that says what it is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest
import yaml

from fleet import content

# Stands in for the rollout: returns its arguments as its result, after the progress and the wait that they ask for.
SAY = """
import time
from ansible.plugins.action import ActionBase
from fleet.progress_stream import emit

class ActionModule(ActionBase):
    _requires_connection = False
    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = self._task.args
        for stage in args.get("stages", []):
            emit(host=task_vars["inventory_hostname"], slot="gpu1", stage=stage, message="m-" + stage)
        time.sleep(float(args.get("wait", 0)))
        return {**result, **args.get("result", {})}
"""

DRIVER = """
import sys
from pathlib import Path
from fleet import cli, content
content.playbook = lambda name: Path({folder!r}) / f"{{name}}.yml"
sys.argv[0] = "fleet"
cli.main()
"""

TAKEN_BACK = {
    "failed": True,
    "msg": "slot gpu1: the engine died",
    "ddtree": {
        "outcome": "failed_rolled_back",
        "slots": [
            {
                "slot": "gpu1",
                "outcome": "failed_rolled_back",
                "release": "cpu-new",
                "serves": "cpu-old",
                "verdict": {
                    "verdict": "fail",
                    "cause": "the engine died",
                    "root": "RuntimeError: boom",
                    "fix": "mend it",
                },
            }
        ],
    },
}


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inventory = folder / "hosts.yml"
        self.inventory.write_text(
            yaml.safe_dump(
                {
                    "all": {
                        "hosts": {"ct200": {}},
                        "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
                    }
                }
            )
        )
        plugins = folder / "plugins"
        plugins.mkdir()
        (plugins / "say.py").write_text(SAY)
        (folder / "driver.py").write_text(DRIVER.format(folder=str(folder)))
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(folder / "state"),
            "ANSIBLE_ACTION_PLUGINS": str(plugins),
            "COLUMNS": "200",
        }

    def playbook(self, name: str, *tasks: dict[str, Any]) -> None:
        plays = [{"name": "Test", "hosts": "all", "gather_facts": False, "tasks": list(tasks)}]
        (self.folder / f"{name}.yml").write_text(yaml.safe_dump(plays))

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.folder / "driver.py"), *arguments]

    def run(self, *arguments: str, inventory: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        where = ["-i", str(self.inventory)] if inventory else []
        return subprocess.run(
            self.argv(*arguments, *where),
            env={**self.environment, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def kept(self) -> Path:
        (run,) = (self.folder / "state" / "ddtree-fleet" / "runs").iterdir()
        return run


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def say(**arguments: Any) -> dict[str, Any]:
    return {"name": "Say", "say": arguments}


def test_a_failed_rollout_ends_with_2_and_names_cause_root_line_and_fix(fleet: Fleet) -> None:
    fleet.playbook("deploy", say(result=TAKEN_BACK))
    done = fleet.run("deploy")
    assert done.returncode == 2, done.stderr
    for part in ("ct200/gpu1: the engine died", "root line: RuntimeError: boom", "fix: mend it", "serves: cpu-old"):
        assert part in done.stdout
    assert "failed, rolled back" in done.stdout and "Next: " in done.stdout


def test_json_is_exactly_one_document_on_stdout(fleet: Fleet) -> None:
    fleet.playbook("deploy", say(stages=["build"], result=TAKEN_BACK))
    done = fleet.run("deploy", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["status"], document["meaning"]) == (2, 2, "rolled_back")
    assert document["hosts"]["ct200"]["slots"][0]["root"] == "RuntimeError: boom"
    assert "ct200/gpu1" in done.stderr and "build" in done.stderr


def test_progress_is_one_plain_line_per_stage_where_there_is_no_terminal(fleet: Fleet) -> None:
    fleet.playbook("deploy", say(stages=["stage", "build"], result={"ddtree": {"outcome": "deployed"}}))
    done = fleet.run("deploy")
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stderr.splitlines() if "ct200/gpu1" in line]
    assert lines == [["ct200/gpu1", "stage", "m-stage"], ["ct200/gpu1", "build", "m-build"]]
    assert "\x1b" not in done.stdout + done.stderr


def test_host_key_checking_stays_on_and_the_contents_configuration_is_used(fleet: Fleet) -> None:
    lookup = "{{ lookup('ansible.builtin.env', 'NAME') }}"
    names = ("ANSIBLE_HOST_KEY_CHECKING", "ANSIBLE_CONFIG", "FLEET_RUN_ID")
    seen = {name: lookup.replace("NAME", name) for name in names}
    fleet.playbook("deploy", say(result={"ddtree": {"outcome": "deployed", "reason": "{{ seen | to_json }}"}}))
    done = fleet.run("deploy", "--json", "-e", json.dumps({"seen": seen}))
    document = json.loads(done.stdout)
    reported = json.loads(document["hosts"]["ct200"]["reason"])
    assert reported["ANSIBLE_HOST_KEY_CHECKING"] == "True"
    assert reported["ANSIBLE_CONFIG"] == str(content.config())
    assert reported["FLEET_RUN_ID"] == document["run_id"]


def test_what_a_run_leaves_is_private_and_holds_no_secret(fleet: Fleet) -> None:
    told = {"msg": "the key is {{ fleet_api_key }}", "ddtree": {"outcome": "deployed", "reason": "{{ fleet_api_key }}"}}
    fleet.playbook("deploy", say(result=told))
    done = fleet.run("deploy", "-vvv", "-e", "fleet_api_key=very-secret-key", HF_TOKEN="hf_another-secret")
    assert done.returncode == 0, done.stderr
    run = fleet.kept()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"command", "stdout", "rc"} <= {path.name for path in files}
    for path in files:
        assert not path.stat().st_mode & 0o077, path
        text = path.read_text()
        assert "very-secret-key" not in text and "hf_another-secret" not in text, path
    assert "very-secret-key" not in done.stdout + done.stderr


def processes_with(argument: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if argument in line:
                found.append(line)
    return found


def test_ctrl_c_lets_go_says_so_and_leaves_no_ansible_behind(fleet: Fleet) -> None:
    fleet.playbook("deploy", say(stages=["activate"], wait=60))
    process = subprocess.Popen(
        fleet.argv("deploy", "-i", str(fleet.inventory), "--json"),
        env=fleet.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    progress = fleet.folder / "state" / "ddtree-fleet" / "runs"
    deadline = time.monotonic() + 60
    while not list(progress.glob("*/progress.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130, err
    assert "the hosts own their transactions" in err and f"fleet status -i {fleet.inventory}" in err
    assert json.loads(out)["status"] == 130
    assert not processes_with(str(fleet.folder / "deploy.yml"))


def test_ansibles_own_error_is_shown_and_ends_with_1(fleet: Fleet) -> None:
    fleet.playbook("deploy", {"name": "Typing error", "no_such_module": {}})
    done = fleet.run("deploy")
    assert done.returncode == 1
    assert "no_such_module" in done.stdout and "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["deploy", "--no-such-option"], ["no-such-command"], ["logs", "a:b:c"], ["logs"], ["history", "-n", "x"]],
)
def test_a_wrong_command_line_is_not_taken_for_a_rolled_back_deployment(fleet: Fleet, arguments: list[str]) -> None:
    assert fleet.run(*arguments, inventory=False).returncode == 64


def test_an_inventory_that_is_not_there_is_named_before_ansible_starts(fleet: Fleet) -> None:
    done = fleet.run("deploy", "-i", "nowhere.yml", inventory=False)
    assert done.returncode == 64 and "nowhere.yml does not exist" in done.stderr
    assert not (fleet.folder / "state").exists()


def test_rollback_hands_the_release_on(fleet: Fleet) -> None:
    fleet.playbook("rollback", say(result={"ddtree": {"outcome": "deployed", "release": "{{ fleet_release }}"}}))
    done = fleet.run("rollback", "--to", "cpu-old", "--json", "-e", "fleet_release=other")
    assert json.loads(done.stdout)["hosts"]["ct200"]["release"] == "cpu-old"


def test_check_and_diff_reach_ansible_and_differences_are_shown(fleet: Fleet) -> None:
    diff = [{"before": "old\n", "after": "new\n", "before_header": "unit", "after_header": "unit"}]
    told = {"changed": True, "diff": diff, "ddtree": {"outcome": "checked", "reason": "{{ ansible_check_mode }}"}}
    fleet.playbook("deploy", say(result=told))
    done = fleet.run("deploy", "--check", "--diff")
    assert done.returncode == 0, done.stderr
    assert "-old" in done.stdout and "+new" in done.stdout
    assert json.loads(fleet.run("deploy", "--check", "--json").stdout)["hosts"]["ct200"]["reason"] in ("True", True)


@pytest.fixture
def vaulted(fleet: Fleet) -> Fleet:
    """A key that only the vault password `open sesame` reveals; the play reports its length."""
    (fleet.folder / "password").write_text("open sesame\n")
    vars_file = fleet.folder / "secret.yml"
    vars_file.write_text("fleet_api_key: twelve-bytes\n")
    program = Path(sys.executable).parent / "ansible-vault"
    command = [str(program), "encrypt", "--vault-password-file", str(fleet.folder / "password"), str(vars_file)]
    subprocess.run(command, check=True, capture_output=True)
    told = {"ddtree": {"outcome": "deployed", "reason": "length {{ fleet_api_key | length }}"}}
    fleet.playbook("deploy", say(result=told))
    return fleet


def test_a_vault_password_file_passes_through(vaulted: Fleet) -> None:
    done = vaulted.run("deploy", "--json", "-e", "@secret.yml", "--vault-password-file", "password")
    assert json.loads(done.stdout)["hosts"]["ct200"]["reason"] == "length 12", done.stderr


def test_a_vault_password_is_asked_for_on_the_terminal_and_kept_nowhere(vaulted: Fleet) -> None:
    argv = vaulted.argv("deploy", "-i", str(vaulted.inventory), "-e", "@secret.yml", "--ask-vault-pass")
    terminal = pexpect.spawn(argv[0], argv[1:], env=vaulted.environment, cwd=str(vaulted.folder), timeout=60)
    terminal.expect("Vault password: ")
    terminal.sendline("open sesame")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0, terminal.before
    assert not [path for path in vaulted.kept().rglob("*") if path.is_file() and "open sesame" in path.read_text()]


FACTS = {
    "host": "ct200",
    "gpu_source": "simulated",
    "gpus": [{"uuid": "GPU-1", "index": 1, "name": "RTX PRO 6000"}],
    "releases": [{"id": "cpu-old", "created_t": 1764500000.0}, {"id": "cpu-new", "created_t": 1764600000.0}],
    "lock": None,
    "slots": {
        "gpu1": {
            "release": "cpu-new",
            "since": "2025-12-01T10:00:00.000Z",
            "good": [{"release": "cpu-old"}, {"release": "cpu-new"}],
            "unit": {"ActiveState": "active", "NRestarts": 2},
            "health": {"status": 200, "error": ""},
            "port": 30001,
            "gpu": "GPU-1",
        }
    },
}


@pytest.fixture
def seen(fleet: Fleet) -> Fleet:
    fleet.playbook("status", say(result={"ddtree_facts": FACTS}))
    return fleet


def test_status_shows_what_serves(seen: Fleet) -> None:
    done = seen.run("status")
    assert done.returncode == 0, done.stderr
    for part in ("gpu1", "active, 2 restarts", "ok", "cpu-new", "1: RTX PRO 6000 (simulated)", "30001"):
        assert part in done.stdout


def test_status_as_json_holds_the_facts(seen: Fleet) -> None:
    document = json.loads(seen.run("status", "--json").stdout)
    assert document["facts"]["ct200"]["slots"]["gpu1"]["release"] == "cpu-new"


def test_releases_says_which_slots_could_return(seen: Fleet) -> None:
    lines = seen.run("releases").stdout.splitlines()
    (old,) = [line for line in lines if "cpu-old" in line]
    (new,) = [line for line in lines if "cpu-new" in line]
    assert old.split()[-1] == "gpu1" and new.split()[-1] == "gpu1"
    assert old.index("gpu1") > new.index("gpu1"), "one stands under `good for`, the other under `serves`"


def test_history_shows_one_line_per_activation_with_its_cause(fleet: Fleet) -> None:
    entry = {
        "ts": "2025-12-01T10:00:00.000Z",
        "slot": "gpu1",
        "kind": "deploy",
        "release": "cpu-bad",
        "outcome": "taken_back",
        "seconds": 12.5,
        "cause": "the engine died",
        "root": "RuntimeError: boom",
    }
    fleet.playbook("history", say(result={"ddtree_activations": [entry]}))
    (line,) = [line for line in fleet.run("history").stdout.splitlines() if "cpu-bad" in line]
    for part in ("2025-12-01 10:00:00", "failed, taken back", "12.5 s", "the engine died [RuntimeError: boom]"):
        assert part in line
    assert json.loads(fleet.run("history", "--json").stdout)["activations"]["ct200"] == [entry]


def test_logs_prints_the_lines_of_one_slot(fleet: Fleet) -> None:
    fleet.playbook("logs", say(result={"stdout_lines": ["first", "{{ logs_slot }} {{ logs_lines }}"]}))
    done = fleet.run("logs", "ct200:gpu1", "-n", "7")
    assert done.stdout.splitlines() == ["first", "gpu1 7"]
    assert fleet.run("logs", "ct200", "--json").returncode == 0


def test_logs_of_an_unknown_host_is_an_error_in_words(fleet: Fleet) -> None:
    fleet.playbook("logs", say(result={"stdout_lines": []}))
    done = fleet.run("logs", "nosuch")
    assert done.returncode == 1 and "no host" in (done.stdout + done.stderr).lower()


@pytest.mark.parametrize(
    "command", ["deploy", "rollback", "preflight", "status", "history", "releases", "logs", "audit", "bom", "diff"]
)
def test_every_command_teaches_with_examples(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet.cli", command, "--help"], capture_output=True, text=True, check=True
    )
    assert "Examples" in done.stdout and f"fleet {command}" in done.stdout.split("Examples")[1]


def test_version_names_the_content_too() -> None:
    done = subprocess.run([sys.executable, "-m", "fleet.cli", "--version"], capture_output=True, text=True, check=True)
    assert content.version() in done.stdout and str(content.root()) in done.stdout
