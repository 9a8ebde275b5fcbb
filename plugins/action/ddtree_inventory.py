"""Check the whole inventory of a play, before any host is contacted. Runs once, on the control node, unconnected.

Sets no facts: each host's desired state is resolved again, from the same code, by the first task about that host
(ddtree_host), so that nothing of one host ends up among the variables of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from fleet import desired, variables
from fleet.progress_stream import emit
from fleet.varspec import Problem

WAVES_TOO_LATE = (
    "not used: Ansible fixes the waves before it reads the variables of hosts. "
    'Give them with the command, as in -e \'{"fleet_waves": [1, "100%"]}\''
)


class ActionModule(ActionBase):
    """Argument: `slots_required` (default true): a host without any slot is an error."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        unknown = set(self._task.args) - {"slots_required"}
        if unknown:
            raise AnsibleActionFail(f"ddtree_inventory has no option {', '.join(sorted(unknown))}")
        hosts = self._hosts(task_vars)
        emit(host="all", stage="validate", message=f"{len(hosts)} hosts of the inventory")
        found, problems = desired.check_fleet(
            hosts,
            variables.extra_names(self._loader),
            variables.origin,
            slots_required=bool(self._task.args.get("slots_required", True)),
        )
        if problems:
            return {**result, **refusal(problems, len(hosts))}
        extra = set(variables.extra_names(self._loader))
        late = [host for host in sorted(found) if "fleet_waves" in hosts[host] and "fleet_waves" not in extra]
        warnings = [f"hosts.{late[0]}.fleet_waves: {WAVES_TOO_LATE}"] if late else []
        return {**result, "changed": False, "hosts": sorted(found), "warnings": warnings}

    def _hosts(self, task_vars: dict[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Every host of the play as --limit leaves it, those of later waves too."""
        names = task_vars.get("ansible_play_hosts_all") or [task_vars["inventory_hostname"]]
        me = task_vars["inventory_hostname"]
        own = variables.Templated(task_vars, self._templar)
        return {name: own if name == me else task_vars["hostvars"][name] for name in names}


def refusal(problems: list[Problem], hosts: int) -> dict[str, Any]:
    """A failed result that lists everything at once."""
    for problem in problems:
        emit(host="all", stage="validate", message=str(problem), level="error")
    text = str(desired.InvalidInventory(problems))
    return {
        "changed": False,
        "failed": True,
        "msg": f"{text}\nNo host has been contacted.",
        "ddtree": {
            "outcome": "refused",
            "stage": "inventory",
            "message": f"the inventory ({hosts} hosts) has problems; no host has been contacted",
            "problems": [problem.as_dict() for problem in problems],
        },
    }
