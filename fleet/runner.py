"""Runs a playbook through ansible-runner and hands its events on, without waiting for anyone.

ansible-runner calls its event handler inline, so the handler only hides secrets and queues; showing happens elsewhere.
Each run keeps its artefacts in a private folder of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import getpass
import json
import os
import queue
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import content
from .arguments import AnsibleOptions, build_args
from .redact import Redactor, dump

KEPT_RUNS = 50
GRACE_S = 10.0  # what Ansible gets to end by itself after Ctrl-C


class Interrupted(Exception):
    """The operator (or a SIGTERM) ended the run."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing that happened: an Ansible event, a progress record, or nothing for a moment ("tick")."""

    kind: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def new_run_id() -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{now}-{secrets.token_hex(3)}"


def runs_folder() -> Path:
    return content.state_home() / "runs"


class PlaybookRun:
    """One run of one playbook. Iterate over `follow()`; afterwards `rc` holds Ansible's exit status."""

    def __init__(
        self,
        playbook: Path,
        options: AnsibleOptions,
        variables: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        self.run_id = run_id or new_run_id()
        self.folder = runs_folder() / self.run_id
        self.progress_file = self.folder / "progress.jsonl"
        self.rc: int | None = None
        self.error: BaseException | None = None
        self.interrupted = False
        self._options = options
        self._args = build_args(playbook, options, variables)
        self._redactor = Redactor(os.environ, options.extra_vars)
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._kill = threading.Event()
        self._ansible_pid: int | None = None
        self._progress_offset = 0

    def follow(self, tick_s: float = 0.2) -> Iterator[Item]:
        """Start the playbook and yield what happens until it has ended. Raises Interrupted on Ctrl-C or SIGTERM."""
        _private_folder(self.folder)
        _prune_runs(keep=self.run_id)
        passwords = self._ask_passwords()
        thread = threading.Thread(target=self._run, args=(passwords,), name="ansible", daemon=True)
        previous = _terminate_like_interrupt()
        try:
            thread.start()
            yield from self._items(thread, tick_s)
        except KeyboardInterrupt:
            self.interrupted = True
            self._stop(thread)
            raise Interrupted from None
        except GeneratorExit:
            self._stop(thread)
            raise
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
            self._sweep()
        if self.error is not None:
            raise self.error

    def _items(self, thread: threading.Thread, tick_s: float) -> Iterator[Item]:
        ended = False
        while not ended:
            batch: list[Item] = []
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=tick_s)
                while item is not None:
                    batch.append(item)
                    item = self._queue.get_nowait()
                ended = True
            # progress first: a record is written before the task that wrote it reports its result
            yield from self._progress()
            yield from batch
            yield Item("tick")
        thread.join()

    def _progress(self) -> Iterator[Item]:
        """Complete lines that plugins have appended since the last look."""
        try:
            with self.progress_file.open("rb") as file:
                file.seek(self._progress_offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._progress_offset += len(complete)
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield Item("progress", self._redactor.data(record))

    def _ask_passwords(self) -> dict[str, str]:
        """Ansible runs on a terminal of its own, so its questions are asked here and answered there."""
        answers: dict[str, str] = {}
        if self._options.ask_vault_pass:
            answers[r"Vault password.*:\s*?$"] = getpass.getpass("Vault password: ", stream=sys.stderr)
        if self._options.ask_become_pass:
            answers[r"BECOME password.*:\s*?$"] = getpass.getpass("BECOME password: ", stream=sys.stderr)
        for answer in answers.values():
            self._redactor.learn(answer)
        return answers

    def _run(self, passwords: dict[str, str]) -> None:
        try:
            self._run_ansible(passwords)
        except BaseException as error:  # the thread's failure is the run's failure: re-raised by follow()
            self.error = error
        finally:
            self._queue.put(None)

    def _run_ansible(self, passwords: dict[str, str]) -> None:
        from ansible_runner import Runner  # slow to import, and not needed for --help
        from ansible_runner.config.command import CommandConfig

        config = CommandConfig(
            private_data_dir=str(self.folder),
            artifact_dir=str(self.folder),
            ident="artifacts",
            envvars=self._environment(),
            passwords=passwords,
            # often enough to notice Ctrl-C; each wait costs nothing
            settings={"pexpect_timeout": 0.5},
            # the default writes every host's facts beside the artefacts and reads them back in the next run
            fact_cache_type="memory",
            quiet=True,
        )
        config.prepare_run_command(str(ansible_playbook()), cmdline_args=self._args)
        runner = Runner(
            config=config,
            event_handler=self._on_event,
            status_handler=self._on_status,
            cancel_callback=self._kill.is_set,
        )
        _status, self.rc = runner.run()

    def _environment(self) -> dict[str, str]:
        return {
            "ANSIBLE_CONFIG": str(content.config()),
            # ansible-runner switches host key checking off unless it is set here
            "ANSIBLE_HOST_KEY_CHECKING": os.environ.get("ANSIBLE_HOST_KEY_CHECKING", "True"),
            # colours would be kept in the artefacts and in every message that is taken from them
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
            "DDTREE_PROGRESS": str(self.progress_file),
            "FLEET_RUN_ID": self.run_id,
            "PYTHONUNBUFFERED": "1",
        }

    def _on_event(self, event: dict[str, Any]) -> bool:
        """Called by ansible-runner for each event, before it writes it: hide, queue, return."""
        clean = self._redactor.data(event)
        event.clear()
        event.update(clean)
        if event.get("event") == "playbook_on_start":
            self._ansible_pid = event.get("pid")
        self._queue.put(Item("event", clean))
        return True

    def _on_status(self, status: dict[str, Any], runner_config: Any) -> None:
        """The file `command` holds the whole environment and command line: replace it as soon as it exists."""
        if status.get("status") == "running":
            path = Path(runner_config.artifact_dir) / "command"
            record = {
                "command": [self._redactor.text(str(word)) for word in runner_config.command],
                "cwd": runner_config.cwd,
                "env": self._redactor.environment(runner_config.env),
            }
            path.write_text(dump(self._redactor.data(record)))

    def _stop(self, thread: threading.Thread) -> None:
        """First ask Ansible to end (its plugins may tidy up), then make it end."""
        if self._ansible_pid is not None and thread.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._ansible_pid, signal.SIGINT)
        else:
            self._kill.set()
        deadline = time.monotonic() + GRACE_S
        while thread.is_alive():
            try:
                thread.join(0.2)
            except KeyboardInterrupt:
                self._kill.set()  # a second Ctrl-C: at once
            if time.monotonic() > deadline:
                self._kill.set()
            if time.monotonic() > deadline + GRACE_S:
                return

    def _sweep(self) -> None:
        """Half-written events have not passed the redactor; an interrupted run leaves some."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "artifacts" / "stderr").chmod(0o600)  # the one file that ansible-runner leaves readable
        for partial in (self.folder / "artifacts" / "job_events").glob("*-partial.json*"):
            partial.unlink(missing_ok=True)


def ansible_playbook() -> Path:
    """The ansible-playbook of this very environment: its plugins import `fleet`."""
    beside = Path(sys.executable).parent / "ansible-playbook"
    if beside.exists():
        return beside
    found = shutil.which("ansible-playbook")
    if found is None:
        raise content.ContentMissing(f"no ansible-playbook beside {sys.executable}: install ddtree-fleet again")
    return Path(found)


def _private_folder(folder: Path) -> None:
    runs = folder.parent
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    runs.chmod(0o700)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def _prune_runs(keep: str) -> None:
    """Run ids begin with their time, so the oldest sort first."""
    folders = sorted(path for path in runs_folder().iterdir() if path.is_dir() and path.name != keep)
    for old in folders[: max(0, len(folders) - KEPT_RUNS + 1)]:
        shutil.rmtree(old, ignore_errors=True)


def _terminate_like_interrupt() -> Any:
    """A SIGTERM (a CI job cancelled, a shutdown) ends a run as gently as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def raise_interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    return signal.signal(signal.SIGTERM, raise_interrupt)
