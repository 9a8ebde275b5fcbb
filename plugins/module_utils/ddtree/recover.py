"""What happens when an activation was cut off: the slot goes back to its last known good.

Runs at boot before any slot starts, and whenever an activation unit fails (`OnFailure=`). Where no activation is open
it does nothing. It never waits for an engine: slots are ordered after it, so the work that needs a running engine is
left to `ddtree-activate@`.
"""

from __future__ import annotations

from . import files, units
from .journal import Journal, fold
from .paths import Paths, activation_unit
from .transaction import Record, Refused, Transaction, load, pending_file, slot_lock


def recover(paths: Paths) -> int:
    """See to every activation that nobody carries any more. 0: each was put back or handed on."""
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
    except (Refused, ValueError) as error:
        print(f"{slot}: {error}")
        record = {key: state.open.get(key, "") for key in ("id", "slot", "release", "config_digest", "kind", "run")}
    touched = record["kind"] == "verify" or {"flipping", "taking_back"} & set(state.open_events)
    if booting and touched:
        files.remove(pending_file(paths, slot))
        check = transaction.restore_at_boot(record)
        if check is None:
            return True
    else:
        files.write_json(pending_file(paths, slot), {"id": activation}, 0o600)
    units.reset_failed(activation_unit(slot))
    units.start(activation_unit(slot))
    return True
