"""Outcomes and exit statuses from the events that Ansible emits (recorded shapes)."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.results import Results, Status


def ok(host: str, ddtree: dict[str, Any] | None = None, **res: Any) -> dict[str, Any]:
    return _event("runner_on_ok", host, {**({"ddtree": ddtree} if ddtree else {}), "changed": False, **res})


def failed(host: str, ddtree: dict[str, Any] | None = None, msg: str = "it broke", **res: Any) -> dict[str, Any]:
    return _event(
        "runner_on_failed", host, {**({"ddtree": ddtree} if ddtree else {}), "msg": msg, "failed": True, **res}
    )


def unreachable(host: str) -> dict[str, Any]:
    text = "Failed to connect to the host via ssh: ssh: connect to host 10.200.0.200 port 22: No route to host"
    return _event("runner_on_unreachable", host, {"unreachable": True, "msg": text, "changed": False})


def _event(kind: str, host: str, res: dict[str, Any]) -> dict[str, Any]:
    return {
        "event": kind,
        "uuid": "u",
        "counter": 1,
        "stdout": "",
        "event_data": {"host": host, "task": "rollout : Move the slots", "task_action": "ddtree_rollout", "res": res},
    }


def stats(**kinds: dict[str, int]) -> dict[str, Any]:
    return {"event": "playbook_on_stats", "event_data": {"uuid": "u", "playbook": "deploy.yml", **kinds}}


def fold(*events: dict[str, Any], rc: int = 0) -> Results:
    results = Results()
    for event in events:
        results.add_event(event)
    results.finish(rc)
    return results


DEPLOYED = {"outcome": "deployed", "slots": [{"slot": "gpu1", "outcome": "deployed", "release": "r1", "seconds": 4.2}]}
TAKEN_BACK = {
    "outcome": "failed_rolled_back",
    "slots": [
        {
            "slot": "gpu1",
            "outcome": "failed_rolled_back",
            "release": "r2",
            "serves": "r1",
            "cause": "gate said no",
            "verdict": {
                "verdict": "fail",
                "stage": "alive",
                "cause": "the engine died",
                "root": "RuntimeError: boom",
                "fix": "mend it",
                "death_to_verdict_s": 0.2,
            },
            "seconds": 9.1,
        }
    ],
}
LOST = {
    "outcome": "failed_not_rolled_back",
    "slots": [{"slot": "gpu1", "outcome": "failed_not_rolled_back", "cause": "x"}],
}
REFUSED = {"outcome": "refused", "violations": [{"rule": "PORT-TAKEN", "found": "wrapper", "stops": True}]}


@pytest.mark.parametrize(
    ("events", "rc", "status"),
    [
        pytest.param([ok("a", {"outcome": "noop"})], 0, Status.OK, id="nothing to do"),
        pytest.param([ok("a", DEPLOYED)], 0, Status.OK, id="deployed"),
        pytest.param([ok("a", {"outcome": "checked"})], 0, Status.OK, id="check mode"),
        pytest.param([failed("a", TAKEN_BACK)], 2, Status.ROLLED_BACK, id="rolled back"),
        pytest.param([failed("a", LOST)], 2, Status.NOT_ROLLED_BACK, id="not rolled back"),
        pytest.param([failed("a", REFUSED)], 2, Status.REFUSED, id="refused"),
        pytest.param([failed("a", {"outcome": "locked"})], 2, Status.LOCKED, id="locked"),
        pytest.param([unreachable("a")], 4, Status.UNREACHABLE, id="unreachable"),
        pytest.param([failed("a")], 2, Status.ERROR, id="a task without an outcome of ours"),
        pytest.param([], 1, Status.ERROR, id="Ansible ended before any host"),
        # several hosts: what needs a person soonest
        pytest.param([ok("a", DEPLOYED), unreachable("b")], 4, Status.UNREACHABLE, id="others fine, one unreachable"),
        pytest.param(
            [failed("a", TAKEN_BACK), unreachable("b")], 4, Status.ROLLED_BACK, id="rolled back over unreachable"
        ),
        pytest.param([failed("a", REFUSED), unreachable("b")], 4, Status.UNREACHABLE, id="unreachable over refused"),
        pytest.param(
            [failed("a", LOST), failed("b", TAKEN_BACK)], 2, Status.NOT_ROLLED_BACK, id="lost over rolled back"
        ),
        pytest.param(
            [failed("a", TAKEN_BACK), failed("b", REFUSED)], 2, Status.ROLLED_BACK, id="rolled back over refused"
        ),
        pytest.param([ok("a", DEPLOYED), failed("b", REFUSED)], 2, Status.REFUSED, id="refused over deployed"),
        pytest.param([failed("a"), failed("b", TAKEN_BACK)], 2, Status.ERROR, id="unknown failure over rolled back"),
    ],
)
def test_exit_status(events: list[dict[str, Any]], rc: int, status: Status) -> None:
    assert fold(*events, rc=rc).status() is status


def test_the_numbers_of_the_statuses_are_a_contract() -> None:
    assert [int(status) for status in Status] == [0, 1, 2, 3, 4, 5, 6, 64, 130]


def test_a_failed_slot_carries_its_cause_root_line_and_fix() -> None:
    slot = fold(failed("a", TAKEN_BACK), rc=2).hosts["a"].slots["gpu1"]
    assert (slot.cause, slot.root, slot.hint, slot.serves) == ("the engine died", "RuntimeError: boom", "mend it", "r1")
    assert slot.as_dict()["gate"]["death_to_verdict_s"] == 0.2


def test_a_later_outcome_replaces_an_earlier_one() -> None:
    """Preflight says a host is to be deployed, the rollout says what became of it."""
    results = fold(
        ok("a", {"outcome": "planned", "slots": [{"name": "gpu1", "action": "activate"}]}), ok("a", DEPLOYED)
    )
    assert results.hosts["a"].outcome == "deployed"
    assert results.hosts["a"].slots["gpu1"].outcome == "deployed"


def test_a_failure_after_an_outcome_of_ours_is_not_hidden_by_it() -> None:
    results = fold(ok("a", DEPLOYED), failed("a", msg="pruning broke"), rc=2)
    assert results.status() is Status.ERROR
    assert results.hosts["a"].message == "pruning broke"


def test_an_ignored_failure_is_no_failure() -> None:
    event = failed("a")
    event["event_data"]["ignore_errors"] = True
    assert fold(ok("a", DEPLOYED), event).status() is Status.OK


def test_an_unknown_outcome_is_an_error_and_never_success() -> None:
    assert fold(ok("a", {"outcome": "something new"})).status() is Status.ERROR


def test_hosts_of_a_stopped_run_are_not_reported_as_done() -> None:
    results = fold(failed("a", TAKEN_BACK), stats(ok={"a": 3, "b": 1}, failures={"a": 1}, changed={"a": 2}), rc=2)
    assert results.hosts["b"].outcome == "not_reached"
    assert results.hosts["a"].tasks == 4 and results.hosts["a"].changed == 2
    assert results.status() is Status.ROLLED_BACK


def test_a_slot_that_was_planned_and_never_begun_is_not_called_rolled_back() -> None:
    plan = {"slots": [{"name": "gpu1", "action": "activate"}, {"name": "gpu2", "action": "activate"}]}
    results = fold(ok("a", plan), failed("a", TAKEN_BACK), rc=2)
    assert {name: slot.outcome for name, slot in results.hosts["a"].slots.items()} == {
        "gpu1": "failed_rolled_back",
        "gpu2": "not_tried",
    }


def test_an_ansible_that_was_killed_is_an_error_and_said_to_be_one() -> None:
    results = Results()
    results.add_event(ok("a"))
    results.finish(None)
    assert results.status() is Status.ERROR and "killed by a signal" in results.problem()


def test_facts_are_found_where_the_module_and_where_the_action_puts_them() -> None:
    results = fold(ok("a", ddtree_facts={"host": "a"}), ok("b", ansible_facts={"ddtree_facts": {"host": "b"}}))
    assert results.facts == {"a": {"host": "a"}, "b": {"host": "b"}}


def test_ansibles_own_error_is_shown_plainly() -> None:
    error = {"event": "error", "stdout": "[ERROR]: the playbook: nosuch.yml could not be found", "event_data": {}}
    results = fold(error, rc=1)
    assert results.status() is Status.ERROR
    assert results.problem() == "[ERROR]: the playbook: nosuch.yml could not be found"


def test_a_pattern_without_hosts_is_an_error_although_ansible_ends_with_0() -> None:
    results = fold({"event": "playbook_on_no_hosts_matched", "event_data": {}}, rc=0)
    assert results.status() is Status.ERROR
    assert "-l" in results.problem()


def test_the_reason_of_a_module_that_did_not_run_is_part_of_the_message() -> None:
    stderr = "sh: 1: /usr/bin/python3: not found\n"
    results = fold(failed("a", msg="Module result deserialization failed", module_stderr=stderr), rc=2)
    assert "python3: not found" in results.hosts["a"].message


def test_problems_of_the_inventory_are_nobodys_host() -> None:
    """Ansible reports them under the name of the first host of the play."""
    problem = {
        "path": "hosts.b.fleet_stak",
        "cause": "unknown variable",
        "fix": "did you mean fleet_stack?",
        "origin": "",
    }
    report = {"outcome": "refused", "stage": "inventory", "problems": [problem]}
    results = fold(failed("a", report), stats(ok={"a": 0}, failures={"a": 1}), rc=2)
    assert results.status() is Status.REFUSED
    assert results.inventory_problems == [problem]
    assert results.hosts["a"].outcome == "not_reached"


def test_violations_are_kept_for_the_summary() -> None:
    assert fold(failed("a", REFUSED), rc=2).hosts["a"].violations[0]["rule"] == "PORT-TAKEN"
