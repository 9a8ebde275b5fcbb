"""Turns a folder of Python sources into training data: a byte-level BPE vocabulary and two streams of tokens.

    python -m ddtree_engine.models.training.prepare /usr/lib/python3.11 DATA --vocabulary 4096

DATA then holds tokens.bin and heldout.bin (uint16; one file in forty is held out; documents end in token 0), the
tokenizer files and prompts.json: openings of functions and classes, the first half from held-out files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .shapes import END, MASK, SPECIAL_TOKENS

# Files that are data in the guise of source, or broken on purpose.
LEFT_OUT = re.compile(
    r"site-packages|test_unicode|/encodings/|lib2to3/tests/data|bad_coding|badsyntax|cjkencodings|pydoc_data"
    r"|_sysconfigdata|config-3"
)
LARGEST, SMALLEST = 400_000, 200  # bytes; characters
PROMPTS = 32
PROMPT_CONTEXT = 600  # characters before the opening
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def documents(sources: Path) -> list[str]:
    found = []
    for file in sorted(sources.rglob("*.py")):
        if LEFT_OUT.search(str(file)) or not file.is_file() or file.stat().st_size > LARGEST:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= SMALLEST:
            found.append(text)
    return found


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary or tokenizer.token_to_id(SPECIAL_TOKENS[MASK]) != MASK:
        raise ValueError(
            f"the sources give a vocabulary of {tokenizer.get_vocab_size()} tokens, {vocabulary} are wanted: "
            "give more sources or a smaller --vocabulary"
        )
    return tokenizer


def tokenizer_settings() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[END],
        "mask_token": SPECIAL_TOKENS[MASK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += encoding.ids
        ids.append(END)
    return np.array(ids, dtype=np.uint16)


def openings(texts: list[str], count: int, choose: random.Random) -> list[str]:
    """Up to `count` prompts that end in the head of a function or class, one per text."""
    prompts: list[str] = []
    for text in texts:
        heads = [match.start() for match in re.finditer(r"\n    def |\ndef |\nclass ", text)]
        heads = [head for head in heads if head > PROMPT_CONTEXT]
        if heads and len(prompts) < count:
            head = choose.choice(heads)
            end = text.find(":\n", head)
            if 0 < end - head < 200:
                prompts.append(text[max(0, head - PROMPT_CONTEXT) : end + 2])
    return prompts


def prepare(sources: Path, out: Path, vocabulary: int) -> dict[str, int]:
    """Writes everything and says how much there was. Raises ValueError when the sources do not suffice."""
    texts = documents(sources)
    if len(texts) < 16:
        raise ValueError(f"{sources}: only {len(texts)} usable Python files; at least 16 are needed")
    choose = random.Random(0)
    choose.shuffle(texts)
    cut = max(8, len(texts) // 40)
    held, train = texts[:cut], texts[cut:]
    tokenizer = train_tokenizer(train, vocabulary)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings(), indent=1) + "\n", encoding="utf-8")
    streams = {"tokens": encode(tokenizer, train), "heldout": encode(tokenizer, held)}
    for name, stream in streams.items():
        stream.tofile(out / f"{name}.bin")
    prompts = openings(held, PROMPTS // 2, choose) + openings(train, PROMPTS // 2, choose)
    (out / "prompts.json").write_text(json.dumps(prompts, indent=0) + "\n", encoding="utf-8")
    return {"files": len(texts), "held out": len(held), "prompts": len(prompts)} | {
        name: len(stream) for name, stream in streams.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder with Python sources, searched with all its subfolders")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", type=int, default=4096)
    options = parser.parse_args()
    try:
        print(prepare(options.sources, options.out, options.vocabulary))
    except ValueError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
