"""From a unit's log to the line that says why: the root line, its signature, and what to do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from .signatures import Signature, match

_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Failure|Timeout|Fault)\b(?:: .*)?$"
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_PREFIX = re.compile(
    r"^(?:\[[^\]]*\]\s*|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s*|(?:INFO|ERROR|WARNING|CRITICAL|DEBUG)[: ]+\s*"
    r"|\(\w+ pid=\d+\)\s*)+"
)
_SYSTEMD = re.compile(
    r"^(ddtree-\S+\.service: |Started |Starting |Stopping |Stopped |Failed to start |Scheduled restart job"
    r"|Consumed \S+ CPU)"
)
_BAD_WORDS = re.compile(
    r"\b(error|fatal|failed|failure|cannot|could not|unable|denied|refused|abort|killed|no such|not found|invalid)\b",
    re.IGNORECASE,
)
_CONSEQUENCES = re.compile(
    r"^(KeyboardInterrupt|SystemExit|asyncio\.exceptions\.CancelledError|BrokenPipeError|EOFError)\b"
)
_NOISE = re.compile(r"DeprecationWarning|FutureWarning|UserWarning|deprecat", re.I)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """`root` is the line to read first; `signature` is None where the catalogue does not know it."""

    root: str
    signature: Signature | None
    context: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        return self.signature.cause if self.signature else self.root

    @property
    def fix(self) -> str:
        return self.signature.fix if self.signature else ""

    @property
    def verdict(self) -> str:
        """fail, or host_fault where the signature says that no release could have helped."""
        return self.signature.verdict if self.signature else "fail"

    def as_dict(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "signature": self.signature.id if self.signature else None,
            "cause": self.cause,
            "fix": self.fix,
            "context": list(self.context),
        }


def strip(line: str) -> str:
    """A log line without the time, level and process marks that loggers put before it."""
    return _PREFIX.sub("", line.rstrip()).strip()


def diagnose(lines: Sequence[str], default: str = "the engine printed nothing that names a cause") -> Diagnosis:
    """The root line of a failed start or run.

    The earliest line that a signature knows wins; otherwise the last line of the first traceback that is not a mere
    consequence (chained tracebacks print their origin first), otherwise the first line that reads like an error.
    """
    cleaned = [strip(line) for line in lines]
    for index, line in enumerate(cleaned):
        signature = match(line)
        if signature:
            return Diagnosis(line, signature, _around(cleaned, index))
    for index, line in enumerate(cleaned):
        if _TRACEBACK.search(line):
            end = _exception_after(cleaned, index)
            if end is not None and not _CONSEQUENCES.match(cleaned[end]):
                return Diagnosis(cleaned[end], None, _around(cleaned, end))
    for index, line in enumerate(cleaned):
        if _EXCEPTION.match(line) and not _CONSEQUENCES.match(line) and not _NOISE.search(line):
            return Diagnosis(line, None, _around(cleaned, index))
    for index, line in enumerate(cleaned):
        if _BAD_WORDS.search(line) and not _SYSTEMD.match(line) and not _NOISE.search(line):
            return Diagnosis(line, None, _around(cleaned, index))
    return Diagnosis(default, None, tuple(cleaned[-5:]))


def _exception_after(lines: Sequence[str], start: int) -> int | None:
    """Index of the line that ends the traceback which begins at `start` (engines may print several at once)."""
    for index in range(start + 1, min(start + 400, len(lines))):
        if _EXCEPTION.match(lines[index]):
            return index
        if index > start + 1 and _TRACEBACK.search(lines[index]):
            return None
    return None


def _around(lines: Sequence[str], index: int, width: int = 3) -> tuple[str, ...]:
    return tuple(line for line in lines[max(0, index - width) : index + width + 1] if line)
