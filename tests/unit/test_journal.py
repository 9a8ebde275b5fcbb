"""The journal survives torn writes, and the state of a slot follows from it alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from ddtree.journal import Journal, SlotState, fold


def entry(event: str, **fields: Any) -> dict[str, Any]:
    return {"t": 1.0, "event": event, "slot": "gpu1", "kind": "deploy", **fields}


def activation(number: int, release: str, end: str, **fields: Any) -> list[dict[str, Any]]:
    common = {"id": f"a{number}", "release": release, "config_digest": "c", **fields}
    return [entry("intent", **common), entry("flipping", **common), entry(end, **common)]


def state_of(*groups: list[dict[str, Any]]) -> SlotState:
    return fold([item for group in groups for item in group])["gpu1"]


def releases(state: SlotState) -> list[str]:
    return [item.release for item in state.good]


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state" / "journal.jsonl")
    for number in range(5):
        journal.append("note", slot="gpu1", number=number)
    assert [item["number"] for item in journal.entries()] == [0, 1, 2, 3, 4]


def test_a_line_torn_by_a_power_cut_is_skipped_and_later_ones_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("note", number=1)
    with journal.path.open("ab") as file:
        file.write(b'{"t": 1, "event": "no')
    journal.append("note", number=2)
    assert [item["number"] for item in journal.entries()] == [1, 2]
    assert journal.path.read_bytes().endswith(b"\n")


def test_reading_on_from_an_offset_never_returns_half_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("note", number=1)
    _, offset = journal.read()
    line = json.dumps({"event": "note", "number": 2}).encode() + b"\n"
    with journal.path.open("ab") as file:
        file.write(line[:10])
    assert journal.read(offset) == ([], offset)
    with journal.path.open("ab") as file:
        file.write(line[10:])
    entries, _ = journal.read(offset)
    assert [item["number"] for item in entries] == [2]


def test_many_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")

    def write(name: int) -> None:
        for _ in range(20):
            journal.append("note", writer=name, filler="x" * 3000)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(journal.entries()) == 80


def test_a_commit_becomes_the_last_known_good() -> None:
    state = state_of(activation(1, "r1", "committed"), activation(2, "r2", "committed"))
    assert releases(state) == ["r1", "r2"]
    assert state.current is not None and state.current.release == "r2"
    assert state.open is None


def test_an_intent_without_an_outcome_is_open() -> None:
    state = state_of(activation(1, "r1", "committed"), activation(2, "r2", "committed")[:2])
    assert state.open is not None and state.open["id"] == "a2"
    assert state.open_events == ["flipping"]


def test_a_failed_gate_leaves_the_last_known_good_and_refuses_the_release_next_time() -> None:
    bad = activation(2, "r2", "taken_back", to="a1")
    bad.insert(2, entry("verdict", id="a2", release="r2", config_digest="c", verdict="fail", cause="no port"))
    state = state_of(activation(1, "r1", "committed"), bad)
    assert releases(state) == ["r1"]
    assert state.refusal("r2", "c") == "no port"
    assert state.refusal("r2", "other configuration") is None
    assert state.refusal("r1", "c") is None


def test_a_host_fault_does_not_blame_the_release() -> None:
    bad = activation(2, "r2", "quarantined", cause="GPU lost")
    bad.insert(2, entry("verdict", id="a2", release="r2", config_digest="c", verdict="host_fault", cause="GPU lost"))
    state = state_of(activation(1, "r1", "committed"), bad)
    assert state.refusal("r2", "c") is None
    assert state.quarantined == "GPU lost"
    assert state.current is None


def test_the_way_back_failing_does_not_refuse_the_old_release() -> None:
    bad = activation(2, "r2", "failed", cause="nothing starts")
    bad.insert(2, entry("verdict", id="a2", release="r1", config_digest="c", verdict="fail", on_way_back=True))
    state = state_of(activation(1, "r1", "committed"), bad)
    assert state.refusal("r1", "c") is None
    assert state.down == "nothing starts" and state.current is None


def test_a_forced_success_lifts_the_refusal() -> None:
    bad = activation(2, "r2", "taken_back", to="a1")
    bad.insert(2, entry("verdict", id="a2", release="r2", config_digest="c", verdict="fail", cause="no port"))
    state = state_of(activation(1, "r1", "committed"), bad, activation(3, "r2", "committed"))
    assert state.refusal("r2", "c") is None


def test_rolling_back_twice_goes_back_twice_and_does_not_toggle() -> None:
    good = [activation(number, f"r{number}", "committed") for number in (1, 2, 3)]
    once = activation(4, "r2", "committed", kind="rollback", restores="a2")
    twice = activation(5, "r1", "committed", kind="rollback", restores="a1")
    assert releases(state_of(*good, once)) == ["r1", "r2"]
    assert releases(state_of(*good, once, twice)) == ["r1"]


def test_the_same_release_again_replaces_itself() -> None:
    again = [activation(number, "r2", "committed") for number in (2, 3)]
    state = state_of(activation(1, "r1", "committed"), *again)
    assert releases(state) == ["r1", "r2"]
    assert state.current is not None and state.current.activation == "a3"


def test_a_verification_after_a_reboot_changes_no_history() -> None:
    check = activation(3, "r2", "committed", kind="verify")
    state = state_of(activation(1, "r1", "committed"), activation(2, "r2", "committed"), check)
    assert releases(state) == ["r1", "r2"]
    assert state.current is not None and state.current.activation == "a2"


def test_a_damaged_last_known_good_is_passed_over() -> None:
    bad = activation(3, "r3", "taken_back", to="a1")
    state = state_of(activation(1, "r1", "committed"), activation(2, "r2", "committed"), bad)
    assert releases(state) == ["r1"]


def test_a_first_activation_that_fails_leaves_nothing() -> None:
    state = state_of(activation(1, "r1", "taken_back", to=None))
    assert state.good == [] and state.current is None and state.down is None
