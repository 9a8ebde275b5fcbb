"""One activation: point a slot at a release and a configuration, gate it, keep it or take it back.

The host owns this transaction. Nothing here needs the control node, every step is journaled before it is taken, and
every step can be repeated, so that whoever comes next (`ddtree-recover`, after a kill or a reboot) can finish it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import content, files, release, units
from .gate import Gate, GateConfig, Verdict
from .journal import Good, Journal, SlotState, fold
from .paths import Paths, slot_unit
from .slothost import SlotHost

Record = dict[str, Any]
REQUIRED = ("id", "slot", "kind", "release", "config_digest", "unit", "env", "gate")


class Refused(Exception):
    """An activation that must not begin; nothing was touched."""


def new_id() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)


def pending_file(paths: Paths, slot: str) -> Path:
    return paths.slot_state(slot) / "pending.json"


def submit(paths: Paths, record: Record, api_key: str = "") -> str:
    """Leave a complete activation record for the agent and return its id; `ddtree-activate@` carries it out."""
    missing = [key for key in REQUIRED if key not in record]
    if missing:
        raise ValueError(f"activation record lacks {', '.join(missing)}")
    path = paths.activation(record["slot"], record["id"])
    path.parent.mkdir(parents=True, exist_ok=True)
    paths.slot_state(record["slot"]).chmod(0o700)
    if api_key:
        files.write_atomic(path.with_suffix(".key"), api_key, 0o600)
    files.write_json(path, record, 0o600)
    files.write_json(pending_file(paths, record["slot"]), {"id": record["id"]}, 0o600)
    return str(record["id"])


def load(paths: Paths, slot: str, activation_id: str) -> Record:
    record = files.read_json(paths.activation(slot, activation_id))
    if record is None:
        raise Refused(f"the record of activation {activation_id} of slot {slot} is gone")
    return dict(record)


def api_key(paths: Paths, record: Record) -> str:
    try:
        return paths.activation(record["slot"], record["id"]).with_suffix(".key").read_text()
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def slot_lock(paths: Paths, slot: str) -> Iterator[None]:
    """Only one process at a time changes a slot. Raises Refused where another one does."""
    directory = paths.slot_state(slot)
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / "busy", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"another activation of slot {slot} is under way on this host") from error
        yield
    finally:
        os.close(descriptor)


@dataclasses.dataclass
class Transaction:
    """The work on one slot; `paths` say where, the journal what happened before."""

    paths: Paths
    slot: str

    def __post_init__(self) -> None:
        self.journal = Journal(self.paths.journal)
        self.unit = slot_unit(self.slot)

    def state(self) -> SlotState:
        return fold(self.journal.entries()).get(self.slot, SlotState(self.slot))

    # -- forward ------------------------------------------------------------------------------------------------

    def activate(self, record: Record) -> bool:
        """Carry out `record`. True: the slot serves it. False: it was refused or taken back, and the journal says why.

        Raises Refused where the release may not be activated at all; the slot was not touched then.
        """
        before = self.state()
        facts = {key: record.get(key) for key in ("run", "who", "why", "forced", "restores") if record.get(key)}
        self._note("intent", record, **facts, previous=before.current.activation if before.current else None)
        try:
            self._admit(record, before)
        except Refused as refusal:
            self._note("abandoned", record, cause=str(refusal))
            raise
        if record["kind"] == "verify":
            verdict = self._gate(record, self._started_at())
        else:
            verdict = self._switch(record)
        if verdict.passed:
            self._commit(record, verdict)
            return True
        if units.system_state() == "stopping":
            raise Refused("the host is shutting down; the activation is taken back when it boots")
        self._judge(record, verdict)
        if verdict.kind == "host_fault":
            self._quarantine(record, verdict)
        else:
            self.take_back(record, verdict.cause)
        return False

    def _admit(self, record: Record, before: SlotState) -> None:
        if record["kind"] == "verify":
            return
        cause = before.refusal(record["release"], record["config_digest"])
        if cause and not record.get("forced"):
            raise Refused(f"release {record['release']} failed on this slot before ({cause}); force tries it again")
        # a release just built was hashed in full; one that lay about for long is hashed again
        damage = release.verify(self.paths, record["release"], quick=record["kind"] == "deploy")
        if damage:
            raise Refused(f"release {record['release']} is damaged: {words(damage)}")
        if record["kind"] == "deploy" and before.current and before.current.release != record["release"]:
            self._admit_way_back(record, before)

    def _admit_way_back(self, record: Record, before: SlotState) -> None:
        """Damage of the release to fall back to is found now, while it still serves, and not when it is needed."""
        found = ""
        for good in reversed(before.good):
            damage = release.verify(self.paths, good.release, quick=True)
            if not damage:
                return
            self._note("damaged", record, damaged=good.release, cause=words(damage))
            found = found or f"release {good.release} is damaged: {words(damage)}"
        if not record.get("forced"):
            raise Refused(
                f"there would be no way back, {found}; what serves now is left alone. "
                "Force goes on without a way back, for instance to replace a damaged release by an intact one"
            )

    def _switch(self, record: Record) -> Verdict:
        self._note("flipping", record)
        units.stop(self.unit)  # before the link moves: a running engine must not import from another release
        self.flip(record)
        self._note("flipped", record)
        started = self._start()
        self._note("restarted", record)
        return self._gate(record, started)

    def _commit(self, record: Record, verdict: Verdict) -> None:
        units.enable(self.unit)
        details = {"restores": record["restores"]} if record.get("restores") else {}
        self._note("committed", record, gate=verdict.as_dict(), run=record.get("run"), **details)
        self._keep_answers(record, verdict)
        self._tidy()
        release.prune(self.paths, int(record.get("keep_releases", 3)), protected(self.paths))

    # -- cut off ------------------------------------------------------------------------------------------------

    def resume(self, record: Record) -> bool:
        """This activation was cut off while it was open: nobody knows how far its engine got, so it is taken back."""
        events = set(self.state().open_events)
        if record["kind"] == "verify" and "taking_back" not in events:
            return self.activate(record)
        if not events & {"flipping", "taking_back"}:
            self._note("abandoned", record, cause="the activation was cut off before anything was touched")
            return False
        self.take_back(record, "the activation was cut off before its gate had decided")
        return False

    def supersede(self, old: dict[str, Any], new: Record) -> None:
        """A newer request replaces one that was cut off; the last known good stays what it was."""
        known = {key: old.get(key) for key in ("id", "slot", "release", "config_digest", "kind", "run")}
        self.journal.append("abandoned", **known, cause=f"cut off, and replaced by activation {new['id']}")

    # -- back ---------------------------------------------------------------------------------------------------

    def take_back(self, record: Record, cause: str) -> bool:
        """Return to the newest good activation that is intact and passes its gate. False: nothing could be started."""
        self._note("taking_back", record, cause=cause)
        state = self.state()
        candidates = [item for item in reversed(state.good) if item.activation != record["id"]]
        if record["kind"] == "verify" and candidates:
            candidates = candidates[1:]  # the one just checked is the one that failed
        if not state.good and not state.down:
            self._clear()
            self._note("taken_back", record, to=None, cause=cause, run=record.get("run"))
            return True
        for good in candidates:
            if self._return_to(record, good, cause):
                return True
        units.stop(self.unit)
        cause = f"{cause}; and no earlier good activation could be started"
        self._note("failed", record, cause=cause, run=record.get("run"))
        return False

    def _return_to(self, record: Record, good: Good, cause: str) -> bool:
        damage = release.verify(self.paths, good.release, quick=True)
        if damage:
            self._note("damaged", record, damaged=good.release, cause=words(damage))
            return False
        try:
            target = load(self.paths, self.slot, good.activation)
        except Refused as error:
            self._note("damaged", record, damaged=good.release, cause=str(error))
            return False
        units.stop(self.unit)
        self.flip(target)
        verdict = self._gate(target, self._start(), back=record)
        if not verdict.passed:
            self._judge(target, verdict, back=record)
            return False
        units.enable(self.unit)
        self._note(
            "taken_back",
            record,
            to=good.activation,
            to_release=good.release,
            cause=cause,
            gate=verdict.as_dict(),
            run=record.get("run"),
        )
        return True

    def restore_at_boot(self, record: Record) -> Record | None:
        """Before the slot starts: put the last known good in place and leave a request to verify it once it runs."""
        self._note("taking_back", record, cause="the host went down while the activation was open")
        state = self.state()
        for good in reversed(state.good):
            damage = release.verify(self.paths, good.release)
            if damage:
                self._note("damaged", record, damaged=good.release, cause=words(damage))
                continue
            target = load(self.paths, self.slot, good.activation)
            self.flip(target)
            self._note("taken_back", record, to=good.activation, to_release=good.release, cause="reboot")
            check = {**target, "id": new_id(), "kind": "verify", "run": record.get("run"), "who": "ddtree-recover"}
            submit(self.paths, check, api_key(self.paths, target))
            return check
        if state.good:
            units.disable(self.unit)
            files.remove(self.paths.unit_file(self.slot))
            self._note("failed", record, cause="no intact good release is left to boot")
        else:
            self._clear()
            self._note("taken_back", record, to=None, cause="reboot")
        units.daemon_reload()
        return None

    def _quarantine(self, record: Record, verdict: Verdict) -> None:
        units.stop(self.unit)
        units.disable(self.unit)
        self._note("quarantined", record, cause=verdict.cause, run=record.get("run"))

    def _clear(self) -> None:
        """There was nothing before: leave nothing behind that could start."""
        units.stop(self.unit)
        units.disable(self.unit)
        files.remove(self.paths.unit_file(self.slot))
        files.remove(self.paths.slot(self.slot) / "current")
        units.daemon_reload()
        units.reset_failed(self.unit)

    # -- steps --------------------------------------------------------------------------------------------------

    def flip(self, record: Record) -> None:
        """Put the unit, the environment, the secret and the `current` link of `record` in place."""
        directory = self.paths.slot(self.slot)
        directory.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(self.paths.release(record["release"]), directory)
        files.write_atomic(directory / "slot.env", record["env"])
        files.write_atomic(directory / "api_key", api_key(self.paths, record), 0o600)
        files.write_atomic(self.paths.unit_file(self.slot), record["unit"])
        files.replace_link(directory / "current", target)
        units.daemon_reload()

    def _start(self) -> float:
        """Start the unit and return, once that start has begun, when it did (epoch seconds)."""
        units.reset_failed(self.unit)
        before = units.show(self.unit).invocation
        began = time.time()
        units.start(self.unit)
        end = time.monotonic() + 15.0
        while time.monotonic() < end:
            state = units.show(self.unit)
            if state.invocation and state.invocation != before and state.active != "inactive":
                break
            if state.active == "failed":
                break
            time.sleep(0.02)
        return began

    def _started_at(self) -> float:
        state = units.show(self.unit)
        return state.active_at or time.time()

    def _gate(self, record: Record, started: float, back: Record | None = None) -> Verdict:
        config = GateConfig.of(self._gate_settings(record), api_key(self.paths, record))
        host = SlotHost(self.unit, started, str(record.get("gpu", "")))
        about = back or record

        def report(stage: str, message: str) -> None:
            self._note("stage", about, stage=stage, message=message, on_way_back=back is not None)

        try:
            return Gate(config, host, report).run()
        finally:
            host.close()

    def _gate_settings(self, record: Record) -> dict[str, Any]:
        settings = dict(record["gate"])
        if not settings.get("answers"):
            settings.pop("answers", None)
            known = files.read_json(self._answers_file(record)) if record.get("answers_key") else None
            if known:
                settings["answers"] = known
        return settings

    def _answers_file(self, record: Record) -> Path:
        return self.paths.golden / f"{record['answers_key']}.json"

    def _keep_answers(self, record: Record, verdict: Verdict) -> None:
        """A first good activation of a model records its answers; later ones have to agree with them."""
        if not record.get("answers_key") or record["gate"].get("answers") or self._answers_file(record).exists():
            return
        asked = {golden.prompt: golden for golden in content.QUESTIONS}
        exact = bool(record.get("exact_answers"))
        known = [
            {"prompt": prompt, "max_tokens": asked[prompt].max_tokens, "text": text, "exact": exact}
            for prompt, text in verdict.answers.items()
            if prompt in asked
        ]
        if known:
            files.write_json(self._answers_file(record), known)

    def _judge(self, record: Record, verdict: Verdict, back: Record | None = None) -> None:
        """Keep the evidence before anything is torn down, then write the verdict."""
        about = back or record
        evidence = self.paths.slot_state(self.slot) / "evidence" / f"{about['id']}{'-back' if back else ''}.json"
        lines = [line.text for line in units.log(self.unit, lines=200)]
        files.write_json(
            evidence,
            {"verdict": verdict.as_dict(), "unit": dataclasses.asdict(units.show(self.unit)), "log": lines},
            0o600,
        )
        self._note(
            "verdict",
            about,
            verdict=verdict.kind,
            release=record["release"],
            config_digest=record["config_digest"],
            on_way_back=back is not None,
            evidence=str(evidence),
            **{key: value for key, value in verdict.as_dict().items() if key != "kind"},
        )

    def _note(self, event: str, record: Record, **fields: Any) -> None:
        common = {
            "id": record["id"],
            "slot": self.slot,
            "release": record["release"],
            "config_digest": record["config_digest"],
            "kind": record["kind"],
        }
        known = {key: item for key, item in fields.items() if item is not None or key == "to"}
        self.journal.append(event, **{**common, **known})

    def _tidy(self, keep: int = 20) -> None:
        """Old activation records go; those that a way back could need stay."""
        state = self.state()
        needed = {item.activation for item in state.good[-keep:]}
        records = sorted((self.paths.slot_state(self.slot) / "activations").glob("*.json"))
        for path in records[:-keep]:
            if path.stem not in needed:
                files.remove(path)
                files.remove(path.with_suffix(".key"))


def protected(paths: Paths) -> set[str]:
    """Releases that pruning must leave: what slots point at, their last two good ones, what open intents name."""
    kept: set[str] = set()
    for state in fold(Journal(paths.journal).entries()).values():
        kept.update(item.release for item in state.good[-2:])
        if state.open:
            kept.add(str(state.open.get("release")))
    if paths.slots.is_dir():
        for link in paths.slots.glob("*/current"):
            with contextlib.suppress(OSError):
                kept.add(link.readlink().name)
    return kept


def words(damage: Any) -> str:
    """The first few damaged files, by name."""
    listed = [f"{item.path} ({item.what})" for item in damage[:3]]
    more = f" and {len(damage) - 3} more" if len(damage) > 3 else ""
    return ", ".join(listed) + more


def run_pending(paths: Paths, slot: str) -> int:
    """Entry of `ddtree-activate@SLOT`: carry out the request that was left for the slot. 0: it serves."""
    pending = files.read_json(pending_file(paths, slot))
    if not pending:
        print(f"no activation was asked for on slot {slot}")
        return 0
    with slot_lock(paths, slot):
        transaction = Transaction(paths, slot)
        record = load(paths, slot, str(pending["id"]))
        try:
            open_before = transaction.state().open
            if open_before and open_before.get("id") == record["id"]:
                return 0 if transaction.resume(record) else 1
            if open_before:
                transaction.supersede(open_before, record)
            return 0 if transaction.activate(record) else 1
        except Refused as refusal:
            print(f"refused: {refusal}")
            return 1
        finally:
            current = files.read_json(pending_file(paths, slot))
            if current and current.get("id") == record["id"] and transaction.state().open is None:
                files.remove(pending_file(paths, slot))
