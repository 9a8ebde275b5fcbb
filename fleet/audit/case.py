"""What the audit judges: the survey of an environment, what it should be, and where it is to run."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import knowledge, rules
from .rules import Rule

_SITE = re.compile(r"(?:lib(?:64)?/python3\.\d+/(?:site|dist)-packages/)")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with what shows it and how to mend it."""

    rule: str
    severity: str
    title: str
    subject: str
    evidence: tuple[str, ...]
    fix: str
    explanation: str
    count: int = 1
    waived: str | None = None

    @property
    def stops(self) -> bool:
        return self.severity == rules.ERROR and self.waived is None

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "evidence": list(self.evidence), "stops": self.stops}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One distribution that a lock names."""

    name: str
    version: str
    sha256: str = ""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where an environment is to run. What is not known is not judged."""

    glibc: str = ""
    machine: str = ""
    driver: str = ""
    # name or UUID to compute capability
    gpus: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # version of the toolkit that compilers find first; "none" where there is surely none
    toolkit: str = ""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Target:
        """The host that `facts` (of the module ddtree_host) describe."""
        toolkits = facts.get("toolkits")
        return cls(
            glibc=str(facts.get("glibc") or ""),
            machine=str(facts.get("arch") or ""),
            driver=str((facts.get("driver") or {}).get("kernel") or ""),
            gpus={gpu["uuid"]: str(gpu["compute_cap"]) for gpu in facts.get("gpus") or [] if gpu.get("compute_cap")},
            toolkit=str(toolkits[0]["version"]) if toolkits else "" if toolkits is None else "none",
        )


class Case:
    """Looks things up, so that the checks read like the rules."""

    def __init__(
        self,
        survey: Mapping[str, Any],
        stack: Mapping[str, Any] | None = None,
        lock: Sequence[Wanted] | None = None,
        target: Target | None = None,
        also: Iterable[str] = (),
    ) -> None:
        self.survey = survey
        self.stack: Mapping[str, Any] = stack or {}
        self.has_stack = stack is not None
        self.lock = {item.name: item for item in lock} if lock is not None else None
        self.target = target or Target()
        self.also = frozenset(also)  # distributions that belong to the release beside the lock
        self.distributions: list[Mapping[str, Any]] = list(survey.get("distributions") or [])
        self.by_name = {item["name"]: item for item in self.distributions}
        self.libraries: list[Mapping[str, Any]] = list(survey.get("libraries") or [])
        self.python = str((survey.get("python") or {}).get("minor") or "")
        self.torch: Mapping[str, str] = survey.get("torch") or {}
        self._owners = {str(item["path"]): str(item.get("distribution") or "") for item in self.libraries}

    @property
    def torch_version(self) -> str:
        installed = self.by_name.get("torch") or {}
        return str(self.torch.get("version") or installed.get("version") or "")

    @property
    def cuda(self) -> int | None:
        """The one CUDA major: the stack's, else that which torch was built for. None where neither says."""
        for value in (self.stack.get("cuda"), self.torch.get("cuda")):
            match = re.match(r"(\d{1,3})(?:\.|\Z)", str(value or ""))
            if match:
                return int(match.group(1))
        return None

    def owner(self, path: str) -> str:
        """The distribution that brought a library; its folder, where nobody says."""
        return self._owners.get(path) or site_path(path).partition("/")[0]

    def loaded(self) -> Iterable[Mapping[str, Any]]:
        """Libraries that are loaded here, without those that their package takes on other systems only."""
        for library in self.libraries:
            if not self.set_aside(str(library["path"])):
                yield library

    def set_aside(self, path: str) -> bool:
        """The file is one of several of which its package takes another one here."""
        return knowledge.choice(site_path(path), self.torch_version, self.cuda, self.python)[1]

    def optional(self, path: str) -> bool:
        return knowledge.choice(site_path(path), self.torch_version, self.cuda, self.python)[0] is not None

    def finding(
        self, rule_id: str, subject: str, evidence: Iterable[str], *, count: int | None = None, **words: Any
    ) -> Finding:
        rule: Rule = rules.RULES[rule_id]
        shown = tuple(evidence)
        values = {"name": subject, "found": "", "needed": "", **words}
        return Finding(
            rule.id,
            rule.severity,
            rule.title,
            subject,
            shown,
            rule.fix.format_map(values),
            rule.explanation.format_map(values),
            count if count is not None else max(1, len(shown)),
        )


def site_path(path: str) -> str:
    return _SITE.sub("", posixpath.normpath(path), count=1)


def version(text: str) -> tuple[int, ...]:
    """A dotted version as numbers; 2.4 comes before 2.36."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))
