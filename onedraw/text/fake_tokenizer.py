"""Tokenizers and a chat template for models without a checkpoint: the fake backend, and random weights.

The fake backend has one token per byte. Random weights of a known shape have a byte-level BPE of their own vocabulary size, made
of the words of this package's source, so that token masks and detokenization cost what they cost with a real tokenizer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from onedraw.text.chat_template import ChatTemplate
from onedraw.text.tokenizer import Tokenizer

END, TURN, TURN_END = "<|end|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, TURN, TURN_END)  # the special tokens, with the ids 256 to 258 after those of the 256 bytes
READABLE = "etaoin shrdlu cmfwypvbgk"  # The fake model prefers these characters, so that its output can be read.
LONGEST = 24  # most characters of a token of the synthetic tokenizer
_WORDS = re.compile(r" ?[A-Za-z]+|\d{1,3}| ?[!-/:-@\[-`{-~]+|[\n ]+")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)


def fake_tokenizer() -> Tokenizer:
    """Return a tokenizer of 259 tokens: the 256 bytes and three special tokens."""
    return _byte_level_bpe(_bytes_and_special(), [], use_regex=False)


def synthetic_tokenizer(size: int) -> Tokenizer:
    """Return a byte-level BPE of `size` tokens: those of the fake tokenizer, then words and all their beginnings, the most
    frequent words first, then pairs of words. If `size` is less than the size of the fake tokenizer, return that one."""
    vocab, merges = _bytes_and_special(), list[tuple[str, str]]()
    if size <= len(vocab):
        return fake_tokenizer()
    for word in _spellings():
        for stop in range(2, len(word) + 1):
            if word[:stop] not in vocab:
                vocab[word[:stop]] = len(vocab)
                merges.append((word[: stop - 1], word[stop - 1]))
                if len(vocab) == size:
                    return _byte_level_bpe(vocab, merges, use_regex=True)
    raise AssertionError(f"the words of the package make {len(vocab)} tokens, fewer than {size}")


def _bytes_and_special() -> dict[str, int]:
    return {token: number for number, token in enumerate((*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL))}


def _byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], *, use_regex: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, bos_id=None, eos_id=vocab[END])


def _spellings() -> Iterator[str]:
    """Yield words in the alphabet of byte-level BPE, each as in the source and capitalized, without and with a space before it,
    and then pairs of words."""
    counts: Counter[str] = Counter()
    for text in _sources(resources.files("onedraw")):
        counts.update(word[:LONGEST] for word in _WORDS.findall(text) if word.isascii())
    words = sorted(counts, key=lambda word: (-counts[word], word))
    for word in words:
        plain = word.strip(" ")
        for spelling in (word, plain, f" {plain}", plain.capitalize(), f" {plain.capitalize()}"):
            yield spelling.replace(" ", "Ġ").replace("\n", "Ċ")
    plain_words = [word for word in dict.fromkeys(word.strip(" \n") for word in words) if word.isalpha()]
    for first, second in product(plain_words, plain_words):
        yield (first + second.capitalize())[:LONGEST]


def _sources(folder: Traversable) -> Iterator[str]:
    """Yield the texts of all Python files in a folder, in the order of their names, from which the words are taken."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.name.endswith(".py"):
            yield entry.read_text(encoding="utf-8")


def fake_chat_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, bos_token="", eos_token=END)
