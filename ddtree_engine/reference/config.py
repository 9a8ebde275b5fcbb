"""What a checkpoint's config.json says, checked: anything this engine would compute wrongly is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN = "qwen3"
HYBRIDS = ("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True)
class BlockConfig:
    """Shape of one transformer stack (grouped heads with normalised queries and keys, gated MLP)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    rotary_dim: int  # values of each head that are turned
    gated: bool  # attention's output passes a gate (hybrids)
    norm_offset: float  # added to the stored norm weights: 1 where they are stored around zero (hybrids)


@dataclass(frozen=True)
class LinearConfig:
    """Shape of a gated-delta-net layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees, the current one included

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class TargetConfig:
    block: BlockConfig
    vocab: int
    tied: bool
    eos_token_ids: frozenset[int]
    attention_layers: tuple[int, ...]  # the others are linear
    linear: LinearConfig | None
    prefix: str  # of the tensors' names


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
    outer = read_json(path)
    kind = outer.get("model_type")
    if kind != PLAIN and kind not in HYBRIDS:
        known = ", ".join((PLAIN, *HYBRIDS))
        raise ValueError(f"{path}: model_type {kind!r} is not supported; this engine loads {known}")
    raw = outer.get("text_config", outer)  # multimodal checkpoints nest the language model's part
    hybrid = kind in HYBRIDS
    block = _block(raw, path, hybrid=hybrid)
    eos = raw.get("eos_token_id", outer.get("eos_token_id"))
    return TargetConfig(
        block=block,
        vocab=_integer(raw, "vocab_size", path),
        tied=bool(raw.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
        attention_layers=_attention_layers(raw, path, block.layers) if hybrid else tuple(range(block.layers)),
        linear=_linear(raw, path) if hybrid else None,
        prefix="model.language_model" if raw is not outer else "model",
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
        block=_block(raw, path, hybrid=False),
        block_size=block_size,
        mask_token=_integer(dflash, "mask_token_id", path),
        target_layers=tuple(layers),
        target_depth=raw.get("num_target_layers"),
    )


def _block(raw: dict[str, Any], path: Path, *, hybrid: bool) -> BlockConfig:
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
    head_dim = raw.get("head_dim") or _integer(raw, "hidden_size", path) // heads
    turned = raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.25 if hybrid else 1.0))
    return BlockConfig(
        layers=_integer(raw, "num_hidden_layers", path),
        hidden=_integer(raw, "hidden_size", path),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_integer(raw, "intermediate_size", path),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rotary_dim=int(head_dim * turned),
        gated=hybrid,
        norm_offset=1.0 if hybrid else 0.0,
    )


def _linear(raw: dict[str, Any], path: Path) -> LinearConfig:
    config = LinearConfig(
        key_heads=_integer(raw, "linear_num_key_heads", path),
        value_heads=_integer(raw, "linear_num_value_heads", path),
        key_dim=_integer(raw, "linear_key_head_dim", path),
        value_dim=_integer(raw, "linear_value_head_dim", path),
        kernel=_integer(raw, "linear_conv_kernel_dim", path),
    )
    if config.value_heads % config.key_heads:
        raise ValueError(f"{path}: {config.value_heads} value heads cannot share {config.key_heads} key heads")
    return config


def _attention_layers(raw: dict[str, Any], path: Path, layers: int) -> tuple[int, ...]:
    kinds = raw.get("layer_types")
    if kinds is None:
        interval = _integer(raw, "full_attention_interval", path)
        return tuple(range(interval - 1, layers, interval))
    unknown = set(kinds) - {"full_attention", "linear_attention"}
    if unknown or len(kinds) != layers:
        raise ValueError(f"{path}: layer_types should name full_attention or linear_attention for {layers} layers")
    return tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")


def _integer(raw: dict[str, Any], key: str, path: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{path}: {key} should be a whole number, not {value!r}")
    return value
