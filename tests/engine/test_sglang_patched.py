"""The patched engine's own code, where it is unpacked: seams, argument resolution, the law of sampled nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

SITE = os.environ.get("DDTREE_PATCHED_SITE", "")
pytestmark = pytest.mark.skipif(
    not Path(SITE, "sglang").is_dir(), reason="DDTREE_PATCHED_SITE names no unpacked patched engine"
)
DRAWS = 16000


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    here = Path(__file__).parent
    run = subprocess.run(
        [os.environ.get("DDTREE_PATCHED_PYTHON", sys.executable), str(here / "patched_probe.py"), str(DRAWS)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent.parent}"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_every_seam_is_there_and_the_worker_extends_the_engine_s(probe: dict[str, Any]) -> None:
    assert probe["missing"] == []
    assert probe["worker"] == "DFlashWorker"


def test_arguments_resolve_to_tree_width_and_block_size(probe: dict[str, Any]) -> None:
    assert probe["tree"] == {
        "attention_backend": "triton",
        "speculative_num_draft_tokens": 8,
        "speculative_dflash_block_size": 16,
        "speculative_eagle_topk": 2,
        "disable_overlap_schedule": True,
    }
    assert probe["shadow"]["speculative_num_draft_tokens"] == 16
    assert probe["shadow"]["speculative_eagle_topk"] == 1
    assert "page size 16" in probe["paged"]["refused"]


def test_nodes_are_drawn_from_the_target_s_adjusted_distribution(probe: dict[str, Any]) -> None:
    counts = torch.tensor(probe["sampling"]["counts"])
    logits = torch.tensor(probe["sampling"]["logits"], dtype=torch.float64)
    assert counts[0].tolist() == [DRAWS, 0, 0, 0, 0, 0], "greedy requests in a mixed batch take the arg-max"
    scaled = torch.softmax(logits / 0.8, 0)
    for row, kept in ((1, scaled[:3]), (2, scaled[: int((scaled.cumsum(0) - scaled <= 0.7).sum())])):
        assert int(counts[row, len(kept) :].sum()) == 0, "tokens outside top-k or top-p were drawn"
        expected = (kept / kept.sum() * DRAWS).tolist()
        assert chisquare(counts[row, : len(kept)].tolist(), expected).pvalue > 1e-4
