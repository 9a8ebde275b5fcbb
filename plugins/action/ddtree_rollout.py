"""Move the slots of one host, one batch after the other, and report what the host itself decided."""

from __future__ import annotations

import getpass
import os
import socket
import time
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from fleet import slotconfig
from fleet.progress_stream import emit
from fleet.rollout_report import BAD, explain, worst

# The host carries on by itself when the connection breaks; so long do we try to hear from it again.
RECONNECT_S = 60.0
FOLLOW_S = 2.0
ENDS = ("committed", "taken_back", "failed", "quarantined", "abandoned")


class ActionModule(ActionBase):
    """Arguments: `state` (deploy, rollback), `release` (rollback target). Reads ddtree_desired and ddtree_plan."""

    TRANSFERS_FILES = False
    _requires_connection = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.vars = task_vars or {}
        self.host = str(self.vars["inventory_hostname"])
        facts = self.vars.get("ansible_facts", {})
        self.desired = self.vars.get("ddtree_desired") or facts.get("ddtree_desired")
        if not self.desired:
            raise AnsibleActionFail("ddtree_desired is not known: run the role preflight before this one")
        state = self._task.args.get("state", "deploy")
        if state not in ("deploy", "rollback"):
            raise AnsibleActionFail(f"state must be deploy or rollback, not {state!r}")
        began = time.monotonic()
        outcomes = self._deploy() if state == "deploy" else self._rollback()
        seconds = round(time.monotonic() - began, 1)
        return {**result, **self._result(outcomes, seconds)}

    # -- what to do ---------------------------------------------------------------------------------------------

    def _deploy(self) -> list[dict[str, Any]]:
        plan = self.vars.get("ddtree_plan") or self.vars.get("ansible_facts", {}).get("ddtree_plan") or {}
        release = self.vars.get("ddtree_release_id") or plan.get("release_id")
        if not release:
            raise AnsibleActionFail("the release is not known: run the role release before this one")
        wanted = {item["name"]: item for item in plan.get("slots", [])}
        slots = [slot for slot in self.desired["slots"] if wanted.get(slot["name"], {}).get("action") != "none"]
        moved: list[dict[str, Any]] = []
        for batch in self._batches(slots):
            done = self._carry_out([self._submit_deploy(slot, release) for slot in batch])
            moved += done
            if any(item["outcome"] != "deployed" for item in done) and not self._task.check_mode:
                tried = {item["slot"] for item in moved}
                rest = [slot["name"] for slot in slots if slot["name"] not in tried]
                return [*self._return(moved), *({"slot": name, "outcome": "not_reached"} for name in rest)]
        return moved

    def _batches(self, slots: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The first slot alone, so that a bad release costs one slot; then as many at once as may be unavailable."""
        width = max(1, int(self.desired.get("max_unavailable") or 1))
        return [slots[:1], *(slots[start : start + width] for start in range(1, len(slots), width))] if slots else []

    def _submit_deploy(self, slot: dict[str, Any], release: str) -> dict[str, Any]:
        key = str(self._templar.template(self.vars.get("fleet_api_key") or ""))
        rendered = slotconfig.render(self.desired, slot, release, key)
        record = {
            "kind": "deploy",
            "release": release,
            "config_digest": rendered.digest,
            "unit": rendered.unit,
            "env": rendered.env,
            "gate": rendered.gate,
            "gpu": "" if slot["gpu"] == "none" else slot["gpu"],
            "exact_answers": rendered.exact_answers,
            "answers_key": rendered.answers_key,
            "keep_releases": self.desired["keep_releases"],
            "forced": bool(self.desired["force"]),
        }
        return self._begin(slot["name"], {"state": "activated", "record": record, "api_key": key})

    def _rollback(self) -> list[dict[str, Any]]:
        release = self._task.args.get("release") or self.desired["release"] or ""
        slots = [slot["name"] for slot in self.desired["slots"]]
        if not self._task.check_mode:
            # first ask for every slot: an error for one must leave all of them untouched
            asked = [self._ask_rollback(slot, release, check=True) for slot in slots]
            if any(item["outcome"] == "refused" for item in asked):
                return [item for item in asked if item["outcome"] == "refused"]
        moved = []
        for slot in slots:
            moved += self._carry_out([self._ask_rollback(slot, release)])
            if moved[-1]["outcome"] not in ("deployed", "noop"):
                break
        return moved

    def _ask_rollback(self, slot: str, release: str, check: bool = False) -> dict[str, Any]:
        return self._begin(slot, {"state": "rolled_back", "release": release}, check=check)

    def _return(self, moved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A later slot failed: the slots that had moved go back too, so that the host is not mixed."""
        for item in moved:
            if item["outcome"] != "deployed":
                continue
            emit(host=self.host, slot=item["slot"], stage="rollback", message="returning: another slot failed")
            back = self._carry_out([self._ask_rollback(item["slot"], "")])[0]
            if back["outcome"] == "refused":
                item["note"] = "stays on the new release: there was none before"
            elif back["outcome"] in ("deployed", "noop"):
                item.update(outcome="returned", note=f"returned to {back['release']} because another slot failed")
            else:
                item.update(outcome=back["outcome"], cause=back["cause"])
        return moved

    # -- with the host ------------------------------------------------------------------------------------------

    def _module(self, arguments: dict[str, Any], check: bool = False) -> dict[str, Any]:
        paths = {key: self.desired[key] for key in ("root", "state", "cache")}
        before = self._task.check_mode
        self._task.check_mode = before or check
        try:
            answer: dict[str, Any] = self._execute_module(
                module_name="ddtree_slot", module_args={"paths": paths, **arguments}, task_vars=self.vars
            )
        finally:
            self._task.check_mode = before
        return answer

    def _begin(self, slot: str, arguments: dict[str, Any], check: bool = False) -> dict[str, Any]:
        """Start one activation. The item's `end` is set where it is over already: refused, no change, check mode."""
        facts = {"run": os.environ.get("FLEET_RUN_ID") or f"ansible-{os.getppid()}", "who": who()}
        if self.desired.get("reason"):
            facts["why"] = self.desired["reason"]
        answer = self._module({"slot": slot, "run_facts": facts, **arguments}, check)
        item: dict[str, Any] = {"slot": slot, "release": answer.get("release"), "end": "", "began": time.monotonic()}
        if answer.get("failed"):
            outcome = "locked" if answer.get("busy") else "refused"
            return {**item, "end": outcome, "outcome": outcome, "cause": answer.get("msg", "no reason given")}
        if not answer.get("changed"):
            return {**item, "end": "noop", "outcome": "noop", "cause": "", "note": answer.get("msg", "")}
        if not answer.get("id"):
            return {**item, "end": "checked", "outcome": "checked", "cause": "", "diff": answer.get("diff", [])}
        emit(host=self.host, slot=slot, stage="activate", message=f"release {answer['release']}")
        return {**item, "id": answer["id"], "offset": answer["offset"], "diff": answer.get("diff", [])}

    def _carry_out(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Follow the activations of one batch to their end."""
        running = {item["id"]: item for item in items if not item["end"]}
        offset = min((item["offset"] for item in running.values()), default=0)
        while any(not item["end"] for item in running.values()):
            ids = [identity for identity, item in running.items() if not item["end"]]
            answer = self._follow(ids, offset)
            offset = answer["offset"]
            for entry in answer["entries"]:
                self._take_in(running[entry["id"]], entry)
            for identity in answer.get("silent", []):
                if running[identity].get("quiet", 0) > 2:
                    cause = (
                        "the host left the activation open and nothing carries it out; look at "
                        f"`journalctl -u ddtree-activate@{running[identity]['slot']} -u ddtree-recover` there"
                    )
                    running[identity].update(end="silent", outcome="failed_not_rolled_back", cause=cause)
                running[identity]["quiet"] = running[identity].get("quiet", 0) + 1
        for item in items:
            item["seconds"] = round(time.monotonic() - item.pop("began"), 1)
        return items

    def _follow(self, ids: list[str], offset: int) -> dict[str, Any]:
        end = time.monotonic() + RECONNECT_S
        while True:
            try:
                answer = self._module({"state": "followed", "ids": ids, "offset": offset, "timeout": FOLLOW_S})
            except AnsibleConnectionFailure:
                if time.monotonic() > end:
                    raise
                emit(host=self.host, stage="activate", message="connection lost; the host carries on, trying again")
                time.sleep(3)
                continue
            if answer.get("failed"):
                raise AnsibleActionFail(f"following the activation failed: {answer.get('msg')}")
            return answer

    def _take_in(self, item: dict[str, Any], entry: dict[str, Any]) -> None:
        """One journal entry of an activation that is followed."""
        event = entry["event"]
        slot = item["slot"]
        if event == "stage":
            where = f"{'back/' if entry.get('on_way_back') else ''}{entry['stage']}"
            emit(host=self.host, slot=slot, stage=f"activate/{where}", message=entry.get("message", ""))
        elif event == "verdict" and not entry.get("on_way_back"):
            item["verdict"] = {key: entry[key] for key in VERDICT_KEYS if key in entry}
            emit(host=self.host, slot=slot, stage="verdict", message=f"{entry['verdict']}: {entry.get('cause', '')}")
        elif event == "damaged":
            item.setdefault("notes", []).append(f"release {entry['damaged']} is damaged: {entry['cause']}")
        elif event in ENDS:
            item["end"] = event
            item["cause"] = entry.get("cause", "")
            item["outcome"] = {
                "committed": "deployed",
                "taken_back": "failed_rolled_back",
                "abandoned": "refused",
            }.get(event, "failed_not_rolled_back")
            item["serves"] = entry.get("to_release") if event == "taken_back" else None
            if event == "committed":
                item["serves"] = item["release"]
                item["verdict"] = {"verdict": "pass", **entry.get("gate", {})}
            message = item["serves"] or entry.get("cause", "")
            stage = {"committed": "commit", "taken_back": "rollback"}.get(event, event)
            emit(host=self.host, slot=slot, stage=stage, message=message, t_host=entry["t"])
        elif event in ("flipped", "taking_back"):
            emit(host=self.host, slot=slot, stage="activate", message=event.replace("_", " "))

    # -- what came of it ----------------------------------------------------------------------------------------

    def _result(self, items: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        diff = [change for item in items for change in item.pop("diff", [])]
        for item in items:
            for key in ("end", "offset", "quiet", "began"):
                item.pop(key, None)
        outcome = worst([item["outcome"] for item in items])
        result: dict[str, Any] = {
            "changed": outcome not in ("noop", "refused", "locked"),
            "diff": diff,
            "ddtree": {"outcome": outcome, "slots": items, "seconds": seconds},
        }
        bad = [item for item in items if item["outcome"] in BAD]
        if bad:
            result["failed"] = True
            result["msg"] = "; ".join(explain(item) for item in bad)
        emit(host=self.host, stage="done", message=outcome)
        return result


VERDICT_KEYS = (
    "verdict",
    "stage",
    "cause",
    "fix",
    "root",
    "signature",
    "seconds",
    "stages",
    "death_to_verdict_s",
    "evidence",
    "acceptance_length",
    "t",
)


def who() -> str:
    return f"{os.environ.get('SUDO_USER') or getpass.getuser()}@{socket.gethostname()}"
