"""Answers of the commands that only look: tables from the facts that hosts report."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .render import duration

Facts = Mapping[str, Mapping[str, Any]]

_KINDS = {"deploy": "deploy", "rollback": "rollback", "verify": "check again"}
_OUTCOMES = {
    "committed": ("committed", "green"),
    "taken_back": ("failed, taken back", "red"),
    "failed": ("failed", "bold red"),
    "quarantined": ("quarantined", "bold red"),
    "abandoned": ("abandoned", "yellow"),
}


def status(console: Console, facts: Facts) -> None:
    """One line per slot; slots that do not serve say why."""
    table = _table("host", "slot", "state", "health", "release", "gpu", "port", "for")
    remarks: list[str] = []
    for host, fact in sorted(facts.items()):
        slots = fact.get("slots") or {}
        if not slots:
            table.add_row(host, "", Text("no slot deployed", style="yellow"), "", "", "", "", "")
        for name, slot in sorted(slots.items()):
            state, style = _state(slot)
            table.add_row(
                host,
                name,
                Text(state, style=style),
                _health(slot),
                str(slot.get("release") or ""),
                _gpu(fact, slot),
                str(slot.get("port") or ""),
                _age(slot.get("since")),
            )
            for key in ("down", "quarantined"):
                if slot.get(key):
                    remarks.append(f"{host}/{name}: {key}: {slot[key]}")
            for change in slot.get("altered") or []:
                remarks.append(f"{host}/{name}: changed by hand: {change}")
        lock = fact.get("lock")
        if lock:
            remarks.append(f"{host}: locked: {_sentence(lock)}")
    console.print(table)
    for remark in remarks:
        console.print(Text(remark, style="yellow"), soft_wrap=True)


def history(console: Console, activations: Mapping[str, list[Mapping[str, Any]]]) -> None:
    """One line per activation, as module ddtree_history tells them."""
    table = _table("when (UTC)", "host", "slot", "kind", "release", "outcome", "time", "cause")
    for host, entries in sorted(activations.items()):
        for entry in entries:
            text, style = _OUTCOMES.get(str(entry.get("outcome")), ("under way", "cyan"))
            cause = str(entry.get("cause") or entry.get("why") or "")
            if entry.get("root") and str(entry["root"]) not in cause:
                cause += f" [{entry['root']}]"
            table.add_row(
                str(entry.get("ts") or "")[:19].replace("T", " "),
                host,
                str(entry.get("slot") or ""),
                _KINDS.get(str(entry.get("kind")), str(entry.get("kind") or "")),
                str(entry.get("release") or ""),
                Text(text, style=style),
                duration(entry["seconds"]) if entry.get("seconds") is not None else "",
                Text(cause),
            )
    console.print(table if table.row_count else Text("no activation is on record", style="yellow"))


def releases(console: Console, facts: Facts) -> None:
    """One line per release kept on a host, with the slots that serve it or could return to it."""
    table = _table("host", "release", "built", "serves", "good for")
    for host, fact in sorted(facts.items()):
        slots = fact.get("slots") or {}
        kept = fact.get("releases") or []
        if not kept:
            table.add_row(host, Text("no release", style="yellow"), "", "", "")
        for release in kept:
            identity = str(release.get("id") if isinstance(release, Mapping) else release)
            built = release.get("created_t") if isinstance(release, Mapping) else None
            serving = [name for name, slot in sorted(slots.items()) if slot.get("release") == identity]
            good = [
                name
                for name, slot in sorted(slots.items())
                if name not in serving and any(item.get("release") == identity for item in slot.get("good") or [])
            ]
            table.add_row(
                host,
                identity,
                _day(built),
                Text(", ".join(serving), style="green"),
                ", ".join(good),
            )
    console.print(table)


def log_lines(result: Mapping[str, Any]) -> list[str]:
    """The lines that playbooks/logs.yml read on one host."""
    return [str(line) for line in result.get("stdout_lines") or []]


def logs(console: Console, found: Mapping[str, list[str]]) -> None:
    for host, lines in sorted(found.items()):
        if not lines:
            console.print(Text(f"{host}: no log lines: nothing of ours has run there", style="yellow"), soft_wrap=True)
        for line in lines:
            console.print(Text(line), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("time", "for", "port") else "left", overflow="fold")
    return table


def _state(slot: Mapping[str, Any]) -> tuple[str, str]:
    unit = slot.get("unit") or {}
    state = str(unit.get("ActiveState") or "unknown")
    if slot.get("open") or slot.get("activating"):
        return "activation under way", "cyan"
    if slot.get("quarantined"):
        return "quarantined", "bold red"
    if not slot.get("release") and state == "inactive":
        return ("down", "bold red") if slot.get("down") else ("not deployed", "yellow")
    restarts = int(unit.get("NRestarts") or 0)
    text = state if not restarts else f"{state}, {restarts} restarts"
    return text, {"active": "green", "failed": "bold red", "unknown": "yellow"}.get(state, "yellow")


def _health(slot: Mapping[str, Any]) -> Text:
    health = slot.get("health") or {}
    if not health and (slot.get("unit") or {}).get("ActiveState") != "active":
        return Text("")
    if health.get("status") == 200:
        return Text("ok", style="green")
    return Text(str(health.get("error") or health.get("status") or "no answer"), style="yellow")


def _gpu(fact: Mapping[str, Any], slot: Mapping[str, Any]) -> str:
    uuid = slot.get("gpu")
    for gpu in fact.get("gpus") or []:
        if uuid and gpu.get("uuid") == uuid:
            name = f"{gpu.get('index')}: {gpu.get('name')}"
            return name if fact.get("gpu_source") != "simulated" else f"{name} (simulated)"
    return str(uuid or "")


def _age(since: Any) -> str:
    if not isinstance(since, str):
        return ""
    try:
        then = datetime.datetime.fromisoformat(since)
    except ValueError:
        return ""
    return duration(max(0.0, time.time() - then.timestamp()))


def _day(t: Any) -> str:
    if not isinstance(t, int | float):
        return ""
    return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def _sentence(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item not in (None, "", [], {}))
    return str(value)
