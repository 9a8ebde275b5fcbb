"""The host agent's command line: what systemd units on a host run. People use `fleet`; this is for units and rescue.

ddtree-agent [--root DIR] [--state DIR] [--cache DIR] activate SLOT | recover | prestart SLOT | status
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from types import FrameType

from . import prestart, recover, transaction
from .journal import slot_states
from .paths import Paths


def _terminated(signum: int, frame: FrameType | None) -> None:
    # leave the activation open: ddtree-recover takes it back, now or at the next boot
    print("stopped by systemd while the activation was open", flush=True)
    sys.exit(1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ddtree-agent", description=__doc__)
    defaults = Paths()
    parser.add_argument("--root", default=str(defaults.root), help="releases and slots (%(default)s)")
    parser.add_argument("--state", default=str(defaults.state), help="journal and records (%(default)s)")
    parser.add_argument("--cache", default=str(defaults.cache), help="compiler caches (%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    activate = commands.add_parser("activate", help="carry out the activation that was asked for on a slot")
    activate.add_argument("slot")
    commands.add_parser("recover", help="take back activations that were cut off")
    before = commands.add_parser("prestart", help="prepare a slot's GPU before its engine starts")
    before.add_argument("slot")
    commands.add_parser("status", help="print the state of every slot as JSON")
    options = parser.parse_args(argv)
    paths = Paths.of(vars(options))
    if options.command in ("activate", "recover"):
        signal.signal(signal.SIGTERM, _terminated)
    if options.command == "activate":
        return transaction.run_pending(paths, options.slot)
    if options.command == "recover":
        return recover.recover(paths)
    if options.command == "prestart":
        return prestart.prepare(paths, options.slot)
    print(json.dumps({slot: state.as_dict() for slot, state in slot_states(paths.journal).items()}, indent=1))
    return 0
