"""What happens when an activation was cut off: the slot goes back to its last known good.

Runs at boot before any slot starts, and whenever an activation unit fails (`OnFailure=`). Where no activation is open
it does nothing.
"""

from __future__ import annotations

from . import files, units
from .journal import Journal, fold
from .paths import Paths, activation_unit, slot_unit
from .transaction import Record, Refused, Transaction, load, pending_file, slot_lock


def recover(paths: Paths) -> int:
    """Take back every activation that nobody carries any more. 0: every slot ended on something good."""
    booting = units.system_state() in ("initializing", "starting")
    failures = 0
    for slot, state in fold(Journal(paths.journal).entries()).items():
        if state.open is None:
            continue
        try:
            with slot_lock(paths, slot):
                failures += not _recover_slot(paths, slot, booting)
        except Refused as busy:
            print(f"{slot}: {busy}")
    return 1 if failures else 0


def _recover_slot(paths: Paths, slot: str, booting: bool) -> bool:
    transaction = Transaction(paths, slot)
    state = transaction.state()
    if state.open is None:  # ended while we waited for the lock
        return True
    activation = str(state.open["id"])
    print(f"{slot}: activation {activation} was left open ({', '.join(state.open_events) or 'nothing done yet'})")
    try:
        record: Record = load(paths, slot, activation)
    except Refused:
        record = {key: state.open.get(key, "") for key in ("id", "slot", "release", "config_digest", "kind", "run")}
    files.remove(pending_file(paths, slot))
    begun = {"flipping", "taking_back"} & set(state.open_events)
    if not begun and record["kind"] != "verify":
        transaction.journal.append(
            "abandoned",
            **{key: record.get(key) for key in ("id", "slot", "release", "config_digest", "kind", "run")},
            cause="the activation was cut off before anything was touched",
        )
        return True
    if booting:
        check = transaction.restore_at_boot(record)
        if check:
            units.daemon_reload()
            units.start(activation_unit(slot))
        return True
    if record["kind"] == "verify" and not begun:
        return transaction.activate({**record}) if _runs(slot) else transaction.take_back(record, "cut off")
    return transaction.take_back(record, "the activation was cut off before its gate had decided")


def _runs(slot: str) -> bool:
    return units.show(slot_unit(slot)).active in ("active", "activating")
