"""Preflight checks of slots: ports, models, units and what the slot's history says."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from .access import BLOCKED
from .case import Case, Check, Violation
from .checks_gpu import describe, who
from .paths import slot_unit

WILDCARDS = ("0.0.0.0", "::")
PRIVATE_DIRECTORIES = ("/tmp", "/var/tmp")


def ports(case: Case) -> Iterator[Violation]:
    ephemeral = case.facts.get("ephemeral") or {}
    for slot in case.slots:
        subject = f"port {slot['port']}"
        told = set()
        for holder in case.facts.get("ports") or []:
            if holder["port"] != slot["port"] or not _overlap(str(holder.get("addr", "")), str(slot["bind"])):
                continue
            if holder.get("slot") == slot["name"] or (holder.get("pid"), holder.get("slot")) in told:
                continue
            told.add((holder.get("pid"), holder.get("slot")))
            if holder.get("ours"):
                yield case.violation(
                    "PORT-OTHER-SLOT",
                    subject,
                    f"slot {holder['slot']} (pid {holder['pid']})",
                    "a free port",
                    slot,
                    other=holder["slot"],
                )
            else:
                yield case.violation("PORT-FOREIGN", subject, describe(holder), "a free port", slot, who=who(holder))
        low, high = int(ephemeral.get("low", 0)), int(ephemeral.get("high", 0))
        reserved = any(first <= slot["port"] <= last for first, last in ephemeral.get("reserved") or [])
        if low <= slot["port"] <= high and not reserved:
            yield case.violation(
                "PORT-EPHEMERAL", subject, f"ephemeral range {low} to {high}", "a port outside it", slot, low=low
            )


def _overlap(one: str, other: str) -> bool:
    """Whether listening on both addresses would collide."""
    if one in WILDCARDS or other in WILDCARDS:
        return True
    return one == other


def addresses(case: Case) -> Iterator[Violation]:
    own = case.facts.get("addresses")
    if not own:
        return
    for slot in case.slots:
        bind = ipaddress.ip_address(str(slot["bind"]))
        if bind.is_unspecified or bind.is_loopback or str(bind) in own:
            continue
        shown = ", ".join(address for address in own if not ipaddress.ip_address(address).is_loopback) or "none"
        yield case.violation(
            "BIND-ADDRESS", f"address {bind}", "not on this host", "an address of the host", slot, addresses=shown
        )


def models(case: Case) -> Iterator[Violation]:
    user = str(case.desired.get("user", ""))
    for index, slot in enumerate(case.slots):
        for key in ("model", "draft"):
            path = str(slot.get(key, ""))
            if not path.startswith("/"):
                continue
            where = f"hosts.{case.desired.get('host', '')}.fleet_slots[{index}].{key}"
            hidden = [*PRIVATE_DIRECTORIES, str(case.desired.get("state", ""))]
            inside = next((item for item in hidden if item and PurePosixPath(path).is_relative_to(item)), None)
            if inside:
                yield case.violation("MODEL-HIDDEN", path, f"{key} below {inside}", "a path that the unit sees", slot)
                continue
            yield from _model(case, slot, path, user, where)


def _model(case: Case, slot: Mapping[str, Any], path: str, user: str, where: str) -> Iterator[Violation]:
    model = (case.facts.get("models") or {}).get(path)
    if model is None:
        return
    if not model.get("exists"):
        yield case.violation("MODEL-MISSING", path, "nothing there", "the model", slot, path=path, where=where)
        return
    if model.get("kind") == "directory" and model.get("missing"):
        yield case.violation(
            "MODEL-INCOMPLETE", path, f"without {', '.join(model['missing'])}", "a complete model", slot, path=path
        )
    blocked = {
        name: why
        for name, why in (case.facts.get("access") or {}).items()
        # its own files; one model inside another's directory is judged by itself
        if name == path or (str(PurePosixPath(name).parent) == path and name not in case.facts["models"])
    }
    if blocked:
        name, why = next(iter(blocked.items()))
        more = f" and {len(blocked) - 1} more files" if len(blocked) > 1 else ""
        yield case.violation(
            "MODEL-UNREADABLE", path, f"{name}: {why}{more}", f"readable by {user}", slot, path=path, user=user
        )


def caches(case: Case) -> Iterator[Violation]:
    cache, user = str(case.desired.get("cache", "")), str(case.desired.get("user", ""))
    for path, why in (case.facts.get("access") or {}).items():
        if cache and path.startswith(f"{cache}/") and why.endswith(BLOCKED):
            yield case.violation("CACHE-UNWRITABLE", path, why, f"open to {user}", path=path, user=user)


def history(case: Case) -> Iterator[Violation]:
    known: Mapping[str, Any] = case.facts.get("slots") or {}
    for slot in case.slots:
        state = known.get(slot["name"])
        if state is None:
            continue
        unit = slot_unit(str(slot["name"]))
        subject = f"slot {slot['name']}"
        if state.get("unit_exists") and state.get("last") is None:
            yield case.violation(
                "SLOT-UNIT-FOREIGN", unit, "a unit that no activation made", "no such unit", slot, unit=unit
            )
        if state.get("altered"):
            yield case.violation(
                "SLOT-ALTERED", subject, ", ".join(state["altered"]), "files as they were activated", slot
            )
        # a unit that only tidies up after its outcome is no reason to refuse: the next activation waits for it
        if state.get("activating") and state.get("open"):
            yield case.violation("SLOT-BUSY", subject, "a running activation", "none", slot)
        elif state.get("open"):
            yield case.violation("SLOT-OPEN", subject, f"activation {state['open'].get('id')}", "none open", slot)
        if state.get("quarantined"):
            yield case.violation("SLOT-QUARANTINED", subject, str(state["quarantined"]), "no quarantine", slot)
        digest = case.digests.get(str(slot["name"]))
        cause = (state.get("refused") or {}).get(f"{case.release_id} {digest}")
        if cause and case.release_id and digest:
            yield case.violation(
                "SLOT-REFUSED", subject, f"{case.release_id}: {cause}", "a release that has not failed here", slot
            )
    wanted = {slot["name"] for slot in case.slots}
    for name, state in known.items():
        if name not in wanted and (state.get("release") or state.get("active")):
            yield case.violation(
                "SLOT-ORPHAN",
                f"slot {name}",
                f"release {state.get('release')}",
                "a slot of the inventory",
                slot=None,
                other=name,
            )


def releases(case: Case) -> Iterator[Violation]:
    wanted = str(case.desired.get("release") or "")
    kept = [item["id"] for item in case.facts.get("releases") or []]
    if wanted and wanted not in kept:
        yield case.violation(
            "RELEASE-UNKNOWN",
            wanted,
            "not on this host",
            "a kept release",
            kept=", ".join(kept) or "none (nothing is kept)",
        )


CHECKS: tuple[Check, ...] = (ports, addresses, models, caches, history, releases)
