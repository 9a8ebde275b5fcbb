"""One command of `fleet` from start to exit status: run the playbook, show it, sum it up."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from . import content
from .arguments import AnsibleOptions
from .progress import Board, Change
from .redact import dump
from .render import LiveReporter, PlainReporter, Reporter
from .results import Results, Status
from .runner import Interrupted, PlaybookRun


@dataclasses.dataclass
class Session:
    """What a command needs: where to print, what was asked for, and afterwards what came of it."""

    command: str
    options: AnsibleOptions
    as_json: bool = False
    quiet: bool = False  # commands that only look print their answer, not how they got it
    out: Console = dataclasses.field(default_factory=lambda: _console(stderr=False))
    err: Console = dataclasses.field(default_factory=lambda: _console(stderr=True))

    def __post_init__(self) -> None:
        self.results = Results(decides=not self.quiet)
        self.board = Board()
        self.seconds = 0.0
        self.run_id = ""
        self.folder = Path()

    def run(self, playbook: str, variables: Mapping[str, Any] | None = None) -> Results:
        """Run one playbook to its end. Raises SystemExit when it was interrupted or could not begin."""
        began = time.monotonic()
        try:
            self._need_inventory()
            run = PlaybookRun(content.playbook(playbook), self.options, variables)
            self.run_id, self.folder = run.run_id, run.folder
            with self._reporter() as reporter:
                for item in run.follow():
                    self._take_in(item.kind, item.data, reporter)
        except Interrupted:
            self.seconds = time.monotonic() - began
            self.results.finish(None)
            self._interrupted()
        except content.ContentMissing as error:
            self.fail(str(error))
        self.seconds = time.monotonic() - began
        self.results.finish(run.rc)
        for host in self.results.hosts.values():
            self.board.finish(host.host, host.outcome)
        return self.results

    def end(self, status: Status, document: Mapping[str, Any] | None = None) -> None:
        """Print the one JSON document where it was asked for, and leave with the status."""
        if self.as_json:
            print(dump(document if document is not None else self.document(status)))
        raise SystemExit(int(status))

    def document(self, status: Status, **more: Any) -> dict[str, Any]:
        return {
            "command": self.command,
            "status": int(status),
            "meaning": status.name.lower(),
            "run_id": self.run_id,
            "seconds": round(self.seconds, 3),
            "artifacts": str(self.folder),
            "inventory_problems": self.results.inventory_problems,
            "errors": [self.results.problem()] if status is Status.ERROR and self.results.problem() else [],
            "hosts": {name: host.as_dict() for name, host in sorted(self.results.hosts.items())},
            **more,
        }

    def fail(self, message: str, status: Status = Status.ERROR) -> None:
        """An error of this machine, before any host was asked."""
        self.err.print(Text.assemble((f"fleet {self.command}: ", "bold red"), message), soft_wrap=True)
        if self.as_json:
            print(dump({"command": self.command, "status": int(status), "errors": [message], "hosts": {}}))
        raise SystemExit(int(status))

    def _need_inventory(self) -> None:
        if self.options.inventory:
            for source in self.options.inventory:
                if "," not in source and not Path(source).expanduser().exists():
                    self.fail(f"the inventory {source} does not exist", Status.USAGE)
            return
        if os.environ.get("ANSIBLE_INVENTORY"):
            return
        sandbox = _sandbox_inventory()
        if sandbox is not None:
            self.options = dataclasses.replace(self.options, inventory=(str(sandbox),))
            return
        self.fail(
            "no inventory: give one with -i FILE (or the variable ANSIBLE_INVENTORY), "
            "or make a fleet to try with: fleet sandbox up",
            Status.USAGE,
        )

    def _reporter(self) -> Reporter:
        if self.quiet and not self.options.verbose:
            return Reporter()
        # Ansible's own output under -v would tear a live table apart
        if self.err.is_terminal and not self.options.verbose:
            return LiveReporter(self.err, self.board)
        return PlainReporter(self.err)

    def _take_in(self, kind: str, data: dict[str, Any], reporter: Reporter) -> None:
        change: Change | None = None
        if kind == "event":
            self.results.add_event(data)
            change = self.board.add_event(data)
            self._echo(data)
        elif kind == "progress":
            change = self.board.add_progress(data)
        else:
            reporter.tick()
        if change is not None:
            reporter.changed(change)

    def _echo(self, event: Mapping[str, Any]) -> None:
        """Ansible's own words, where they were asked for: all of them with -v, the differences with --diff."""
        text = str(event.get("stdout") or "").replace("\r", "")
        if not text:
            return
        if self.options.verbose:
            self.err.print(Text.from_ansi(text), soft_wrap=True)
        elif self.options.diff and event.get("event") == "runner_on_file_diff" and not self.quiet:
            console = self.err if self.as_json else self.out
            host = (event.get("event_data") or {}).get("host", "")
            console.print(Text(f"{host}:", style="bold"), soft_wrap=True)
            for line in text.strip("\r\n").splitlines():
                style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
                console.print(Text(line, style=style), soft_wrap=True)

    def _interrupted(self) -> None:
        again = " ".join(["fleet status", *(f"-i {source}" for source in self.options.inventory)])
        if self.options.limit:
            again += f" -l {','.join(self.options.limit)}"
        self.err.print(
            Text(
                "\nInterrupted. This machine has let go; the hosts own their transactions: an activation under way "
                "goes on to its end there, and takes itself back if its gate says no.\n"
                f"  What serves now:  {again}\n"
                f"  What happened:    {again.replace('fleet status', 'fleet history', 1)}\n"
                "  Running the same command again converges.\n"
                f"  Kept:             {self.folder}"
            ),
            soft_wrap=True,
        )
        if self.as_json:
            print(dump(self.document(Status.INTERRUPTED)))
        sys.exit(int(Status.INTERRUPTED))


def _console(stderr: bool) -> Console:
    """Where nobody looks at a terminal, lines may be as long as they are: names must not be broken for 80 columns."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 240
    return Console(stderr=stderr, width=width, highlight=False)


def _sandbox_inventory() -> Path | None:
    """What `fleet sandbox up` wrote: where ansible.cfg looks, or in the state directory of a sandbox of one's own."""
    from .sandbox.layout import default_state

    own = default_state() / "hosts.yml"
    places = (
        (own, content.default_inventory()) if "DDTREE_SANDBOX_DIR" in os.environ else (content.default_inventory(), own)
    )
    return next((place for place in places if place.is_file()), None)
