#!/usr/bin/python
"""Read a host's journal of activations."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ddtree_history
short_description: Read what happened to the slots of a host
description:
  - Folds the host's journal into one record per activation, oldest first, each with its outcome, duration and, where it
    failed, the cause and the engine's own line that names it.
  - Changes nothing, in check mode as otherwise.
options:
  state_dir:
    description: Directory that holds the journal (C(fleet_state)).
    type: path
    default: /var/lib/ddtree
  slot:
    description: Only this slot. Empty for all.
    type: str
    default: ""
  newest:
    description: At most this many activations, the newest ones.
    type: int
    default: 20
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - ddtree-fleet maintainers
"""

EXAMPLES = r"""
- name: Read the last twenty activations of the host
  ddtree_history:

- name: Read the last five activations of one slot
  ddtree_history:
    slot: gpu1
    newest: 5
"""

RETURN = r"""
ddtree_activations:
  description: The activations, oldest first.
  type: list
  elements: dict
  returned: always
  sample:
    - {"id": "20261201T100000-ab12", "slot": "gpu1", "kind": "deploy", "release": "cpu-standalone-0.1.0-0123456789ab",
       "outcome": "taken_back", "seconds": 9.4, "cause": "the engine died", "root": "RuntimeError: boom"}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree.history import activations
from ansible.module_utils.ddtree.journal import Journal


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "default": "/var/lib/ddtree"},
            "slot": {"type": "str", "default": ""},
            "newest": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    values = module.params
    if values["newest"] < 1:
        module.fail_json(msg="newest must be at least 1")
    journal = Journal(Path(values["state_dir"]) / "journal.jsonl")
    found = activations(journal.entries(), values["slot"] or None, values["newest"])
    module.exit_json(changed=False, ddtree_activations=[item.as_dict() for item in found])


if __name__ == "__main__":
    main()
