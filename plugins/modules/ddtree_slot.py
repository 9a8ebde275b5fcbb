#!/usr/bin/python
"""Ask a host to activate, roll back or report on a slot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ddtree_slot
short_description: Ask a host to move one of its slots, and follow what it does
description:
  - Leaves an activation record on the host and starts C(ddtree-activate@<slot>.service), which owns everything that
    follows. It flips, restarts, gates, and commits or takes back, also when nobody is connected any more.
  - The module returns at once; C(state=followed) reports what the host's journal says since.
options:
  state:
    description:
      - C(activated) submits O(record). C(rolled_back) submits the previous good activation, or that of O(release).
      - C(followed) waits up to O(timeout) seconds for new journal entries of the activations in O(ids).
    type: str
    choices: [activated, rolled_back, followed]
    required: true
  slot:
    description: Name of the slot; not needed to follow.
    type: str
  paths:
    description: Directories of the host (root, state, cache), where they differ from the defaults.
    type: dict
    default: {}
  record:
    description: The activation record without its id (release, config_digest, unit, env, gate and facts of the run).
    type: dict
    default: {}
  api_key:
    description: The engine's API key; kept in a file that only root can read.
    type: str
  release:
    description: For C(rolled_back), the release to return to. Without it, the previous good activation.
    type: str
  run_facts:
    description: Who asks, why, and in which run; goes into the journal.
    type: dict
    default: {}
  ids:
    description: Activations to follow.
    type: list
    elements: str
    default: []
  offset:
    description: Where in the journal to read on, as returned before.
    type: int
    default: 0
  timeout:
    description: Longest wait for news, in seconds.
    type: float
    default: 2.0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - ddtree-fleet maintainers
"""

EXAMPLES = r"""
- name: Take slot gpu1 back to its previous good activation
  ddtree_slot:
    state: rolled_back
    slot: gpu1
"""

RETURN = r"""
id:
  description: The activation that was started; empty in check mode.
  type: str
  returned: state is activated or rolled_back
offset:
  description: Where in the journal to read on.
  type: int
  returned: always
release:
  description: The release that the activation is of.
  type: str
  returned: state is activated or rolled_back
entries:
  description: New journal entries of the followed activations.
  type: list
  returned: state is followed
open:
  description: Followed activations that have not ended yet.
  type: list
  returned: state is followed
silent:
  description: Of these, those that nothing on the host carries out at the moment.
  type: list
  returned: state is followed
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree import transaction, units
from ansible.module_utils.ddtree.journal import OUTCOMES, Journal, SlotState, fold
from ansible.module_utils.ddtree.paths import RECOVER_UNIT, Paths, activation_unit

# Longest time, in seconds, that an activation may take to tidy up after its outcome.
TIDY_S = 60.0


def current_text(paths: Paths, slot: str) -> dict[str, str]:
    """What stands on the host for the slot now, for the diff."""
    texts = {}
    for name, path in (("unit", paths.unit_file(slot)), ("env", paths.slot(slot) / "slot.env")):
        try:
            texts[name] = path.read_text()
        except FileNotFoundError:
            texts[name] = ""
    link = paths.slot(slot) / "current"
    texts["release"] = link.readlink().name + "\n" if link.is_symlink() else ""
    return texts


def differences(paths: Paths, slot: str, record: dict) -> list[dict]:
    before = current_text(paths, slot)
    after = {"unit": record["unit"], "env": record["env"], "release": record["release"] + "\n"}
    headers = {"unit": str(paths.unit_file(slot)), "env": str(paths.slot(slot) / "slot.env"), "release": f"slot {slot}"}
    return [
        {"before_header": headers[key], "after_header": headers[key], "before": before[key], "after": after[key]}
        for key in ("release", "unit", "env")
        if before[key] != after[key]
    ]


def wait_until_free(module: AnsibleModule, paths: Paths, slot: str) -> None:
    """An activation that has its outcome and only tidies up is waited for; one that is open makes the slot busy."""
    end = time.monotonic() + TIDY_S
    while units.show(activation_unit(slot)).active in ("activating", "active", "reloading"):
        state = fold(Journal(paths.journal).entries()).get(slot)
        if (state and state.open) or time.monotonic() > end:
            module.fail_json(msg=f"an activation of slot {slot} is already under way on this host", busy=True)
        time.sleep(0.2)


def begin(module: AnsibleModule, paths: Paths, record: dict, api_key: str) -> None:
    slot = record["slot"]
    offset = Journal(paths.journal).size()
    diff = differences(paths, slot, record)
    result = {"changed": True, "release": record["release"], "offset": offset, "id": "", "diff": diff}
    if not module.check_mode:
        record["id"] = transaction.new_id()
        wait_until_free(module, paths, slot)
        transaction.submit(paths, record, api_key)
        units.reset_failed(activation_unit(slot))
        units.start(activation_unit(slot))
        result["id"] = record["id"]
    module.exit_json(**result)


def earlier(paths: Paths, state: SlotState, release: str) -> dict:
    """Record of the activation to return to. Raises Refused, with the choice there is, where there is none."""
    if not release:
        if len(state.good) < (1 if state.down else 2):
            raise transaction.Refused(
                f"slot {state.slot} has nothing to go back to: "
                + (f"{state.good[-1].release} is its only good one" if state.good else "no activation was ever good")
            )
        good = state.good[-1] if state.down else state.good[-2]
        return transaction.load(paths, state.slot, good.activation)
    seen = []
    for entry in reversed(Journal(paths.journal).entries()):
        if entry.get("slot") == state.slot and entry["event"] == "committed" and entry.get("kind") != "verify":
            seen.append(str(entry["release"]))
            if entry["release"] == release and paths.activation(state.slot, entry["id"]).exists():
                return transaction.load(paths, state.slot, str(entry["id"]))
    choice = ", ".join(dict.fromkeys(seen)) or "none"
    raise transaction.Refused(f"release {release} was never good on slot {state.slot}; good ones: {choice}")


def roll_back(module: AnsibleModule, paths: Paths) -> None:
    slot = module.params["slot"]
    state = fold(Journal(paths.journal).entries()).get(slot, SlotState(slot))
    try:
        target = earlier(paths, state, module.params["release"] or "")
    except transaction.Refused as refusal:
        module.fail_json(msg=str(refusal), nothing_to_do=True)
    if not paths.release(target["release"]).is_dir():
        module.fail_json(msg=f"release {target['release']} is not on this host any more", nothing_to_do=True)
    current = state.current
    if current and (current.release, current.config_digest) == (target["release"], target["config_digest"]):
        text = f"slot {slot} already serves {target['release']}"
        module.exit_json(changed=False, id="", offset=0, release=target["release"], msg=text)
    record = {**target, "kind": "rollback", "restores": target["id"], "forced": True, **module.params["run_facts"]}
    begin(module, paths, record, transaction.api_key(paths, target))


def follow(module: AnsibleModule, paths: Paths) -> None:
    """Entries of the followed activations since `offset`; returns as soon as there are any."""
    ids, offset = set(module.params["ids"]), module.params["offset"]
    journal, end = Journal(paths.journal), time.monotonic() + module.params["timeout"]
    while True:
        fresh, offset = journal.read(offset)
        entries = [entry for entry in fresh if entry.get("id") in ids]
        if entries or time.monotonic() > end:
            break
        time.sleep(0.1)
    ended = {entry["id"] for entry in journal.entries() if entry.get("id") in ids and entry["event"] in OUTCOMES}
    silent = []
    for activation in sorted(ids - ended):
        found = list(paths.state.glob(f"slots/*/activations/{activation}.json"))
        slot = found[0].parent.parent.name if found else ""
        carriers = [activation_unit(slot), RECOVER_UNIT] if slot else [RECOVER_UNIT]
        if not any(units.show(unit).active in ("activating", "active", "reloading") for unit in carriers):
            silent.append(activation)
    module.exit_json(changed=False, entries=entries, offset=offset, open=sorted(ids - ended), silent=silent)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["activated", "rolled_back", "followed"], "required": True},
            "slot": {"type": "str"},
            "paths": {"type": "dict", "default": {}},
            "record": {"type": "dict", "default": {}},
            "api_key": {"type": "str", "no_log": True},
            "release": {"type": "str"},
            "run_facts": {"type": "dict", "default": {}},
            "ids": {"type": "list", "elements": "str", "default": []},
            "offset": {"type": "int", "default": 0},
            "timeout": {"type": "float", "default": 2.0},
        },
        required_if=[("state", "activated", ("slot", "record")), ("state", "rolled_back", ("slot",))],
        supports_check_mode=True,
    )
    paths = Paths.of(module.params["paths"])
    try:
        if module.params["state"] == "followed":
            follow(module, paths)
        elif module.params["state"] == "rolled_back":
            roll_back(module, paths)
        else:
            record = {**module.params["record"], "slot": module.params["slot"], **module.params["run_facts"]}
            begin(module, paths, record, module.params["api_key"] or "")
    except (transaction.Refused, ValueError, OSError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
