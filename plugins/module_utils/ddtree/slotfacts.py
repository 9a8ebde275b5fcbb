"""Slots as they are: what the journal says, what systemd says, what answers, and what somebody changed by hand."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import files, journal, units
from .paths import SLOT_NAME, Paths, activation_unit, slot_unit
from .prestart import read_env
from .probe import Engine, ProbeError
from .process import run

PROPERTIES = (*units.PROPERTIES, "FragmentPath", "DropInPaths", "NeedDaemonReload", "ActiveEnterTimestamp")
# Where `systemctl set-property --runtime` keeps what the slot's own start does (it opens the GPU's device).
_OWN_DROP_INS = "/run/systemd/system.control/"


def slots(paths: Paths, wanted: Iterable[dict[str, Any]], timeout: float) -> dict[str, Any]:
    """Every slot that the inventory asks for, the journal knows or the disk holds, by name."""
    asked = {item["name"]: item for item in wanted}
    states = journal.slot_states(paths.journal)
    names = sorted({*asked, *states, *_on_disk(paths)})
    if not names:
        return {}
    shown = _show([unit for name in names for unit in (slot_unit(name), activation_unit(name))])
    found = {name: _slot(paths, name, asked.get(name), states.get(name), shown) for name in names}
    alive = [
        slot for slot in found.values() if slot["unit"].get("ActiveState") in ("active", "activating") and slot["port"]
    ]
    if alive:
        with concurrent.futures.ThreadPoolExecutor(min(16, len(alive))) as pool:
            for slot, health in zip(alive, pool.map(lambda item: _health(item, timeout), alive), strict=True):
                slot["health"] = health
    return found


def _on_disk(paths: Paths) -> set[str]:
    """Slots with a directory or a unit of their own; the toolkit's own units are none."""
    names = {path.name for path in paths.slots.glob("*") if path.is_dir()}
    for file in paths.units.glob("ddtree-*.service"):
        names.add(file.name.removeprefix("ddtree-").removesuffix(".service"))
    return {name for name in names - {"recover", "router"} if SLOT_NAME.match(name)}


def _show(names: list[str]) -> dict[str, dict[str, str]]:
    """One call for all units; blank lines part them."""
    result = run("systemctl", "show", "-p", ",".join(PROPERTIES), "--", *names, check=False, timeout=20)
    shown = [units.parse_show(block) for block in result.out.split("\n\n") if block.strip()]
    return dict(zip(names, shown, strict=True)) if len(shown) == len(names) else {}


def _slot(
    paths: Paths,
    name: str,
    asked: dict[str, Any] | None,
    state: journal.SlotState | None,
    shown: dict[str, dict[str, str]],
) -> dict[str, Any]:
    facts = (state or journal.SlotState(name)).as_dict()
    unit = shown.get(slot_unit(name), {})
    directory = paths.slot(name)
    try:
        environment = read_env(directory / "slot.env")
    except OSError:
        environment = {}
    port = environment.get("DDTREE_PORT", "")
    link = directory / "current"
    facts.update(
        link=link.readlink().name if link.is_symlink() else None,
        unit={**unit, "NRestarts": int(unit.get("NRestarts") or 0), "MainPID": int(unit.get("MainPID") or 0)},
        unit_exists=paths.unit_file(name).exists(),
        active=unit.get("ActiveState") == "active",
        activating=shown.get(activation_unit(name), {}).get("ActiveState") in ("active", "activating"),
        port=int(port) if port.isdigit() else (asked or {}).get("port"),
        bind=environment.get("DDTREE_HOST") or (asked or {}).get("bind") or "127.0.0.1",
        gpu=environment.get("CUDA_VISIBLE_DEVICES", ""),
        health=None,
        altered=_altered(paths, name, facts["activation"], unit) if not facts["open"] else [],
    )
    return facts


def _altered(paths: Paths, name: str, activation: str | None, unit: dict[str, str]) -> list[str]:
    """Files of the slot that are not as its activation wrote them, and settings that somebody laid over its unit."""
    dropped = [path for path in unit.get("DropInPaths", "").split() if not path.startswith(_OWN_DROP_INS)]
    found = [f"{path} (drop-in)" for path in dropped if slot_unit(name) in path]
    if not activation:
        return found
    try:
        record = files.read_json(paths.activation(name, activation))
    except (OSError, ValueError) as error:
        return [*found, f"activation record: {error}"]
    if not isinstance(record, dict):
        return found
    for path, key in ((paths.unit_file(name), "unit"), (paths.slot(name) / "slot.env", "env")):
        if key in record and _text(path) != record[key]:
            found.append(f"{path} ({'changed' if path.exists() else 'missing'})")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _health(slot: dict[str, Any], timeout: float) -> dict[str, Any]:
    host = "127.0.0.1" if slot["bind"] in ("0.0.0.0", "::", "") else slot["bind"]
    try:
        answer = Engine(int(slot["port"]), host, timeout=timeout).get("/health")
    except ProbeError as error:
        return {"status": None, "error": str(error)}
    return {"status": answer.status, "error": "" if answer.status == 200 else answer.brief()}
