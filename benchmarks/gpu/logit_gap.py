#!/usr/bin/env python3
"""Teacher-force the tokens of a kit run through the model in fp32 on the CPU: how far below the arg-max does each lie?

    python benchmarks/gpu/logit_gap.py TOKENS.json [--model DIR] [--bar 0.01] [--out GAPS.json]

Prints per arm and concurrency the largest and 99th-percentile distance and how many tokens are not the fp32 arg-max,
and for every prompt that differs from AR at concurrency 1 the fp32 top-1/top-2 gap at the first difference.
Exit status 1 when a speculative arm's largest distance exceeds the bar and AR's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from compare import mismatches  # noqa: E402

from ddtree_engine.reference.span import Span  # noqa: E402
from ddtree_engine.reference.target import Target  # noqa: E402


class Teacher:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.target = Target.load(folder, 4096, "cpu", torch.float32)
        self._seen: dict[tuple[int, ...], torch.Tensor] = {}

    def distances(self, prompt: list[int], output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Per output token its distance below the arg-max, and the top-1/top-2 gap there (both in logits)."""
        tokens = prompt + output[:-1]
        with torch.inference_mode():
            span = Span.chain(tokens, 0)
            hidden = self.target.forward(span, self.target.new_state(len(tokens))).hidden
            logits = self.target.logits(hidden[len(prompt) - 1 :])
        top = logits.topk(2, dim=-1).values
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return top[:, 0] - chosen, top[:, 0] - top[:, 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "ddtree_engine" / "models" / "demo-code" / "target")
    parser.add_argument("--bar", type=float, default=0.01)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = json.loads(args.tokens.read_text())
    teacher = Teacher(args.model)
    prompts = [teacher.tokenizer.encode(text).ids for text in run["prompts"]]
    cache: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def judged(number: int, output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        key = (number, *output)
        if key not in cache:  # most arms agree on most prompts
            cache[key] = teacher.distances(prompts[number], output)
        return cache[key]

    base = run["tokens"]["ar"][min(run["tokens"]["ar"], key=int)]
    report: dict[str, Any] = {"bar": args.bar, "arms": {}}
    for arm, by_concurrency in run["tokens"].items():
        for concurrency, outputs in by_concurrency.items():
            gap = torch.cat([judged(number, output)[0] for number, output in enumerate(outputs)])
            differ = []
            for number, position in mismatches(base, outputs):
                differ.append([number, position, round(float(judged(number, outputs[number])[1][position]), 5)])
            report["arms"][f"{arm}@{concurrency}"] = row = {
                "tokens": gap.numel(),
                "max": round(float(gap.max()), 5),
                "p99": round(float(gap.quantile(0.99)), 5),
                "not_argmax": int((gap > 0).sum()),
                "differ_prompt_position_gap": differ,
            }
            print(
                f"{arm}@{concurrency}: max {row['max']}, p99 {row['p99']}, not arg-max {row['not_argmax']}", flush=True
            )
            if differ:
                print(f"  differing prompts: {len(differ)}, gaps {sorted(d[2] for d in differ)}", flush=True)
    ar = max(row["max"] for name, row in report["arms"].items() if name.startswith("ar@"))
    worst = max(row["max"] for name, row in report["arms"].items() if not name.startswith("ar@"))
    report.update(ar_max=ar, speculative_max=worst, passed=worst <= max(args.bar, ar))
    print(
        f"largest distance: AR {ar}, speculative {worst}, bar {args.bar}: {'passed' if report['passed'] else 'FAILED'}"
    )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
