"""Writes pairs in Hugging Face format, as SGLang, transformers and this package load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .shapes import END, MASK, SPECIAL_TOKENS, Pair

WEIGHTS = "model.safetensors"


def export_target(folder: Path, pair: Pair, tensors: Mapping[str, torch.Tensor]) -> None:
    """`tensors`: a TargetNetwork's state."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / WEIGHTS, {f"model.{name}": tensor for name, tensor in tensors.items()})
    _write(
        folder / "config.json",
        _common(pair, pair.layers) | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": pair.layers},
    )
    _write(
        folder / "generation_config.json",
        {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "do_sample": False},
    )


def export_draft(folder: Path, pair: Pair, tensors: Mapping[str, torch.Tensor]) -> None:
    """`tensors`: a DraftNetwork's state."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / WEIGHTS, tensors)
    _write(
        folder / "config.json",
        _common(pair, pair.draft_layers)
        | {
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": pair.draft_layers,
            "layer_types": ["full_attention"] * pair.draft_layers,
            "block_size": pair.block,
            "num_target_layers": pair.layers,
            "dflash_config": {
                "mask_token": SPECIAL_TOKENS[MASK],
                "mask_token_id": MASK,
                "target_layer_ids": list(pair.target_layers),
            },
        },
    )


def _common(pair: Pair, layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": pair.hidden,
        "intermediate_size": pair.intermediate,
        "num_attention_heads": pair.heads,
        "num_key_value_heads": pair.kv_heads,
        "head_dim": pair.head_dim,
        "vocab_size": pair.vocabulary,
        "rms_norm_eps": pair.eps,
        "rope_theta": int(pair.rope_theta),
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": END,
        "eos_token_id": END,
        "use_cache": True,
    }


def _save(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    half = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(half, file, metadata={"format": "pt"})


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
