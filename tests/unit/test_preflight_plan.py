"""From what a host is to what there is to do on it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import healthy_host as host
import pytest

from fleet import desired, host_setup, planning, slotconfig, stack_release

VERSION = "3.11.2"


def wanted(**changes: Any) -> dict[str, Any]:
    slots = [{"name": "gpu1", "gpu": host.UUID, "port": 30001}, {"name": "gpu2", "gpu": host.OTHER, "port": 30002}]
    values = {f"fleet_{name}": value for name, value in changes.items()}
    return desired.resolve({"fleet_stack": "cpu", "fleet_slots": slots, **values}, "ct200").model_dump()


def deployed(state: dict[str, Any]) -> dict[str, Any]:
    """Facts of a host that is exactly as `state` asks for."""
    release = stack_release.plan(state, VERSION).id
    facts = host.facts()
    facts["releases"] = [{"id": release}]
    facts["agent_version"] = host_setup.agent_version()
    facts["agent_units"] = {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in host_setup.units(state).items()
    }
    facts["slots"] = {
        slot["name"]: copy.deepcopy(
            {
                **host.SERVING,
                "slot": slot["name"],
                "release": release,
                "link": release,
                "port": slot["port"],
                "config_digest": slotconfig.digest(state, slot),
            }
        )
        for slot in state["slots"]
    }
    return facts


def test_a_host_that_is_as_asked_for_has_nothing_to_do() -> None:
    state = wanted()
    judged = planning.judge(state, deployed(state))
    assert judged.violations == [] and not judged.refused
    assert judged.plan["noop"] and [slot["action"] for slot in judged.plan["slots"]] == ["none", "none"]
    assert judged.plan["release_id"] in judged.plan["reason"]


def test_a_fresh_host_needs_everything() -> None:
    judged = planning.judge(wanted(), {**host.facts(), "agent_version": ""})
    plan = judged.plan
    assert not plan["noop"] and [slot["action"] for slot in plan["slots"]] == ["activate", "activate"]
    assert "nothing has been activated" in plan["reason"] and "no agent" in plan["reason"]
    assert plan["release_id"] == stack_release.plan(wanted(), VERSION).id
    assert plan["python"]["version"] == VERSION


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda slot: slot.update(release="cpu-old"), "serves cpu-old"),
        (lambda slot: slot.update(config_digest="other"), "configuration has changed"),
        (lambda slot: slot.update(active=False, unit={"ActiveState": "failed"}), "unit is failed"),
        (lambda slot: slot.update(health={"status": 503, "error": "HTTP 503 starting"}), "HTTP 503"),
        (lambda slot: slot.update(health=None), "no answer"),
        (lambda slot: slot.update(link="cpu-old"), "link points at cpu-old"),
        (lambda slot: slot.update(altered=["/etc/systemd/system/ddtree-gpu2.service (changed)"]), "changed by hand"),
        (lambda slot: slot.update(open={"id": "a2"}), "cut off"),
        (lambda slot: slot.update(release=None, down="crashed"), "it is down: crashed"),
    ],
)
def test_only_the_slot_that_differs_is_activated_and_the_plan_says_why(change: Change, why: str) -> None:
    state = wanted()
    facts = deployed(state)
    change(facts["slots"]["gpu2"])
    plan = planning.judge(state, facts).plan
    assert not plan["noop"]
    assert [slot["action"] for slot in plan["slots"]] == ["none", "activate"]
    assert why in plan["slots"][1]["why"] and "slot gpu2" in plan["reason"]


def test_a_drop_in_restarts_nothing_because_it_would_do_so_at_every_deployment() -> None:
    state = wanted()
    facts = deployed(state)
    facts["slots"]["gpu1"]["altered"] = ["/etc/systemd/system/ddtree-gpu1.service.d/o.conf (drop-in)"]
    judged = planning.judge(state, facts)
    assert judged.plan["noop"]
    assert [item.rule for item in judged.violations] == ["SLOT-ALTERED"]


def test_a_changed_setting_of_a_slot_moves_that_slot_only() -> None:
    before = wanted()
    after = wanted()
    after["slots"][1]["budget"] = 16
    plan = planning.judge(after, deployed(before)).plan
    assert [slot["action"] for slot in plan["slots"]] == ["none", "activate"]


def test_another_api_key_moves_every_slot() -> None:
    state = wanted()
    plan = planning.judge(state, deployed(state), api_key="new").plan
    assert [slot["action"] for slot in plan["slots"]] == ["activate", "activate"]
    assert "new" not in str(plan).replace("newest", "")


def test_a_stricter_gate_alone_is_no_reason_to_restart() -> None:
    assert planning.judge(wanted(gate={"completions": 9}), deployed(wanted())).plan["noop"]


def test_force_activates_what_is_healthy() -> None:
    state = wanted(force=True)
    plan = planning.judge(state, deployed(wanted())).plan
    assert [slot["action"] for slot in plan["slots"]] == ["activate", "activate"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda facts: facts.update(agent_version="old"), "agent"),
        (lambda facts: facts["agent_units"].pop("ddtree-recover.service"), "ddtree-recover.service is missing"),
        (lambda facts: facts["agent_units"].update({"ddtree-activate@.service": "x"}), "not as it should be"),
        (lambda facts: facts.update(releases=[]), "is not on the host"),
    ],
)
def test_what_the_host_needs_beside_slots_is_no_noop_but_restarts_none(change: Change, why: str) -> None:
    state = wanted()
    facts = deployed(state)
    change(facts)
    plan = planning.judge(state, facts).plan
    assert not plan["noop"] and why in plan["reason"]
    assert [slot["action"] for slot in plan["slots"]] == ["none", "none"]


def test_a_python_without_lock_is_a_violation_and_not_a_crash() -> None:
    facts = host.facts()
    facts["python"].update(version="3.14.0", minor="3.14")
    judged = planning.judge(wanted(), facts)
    assert judged.refused and judged.plan["release_id"] is None
    assert "HOST-PYTHON-MINOR" in [item.rule for item in judged.violations]
    facts["python"].update(version="", minor="", error="not installed")
    assert "HOST-PYTHON-MISSING" in [item.rule for item in planning.judge(wanted(), facts).violations]


def test_a_named_release_is_gone_to_whatever_the_stack_says() -> None:
    facts = deployed(wanted())
    facts["releases"].append({"id": "cpu-standalone-0.0.9-aaaaaaaaaaaa"})
    plan = planning.judge(wanted(release="cpu-standalone-0.0.9-aaaaaaaaaaaa"), facts).plan
    assert plan["release_id"] == "cpu-standalone-0.0.9-aaaaaaaaaaaa"
    assert [slot["action"] for slot in plan["slots"]] == ["activate", "activate"]
    judged = planning.judge(wanted(release="cpu-gone"), facts)
    assert [item.rule for item in judged.violations if item.stops] == ["RELEASE-UNKNOWN"]
