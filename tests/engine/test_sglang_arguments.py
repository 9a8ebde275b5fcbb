"""What DDTREE makes of the server's arguments, and which of them it refuses, told from a plain namespace."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_engine.sglang import arguments


def server_args(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "speculative_draft_model_path": "/models/draft",
        "speculative_num_draft_tokens": None,
        "speculative_dflash_draft_window_size": None,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "page_size": None,
        "attention_backend": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "linear_attn_backend": "triton",
        "linear_attn_decode_backend": None,
        "linear_attn_prefill_backend": None,
        "mamba_scheduler_strategy": "auto",
        "disable_radix_cache": False,
        "speculative_ddtree_budget": None,
        "speculative_ddtree_topk": None,
        "speculative_ddtree_shadow": False,
        "speculative_ddtree_allow_hybrid_unsafe": False,
        "architectures": ["Qwen3ForCausalLM"],
    }
    values.update(changes)
    architectures = values.pop("architectures")
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=architectures))
    return SimpleNamespace(get_model_config=lambda: config, **values)


def resolved(block_size: int = 16, **changes: Any) -> SimpleNamespace:
    args = server_args(**changes)
    arguments.choose_backends(args)
    args.speculative_num_draft_tokens = block_size  # what DFLASH's own resolution leaves
    args.speculative_eagle_topk, args.speculative_num_steps = 1, 1
    arguments.resolve(args)
    return args


def test_width_follows_from_the_budget_and_the_drafter_keeps_its_block() -> None:
    args = resolved(speculative_ddtree_budget=7, speculative_ddtree_topk=4)
    assert (args.speculative_num_draft_tokens, args.speculative_dflash_block_size) == (8, 16)
    assert args.speculative_eagle_topk > 1, "attention and gated delta nets would take their chain path"
    assert args.speculative_ddtree_topk == 4


def test_defaults_are_fifteen_nodes_of_eight_candidates_on_triton() -> None:
    args = resolved()
    assert (args.speculative_ddtree_budget, args.speculative_ddtree_topk) == (15, 8)
    assert (args.attention_backend, args.speculative_num_draft_tokens) == ("triton", 16)


def test_shadow_leaves_the_linear_widths_alone() -> None:
    args = resolved(speculative_ddtree_shadow=True, speculative_ddtree_budget=63)
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk) == (16, 1)
    assert args.speculative_ddtree_budget == 63


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"attention_backend": "fa3"}, "--attention-backend"),
        ({"decode_attention_backend": "trtllm_mha"}, "--decode-attention-backend"),
        ({"prefill_attention_backend": "triton", "decode_attention_backend": "flashinfer"}, "different attention"),
        ({"page_size": 16}, "page size 16"),
        ({"pp_size": 2}, "--pp-size 1"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"linear_attn_backend": "flashinfer"}, "--linear-attn-backend triton"),
        ({"linear_attn_decode_backend": "cutedsl"}, "--linear-attn-decode-backend triton"),
        ({"speculative_num_draft_tokens": 8}, "--speculative-ddtree-budget"),
        ({"speculative_accept_threshold_acc": 0.9}, "thresholds"),
        ({"speculative_dflash_draft_window_size": 512}, "--speculative-dflash-draft-window-size"),
        ({"speculative_ddtree_budget": 0}, "--speculative-ddtree-budget 0"),
        ({"speculative_ddtree_budget": 256}, "from 1 to 255"),
        ({"speculative_ddtree_topk": 0}, "--speculative-ddtree-topk 0"),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "mamba_scheduler_strategy": "extra_buffer"},
            "no_buffer",
        ),
    ],
)
def test_unsupported_combinations_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(arguments.UnsupportedConfiguration, match=named):
        resolved(**changes)


def test_a_block_of_one_token_drafts_nothing() -> None:
    with pytest.raises(arguments.UnsupportedConfiguration, match="block size 1"):
        resolved(block_size=1)


def test_hybrids_are_served_without_the_prefix_cache_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        args = resolved(architectures=["Qwen3_5ForConditionalGeneration"])
    assert args.disable_radix_cache
    assert "radix cache" in caplog.text
    assert not resolved().disable_radix_cache


def test_the_unsafe_flag_warns_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plain = vars(resolved())
    with caplog.at_level(logging.WARNING):
        flagged = vars(resolved(speculative_ddtree_allow_hybrid_unsafe=True))
    assert "not needed" in caplog.text
    skip = {"speculative_ddtree_allow_hybrid_unsafe", "get_model_config"}
    assert {k: v for k, v in plain.items() if k not in skip} == {k: v for k, v in flagged.items() if k not in skip}


def model_runner(steps: int = 16, dtype: str = "torch.float32", gdn: object = object()) -> Any:
    cache = SimpleNamespace(
        temporal=SimpleNamespace(dtype=dtype), intermediate_ssm=SimpleNamespace(shape=(3, 9, steps, 4, 64, 64))
    )
    return SimpleNamespace(
        sliding_window_size=None,
        use_mla_backend=False,
        mambaish_config=object(),
        hybrid_gdn_config=gdn,
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache)),
        server_args=SimpleNamespace(speculative_num_draft_tokens=16),
    )


def test_a_hybrid_whose_buffers_fit_is_accepted() -> None:
    arguments.validate_model(model_runner())


@pytest.mark.parametrize(
    ("runner", "named"),
    [
        (model_runner(steps=17), "differs from the 17 steps"),
        (model_runner(dtype="torch.bfloat16"), "--mamba-ssm-dtype float32"),
        (model_runner(gdn=None), "not gated delta nets"),
        (SimpleNamespace(sliding_window_size=4096), "sliding-window"),
        (SimpleNamespace(use_mla_backend=True), "MLA"),
    ],
)
def test_models_that_trees_would_serve_wrongly_are_refused(runner: Any, named: str) -> None:
    with pytest.raises(arguments.UnsupportedConfiguration, match=named):
        arguments.validate_model(runner)
