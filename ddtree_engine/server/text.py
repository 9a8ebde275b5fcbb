"""From tokens to text, one token at a time: whole characters only, and nothing of a stop string ever shown."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so a decoder that maps one token to one byte needs four tokens at most.
MAX_PENDING_TOKENS = 4


class TextStream(Protocol):
    """Text of a growing token sequence. The pieces joined are what decoding all tokens at once would give."""

    def push(self, token: int) -> str:
        """Text that became certain with this token; empty while a character is still incomplete."""

    def flush(self) -> str:
        """The rest, at the end: an incomplete character becomes U+FFFD."""


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself if printable, else one from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


class ByteLevelText:
    """For byte-level BPE: every token is a run of bytes, so an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return ""
        table = _byte_of_character()
        try:
            raw = bytes(table[character] for character in written)
        except KeyError:  # an added token stands in the vocabulary as plain text
            raw = written.encode()
        return self._decoder.decode(raw)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowText:
    """For any other decoder: decode a short window again with each token and keep what is new.

    The window starts at a token whose text is already out, because decoders may treat the first token specially
    (a leading space, for instance).
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=False) if self._shown else ""
        return self._tokenizer.decode(self._shown + self._pending, skip_special_tokens=False)[len(before) :]

    def _take(self, text: str) -> str:
        self._shown, self._pending = self._pending, []
        return text


class TextDecoder:
    """What is fixed for one tokenizer: which tokens are special, and which stream suits its decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        layout = json.loads(tokenizer.to_str())
        self.special = frozenset(token["id"] for token in layout.get("added_tokens") or [] if token.get("special"))
        self._byte_level = (layout.get("decoder") or {}).get("type") == "ByteLevel"

    def stream(self) -> TextStream:
        return (ByteLevelText if self._byte_level else WindowText)(self._tokenizer, self.special)


class StopScanner:
    """Passes text on, holding back whatever might be the beginning of a stop string."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete). The stop string itself is never shown."""
        held = self._held + text
        hits = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if hits:
            self._held = ""
            return held[: min(hits)], True
        keep = self._unsafe_suffix(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _unsafe_suffix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
