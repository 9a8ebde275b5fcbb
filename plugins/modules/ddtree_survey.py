#!/usr/bin/python
"""Read what the Python environments of a host hold, for the audit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ddtree_survey
short_description: Read what the Python environments of a host hold
description:
  - Reads every distribution, file and shared library of an environment, without importing anything from it.
  - Without I(venv), those of the releases that slots point to are read; if there are none, that of the newest release.
  - Files that have not changed since the last time are not read again.
  - Changes nothing but its own cache below I(state_dir), where that exists; check mode leaves it alone too.
options:
  venv:
    description: Folder of an environment, whoever made it. Empty for those of the slots' releases.
    type: path
    default: ""
  root:
    description: Directory of releases and slots (C(fleet_root)).
    type: path
    default: /opt/ddtree
  state_dir:
    description: Directory of the host's state (C(fleet_state)).
    type: path
    default: /var/lib/ddtree
  jobs:
    description: Files that are hashed at the same time.
    type: int
    default: 2
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
author:
  - ddtree-fleet maintainers
"""

EXAMPLES = r"""
- name: Read the environments that serve
  ddtree_survey:

- name: Read an environment that somebody made by hand
  ddtree_survey:
    venv: /opt/sglang/venv
"""

RETURN = r"""
ddtree_surveys:
  description: One entry for each environment, with its name, the manifest of its release (if it is one) and its survey.
  type: list
  elements: dict
  returned: always
  sample:
    - {"name": "/opt/sglang/venv", "manifest": {}, "survey": {"schema": 1, "distributions": []}}
"""

import hashlib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree import bom
from ansible.module_utils.ddtree.survey import environments, survey


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "venv": {"type": "path", "default": ""},
            "root": {"type": "path", "default": "/opt/ddtree"},
            "state_dir": {"type": "path", "default": "/var/lib/ddtree"},
            "jobs": {"type": "int", "default": 2},
        },
        supports_check_mode=True,
    )
    values = module.params
    chosen = environments(values["venv"] or "", Path(values["root"]))
    if not chosen:
        module.fail_json(msg=f"{values['root']} holds no release: name an environment with venv (fleet: --venv)")
    found = []
    for name, venv, manifest in chosen:
        key = hashlib.sha256(str(venv).encode()).hexdigest()[:16]
        # a host that the toolkit does not manage is only looked at
        keeps = Path(values["state_dir"]).is_dir() and not module.check_mode
        cache = Path(values["state_dir"]) / "audit" / f"{key}.json" if keeps else None
        try:
            facts = survey(venv, cache, values["jobs"])
        except (bom.NotAVenv, OSError) as error:
            module.fail_json(msg=f"{venv} cannot be read: {error}")
        found.append({"name": name, "manifest": manifest, "survey": facts})
    module.exit_json(changed=False, ddtree_surveys=found)


if __name__ == "__main__":
    main()
