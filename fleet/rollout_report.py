"""What a host's rollout is reported as, from what became of each of its slots."""

from __future__ import annotations

from typing import Any

ORDER = (
    "not_reached",
    "noop",
    "checked",
    "deployed",
    "returned",
    "refused",
    "locked",
    "failed_rolled_back",
    "failed_not_rolled_back",
)
BAD = ("refused", "locked", "failed_rolled_back", "failed_not_rolled_back")


def worst(outcomes: list[str]) -> str:
    return max(outcomes, key=ORDER.index, default="noop")


def explain(item: dict[str, Any]) -> str:
    """One slot's failure as an operator reads it: cause first, then where the slot stands, then what to do."""
    verdict = item.get("verdict") or {}
    cause = verdict.get("cause") or item.get("cause") or "no cause was found"
    if item["outcome"] in ("refused", "locked"):
        return f"slot {item['slot']}: refused, nothing was touched: {cause}"
    if item["outcome"] == "failed_rolled_back":
        where = f"it serves {item['serves']} again" if item.get("serves") else "nothing served there before"
    else:
        where = f"NOT rolled back: {item.get('cause')}"
    root = verdict.get("root")
    text = f"slot {item['slot']}: {cause}; {where}"
    if root and root not in text:
        text += f" [root line: {root}]"
    return text + (f" [fix: {verdict['fix']}]" if verdict.get("fix") else "")
