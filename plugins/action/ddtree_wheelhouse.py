"""Complete the wheelhouse on the control node for every stack and Python that hosts of this batch need."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from fleet import stack as stacks
from fleet.progress_stream import emit
from fleet.wheelhouse import Progress, Wheelhouse, WheelhouseError


class ActionModule(ActionBase):
    """No arguments; runs once for all hosts of a batch. Reads ddtree_desired, ddtree_facts and ddtree_plan of each."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        if self._task.args:
            raise AnsibleActionFail(f"ddtree_wheelhouse has no option {', '.join(sorted(self._task.args))}")
        began = time.monotonic()
        self._host = str(task_vars["inventory_hostname"])
        done: list[dict[str, Any]] = []
        problems: list[str] = []
        for (folder, name, minor), hosts in sorted(_needed(task_vars).items()):
            try:
                done.append({"stack": name, "python": minor, "hosts": hosts, **self._complete(folder, name, minor)})
            except (WheelhouseError, stacks.StackError) as error:
                problems.append(f"stack {name}, Python {minor} (for {', '.join(hosts)}): {error}")
        report: dict[str, Any] = {"wheelhouses": done, "seconds": round(time.monotonic() - began, 1)}
        if problems:
            report["outcome"] = "refused"
            return {**result, "failed": True, "msg": "\n".join(problems), "ddtree": report}
        missing = [name for item in done for name in item["missing"]]
        if missing and self._task.check_mode:
            result["msg"] = f"{len(missing)} wheels would be fetched: {', '.join(missing[:8])}"
            result["diff"] = [
                {"before": "", "after": "".join(f"{name}\n" for name in missing), "after_header": "wheelhouse"}
            ]
        return {**result, "changed": bool(missing), "ddtree": report}

    def _complete(self, folder: str, name: str, minor: str) -> dict[str, Any]:
        house, stack = Wheelhouse(folder or None), stacks.load(name)
        if self._task.check_mode:
            lacking = house.missing(stack.all_wheels(minor))
            size = sum(wheel.size for wheel in lacking)
            return {"root": str(house.root), "missing": [wheel.filename for wheel in lacking], "bytes": size}

        def report(progress: Progress) -> None:
            left = "" if progress.eta_s is None else f", {progress.eta_s:.0f} s left"
            emit(
                host=self._host,
                stage="wheelhouse",
                message=f"{progress.files_done}/{progress.files} wheels, {progress.bytes_done >> 20} of "
                f"{progress.bytes >> 20} MiB{left}: {progress.filename}",
            )

        completion = house.complete(stack, minor, report)
        return {
            "root": str(house.root),
            "missing": [wheel.filename for wheel in completion.fetched],
            "bytes": completion.bytes,
            "present": completion.present,
        }


def _needed(task_vars: Mapping[str, Any]) -> dict[tuple[str, str, str], list[str]]:
    """(wheelhouse, stack, Python minor) -> hosts of this batch that need it."""
    needed: dict[tuple[str, str, str], list[str]] = {}
    for host in task_vars.get("ansible_play_batch") or [task_vars["inventory_hostname"]]:
        known = task_vars["hostvars"][host]
        facts = known.get("ansible_facts") or {}
        desired = known.get("ddtree_desired") or facts.get("ddtree_desired")
        observed = known.get("ddtree_facts") or facts.get("ddtree_facts")
        plan = known.get("ddtree_plan") or facts.get("ddtree_plan") or {}
        if desired and observed and not plan.get("noop") and not desired.get("release"):
            minor = stacks.minor_of(str(observed["python"]["version"]))
            needed.setdefault((str(desired.get("wheelhouse") or ""), str(desired["stack"]), minor), []).append(
                str(host)
            )
    return needed
