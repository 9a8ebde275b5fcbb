"""Writes the reference pages of docs/ from the code that they describe; `--check` fails when one has drifted.

python -m fleet.docs            write docs/variables.md and docs/failure-catalogue.md
python -m fleet.docs --check    say which of them is out of date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import content, varspec

GENERATED = "<!-- Written by `make docs` from {source}. Changes made here are lost. -->"


def variables_page(roles: Path) -> str:
    """The variable reference, from the roles' argument specifications."""
    options = sorted(varspec.load(roles).values(), key=lambda option: (option.role, option.name))
    lines = [
        "# Variables",
        "",
        GENERATED.format(source="roles/*/meta/argument_specs.yml"),
        "",
        "What an inventory may say. Every variable begins with `fleet_`; one that is not listed here is an error,",
        'named by its path before any host is contacted. A number must be one: `"30001"` is refused where `30001` is',
        "meant.",
        "",
    ]
    for role in sorted({option.role for option in options}):
        lines += [f"## Role {role}", ""]
        for option in options:
            if option.role == role:
                lines += _variable(option)
    return "\n".join(lines).rstrip() + "\n"


def catalogue_page() -> str:
    """Everything that is refused before a deployment and everything that is recognised after a failure."""
    content.add_host_code()
    from ddtree import rules, signatures

    lines = [
        "# Failure catalogue",
        "",
        GENERATED.format(source="ddtree/rules.py and ddtree/signatures.py"),
        "",
        "Two lists: what preflight refuses before a byte is copied, and what the gate recognises in the output of an",
        "engine that fails. H1 to H15 are the failures of the deployment by hand that this toolkit grew out of.",
        "",
        "## Preflight rules",
        "",
        "An *error* stops the host, a *warning* is shown. A rule that may be waived is set aside for a host or group",
        "with a reason: `fleet_waivers: {RULE-ID: why this is safe here}`.",
        "",
    ]
    for stage in dict.fromkeys(rule.stage for rule in rules.RULES.values()):
        lines += [f"### About {_article(stage)}", ""]
        for rule in rules.RULES.values():
            if rule.stage == stage:
                lines += _rule(rule)
    lines += [
        "## Signatures",
        "",
        "Matched, in this order, against the engine's output. *host fault*: no release could have helped, the slot is",
        "set aside and the release is not blamed. *at once*: the gate ends although the process lives.",
        "",
    ]
    for signature in signatures.SIGNATURES:
        lines += _signature(signature)
    return "\n".join(lines).rstrip() + "\n"


def pages(root: Path) -> dict[Path, str]:
    return {
        root / "docs" / "variables.md": variables_page(root / "roles"),
        root / "docs" / "failure-catalogue.md": catalogue_page(),
    }


def drifted(root: Path) -> list[Path]:
    """Pages that are not what the code says now."""
    return [path for path, text in pages(root).items() if not path.is_file() or path.read_text() != text]


def _variable(option: varspec.Option) -> list[str]:
    lines = [f"### `{option.name}`", "", f"{_facts(option)}  ", _markup(option.description), ""]
    if option.options:
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in option.options.values():
            default = "**required**" if key.required else f"`{_yaml(key.default)}`"
            lines.append(f"| `{key.name}` | {_type(key)} | {default} | {_cell(_markup(key.description))} |")
        lines.append("")
    return lines


def _facts(option: varspec.Option) -> str:
    facts = [_type(option), "**required**" if option.required else f"default `{_yaml(option.default)}`"]
    if option.secret:
        facts.append("secret: keep it in Ansible Vault")
    return ", ".join(facts) + "."


def _type(option: varspec.Option) -> str:
    if option.choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in option.choices)
    return f"{option.type} of {option.elements}" if option.elements else option.type


def _rule(rule: Any) -> list[str]:
    notes = [f"*{rule.severity}*", "may be waived" if rule.waivable else "cannot be waived"]
    if rule.source:
        notes.append(f"source: {rule.source}")
    fix = re.sub(r"\{([a-z_]+)\}", r"*\1*", rule.fix)  # words in braces stand for what was found
    return [
        f"#### {rule.id}: {rule.title}",
        "",
        f"{', '.join(notes)}. {_markup(rule.explanation)}  ",
        f"**Fix:** {_markup(fix)}.",
        "",
    ]


def _signature(signature: Any) -> list[str]:
    notes = [f"*{signature.verdict.replace('_', ' ')}*"] + (["*at once*"] if signature.fatal else [])
    return [
        f"### {signature.id}",
        "",
        f"{', '.join(notes)}. {signature.cause[:1].upper()}{signature.cause[1:]}.  ",
        f"**Fix:** {signature.fix}.  ",
        f"**Source:** {signature.source}.",
        "",
        "```regex",
        signature.pattern,
        "```",
        "",
    ]


def _article(stage: str) -> str:
    return {"host": "the host", "gpu": "its GPUs", "slot": "the slots"}.get(stage, f"the {stage}")


def _markup(text: str) -> str:
    """Ansible's C(), I(), B() and V() in Markdown."""
    text = re.sub(r"\b[CV]\(([^)]*)\)", r"`\1`", text)
    text = re.sub(r"\bI\(([^)]*)\)", r"*\1*", text)
    return re.sub(r"\bB\(([^)]*)\)", r"**\1**", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if value == "":
        return '""'
    return value if isinstance(value, str) else json.dumps(value)


def main(arguments: Iterable[str] = ()) -> int:
    root = content.root()
    if not content.in_checkout():
        print("the pages belong to a checkout, and this is an installed package", file=sys.stderr)
        return 1
    if "--check" in list(arguments):
        stale = drifted(root)
        for path in stale:
            print(f"{path.relative_to(root)} is out of date: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages(root).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
