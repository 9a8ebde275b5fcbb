"""Judge one host from what was observed: preflight rules, and whether there is anything to do. Makes no connection.

Sets the fact `ddtree_plan` {noop, reason, release_id, python, slots: [{name, action, why}]}. Fails, with every violated
rule, when the host cannot take the deployment.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from fleet import planning
from fleet.progress_stream import emit


class ActionModule(ActionBase):
    """Reads ddtree_desired and ddtree_facts, which task ddtree_host has set."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        if self._task.args:
            raise AnsibleActionFail(f"ddtree_preflight has no option {', '.join(sorted(self._task.args))}")
        host = str(task_vars["inventory_hostname"])
        known = {**(task_vars.get("ansible_facts") or {}), **task_vars}
        if "ddtree_desired" not in known or "ddtree_facts" not in known:
            raise AnsibleActionFail("nothing is known of the host: run task ddtree_host before this one")
        key = str(self._templar.template(task_vars.get("fleet_api_key") or ""))
        judged = planning.judge(known["ddtree_desired"], known["ddtree_facts"], api_key=key, now=time.time())
        for violation in judged.violations:
            emit(host=host, slot=violation.slot, stage="preflight", message=str(violation), level=violation.severity)
        plan = judged.plan
        report: dict[str, Any] = {
            "violations": [violation.as_dict() for violation in judged.violations],
            "release": plan["release_id"],
        }
        warnings = [str(item) for item in judged.violations if not item.stops]
        if judged.refused:
            stopping = [item for item in judged.violations if item.stops]
            count = "1 rule is" if len(stopping) == 1 else f"{len(stopping)} rules are"
            report.update(outcome="refused", message=f"{count} violated; nothing was sent to the host")
            lines = "\n".join(f"  - {item}" for item in stopping)
            message = f"{host} cannot take this deployment, {count} violated; nothing was sent to the host:\n{lines}"
            return {**result, "failed": True, "changed": False, "msg": message, "ddtree": report, "warnings": warnings}
        report.update(reason=plan["reason"], slots=plan["slots"])
        if plan["noop"]:
            report["outcome"] = "noop"
            emit(host=host, stage="done", message=f"nothing to do: {plan['reason']}")
        return {
            **result,
            "changed": False,
            "ansible_facts": {"ddtree_plan": plan},
            "ddtree": report,
            "warnings": warnings,
            "msg": plan["reason"],
        }
