"""Checkpoints: what loads, and what is refused with its reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_toys import TOY, edit_config, write_toy_pair
from safetensors.torch import load_file, save_file

from ddtree_engine.models import EMBEDDED_PAIR, resolve
from ddtree_engine.reference.engine import Decoder, SamplingParams


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write_toy_pair(tmp_path)
    shutil.copyfile(EMBEDDED_PAIR / "target" / "tokenizer.json", tmp_path / "target" / "tokenizer.json")
    return tmp_path


def load(pair: Path, mode: str = "tree") -> Decoder:
    return Decoder.load(pair / "target", pair / "draft", mode=mode, context_length=64)  # type: ignore[arg-type]


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Changes tensors of a checkpoint; None removes one. Dots in names are written as two underscores."""
    state = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / "model.safetensors")


def first_tokens(decoder: Decoder) -> list[int]:
    return decoder.start([5, 6, 7], SamplingParams(max_tokens=8)).step().tokens


def test_a_sharded_checkpoint_loads_like_a_whole_one(pair: Path) -> None:
    whole = first_tokens(load(pair))
    target = pair / "target"
    state = load_file(target / "model.safetensors")
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, target / file)
    (target / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert first_tokens(load(pair)) == whole
    (target / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"weights are missing: b\.safetensors"):
        load(pair)


def test_an_untied_head_is_used(pair: Path) -> None:
    edit_config(pair / "target", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"no tensor lm_head\.weight"):
        load(pair)
    head = torch.zeros(TOY.vocabulary, TOY.hidden)
    rewrite(pair / "target", lm_head__weight=head)
    assert first_tokens(load(pair, "ar")) == [0]  # all logits are 0


def test_a_tied_checkpoint_may_repeat_its_embedding_as_head(pair: Path) -> None:
    rewrite(
        pair / "target", lm_head__weight=load_file(pair / "target" / "model.safetensors")["model.embed_tokens.weight"]
    )
    load(pair)


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("target", {"model_type": "llama"}, "model_type 'llama' is not supported"),
        ("target", {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ("target", {"attention_bias": True}, "attention_bias"),
        ("target", {"use_sliding_window": True}, "use_sliding_window"),
        ("target", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("target", {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ("target", {"hidden_size": "24"}, "hidden_size should be a whole number"),
        ("target", {"rope_theta": None}, "rope_theta is missing"),
        ("target", {"intermediate_size": None}, "intermediate_size should be"),
        ("target", {"vocab_size": 62}, r"embed_tokens\.weight has shape \(61, 24\)"),
        ("target", {"num_hidden_layers": 4}, r"no tensor model\.layers\.3\."),
        ("target", {"num_hidden_layers": 2}, "11 tensors are not part of this architecture"),
        ("draft", {"architectures": ["Qwen3ForCausalLM"]}, "does not name DFlashDraftModel"),
        ("draft", {"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is missing"),
        ("draft", {"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id should be"),
        ("draft", {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 61}}, "mask token 61 lies outside"),
        ("draft", {"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 3}}, "this one has 3"),
        ("draft", {"num_target_layers": 36}, "made for a target of 36 layers, this one has 3"),
        ("draft", {"hidden_size": 32}, "made for hidden size 32, the target has 24"),
        ("draft", {"block_size": 1}, "drafts nothing"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    pair: Path, part: str, values: dict[str, object], message: str
) -> None:
    edit_config(pair / part, **values)
    with pytest.raises(ValueError, match=message) as error:
        load(pair)
    assert str(pair / part) in str(error.value)


def test_rope_parameters_of_newer_checkpoints_are_read(pair: Path) -> None:
    before = first_tokens(load(pair))
    edit_config(pair / "target", rope_theta=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert first_tokens(load(pair)) == before
    edit_config(pair / "target", rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"})
    with pytest.raises(ValueError, match="rope_type 'yarn'"):
        load(pair)


def test_a_damaged_weight_file_is_named(pair: Path) -> None:
    (pair / "draft" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"draft/model\.safetensors: not a readable"):
        load(pair)


def test_broken_json_is_named(pair: Path) -> None:
    (pair / "target" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"target/config\.json: cannot be read as JSON"):
        load(pair)


def test_a_missing_tokenizer_is_named(pair: Path) -> None:
    (pair / "target" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load(pair)


def test_speculation_without_a_draft_model_is_refused(pair: Path) -> None:
    with pytest.raises(ValueError, match="mode tree needs a draft model"):
        Decoder.load(pair / "target", None, mode="tree")
    assert Decoder.load(pair / "target", None, mode="ar").block_size == 1


@pytest.mark.parametrize(
    "values",
    [{"budget": 0}, {"topk": 0}, {"context_length": 1}, {"mode": "chain"}],
    ids=lambda values: next(iter(values)),
)
def test_senseless_settings_are_refused(pair: Path, values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Decoder.load(pair / "target", pair / "draft", **values)  # type: ignore[arg-type]


def test_embedded_names_the_packaged_pair_and_paths_are_checked(tmp_path: Path) -> None:
    assert (resolve("embedded", "target") / "config.json").is_file()
    assert (resolve("embedded", "draft") / "config.json").is_file()
    assert resolve(str(EMBEDDED_PAIR / "draft"), "draft") == EMBEDDED_PAIR / "draft"
    with pytest.raises(ValueError, match="is not a folder"):
        resolve(str(tmp_path / "nothing"), "target")
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve(str(tmp_path), "draft")


def test_the_packaged_weights_stay_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in EMBEDDED_PAIR.rglob("*") if file.is_file()) < 20e6
