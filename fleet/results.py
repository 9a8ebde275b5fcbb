"""Folds the events of a run into one outcome per host and slot, and into the exit status of the command."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any


class Status(enum.IntEnum):
    """Exit statuses of `fleet`; scripts may rely on them."""

    OK = 0  # done, or nothing to do
    ERROR = 1  # Ansible or this program failed in a way that has no status of its own
    ROLLED_BACK = 2  # failed, and rolled back everywhere it was tried
    NOT_ROLLED_BACK = 3  # failed, and not fully rolled back
    REFUSED = 4  # refused by inventory validation, preflight or audit
    LOCKED = 5  # somebody else's run holds the lock of a host
    UNREACHABLE = 6  # hosts could not be reached
    USAGE = 64  # the command line is wrong
    INTERRUPTED = 130  # Ctrl-C or SIGTERM


# When hosts differ, the first of these that any host has is the status of the run: what needs a person soonest.
SEVERITY = (
    Status.NOT_ROLLED_BACK,
    Status.ERROR,
    Status.ROLLED_BACK,
    Status.UNREACHABLE,
    Status.LOCKED,
    Status.REFUSED,
)

STATUS_OF_OUTCOME: dict[str, Status] = {
    "noop": Status.OK,
    "deployed": Status.OK,
    "rolled_back": Status.OK,
    "checked": Status.OK,
    "done": Status.OK,
    "refused": Status.REFUSED,
    "locked": Status.LOCKED,
    "unreachable": Status.UNREACHABLE,
    "failed_rolled_back": Status.ROLLED_BACK,
    "returned": Status.ROLLED_BACK,  # a good slot taken back because another slot of its host failed
    "failed_not_rolled_back": Status.NOT_ROLLED_BACK,
    "failed": Status.ERROR,
    "not_reached": Status.OK,  # another host's failure ended the run first; that host gives the status
}

_FAILED = ("runner_on_failed", "runner_on_async_failed", "runner_item_on_failed")
_ERROR_MARK = re.compile(r"^(\[ERROR\]:|ERROR!|fatal:|usage:|ansible-playbook: error)")
_WRAPPING = re.compile(r"^((Task|Action|Module) failed: )+")  # ansible-core puts its layers before the cause
_NO_HOSTS_MATCH = re.compile(r"no hosts matched|Could not match supplied host pattern|leaves us with no hosts", re.I)


@dataclasses.dataclass
class SlotResult:
    """What became of one slot. `root` is the engine's own line that names the cause, `serves` what serves there now."""

    slot: str
    outcome: str = ""
    release: str | None = None
    serves: str | None = None
    verdict: str | None = None
    cause: str | None = None
    root: str | None = None
    hint: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> SlotResult:
        gate = data.get("verdict")
        gate = dict(gate) if isinstance(gate, Mapping) else {"verdict": gate}
        known = ("slot", "name", "outcome", "release", "serves", "verdict", "cause", "note", "notes", "seconds")
        return cls(
            slot=str(data.get("slot") or data.get("name") or "?"),
            outcome=str(data.get("outcome") or ""),
            release=data.get("release"),
            serves=data.get("serves"),
            verdict=gate.pop("verdict", None),
            cause=gate.pop("cause", None) or data.get("cause") or None,
            root=gate.pop("root", None) or None,
            hint=gate.pop("fix", None) or None,
            notes=[str(note) for note in [data.get("note"), *_as_list(data.get("notes"))] if note],
            seconds=data.get("seconds"),
            details={"gate": gate, **{name: value for name, value in data.items() if name not in known}},
        )

    def as_dict(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        return {**plain.pop("details"), **plain}


@dataclasses.dataclass
class HostResult:
    """What became of one host."""

    host: str
    outcome: str = ""
    message: str = ""
    task: str = ""
    changed: int = 0
    tasks: int = 0
    release: str | None = None
    slots: dict[str, SlotResult] = dataclasses.field(default_factory=dict)
    violations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reason: str = ""
    diffs: list[Any] = dataclasses.field(default_factory=list)

    @property
    def status(self) -> Status:
        return STATUS_OF_OUTCOME.get(self.outcome, Status.ERROR)

    def as_dict(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        plain["slots"] = [slot.as_dict() for slot in self.slots.values()]
        plain["status"] = int(self.status)
        return plain


class Results:
    """Everything a run said, host by host. Feed it each event once, in order.

    `decides`: the playbook ends with an outcome for every host, so a host without one was not reached.
    """

    def __init__(self, decides: bool = True) -> None:
        self._decides = decides
        self.hosts: dict[str, HostResult] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.inventory_problems: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.outputs: dict[str, dict[str, Any]] = {}  # last result per host, for commands that show output
        self.rc: int | None = None
        self.no_hosts = False
        self._stats: Mapping[str, Any] | None = None

    def host(self, name: str) -> HostResult:
        return self.hosts.setdefault(name, HostResult(name))

    def add_event(self, event: Mapping[str, Any]) -> None:
        kind = str(event.get("event", ""))
        data = event.get("event_data") or {}
        if kind in ("error", "warning", "system_warning", "deprecated", "verbose"):
            self._add_text(kind, str(event.get("stdout") or "").replace("\r", ""))
        elif kind == "playbook_on_no_hosts_matched":
            self.no_hosts = True
        elif kind == "playbook_on_stats":
            self._stats = data
        elif kind == "runner_on_unreachable":
            host = self.host(data.get("host", "?"))
            host.outcome, host.task = "unreachable", str(data.get("task") or "")
            host.message = _message(data.get("res") or {})
        elif kind in ("runner_on_ok", *_FAILED):
            self._add_result(data, failed=kind in _FAILED and not data.get("ignore_errors"))

    def finish(self, rc: int | None) -> None:
        """Ansible has ended with `rc`: name what no result named."""
        self.rc = rc
        for kind, hosts in (self._stats or {}).items():
            if not isinstance(hosts, Mapping):
                continue
            for name, count in hosts.items():
                if name == "localhost" and name not in self.hosts:
                    continue
                host = self.host(name)
                if kind == "changed":
                    host.changed = count
                elif kind == "processed":
                    continue
                elif kind in ("ok", "failures", "dark"):
                    host.tasks += count
        for host in self.hosts.values():
            if not host.outcome:
                host.outcome = "not_reached" if self._decides and rc != 0 else "done"
            for slot in host.slots.values():
                if not slot.outcome and host.status is not Status.OK:
                    slot.outcome = "not_tried"  # planned, and then something else ended the host's rollout

    def status(self) -> Status:
        found = {host.status for host in self.hosts.values()}
        if self.inventory_problems:
            found.add(Status.REFUSED)
        for status in SEVERITY:
            if status in found:
                return status
        if self.rc != 0 or self.no_hosts or not self.hosts:
            return Status.ERROR
        return Status.OK

    def problem(self) -> str:
        """The plain words for a run that failed without any host saying why."""
        if self.errors:
            return "\n".join(self.errors)
        if self.no_hosts:
            return "no host of the inventory matches: check -i and -l"
        if self.rc is None:
            return "Ansible was killed by a signal before it had ended; running the command again converges"
        if not self.hosts:
            return f"Ansible ended with status {self.rc} before it reached any host"
        return ""

    def _add_text(self, kind: str, text: str) -> None:
        text = text.strip()
        if not text:
            return
        if kind == "error" or _ERROR_MARK.match(text):
            self.errors.append(text)
        elif kind in ("warning", "system_warning"):
            self.warnings.append(text)
        elif kind == "verbose" and self.errors and not text.startswith(("PLAY", "TASK", "<", "Using ")):
            self.errors.append(text)  # the lines under an error: where, and the source
        if _NO_HOSTS_MATCH.search(text):
            self.no_hosts = True

    def _add_result(self, data: Mapping[str, Any], failed: bool) -> None:
        res = data.get("res")
        if not isinstance(res, Mapping):
            return
        name = str(data.get("host", "?"))
        report = res.get("ddtree")
        if isinstance(report, Mapping) and report.get("stage") == "inventory":
            # checked once for all hosts, on this machine: the host whose name Ansible gives it has no part in it
            self.inventory_problems += [dict(item) for item in _as_list(report.get("problems"))]
            return
        host = self.host(name)
        self.outputs[name] = dict(res)
        facts = res.get("ddtree_facts") or (res.get("ansible_facts") or {}).get("ddtree_facts")
        if isinstance(facts, Mapping):
            self.facts[name] = dict(facts)
        host.diffs += _as_list(res.get("diff"))
        if isinstance(report, Mapping):
            self._add_report(host, report)
        if failed:
            host.task = str(data.get("task") or "")
            message = _message(res)
            if not host.outcome or STATUS_OF_OUTCOME.get(host.outcome) is Status.OK:
                host.outcome = "failed"
            host.message = host.message or message

    def _add_report(self, host: HostResult, report: Mapping[str, Any]) -> None:
        outcome = report.get("outcome")
        if isinstance(outcome, str) and outcome:
            host.outcome = outcome
        if report.get("message"):
            host.message = str(report["message"])
        host.release = report.get("release") or report.get("release_id") or host.release
        host.reason = str(report.get("reason") or host.reason)
        for problem in _as_list(report.get("violations")):
            if isinstance(problem, Mapping):
                host.violations.append(dict(problem))
        for slot in _slots(report.get("slots")):
            result = SlotResult.from_data(slot)
            if result.outcome or result.slot not in host.slots:
                host.slots[result.slot] = result


def _slots(slots: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(slots, Mapping):
        return [{"slot": name, **value} for name, value in slots.items() if isinstance(value, Mapping)]
    return [slot for slot in _as_list(slots) if isinstance(slot, Mapping)]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _message(res: Mapping[str, Any]) -> str:
    """The one message a person needs from a failed task's result."""
    for key in ("msg", "message", "stderr", "module_stderr", "exception", "reason"):
        value = res.get(key)
        if isinstance(value, list):
            value = "\n".join(map(str, value))
        if isinstance(value, str) and value.strip():
            text = _WRAPPING.sub("", value.strip())
            stderr = str(res.get("module_stderr") or res.get("stderr") or "").strip()
            if key == "msg" and stderr and stderr not in text:  # the message says that it failed, this says why
                text += f": {stderr.splitlines()[-1] if 'Traceback' in stderr else stderr.splitlines()[0]}"
            return text
    return "the task failed without a message"
