"""Token identity between arms, judged by what plain decoding does to itself when only the batch size changes."""

from __future__ import annotations

from typing import Any

Tokens = dict[str, dict[str, list[list[int]]]]  # arm -> concurrency -> prompt -> token ids


def mismatches(a: list[list[int]], b: list[list[int]]) -> list[tuple[int, int]]:
    """(prompt, first differing position) of every prompt whose tokens differ."""
    found = []
    for prompt, (left, right) in enumerate(zip(a, b, strict=True)):
        if left != right:
            first = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), None)
            found.append((prompt, min(len(left), len(right)) if first is None else first))
    return found


def compare(tokens: Tokens) -> dict[str, Any]:
    """Every arm and concurrency against AR at concurrency 1. The bar: no more differing prompts than AR shows against
    itself between its lowest and highest concurrency."""
    if "ar" not in tokens or not tokens["ar"]:
        return {"lines": ["no AR arm: nothing to compare with"], "within_ar": False, "pairs": {}}
    base_concurrency = min(tokens["ar"], key=int)
    base = tokens["ar"][base_concurrency]
    pairs: dict[str, list[tuple[int, int]]] = {}
    for arm, by_concurrency in tokens.items():
        for concurrency, ids in by_concurrency.items():
            if (arm, concurrency) != ("ar", base_concurrency):
                pairs[f"{arm}@{concurrency}"] = mismatches(base, ids)
    allowed = max((len(found) for name, found in pairs.items() if name.startswith("ar@")), default=0)
    lines = [f"against ar@{base_concurrency}: AR differs from itself on up to {allowed} of {len(base)} prompts"]
    lines += [f"  {name}: {len(found)} differ {found}" for name, found in pairs.items()]
    trees = [len(found) for name, found in pairs.items() if not name.startswith(("ar@", "dflash@", "leaky@"))]
    return {"lines": lines, "within_ar": all(n <= allowed for n in trees), "pairs": pairs, "allowed": allowed}
