"""The places where the patched SGLang calls this package, checked when the worker module is imported.

A half-patched engine must not start: it would serve, and be wrong or slow without saying so. Each seam is recognised by
a name that the patched function's code uses, so the check needs no source files.
"""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass
from typing import Any

ENGINE_VERSION = "0.5.11"


@dataclass(frozen=True)
class Seam:
    module: str
    qualname: str
    uses: str  # a name or string constant that the patched code contains
    purpose: str


SEAMS: tuple[Seam, ...] = (
    Seam("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.is_dflash", "DDTREE", "shares DFLASH's handling"),
    Seam("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.is_ddtree", "DDTREE", "the algorithm's name"),
    Seam("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.create_worker", "create_worker", "the worker"),
    Seam("sglang.srt.server_args", "ServerArgs.__post_init__", "choose_backends", "backends and refusals"),
    Seam("sglang.srt.server_args", "ServerArgs._handle_speculative_decoding", "resolve", "verify width"),
    Seam("sglang.srt.server_args", "ServerArgs.add_cli_args", "--speculative-ddtree-budget", "the flags"),
    Seam(
        "sglang.srt.speculative.dflash_worker",
        "DFlashWorker.__init__",
        "_configure_draft_server_args",
        "the drafter's own width",
    ),
    Seam(
        "sglang.srt.speculative.dflash_worker",
        "DFlashWorker._prepare_for_speculative_decoding",
        "_make_verify_input",
        "the tree instead of the chain",
    ),
    Seam(
        "sglang.srt.model_executor.cuda_graph_runner",
        "CudaGraphRunner.get_spec_info",
        "capture_verify_input",
        "graphs of tree width",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner._dummy_run",
        "capture_verify_input",
        "warm-up of tree width",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_kv_cache_mixin",
        "ModelRunnerKVCacheMixin._init_pools",
        "speculative_dflash_block_size",
        "room for a whole drafted block",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.new_tokens_required_next_decode",
        "speculative_dflash_block_size",
        "reserve for a whole drafted block",
    ),
    Seam("sglang.srt.managers.scheduler", "Scheduler.get_internal_state", "ddtree_state", "counters"),
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend",
        "MambaAttnBackendBase._replay_metadata",
        "tree_batch_size",
        "padding told from one-token prefixes",
    ),
)


class SeamMissing(ImportError):
    """The SGLang in use is not the patched one this package belongs to."""


def _contains(code: types.CodeType, wanted: str) -> bool:
    if wanted in code.co_names or wanted in code.co_varnames:
        return True
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if _contains(constant, wanted):
                return True
        elif constant == wanted:
            return True
    return False


def missing(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """One line for each seam that is not there, naming it, what it is for and what was found instead."""
    lines = []
    for seam in seams:
        where = f"{seam.module}:{seam.qualname}"
        try:
            target: Any = importlib.import_module(seam.module)
            for part in seam.qualname.split("."):
                target = getattr(target, part)
            target = getattr(target, "__func__", target)
            code = getattr(getattr(target, "__wrapped__", target), "__code__", None)
        except (ImportError, AttributeError) as error:
            lines.append(f"{where} ({seam.purpose}): {type(error).__name__}: {error}")
            continue
        if code is None or not _contains(code, seam.uses):
            lines.append(f"{where} ({seam.purpose}): does not mention {seam.uses!r}")
    return lines


def check() -> None:
    """Raise with the whole list when any seam is missing."""
    lines = missing()
    if lines:
        raise SeamMissing(
            f"this SGLang lacks {len(lines)} of {len(SEAMS)} DDTree seams; install the patched {ENGINE_VERSION} wheel. "
            "Missing: " + "; ".join(lines)
        )
