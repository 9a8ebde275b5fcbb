#!/usr/bin/python
"""Prepare a host for releases, build one from wheels that were sent, and say what is there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ddtree_release
short_description: Build an immutable release on a host, offline, from wheels in its store
description:
  - A release is one directory with a virtual environment, its bill of materials, its manifest and the hash of every
    file. It is built under a temporary name, proven by an import run as the service user, and only then visible.
  - As a task, C(ddtree_release) without arguments does all of it. An action plugin works out on the control node which
    release the host is to have, asks for what is lacking, sends only that over the present connection, and has it
    built. It needs the facts that the role C(preflight) leaves. The options below are what it uses on the host.
options:
  state:
    description:
      - C(query) says what differs and changes nothing. C(agent) makes user, directories, agent and its units as in
        O(host).
      - C(present) takes O(uploads) into the store and builds the release of O(manifest) unless it is there and intact.
      - C(absent) removes O(release), unless a slot needs it. C(facts) lists the releases on the host.
    type: str
    choices: [query, present, absent, agent, facts]
    default: facts
  paths:
    description: Directories of the host (root, state, cache), where they differ from the defaults.
    type: dict
    default: {}
  manifest:
    description: What the release consists of. It names the id, the interpreter's version, and each wheel with its hash.
    type: dict
    default: {}
  python:
    description: Interpreter that the release is made from.
    type: path
    default: /usr/bin/python3
  user:
    description: Service user that the import run is done as.
    type: str
    default: ddtree
  smoke:
    description: Modules to import before the release becomes visible.
    type: list
    elements: str
    default: []
  uv:
    description: The wheel of uv, which makes the environment (name, version, filename, sha256).
    type: dict
    default: {}
  host:
    description: What has to stand on the host (user, agent, agent_version, units, sender).
    type: dict
    default: {}
  uploads:
    description: Names of files in C(<root>/store/incoming) that were sent for this release.
    type: list
    elements: str
    default: []
  release:
    description: Id of the release to remove.
    type: str
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - ddtree-fleet maintainers
"""

EXAMPLES = r"""
- name: Bring the release that the inventory asks for to the host
  ddtree_release:

- name: List the releases on the host
  ddtree_release:
    state: facts
"""

RETURN = r"""
ddtree:
  description: The release, whether it was built, what was sent, and how long each stage took.
  type: dict
  returned: always
lacking:
  description: Wheels that have to be sent, as sha256 to C(missing) or C(damaged).
  type: dict
  returned: state is query
release:
  description: Whether the release is C(absent), C(intact) or C(damaged) on the host.
  type: str
  returned: state is query
changes:
  description: What differs on the host beside the release, in words.
  type: list
  returned: state is query or agent
releases:
  description: Manifests of the releases on the host, newest first.
  type: list
  returned: state is facts
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree import install, release, store, transaction
from ansible.module_utils.ddtree.paths import Paths
from ansible.module_utils.ddtree.process import CommandError


def describe(manifest: dict) -> str:
    """A release as text, for the diff."""
    if not manifest:
        return ""
    head = [f"release {manifest.get('id')}", f"python {manifest.get('python')}"]
    wheels = [
        f"{wheel['name']} {wheel['version']} sha256:{wheel['sha256'][:16]}" for wheel in manifest.get("wheels", [])
    ]
    return "\n".join([*head, *sorted(wheels)]) + "\n"


def current(paths: Paths) -> dict:
    """Manifest of the release that slots run, the newest of them; without any, of the newest on the host."""
    known = {item["id"]: item for item in release.listing(paths)}
    linked = {link.readlink().name for link in paths.slots.glob("*/current") if link.is_symlink()}
    for name, item in known.items():
        if name in linked:
            return item
    return next(iter(known.values()), {})


def changes_as_diff(changes: list[install.Change]) -> list[dict]:
    found = [
        {"before_header": item.header, "after_header": item.header, "before": item.before, "after": item.after}
        for item in changes
        if item.header
    ]
    words = "".join(f"{item.what}\n" for item in changes if not item.header)
    if words:
        found.append({"before_header": "host", "after_header": "host", "before": "", "after": words})
    return found


def query(module: AnsibleModule, paths: Paths) -> None:
    request = request_of(module)
    changes = install.plan(paths, install.Spec.of(module.params["host"]))
    state, damage = "absent", []
    if release.present(paths, request.id):
        damage = [str(item) for item in release.verify(paths, request.id, quick=True, remember=not module.check_mode)]
        state = "damaged" if damage else "intact"
    lacking = {}
    if state != "intact":
        blobs = [*request.blobs, request.uv]
        lacking = store.lacking(paths, blobs, remember=not module.check_mode and paths.verified.is_dir())
    before, after = describe(current(paths)), describe(request.manifest)
    diff = changes_as_diff(changes)
    if state != "intact" and before != after:
        diff.append({"before_header": "release", "after_header": "release", "before": before, "after": after})
    module.exit_json(
        changed=False,
        release=state,
        damage=damage[:50],
        lacking=lacking,
        changes=[change.what for change in changes],
        agent_wanted=any(change.part == "agent" for change in changes),
        diff=diff,
    )


def request_of(module: AnsibleModule) -> release.Request:
    return release.Request(
        manifest=module.params["manifest"],
        python=module.params["python"],
        user=module.params["user"],
        smoke=tuple(module.params["smoke"]),
        uv=store.Blob.of(module.params["uv"]),
    )


def present(module: AnsibleModule, paths: Paths) -> None:
    request = request_of(module)
    there = release.present(paths, request.id)
    if module.check_mode:
        module.exit_json(changed=not there, ddtree={"release": request.id, "built": False})
    taken = store.receive(paths, module.params["uploads"], [*request.blobs, request.uv])
    report = release.build(paths, request)
    store.clear_incoming(paths)
    module.exit_json(
        changed=report.built or bool(taken), ddtree={"release": request.id, "received": len(taken), **report.as_dict()}
    )


def absent(module: AnsibleModule, paths: Paths) -> None:
    name = module.params["release"] or ""
    if paths.release(name).exists() and name in transaction.protected(paths):
        module.fail_json(msg=f"release {name} is not removed: a slot runs it or may have to return to it")
    if module.check_mode:
        module.exit_json(changed=paths.release(name).exists(), ddtree={"release": name})
    module.exit_json(changed=release.remove(paths, name), ddtree={"release": name})


def prepare(module: AnsibleModule, paths: Paths) -> None:
    spec = install.Spec.of(module.params["host"])
    changes = install.plan(paths, spec) if module.check_mode else install.apply(paths, spec)
    module.exit_json(
        changed=bool(changes),
        changes=[change.what for change in changes],
        diff=changes_as_diff(changes),
        ddtree={"agent": spec.agent_version},
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "default": "facts",
                "choices": ["query", "present", "absent", "agent", "facts"],
            },
            "paths": {"type": "dict", "default": {}},
            "manifest": {"type": "dict", "default": {}},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "user": {"type": "str", "default": "ddtree"},
            "smoke": {"type": "list", "elements": "str", "default": []},
            "uv": {"type": "dict", "default": {}},
            "host": {"type": "dict", "default": {}},
            "uploads": {"type": "list", "elements": "str", "default": []},
            "release": {"type": "str"},
        },
        required_if=[
            ("state", "query", ("manifest", "uv", "host")),
            ("state", "present", ("manifest", "uv")),
            ("state", "absent", ("release",)),
            ("state", "agent", ("host",)),
        ],
        supports_check_mode=True,
    )
    paths = Paths.of(module.params["paths"])
    if os.geteuid() != 0:
        module.fail_json(msg="this needs root on the host: connect as root, or set ansible_become: true")
    states = {"query": query, "present": present, "absent": absent, "agent": prepare}
    try:
        if module.params["state"] in states:
            states[module.params["state"]](module, paths)
        else:
            module.exit_json(changed=False, releases=release.listing(paths), ddtree={})
    except release.BuildError as error:
        module.fail_json(
            msg=f"release {module.params['manifest'].get('id')} was not built, nothing of it is visible: {error}",
            stage=error.stage,
            details=error.details[-4000:],
        )
    except (install.InstallError, store.StoreError, CommandError, ValueError, OSError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
