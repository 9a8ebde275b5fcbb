"""What a host's rollout is reported as, and how its failures read."""

from __future__ import annotations

from typing import Any

import pytest

from fleet import rollout_report as rollout


def test_the_worst_slot_gives_the_hosts_outcome() -> None:
    assert rollout.worst(["deployed", "failed_rolled_back", "not_reached"]) == "failed_rolled_back"
    assert rollout.worst(["failed_rolled_back", "failed_not_rolled_back"]) == "failed_not_rolled_back"
    assert rollout.worst(["noop", "deployed"]) == "deployed"
    assert rollout.worst(["locked", "deployed"]) == "locked"
    assert rollout.worst([]) == "noop"


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        (
            {"outcome": "failed_rolled_back", "serves": "r1", "verdict": {"cause": "no port", "fix": "open it"}},
            ["slot gpu1: no port", "it serves r1 again", "[fix: open it]"],
        ),
        (
            {
                "outcome": "failed_rolled_back",
                "serves": None,
                "verdict": {"cause": "ABI", "root": "undefined symbol: x"},
            },
            ["nothing served there before", "[root line: undefined symbol: x]"],
        ),
        ({"outcome": "failed_not_rolled_back", "cause": "nothing intact"}, ["NOT rolled back: nothing intact"]),
        ({"outcome": "refused", "cause": "damaged"}, ["refused, nothing was touched: damaged"]),
        ({"outcome": "locked", "cause": "under way"}, ["nothing was touched: under way"]),
    ],
)
def test_a_failure_says_cause_state_and_fix(item: dict[str, Any], parts: list[str]) -> None:
    text = rollout.explain({"slot": "gpu1", **item})
    for part in parts:
        assert part in text
