"""The check that decides an activation, on the host, without the control node.

Two things are watched at once: a worker asks the engine over HTTP, stage after stage, while the watcher looks at the
unit, its journal and its GPU several times a second. Whoever knows first decides, so a process that dies is a verdict
within a second and never a time-out. Waiting has no fixed end: it goes on while progress is seen, and stops after
`no_progress_s` seconds without any, or at the absolute `cap_s`.
"""

from __future__ import annotations

import dataclasses
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from . import content, diagnosis, signatures
from .probe import Answer, Engine, ProbeError
from .units import LogLine, UnitState

STAGES = ("alive", "port", "health", "model", "answers", "speculation", "soak")
POLL_S = 0.1
# A unit that uses less than this share of one core is idle, not loading.
BUSY_SHARE = 0.2
# Lines that our own questions cause are no sign of progress.
_ACCESS_LOG = re.compile(r'"(GET|POST|HEAD) /\S* HTTP/')

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """What a slot has to show. Times in seconds."""

    port: int
    served_model: str
    answers: tuple[content.Golden, ...] = content.QUESTIONS
    completions: int = 3
    soak_s: float = 3.0
    no_progress_s: float = 120.0
    cap_s: float = 3600.0
    probe_timeout_s: float = 10.0
    speculation: bool = False
    min_acceptance: float = 1.0
    host: str = "127.0.0.1"
    api_key: str = dataclasses.field(default="", repr=False)

    @classmethod
    def of(cls, value: dict[str, Any], api_key: str = "") -> GateConfig:
        """From an activation record's `gate` object; unknown keys are an error of the caller, not silently lost."""
        names = {field.name for field in dataclasses.fields(cls)} - {"api_key"}
        unknown = set(value) - names
        if unknown:
            raise ValueError(f"unknown gate settings: {', '.join(sorted(unknown))}")
        settings = dict(value)
        if "answers" in settings:
            settings["answers"] = tuple(content.Golden.of(item) for item in settings["answers"]) or content.QUESTIONS
        return cls(**settings, api_key=api_key)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`kind`: pass, fail (the release's fault), host_fault (no release would do), inconclusive."""

    kind: str
    stage: str
    cause: str = ""
    fix: str = ""
    signature: str | None = None
    root: str = ""
    seconds: float = 0.0
    stages: dict[str, float] = dataclasses.field(default_factory=dict)
    death_to_verdict_s: float | None = None
    answers: dict[str, str] = dataclasses.field(default_factory=dict)
    acceptance_length: float | None = None

    @property
    def passed(self) -> bool:
        return self.kind == "pass"

    def as_dict(self) -> dict[str, Any]:
        value = dataclasses.asdict(self)
        value.pop("answers")
        return {key: item for key, item in value.items() if item not in (None, "", {})}


class Host(Protocol):
    """What the gate needs of a host; tests give a scripted one."""

    def unit(self) -> UnitState: ...

    def new_log(self) -> Sequence[LogLine]: ...

    def log(self) -> Sequence[str]: ...

    def cpu_seconds(self, state: UnitState) -> float | None: ...

    def gpu_fault(self, look: bool = False) -> str | None:
        """What is wrong with the slot's GPU, as last seen; `look`: look now, once."""


class _WrongAnswer(Exception):
    """The engine serves, and what it serves is wrong."""


class Gate:
    """One run of the gate over one slot. `report(stage, message)` is told about every step."""

    def __init__(self, config: GateConfig, host: Host, report: Callable[[str, str], None] = lambda *_: None) -> None:
        self.config = config
        self.host = host
        self.report = report
        self.engine = Engine(config.port, config.host, config.api_key, config.probe_timeout_s)
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._stop = threading.Event()
        self._stage = "alive"
        self._stages: dict[str, float] = {}
        self._answers: dict[str, str] = {}
        self._acceptance: float | None = None
        self._began = 0.0

    def run(self) -> Verdict:
        """Watch until there is a verdict. Never raises for what an engine does."""
        self._began = time.monotonic()
        worker = threading.Thread(target=self._work, name="gate-probe", daemon=True)
        worker.start()
        try:
            return self._watch()
        finally:
            self._stop.set()

    # -- the watcher --------------------------------------------------------------------------------------------

    def _watch(self) -> Verdict:
        first = self.host.unit()
        pid, restarts = first.main_pid, first.restarts
        progress_at = time.monotonic()
        cpu, cpu_at = self.host.cpu_seconds(first), progress_at
        status_text = first.status_text
        passed = False
        while True:
            now = time.monotonic()
            state = self.host.unit()
            dead = self._dead(state, pid, restarts)
            if dead:
                return self._died(state, dead)
            pid = pid or state.main_pid
            for line in self.host.new_log():
                if not _ACCESS_LOG.search(line.text):
                    progress_at = now
                signature = signatures.fatal(line.text)
                if signature:
                    return self._verdict(signature.verdict, signature.cause, root=line.text, signature=signature)
            fault = self.host.gpu_fault()
            if fault:
                return self._verdict("host_fault", fault, root=fault)
            event = self._next_event()
            if event:
                kind, value = event
                progress_at = now
                if kind == "wrong":
                    return self._verdict("fail", value, root=value)
                passed = passed or kind == "passed"
            if passed and state.active == "active":
                return self._verdict("pass", "")
            if state.status_text != status_text:
                # told on, but no progress: a supervisor that counts seconds would keep a dead start alive
                status_text = state.status_text
                self.report(self._stage, status_text)
            if now - cpu_at >= 1.0:
                used = self.host.cpu_seconds(state)
                if used is not None and cpu is not None and used - cpu > BUSY_SHARE * (now - cpu_at):
                    progress_at = now
                cpu, cpu_at = used, now
            if now - progress_at > self.config.no_progress_s:
                return self._stalled(now - progress_at)
            if now - self._began > self.config.cap_s:
                return self._verdict(
                    "inconclusive", f"still in stage {self._stage} after {self.config.cap_s:g} s (fleet_gate.cap_s)"
                )
            time.sleep(POLL_S)

    @staticmethod
    def _dead(state: UnitState, pid: int, restarts: int) -> str | None:
        if state.death and not (state.active == "inactive" and not pid and state.exit_at is None):
            return state.death
        if state.restarts > restarts:
            return f"the unit was restarted by systemd ({state.restarts - restarts} times)"
        if pid and state.main_pid and state.main_pid != pid:
            return f"the main process was replaced (pid {pid} is now {state.main_pid})"
        return None

    def _died(self, state: UnitState, words: str) -> Verdict:
        seen_at = time.time()
        died_at = state.exit_at or state.inactive_at
        fault = self.host.gpu_fault(look=True)
        found = diagnosis.diagnose(self.host.log(), default=words)
        if fault:
            verdict = self._verdict("host_fault", fault, root=found.root)
        else:
            cause = found.cause
            if not found.signature and found.root != words:
                cause = f"{found.root} ({words})"
            verdict = self._verdict(found.verdict, cause, root=found.root, signature=found.signature)
        delay = time.time() - died_at if died_at and died_at <= seen_at + 1 else None
        return dataclasses.replace(verdict, death_to_verdict_s=None if delay is None else round(max(0.0, delay), 3))

    def _stalled(self, idle: float) -> Verdict:
        waiting = {
            "alive": "the process never started",
            "port": f"nothing listens on port {self.config.port}",
            "health": "/health never answered 200",
            "model": f"the model {self.config.served_model!r} is not served",
            "answers": "a completion was asked for and none came",
            "speculation": "the engine's counters do not answer",
            "soak": "a completion was asked for during the soak and none came",
        }[self._stage]
        last = self._last_error
        cause = f"{waiting}, and no progress for {idle:.0f} s" + (f" (last answer: {last})" if last else "")
        found = diagnosis.diagnose(self.host.log(), default=cause)
        if found.signature:
            return self._verdict(found.verdict, f"{cause}; {found.cause}", root=found.root, signature=found.signature)
        return self._verdict("fail", cause, root=cause)

    def _verdict(self, kind: str, cause: str, root: str = "", signature: signatures.Signature | None = None) -> Verdict:
        return Verdict(
            kind=kind,
            stage=self._stage,
            cause=cause,
            fix=signature.fix if signature else "",
            signature=signature.id if signature else None,
            root=root,
            seconds=round(time.monotonic() - self._began, 3),
            stages={name: round(value, 3) for name, value in self._stages.items()},
            answers=dict(self._answers),
            acceptance_length=self._acceptance,
        )

    def _next_event(self) -> tuple[str, Any] | None:
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    # -- the worker ---------------------------------------------------------------------------------------------

    _last_error = ""

    def _enter(self, stage: str) -> None:
        self._stages[self._stage] = time.monotonic() - self._began
        self._stage = stage
        self._events.put(("stage", stage))
        self.report(stage, "")

    def _work(self) -> None:
        try:
            self._enter("port")
            self._until(self.engine.listening)
            self._enter("health")
            self._until(lambda: self._answer("/health", 200))
            self._enter("model")
            self._model()
            self._enter("answers")
            for number in range(self.config.completions):
                self._ask(self.config.answers[number % len(self.config.answers)])
            self._enter("speculation")
            self._speculation()
            self._enter("soak")
            self._soak()
            self._stages["soak"] = time.monotonic() - self._began
            self._events.put(("passed", None))
        except _WrongAnswer as error:
            self._events.put(("wrong", str(error)))
        except _Stopped:
            return

    def _until(self, ask: Callable[[], T | None]) -> T:
        """Repeat `ask` until it gives something; only the watcher ends the waiting."""
        while not self._stop.is_set():
            try:
                found = ask()
                if found:
                    return found
            except ProbeError as error:
                self._last_error = str(error)
            self._stop.wait(0.2)
        raise _Stopped

    def _answer(self, path: str, *statuses: int) -> Answer | None:
        answer = self.engine.get(path)
        if answer.status in statuses:
            return answer
        self._last_error = answer.brief()
        return None

    def _model(self) -> None:
        answer = self._until(lambda: self._answer("/v1/models", 200, 401, 403))
        if answer.status != 200:
            raise _WrongAnswer(f"/v1/models refuses the slot's API key: {answer.brief()}")
        try:
            served = [str(item["id"]) for item in answer.json()["data"]]
        except (ProbeError, KeyError, TypeError) as error:
            raise _WrongAnswer(f"/v1/models gives no list of models: {answer.brief()}") from error
        if self.config.served_model not in served:
            raise _WrongAnswer(f"the engine serves {', '.join(served) or 'nothing'}, not {self.config.served_model}")

    def _ask(self, golden: content.Golden) -> None:
        """One completion that must come and must be right. No answer in time is a stall, which the watcher ends."""
        while not self._stop.is_set():
            try:
                text = self.engine.complete(
                    self.config.served_model, golden.prompt, golden.max_tokens, self.config.probe_timeout_s
                )
            except ProbeError as error:
                self._last_error = str(error)
                self._stop.wait(0.2)
                continue
            reason = content.wrong(text, golden)
            if reason:
                raise _WrongAnswer(reason)
            self._answers[golden.prompt] = text
            self._events.put(("answer", golden.prompt))
            return
        raise _Stopped

    def _speculation(self) -> None:
        if not self.config.speculation:
            return
        answer = self._until(lambda: self._answer("/get_server_info", 200))
        length = acceptance_length(answer.json())
        if length is None:
            raise _WrongAnswer("speculation is configured, but the engine reports no acceptance length")
        self._acceptance = round(length, 3)
        if length <= self.config.min_acceptance:
            raise _WrongAnswer(
                f"speculation is not effective: acceptance length {length:.2f}, more than "
                f"{self.config.min_acceptance:g} is needed"
            )

    def _soak(self) -> None:
        end = time.monotonic() + self.config.soak_s
        number = 0
        while time.monotonic() < end:
            self._ask(self.config.answers[number % len(self.config.answers)])
            number += 1
            if self._stop.wait(min(0.5, max(0.0, end - time.monotonic()))):
                raise _Stopped


class _Stopped(Exception):
    """The watcher has decided; the worker ends."""


def acceptance_length(info: Any) -> float | None:
    """Tokens per verify step from /get_server_info of the standalone engine or of SGLang (None: not reported)."""
    if not isinstance(info, dict):
        return None
    value = info.get("acceptance_length")
    if value is None:
        internal = info.get("internal_states") or [{}]
        value = internal[0].get("avg_spec_accept_length") if isinstance(internal[0], dict) else None
    return float(value) if isinstance(value, (int, float)) else None
