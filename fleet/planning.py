"""From what is and what should be to what there is to do: rules first, then slot by slot. Touches no host."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from fleet import content, host_setup, slotconfig, stack, stack_release
from fleet.engine_wheel import EngineError
from fleet.stack import StackError

content.add_host_code()

from ddtree import preflight  # noqa: E402  # importable only once the hosts' code is on the path
from ddtree.case import Violation  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What preflight says of a host. `plan` is what later tasks follow."""

    violations: list[Violation]
    plan: dict[str, Any]

    @property
    def refused(self) -> bool:
        return any(violation.stops for violation in self.violations)


def judge(
    desired: Mapping[str, Any], facts: Mapping[str, Any], *, api_key: str = "", now: float | None = None
) -> Judgement:
    """`desired` and `facts` as the facts ddtree_desired and ddtree_facts hold them."""
    chosen = stack.load(str(desired["stack"])).model_dump(mode="json")
    digests = {slot["name"]: slotconfig.digest(desired, slot, api_key) for slot in desired["slots"]}
    python = dict(facts.get("python") or {})
    release_id = wanted_release(desired, str(python.get("version") or ""))
    violations = preflight.evaluate(facts, chosen, desired, now=now, release_id=release_id, digests=digests)
    slots = [
        {"name": slot["name"], **action(slot, facts, release_id, digests[slot["name"]], bool(desired["force"]))}
        for slot in desired["slots"]
    ]
    todo = [f"slot {slot['name']}: {slot['why']}" for slot in slots if slot["action"] != "none"]
    todo += host_differences(desired, facts)
    if release_id not in {item["id"] for item in facts.get("releases") or []}:
        todo.append(f"release {release_id or 'of this stack'} is not on the host")
    plan = {
        "noop": not todo,
        "reason": "; ".join(todo) or f"every slot serves {release_id} with this configuration and is healthy",
        "release_id": release_id,
        "python": python,
        "slots": slots,
    }
    return Judgement(violations, plan)


def host_differences(desired: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What the toolkit keeps on a host beside releases, where it is not as this version wants it."""
    found = []
    present = facts.get("agent_version") or ""
    if present != host_setup.agent_version():
        found.append("the agent on the host is of another version" if present else "the host has no agent yet")
    digests = facts.get("agent_units") or {}
    for name, text in host_setup.units(desired).items():
        if digests.get(name) != hashlib.sha256(text.encode()).hexdigest():
            found.append(f"{name} is {'not as it should be' if name in digests else 'missing'}")
    return found


def wanted_release(desired: Mapping[str, Any], python_version: str) -> str | None:
    """Id of the release that the host is to have; None where its Python has none (a violation says so)."""
    if desired["release"]:
        return str(desired["release"])
    try:
        return stack_release.plan(desired, python_version).id
    except (StackError, EngineError):
        return None


def action(
    slot: Mapping[str, Any], facts: Mapping[str, Any], release_id: str | None, digest: str, force: bool
) -> dict[str, str]:
    """{action: none | activate, why} of one slot."""
    why = _reason(dict((facts.get("slots") or {}).get(slot["name"]) or {}), release_id, digest, force)
    return {"action": "activate", "why": why} if why else {"action": "none", "why": "healthy on this release already"}


def _reason(state: Mapping[str, Any], release_id: str | None, digest: str, force: bool) -> str:
    """Why a slot has to be activated; empty where it already is what it should be."""
    if force:
        return "asked for by fleet_force"
    if state.get("open"):
        return "an activation of it was cut off"
    if not state.get("release"):
        return f"it is down: {state['down']}" if state.get("down") else "nothing has been activated on it yet"
    if state["release"] != release_id:
        return f"it serves {state['release']}"
    if state.get("config_digest") != digest:
        return "its configuration has changed"
    if state.get("link") != release_id:
        return f"its link points at {state.get('link') or 'nothing'}"
    # an activation writes its files again; a drop-in would still be there afterwards, and restart the slot every time
    altered = [item for item in state.get("altered") or [] if not item.endswith("(drop-in)")]
    if altered:
        return f"changed by hand: {', '.join(altered)}"
    unit = state.get("unit") or {}
    if not state.get("active"):
        return f"its unit is {unit.get('ActiveState') or 'missing'}"
    health = state.get("health") or {}
    if health.get("status") != 200:
        return f"it is not healthy: {health.get('error') or 'no answer'}"
    return ""
