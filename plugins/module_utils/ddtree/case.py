"""What a preflight check works with: the host's facts, what is wanted of it, and how to report a violated rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import rules
from .rules import Rule


@dataclasses.dataclass(frozen=True)
class Violation:
    """A rule that a host does not meet: what was found, what is needed, how to mend it."""

    rule: str
    severity: str
    subject: str
    found: str
    needed: str
    fix: str
    title: str
    slot: str | None = None
    waived: str | None = None

    @property
    def stops(self) -> bool:
        return self.severity == rules.ERROR and self.waived is None

    def __str__(self) -> str:
        mark = f"waived ({self.waived})" if self.waived is not None else self.severity
        what = f"{self.title}. Found {self.found}; needed {self.needed}. Fix: {self.fix}"
        return f"{self.rule} {mark}: {self.subject}: {what}"

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "stops": self.stops}


class Case:
    """One host to judge. Looks things up so that the checks read like the rules."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        stack: Mapping[str, Any],
        desired: Mapping[str, Any],
        now: float | None = None,
        release_id: str | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self.facts = facts
        self.stack = stack
        self.desired = desired
        self.now = now
        self.release_id = release_id
        self.digests = digests or {}
        self.slots: list[Mapping[str, Any]] = list(desired.get("slots") or [])
        self._gpus = {gpu["uuid"].lower(): gpu for gpu in facts.get("gpus") or []}

    def gpu(self, slot: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self._gpus.get(str(slot["gpu"]).lower())

    def gpus(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """(slot, its GPU) for every slot whose GPU answers."""
        for slot in self.slots:
            gpu = self.gpu(slot)
            if gpu is not None:
                yield slot, gpu

    def violation(
        self, rule_id: str, subject: str, found: str, needed: str, slot: Mapping[str, Any] | None = None, **words: Any
    ) -> Violation:
        rule: Rule = rules.RULES[rule_id]
        # a word that a check does not give is what was found or needed
        values = {"found": found, "needed": needed, **words}
        fix = rule.fix.format_map(values) if "{" in rule.fix else rule.fix
        return Violation(
            rule=rule.id,
            severity=rule.severity,
            subject=subject,
            found=found,
            needed=needed,
            fix=fix,
            title=rule.title,
            slot=str(slot["name"]) if slot is not None else None,
        )


Check = Callable[[Case], Iterable[Violation]]


def version(text: str) -> tuple[int, ...]:
    """A dotted version as numbers: 580.9 comes before 580.65, and 2.4 before 2.36."""
    parts = []
    for part in str(text).replace("-", ".").replace("+", ".").split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def mib(amount: float) -> str:
    return f"{amount / 1024:.1f} GiB" if amount >= 1024 else f"{amount:.0f} MiB"
