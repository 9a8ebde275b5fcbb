"""The journal as an operator reads it: one record per activation."""

from __future__ import annotations

from pathlib import Path

from ddtree.history import activations
from ddtree.journal import Journal


def filled(path: Path) -> Journal:
    journal = Journal(path / "journal.jsonl")
    note = journal.append
    note("intent", id="a1", slot="gpu1", release="good", kind="deploy", who="ops@here", why="first", run="r1")
    note("flipped", id="a1", slot="gpu1", release="good", kind="deploy")
    note("committed", id="a1", slot="gpu1", release="good", kind="deploy", gate={"kind": "pass"})
    note("intent", id="a2", slot="gpu1", release="bad", kind="deploy", previous="a1")
    note(
        "verdict",
        id="a2",
        slot="gpu1",
        release="bad",
        verdict="fail",
        cause="it died",
        root="boom",
        death_to_verdict_s=0.3,
    )
    note("taking_back", id="a2", slot="gpu1", release="bad", cause="it died")
    note("verdict", id="a2", slot="gpu1", release="good", verdict="fail", cause="other", on_way_back=True)
    note("taken_back", id="a2", slot="gpu1", release="bad", to="a1", to_release="good", cause="gate")
    note("intent", id="b1", slot="gpu2", release="good", kind="rollback")
    return journal


def test_each_activation_is_one_record_with_outcome_and_cause(tmp_path: Path) -> None:
    good, bad, open_ = activations(filled(tmp_path).entries())
    assert (good.outcome, good.release, good.serves, good.who, good.why) == (
        "committed",
        "good",
        "good",
        "ops@here",
        "first",
    )
    assert (bad.outcome, bad.release, bad.serves, bad.cause, bad.root) == (
        "taken_back",
        "bad",
        "good",
        "it died",
        "boom",
    )
    assert bad.death_to_verdict_s == 0.3 and bad.seconds is not None and bad.seconds >= 0
    assert (open_.outcome, open_.seconds, open_.kind) == ("", None, "rollback")


def test_a_verdict_on_the_way_back_is_not_the_cause(tmp_path: Path) -> None:
    assert activations(filled(tmp_path).entries())[1].cause == "it died"


def test_one_slot_and_the_newest_ones_can_be_asked_for(tmp_path: Path) -> None:
    entries = filled(tmp_path).entries()
    assert [item.id for item in activations(entries, slot="gpu1")] == ["a1", "a2"]
    assert [item.id for item in activations(entries, newest=2)] == ["a2", "b1"]


def test_a_host_without_a_journal_has_no_history(tmp_path: Path) -> None:
    assert activations(Journal(tmp_path / "journal.jsonl").entries()) == []
