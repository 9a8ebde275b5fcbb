#!/usr/bin/env python3
"""A small random hybrid pair (Qwen3-Next target, DFlash drafter) for correctness tests; needs transformers 5.6.

    python make_hybrid.py OUT TOKENIZER_FOLDER

The vocabulary has 64 tokens, so that a random drafter's 8 candidates hold the target's choice often enough to accept
paths through any sibling: what a test of forked recurrent state needs is branching, not a good drafter. Every expert is
always active, so that rounding cannot flip a router. Prompts are token ids, the tokenizer is only there to be loaded.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY, HIDDEN, BLOCK, MASK_TOKEN = 64, 256, 16, 3
LAYERS, INTERVAL = 8, 4  # every fourth layer is full attention
TARGET_LAYERS = [1, 3, 5]


def target_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention" if (i + 1) % INTERVAL else "full_attention" for i in range(LAYERS)],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def draft_config() -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "layer_types": ["full_attention"] * 2,
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token": "<|MASK|>", "mask_token_id": MASK_TOKEN, "target_layer_ids": TARGET_LAYERS},
    }


def make_target(out: Path) -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(1)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**target_config()))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() >= 2:
                fan_in = value.shape[-1] if "conv1d" not in name else value.shape[-1] * 2
                value.normal_(0.0, 1.5 / fan_in**0.5)
            elif "dt_bias" in name:
                value.uniform_(-4.0, 0.0)  # gates that remember for many tokens, and some that do not
            elif "A_log" in name:
                value.uniform_(-1.0, 0.5)
        model.lm_head.weight.normal_(0.0, 0.5)
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
    model.to(torch.bfloat16).save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["full_attention_interval"] = INTERVAL  # the server's own configuration class wants it
    path.write_text(json.dumps(config, indent=1))


def make_draft(out: Path, example: Path) -> None:
    """Random weights under the names and in the shapes of the example drafter, scaled to this pair's sizes."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch.manual_seed(2)
    kept: dict[str, torch.Tensor] = {}
    with safe_open(str(example / "model.safetensors"), "pt") as weights:
        for name in list(weights.keys()):
            shape = list(weights.get_slice(name).get_shape())
            if name.startswith(("layers.2", "layers.3")) or ".layers.2." in name or ".layers.3." in name:
                continue
            if name.split(".")[-2] == "fc":
                shape = [HIDDEN, HIDDEN * len(TARGET_LAYERS)]
            if len(shape) == 1:
                kept[name] = torch.ones(shape, dtype=torch.bfloat16)
                continue
            if "gate_proj" in name or "up_proj" in name:
                shape = [512, HIDDEN]
            elif "down_proj" in name:
                shape = [HIDDEN, 512]
            kept[name] = (torch.randn(shape) * 1.5 / shape[-1] ** 0.5).to(torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    save_file(kept, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(draft_config(), indent=1))


def main() -> None:
    out, example = Path(sys.argv[1]), Path(sys.argv[2])
    make_target(out / "target")
    make_draft(out / "draft", example / "draft")
    for part in ("target", "draft"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(example / "target" / file, out / part / file)
    print(f"{out}: hybrid pair with {LAYERS} layers, vocabulary {VOCABULARY}")


if __name__ == "__main__":
    main()
