"""Bring a release to a host in one task: prepare the host, send the wheels it lacks, have the release built there."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from fleet import host_setup, stack_release, staging
from fleet.engine_wheel import EngineError
from fleet.progress_stream import emit
from fleet.stack import LockedWheel, StackError
from fleet.stack_release import ReleasePlan
from fleet.wheelhouse import Wheelhouse, WheelhouseError


class ActionModule(ActionBase):
    """Without arguments: the release that the inventory asks for. With `state`, what the module does with it."""

    TRANSFERS_FILES = True
    _requires_connection = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.vars = task_vars or {}
        if self._task.args:
            result.update(self._execute_module(task_vars=self.vars))
            return result
        self.host = str(self.vars["inventory_hostname"])
        known = {**(self.vars.get("ansible_facts") or {}), **self.vars}
        self.desired, facts = known.get("ddtree_desired"), known.get("ddtree_facts")
        if not self.desired or not facts:
            raise AnsibleActionFail("nothing is known of the host: run the role preflight before this one")
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}
        try:
            if self.desired["release"]:
                return {**result, **self._keep(str(self.desired["release"]), facts)}
            plan = stack_release.plan(self.desired, str(facts["python"]["version"]))
            return {**result, **self._bring(plan)}
        except (StackError, EngineError, WheelhouseError) as error:
            return {**result, **self._refused(str(error))}

    def _keep(self, release: str, facts: dict[str, Any]) -> dict[str, Any]:
        """A release that was asked for by its id is one that the host has: nothing is sent or built."""
        kept = {item["id"]: item for item in facts.get("releases") or []}
        if release not in kept:
            return self._refused(f"release {release} is not on the host; it has {', '.join(kept) or 'none'}")
        # what the host needs beside releases is the same whichever release it is
        spec = host_setup.spec(self.desired, self._sender(), with_agent=True)
        prepared = self._execute_module(
            module_name="ddtree_release",
            module_args={"state": "agent", "paths": self._paths(), "host": spec},
            task_vars=self.vars,
        )
        if prepared.get("failed"):
            return self._refused(f"the host could not be prepared: {prepared.get('msg')}")
        report = {"release": release, "built": False, "sent_bytes": 0, "host_changes": prepared["changes"]}
        return {
            "changed": prepared["changed"],
            "diff": prepared.get("diff", []),
            "ansible_facts": {"ddtree_release_id": release},
            "ddtree": report,
        }

    def _paths(self) -> dict[str, str]:
        return {key: self.desired[key] for key in ("root", "state", "cache")}

    def _bring(self, plan: ReleasePlan) -> dict[str, Any]:
        query = self._module("query", plan, host=host_setup.spec(self.desired, self._sender()))
        if query.get("failed"):
            return self._refused(query.get("msg", "the host could not be asked"))
        self._note("query")
        report: dict[str, Any] = {"release": plan.id, "built": False, "sent_bytes": 0, "host_changes": query["changes"]}
        answer: dict[str, Any] = {
            "changed": bool(query["changes"]) or query["release"] != "intact",
            "ansible_facts": {"ddtree_release_id": plan.id},
            "diff": query["diff"],
            "ddtree": report,
        }
        wanted = [wheel for wheel in (*plan.wheels, *plan.tools) if wheel.sha256 in query["lacking"]]
        if query["release"] == "damaged":
            report["damage"] = query["damage"]
        if self._task.check_mode:
            answer["msg"] = _announce(query, wanted, plan)
            return answer
        if query["changes"]:
            emit(host=self.host, stage="stage", message=f"preparing the host: {'; '.join(query['changes'])}"[:300])
            spec = host_setup.spec(self.desired, self._sender(), with_agent=query["agent_wanted"])
            prepared = self._module("agent", plan, host=spec)
            if prepared.get("failed"):
                return self._refused(f"the host could not be prepared: {prepared.get('msg')}")
            self._note("prepare")
        if query["release"] != "intact":
            uploads, report["sent_bytes"] = self._send(plan, wanted)
            message = "building the release again, it is damaged" if report.get("damage") else "building the release"
            emit(host=self.host, stage="build", message=f"{message}: {plan.id}")
            built = self._module("present", plan, uploads=uploads)
            if built.get("failed"):
                return self._refused(
                    built.get("msg", ""), stage=built.get("stage", "build"), details=built.get("details", "")
                )
            self._note("build")
            report.update(built["ddtree"], release=plan.id)
            emit(host=self.host, stage="smoke", message=f"imports done in {report['seconds'].get('smoke', 0)} s")
        report["seconds"] = {**self.seconds, **report.get("seconds", {})}
        report["seconds"]["all"] = round(time.monotonic() - self.began, 2)
        return answer

    def _send(self, plan: ReleasePlan, wanted: list[LockedWheel]) -> tuple[list[str], int]:
        """Send what is lacking over the present connection; returns the uploads' names and the bytes sent."""
        if not wanted:
            return [], 0
        house = Wheelhouse(self.desired.get("wheelhouse") or None)
        for wheel in wanted:
            if wheel.sha256 == plan.engine_wheel.sha256:
                house.add(wheel, plan.engine_wheel.data)
        sent = 0
        names = []
        with staging.pack(house, wanted) as uploads:
            total = sum(upload.size for upload in uploads)
            for upload in uploads:
                first = upload.wheels[0].filename
                what = first if len(upload.wheels) == 1 else f"{len(upload.wheels)} small wheels"
                emit(
                    host=self.host,
                    stage="stage",
                    message=f"{sent >> 20} of {total >> 20} MiB sent, sending {what}",
                    bytes_sent=sent,
                    bytes_total=total,
                )
                remote = f"{self.desired['root']}/store/incoming/{upload.name}"
                self._connection.put_file(str(upload.file), remote)
                names.append(upload.name)
                sent += upload.size
        self._note("send")
        emit(host=self.host, stage="stage", message=f"{sent >> 20} MiB sent", bytes_sent=sent, bytes_total=sent)
        return names, sent

    def _module(self, state: str, plan: ReleasePlan, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name="ddtree_release",
            module_args={
                "state": state,
                "paths": self._paths(),
                "manifest": plan.manifest(),
                "python": self.desired["python"],
                "user": self.desired["user"],
                "smoke": plan.stack.smoke[plan.engine],
                "uv": next(tool for tool in plan.tools if tool.name == "uv").as_dict(),
                **arguments,
            },
            task_vars=self.vars,
        )
        return answer

    def _sender(self) -> str:
        """The account that uploads arrive under: the connection's, also where the modules become root."""
        if not self._connection.become:
            return "root"  # modules run as the connection's account too, and they insist on root
        return str(self._get_remote_user() or "root")

    def _note(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = round(now - self.began - sum(self.seconds.values()), 2)

    def _refused(self, message: str, **facts: Any) -> dict[str, Any]:
        emit(host=self.host, stage="refused", message=message.splitlines()[0] if message else "")
        return {
            "failed": True,
            "changed": False,
            "msg": message,
            **facts,
            "ddtree": {"outcome": "refused", "message": message, **facts},
        }


def _announce(query: dict[str, Any], wanted: list[LockedWheel], plan: ReleasePlan) -> str:
    """What a run without check mode would do."""
    parts = [*query["changes"]]
    if wanted:
        parts.append(f"send {len(wanted)} wheels ({sum(wheel.size for wheel in wanted) >> 20} MiB)")
    if query["release"] != "intact":
        again = " again, it is damaged" if query["release"] == "damaged" else ""
        parts.append(f"build release {plan.id}{again}")
    return "would " + "; ".join(parts) if parts else f"release {plan.id} is there and intact"
