#!/usr/bin/python
"""Observe a host: everything that a deployment decides from, in one read-only look."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ddtree_host
short_description: Observe a GPU host in one read-only look
description:
  - Reads the operating system, interpreters, GPUs (with their processes, ECC state, row remaps and kernel faults), the
    driver, CUDA toolkits, disks, listening ports with the processes behind them, releases, slots, unit states and the
    last journal entries.
  - Changes nothing, in check mode as otherwise. Takes well under a second.
  - In a play, the action plugin of the same name fills in all options from the host's C(fleet_*) variables.
options:
  paths:
    description: Directories of the toolkit on the host (root, state, cache), where they differ from the defaults.
    type: dict
    default: {}
  user:
    description: Service user, whose access to models and caches is examined.
    type: str
    default: ddtree
  python:
    description: Interpreter that releases are made from.
    type: path
    default: /usr/bin/python3
  slots:
    description: Slots that the inventory asks for (name, port, bind), looked at beside those that the host has.
    type: list
    elements: dict
    default: []
  models:
    description: Absolute paths of models to examine.
    type: list
    elements: str
    default: []
  libraries:
    description: Sonames of system libraries to look for.
    type: list
    elements: str
    default: []
  xid_window_h:
    description: How far back, in hours, to look for GPU faults in the kernel log.
    type: float
    default: 24.0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - ddtree-fleet maintainers
"""

EXAMPLES = r"""
- name: Observe the host, as its fleet_* variables say
  ddtree_host:

- name: Observe a host with other directories
  ddtree_host:
    paths:
      root: /srv/ddtree
    models:
      - /srv/models/target
"""

RETURN = r"""
ddtree_facts:
  description: The facts, as documented in C(module_utils/ddtree/observe.py).
  type: dict
  returned: always
  sample: {"host": "ct200", "glibc": "2.36", "gpu_source": "nvidia-smi", "slots": {}}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree import observe
from ansible.module_utils.ddtree.paths import Paths


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": "ddtree"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "slots": {"type": "list", "elements": "dict", "default": []},
            "models": {"type": "list", "elements": "str", "default": []},
            "libraries": {"type": "list", "elements": "str", "default": []},
            "xid_window_h": {"type": "float", "default": 24.0},
        },
        supports_check_mode=True,
    )
    values = module.params
    request = observe.Request(
        paths=Paths.of(values["paths"]),
        user=values["user"],
        python=values["python"],
        slots=values["slots"],
        models=values["models"],
        libraries=values["libraries"],
        xid_window_h=values["xid_window_h"],
    )
    module.exit_json(changed=False, ddtree_facts=observe.observe(request))


if __name__ == "__main__":
    main()
