"""What a checkpoint's config.json says, checked: anything this engine would compute wrongly is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BlockConfig:
    """Shape of one transformer stack (Qwen3 style: grouped heads with normalised queries and keys, gated MLP)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


@dataclass(frozen=True)
class TargetConfig:
    block: BlockConfig
    vocab: int
    tied: bool
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter: reads the outputs of `target_layers` and fills a block of `block_size` masked tokens at
    once."""

    block: BlockConfig
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    target_depth: int | None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


def target_config(folder: Path) -> TargetConfig:
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") != "qwen3":
        raise ValueError(f"{path}: model_type {raw.get('model_type')!r} is not supported; this engine loads 'qwen3'")
    eos = raw.get("eos_token_id")
    return TargetConfig(
        block=_block(raw, path),
        vocab=_integer(raw, "vocab_size", path),
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
    )


def draft_config(folder: Path) -> DraftConfig:
    path = folder / "config.json"
    raw = read_json(path)
    if "DFlashDraftModel" not in raw.get("architectures", []):
        raise ValueError(f"{path}: architectures {raw.get('architectures')} does not name DFlashDraftModel")
    dflash = raw.get("dflash_config") or {}
    layers = dflash.get("target_layer_ids")
    if not layers:
        raise ValueError(f"{path}: dflash_config.target_layer_ids is missing")
    block_size = _integer(raw, "block_size", path)
    if block_size < 2:
        raise ValueError(f"{path}: a block_size of {block_size} drafts nothing; at least 2 is needed")
    return DraftConfig(
        block=_block(raw, path),
        block_size=block_size,
        mask_token=_integer(dflash, "mask_token_id", path),
        target_layers=tuple(layers),
        target_depth=raw.get("num_target_layers"),
    )


def _block(raw: dict[str, Any], path: Path) -> BlockConfig:
    for key, wanted in (("attention_bias", False), ("use_sliding_window", False), ("rope_scaling", None)):
        if raw.get(key, wanted) not in (wanted, None):
            raise ValueError(f"{path}: {key}={raw[key]!r} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; this engine computes 'silu'")
    heads = _integer(raw, "num_attention_heads", path)
    kv_heads = _integer(raw, "num_key_value_heads", path)
    if heads % kv_heads:
        raise ValueError(f"{path}: {heads} attention heads cannot share {kv_heads} key/value heads")
    rope = raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta", rope.get("rope_theta"))
    if theta is None:
        raise ValueError(f"{path}: rope_theta is missing")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_type {rope['rope_type']!r} is not supported")
    return BlockConfig(
        layers=_integer(raw, "num_hidden_layers", path),
        hidden=_integer(raw, "hidden_size", path),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or _integer(raw, "hidden_size", path) // heads,
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
    )


def _integer(raw: dict[str, Any], key: str, path: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{path}: {key} should be a whole number, not {value!r}")
    return value
