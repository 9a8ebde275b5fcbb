"""Can this host take this deployment? A pure function of facts, stack and desired state; every violation at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import checks_gpu, checks_host, checks_slot, rules
from .case import Case, Check, Violation

CHECKS: tuple[Check, ...] = (*checks_host.CHECKS, *checks_gpu.CHECKS, *checks_slot.CHECKS)


def evaluate(
    facts: Mapping[str, Any],
    stack: Mapping[str, Any],
    desired: Mapping[str, Any],
    *,
    now: float | None = None,
    release_id: str | None = None,
    digests: Mapping[str, str] | None = None,
) -> list[Violation]:
    """Every violated rule of one host, what stops it first.

    `facts` as `observe` gives them, `stack` as its stack.yml says, `desired` as `fleet.desired` resolves it. `now` is
    the control node's clock; with `release_id` and `digests` (slot name to configuration digest) history counts.
    """
    case = Case(facts, stack, desired, now, release_id, digests)
    found: list[Violation] = []
    for check in CHECKS:
        found += check(case)
    waivers = dict(desired.get("waivers") or {})
    if desired.get("force"):
        waivers.update(dict.fromkeys(rules.FORCED, "fleet_force"))
    found = [_waive(item, waivers) for item in found]
    return sorted(found, key=lambda item: (not item.stops, item.severity != rules.ERROR))


def _waive(item: Violation, waivers: Mapping[str, str]) -> Violation:
    reason = waivers.get(item.rule)
    if reason is None or not rules.RULES[item.rule].waivable:
        return item
    return dataclasses.replace(item, waived=str(reason))
