"""Tokens to text: exact characters however tokens split them, and stop strings that are never shown."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from ddtree_engine.models import resolve
from ddtree_engine.server.chat import ChatTemplate, Message, TemplateError
from ddtree_engine.server.text import StopScanner, TextDecoder

SAMPLE = "naïve → 😀 «ß» 漢字\u0301 tab\tend\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve("embedded", "target") / "tokenizer.json"))


def _pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[str]:
    stream = TextDecoder(tokenizer).stream()
    return [*(stream.push(token) for token in tokens), stream.flush()]


def test_characters_split_over_tokens_come_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(SAMPLE).ids
    assert any("�" in tokenizer.decode([token]) for token in tokens), "the sample must split characters"
    pieces = _pieces(tokenizer, tokens)
    assert "".join(pieces) == SAMPLE
    assert not any("�" in piece for piece in pieces)


def test_any_token_sequence_reads_as_when_decoded_at_once(tokenizer: Tokenizer) -> None:
    chance = random.Random(5)
    size = tokenizer.get_vocab_size()
    for _ in range(300):
        tokens = [chance.randrange(size) for _ in range(chance.randrange(1, 12))]
        assert "".join(_pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|endoftext|>")
    assert "".join(_pieces(tokenizer, [*tokenizer.encode("a").ids, end])) == "a"


def test_a_character_that_never_completes_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.encode("😀").ids[0]
    assert _pieces(tokenizer, [first_byte]) == ["", "�"]


def test_tokenizers_with_byte_fallback_and_word_marks_stream_the_same_text() -> None:
    words = ["<unk>", "▁Hello", "▁world", "!", "▁"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    smile = [vocabulary[f"<0x{byte:02X}>"] for byte in "😀".encode()]
    tokens = [1, 2, *smile, 3, 4, *smile, 2]
    pieces = _pieces(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) == "Hello world😀! 😀 world"
    assert not any("�" in piece for piece in pieces)


def _scan(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    shown: list[str] = []
    for piece in pieces:
        text, hit = scanner.push(piece)
        shown.append(text)
        if hit:
            return shown, True
    return [*shown, scanner.flush()], False


def test_a_stop_string_is_found_wherever_pieces_split_it() -> None:
    text, stop = "one two three", "wo th"
    for at in range(1, len(text)):
        for next_at in range(at, len(text)):
            shown, hit = _scan([stop], [text[:at], text[at:next_at], text[next_at:]])
            assert hit
            assert "".join(shown) == "one t"


def test_what_might_become_a_stop_string_is_held_and_released_if_it_does_not() -> None:
    scanner = StopScanner(["abcd", "cx"])
    assert scanner.push("zab") == ("z", False)
    assert scanner.push("c") == ("", False)
    assert scanner.push("a") == ("abc", False)
    assert scanner.push("!") == ("a!", False)
    assert scanner.push("ab") == ("", False)
    assert scanner.flush() == "ab"


def test_of_several_stop_strings_the_earliest_cuts() -> None:
    assert _scan(["late", "x l"], ["so x late"]) == (["so "], True)


def test_random_pieces_show_exactly_what_stands_before_the_first_stop() -> None:
    chance = random.Random(7)
    for _ in range(500):
        text = "".join(chance.choice("ab") for _ in range(24))
        stop = "".join(chance.choice("ab") for _ in range(chance.randrange(1, 8)))
        shown, hit = _scan([stop], list(text))
        assert hit == (stop in text)
        assert "".join(shown) == text.partition(stop)[0]


def test_the_models_own_chat_template_is_used() -> None:
    template = ChatTemplate.of_model(resolve("embedded", "target"))
    assert template.own
    assert template.render([Message("user", "hi")]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_messages_become_a_plain_transcript(tmp_path: Path) -> None:
    template = ChatTemplate.of_model(tmp_path)
    assert not template.own
    assert template.render([Message("system", "be brief"), Message("user", "hi")]) == (
        "system: be brief\nuser: hi\nassistant:"
    )


def test_a_template_file_wins_and_may_refuse_messages(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old", "bos_token": {"content": "<s>"}}')
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    template = ChatTemplate.of_model(tmp_path)
    assert template.render([Message("user", "hi")]) == "<s>"
    with pytest.raises(TemplateError, match="no system role"):
        template.render([Message("system", "hi")])


def test_a_template_cannot_reach_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TemplateError):
        template.render([Message("user", "hi")])
