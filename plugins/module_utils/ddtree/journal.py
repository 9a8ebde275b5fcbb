"""The host's append-only record of activations, and what follows from it.

Every intent is on disk before it is carried out and every outcome after, one JSON object a line. The state of a
slot (what serves, what was good, what is open) is a pure function of these lines: no second place could disagree.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .files import fsync_dir

Entry = dict[str, Any]

# Events that end an activation; until one of them stands in the journal, the activation is open.
OUTCOMES = frozenset({"committed", "taken_back", "failed", "quarantined", "abandoned"})


def timestamp(t: float) -> str:
    return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


class Journal:
    """The journal file of one host. Safe for several writers and for a power cut in the middle of a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **fields: Any) -> Entry:
        """Write one entry and return it once it is on disk."""
        t = time.time()
        entry: Entry = {"t": round(t, 6), "ts": timestamp(t), "event": event, **fields}
        line = (json.dumps(entry, sort_keys=False, default=str) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a writer lost power in mid-line: seal that line, it will be skipped
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(descriptor, view) :]
            except OSError:
                os.ftruncate(descriptor, size)  # a full disk must not leave half an entry
                raise
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            fsync_dir(self.path.parent)
        return entry

    def read(self, offset: int = 0) -> tuple[list[Entry], int]:
        """Entries from byte `offset` on, and the offset after the last complete line. Broken lines are skipped."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return [], offset
        complete = data[: data.rfind(b"\n") + 1]
        entries = []
        for line in complete.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and "event" in entry:
                entries.append(entry)
        return entries, offset + len(complete)

    def entries(self) -> list[Entry]:
        return self.read()[0]

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


@dataclasses.dataclass
class Good:
    """An activation that passed its gate."""

    activation: str
    release: str
    config_digest: str
    t: float
    kind: str = "deploy"


@dataclasses.dataclass
class SlotState:
    """What the journal says of one slot. `good` is a stack, newest last: its top is the last known good."""

    slot: str
    good: list[Good] = dataclasses.field(default_factory=list)
    open: Entry | None = None
    open_events: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)  # "release config_digest" -> cause
    down: str | None = None  # why nothing serves although something should
    quarantined: str | None = None
    last: Entry | None = None

    @property
    def current(self) -> Good | None:
        """What is on the slot once no activation is open."""
        return None if self.down or not self.good else self.good[-1]

    def refusal(self, release: str, config_digest: str) -> str | None:
        return self.refused.get(f"{release} {config_digest}")

    def as_dict(self) -> dict[str, Any]:
        current = self.current
        return {
            "slot": self.slot,
            "release": current.release if current else None,
            "config_digest": current.config_digest if current else None,
            "activation": current.activation if current else None,
            "since": timestamp(current.t) if current else None,
            "good": [dataclasses.asdict(item) for item in self.good],
            "open": self.open,
            "refused": self.refused,
            "down": self.down,
            "quarantined": self.quarantined,
            "last": self.last,
        }


def fold(entries: Iterable[Entry]) -> dict[str, SlotState]:
    """State of every slot that the journal names."""
    states: dict[str, SlotState] = {}
    for entry in entries:
        slot = entry.get("slot")
        if not isinstance(slot, str):
            continue
        state = states.setdefault(slot, SlotState(slot))
        state.last = entry
        _apply(state, entry)
    return states


def _apply(state: SlotState, entry: Entry) -> None:
    event = entry["event"]
    if event == "intent":
        state.open, state.open_events = entry, []
    elif state.open and entry.get("id") == state.open.get("id") and event not in OUTCOMES:
        state.open_events.append(event)
    if event == "verdict" and entry.get("verdict") == "fail" and not entry.get("on_way_back"):
        key = f"{entry.get('release')} {entry.get('config_digest')}"
        state.refused[key] = str(entry.get("cause") or "failed its gate")
    if event in OUTCOMES:
        state.open, state.open_events = None, []
    if event == "committed":
        _commit(state, entry)
    elif event == "taken_back":
        target = entry.get("to")
        if target is None:
            state.good = []
        else:
            while state.good and state.good[-1].activation != target:
                state.good.pop()
        state.down = None
    elif event == "failed":
        state.down = str(entry.get("cause") or "nothing could be started")
    elif event == "quarantined":
        state.quarantined = state.down = str(entry.get("cause") or "host fault")
    elif event == "removed":
        state.good, state.down, state.quarantined = [], None, None


def _commit(state: SlotState, entry: Entry) -> None:
    good = Good(
        activation=str(entry["id"]),
        release=str(entry["release"]),
        config_digest=str(entry["config_digest"]),
        t=float(entry["t"]),
        kind=str(entry.get("kind", "deploy")),
    )
    state.down = state.quarantined = None
    state.refused.pop(f"{good.release} {good.config_digest}", None)
    if good.kind == "verify":
        return
    restores = entry.get("restores")
    if restores and any(item.activation == restores for item in state.good):
        # a rollback returns to an older entry: what stood above it is no longer what "previous" means
        while state.good and state.good.pop().activation != restores:
            pass
    elif state.good and (state.good[-1].release, state.good[-1].config_digest) == (good.release, good.config_digest):
        state.good.pop()  # the same thing again replaces itself, or "previous" would be no change
    state.good.append(good)


def slot_states(journal_path: Path) -> dict[str, SlotState]:
    return fold(Journal(journal_path).entries())
