"""Judge a survey: every finding at once, what to mend first comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from . import checks_files, checks_native, checks_set, rules
from .case import Case, Finding

Check = Callable[[Case], Iterable[Finding]]
CHECKS: tuple[Check, ...] = (*checks_set.CHECKS, *checks_native.CHECKS, *checks_files.CHECKS)


def judge(case: Case, waivers: Mapping[str, str] | None = None) -> list[Finding]:
    """Every finding about one environment, in the order in which to mend them: errors first, causes before effects."""
    found = [_waive(finding, waivers or {}) for check in CHECKS for finding in check(case)]
    return sorted(
        found,
        key=lambda item: (
            not item.stops,
            rules.SEVERITIES.index(item.severity),
            rules.ORDER[item.rule],
            -item.count,
            item.subject,
        ),
    )


def _waive(finding: Finding, waivers: Mapping[str, str]) -> Finding:
    reason = waivers.get(finding.rule)
    if reason is None or not rules.RULES[finding.rule].waivable:
        return finding
    return dataclasses.replace(finding, waived=str(reason))
