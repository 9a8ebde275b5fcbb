"""What happened to the slots of a host, one record per activation: the journal as an operator wants to read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .journal import OUTCOMES, Entry


@dataclasses.dataclass
class Activation:
    """One activation from its intent to its outcome; `outcome` is empty while it is under way."""

    id: str
    slot: str
    t: float
    ts: str
    kind: str = ""
    release: str = ""
    previous: str = ""
    outcome: str = ""
    serves: str = ""
    seconds: float | None = None
    cause: str = ""
    root: str = ""
    fix: str = ""
    death_to_verdict_s: float | None = None
    run: str = ""
    who: str = ""
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def activations(entries: Iterable[Entry], slot: str | None = None, newest: int | None = None) -> list[Activation]:
    """The activations of all slots, or of one, in the order in which they began; at most the `newest` ones."""
    found: dict[str, Activation] = {}
    for entry in entries:
        identity = str(entry.get("id") or "")
        name = str(entry.get("slot") or "")
        if not identity or not name or (slot is not None and name != slot):
            continue
        record = found.get(identity)
        if record is None:
            record = Activation(identity, name, float(entry.get("t") or 0.0), str(entry.get("ts") or ""))
            found[identity] = record
        _add(record, entry)
    records = list(found.values())
    return records[-newest:] if newest is not None else records


def _add(record: Activation, entry: Entry) -> None:
    event = entry["event"]
    if not entry.get("on_way_back"):
        for key in ("kind", "release", "previous", "run", "who", "why"):
            if not getattr(record, key):
                setattr(record, key, str(entry.get(key) or ""))
    if event == "verdict" and entry.get("verdict") != "pass" and not entry.get("on_way_back"):
        for key in ("cause", "root", "fix"):
            setattr(record, key, str(entry.get(key) or getattr(record, key)))
        record.death_to_verdict_s = entry.get("death_to_verdict_s")
    if event in OUTCOMES:
        record.outcome = event
        record.seconds = round(max(0.0, float(entry.get("t") or record.t) - record.t), 3)
        record.cause = record.cause or str(entry.get("cause") or "")
        record.serves = record.release if event == "committed" else str(entry.get("to_release") or "")
