"""The audit's answer, for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from . import rules
from .case import Finding

_COLOURS = {rules.ERROR: "31", rules.WARNING: "33", rules.NOTE: "36"}


def document(survey: Mapping[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """One document, stable enough to be read by programs."""
    return {
        "schema": 1,
        "root": survey.get("root", ""),
        "python": survey.get("python", {}),
        "torch": survey.get("torch", {}),
        "distributions": len(survey.get("distributions") or ()),
        "libraries": len(survey.get("libraries") or ()),
        "files": survey.get("files", 0),
        "seconds": survey.get("seconds", 0.0),
        "ok": not any(finding.stops for finding in findings),
        "findings": [finding.as_dict() for finding in findings],
    }


def text(name: str, survey: Mapping[str, Any], findings: Sequence[Finding], *, colour: bool = False) -> str:
    """What was found, what to mend first on top."""
    counts = {key: len(survey.get(key) or ()) for key in ("distributions", "libraries")}
    lines = [
        f"{name}: {counts['distributions']} distributions, {counts['libraries']} libraries, "
        f"{survey.get('files', 0)} files in {survey.get('seconds', 0):.1f} s"
    ]
    for position, finding in enumerate(findings, 1):
        mark = f"waived: {finding.waived}" if finding.waived is not None else finding.severity
        head = f"{position}. {finding.rule} ({mark}) {finding.subject}: {finding.title}"
        lines += ["", _paint(head, _COLOURS.get(finding.severity, "0"), colour)]
        for evidence in finding.evidence:
            lines.append(textwrap.fill(evidence, 118, initial_indent="   - ", subsequent_indent="     "))
        lines.append(textwrap.fill(finding.explanation, 118, initial_indent="   Why: ", subsequent_indent="        "))
        lines.append(textwrap.fill(finding.fix, 118, initial_indent="   Fix: ", subsequent_indent="        "))
    lines += ["", _verdict(findings)]
    return "\n".join(lines)


def _verdict(findings: Sequence[Finding]) -> str:
    stops = sum(finding.stops for finding in findings)
    others = len(findings) - stops
    rest = f", {others} warning{'s' if others != 1 else ''}" if others else ""
    if stops:
        return (
            f"Does not fit: {stops} error{'s' if stops != 1 else ''}{rest}. Start with the first; it may cause others."
        )
    return f"Fits{rest}."


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\033[1;{code}m{text}\033[0m" if colour else text
