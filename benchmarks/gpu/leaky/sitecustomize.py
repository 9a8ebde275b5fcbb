"""The recurrent-state leak of earlier hand-made tree patches, put back on purpose for one arm of the hybrid test.

With this folder first on PYTHONPATH the gated-delta-net layers run the tree as a chain (every node continues from the
node before it, whoever its parent is) and the state committed is the one at the path's length. Nothing else changes.
The arm exists to show that the test sees such a leak.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

WORKER = "ddtree_engine.sglang.worker"


def leak(worker: ModuleType) -> None:
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase

    original: Any = MambaAttnBackendBase.__init__

    def chained(self: Any, model_runner: Any) -> None:
        original(self, model_runner)
        self.topk = 1  # what forcing --speculative-eagle-topk to 1 does

    def by_length(self: Any, *, batch: Any, seq_lens_pre_verify: Any, commit_lens: Any) -> None:
        self.target_worker.model_runner.attn_backend.update_mamba_state_after_mtp_verify(
            accepted_steps=commit_lens.long() - 1,
            mamba_track_indices=None,
            mamba_steps_to_track=None,
            model=self.target_worker.model_runner.model,
        )

    MambaAttnBackendBase.__init__ = chained
    worker.DDTreeWorker._update_target_mamba_state_after_verify = by_length  # type: ignore[attr-defined]
    print("LEAKY: recurrent state runs through siblings in this process", flush=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_leak(module: ModuleType) -> None:
            execute(module)
            leak(module)

        spec.loader.exec_module = exec_and_leak  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
