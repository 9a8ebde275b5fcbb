"""Observe a host as its variables say: fills in the options of module ddtree_host and sets what later tasks need.

Facts set for the host: `ddtree_desired` (what the inventory asks for) and `ddtree_facts` (what there is).
"""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from fleet import desired, stack, variables
from fleet.progress_stream import emit


class ActionModule(ActionBase):
    """Arguments: those of the module, each in place of what the variables say; `slots_required` (default true)."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        host = str(task_vars["inventory_hostname"])
        given = dict(self._task.args)
        slots_required = bool(given.pop("slots_required", True))
        try:
            wanted = desired.resolve(
                variables.Templated(task_vars, self._templar),
                host,
                variables.extra_names(self._loader),
                slots_required=slots_required,
            )
        except desired.InvalidInventory as error:
            raise AnsibleActionFail(str(error)) from error
        emit(host=host, stage="observe", message="looking at the host")
        arguments = {**options(wanted), **given}
        answer = self._execute_module(module_name="ddtree_host", module_args=arguments, task_vars=task_vars)
        result.update(answer)
        facts = answer.get("ddtree_facts")
        if facts is not None and not answer.get("failed"):
            result["ansible_facts"] = {"ddtree_desired": wanted.model_dump(), "ddtree_facts": facts}
        return result


def options(wanted: desired.Desired) -> dict[str, Any]:
    """Options of the module for one host."""
    models = [path for slot in wanted.slots for path in (slot.model, slot.draft) if path.startswith("/")]
    return {
        "paths": {"root": wanted.root, "state": wanted.state, "cache": wanted.cache},
        "user": wanted.user,
        "python": wanted.python,
        "slots": [{"name": slot.name, "port": slot.port, "bind": slot.bind} for slot in wanted.slots],
        "models": list(dict.fromkeys(models)),
        "libraries": stack.load(wanted.stack).libraries,
        "xid_window_h": wanted.xid_window_h,
    }
