"""The tokenizer and chat template of the fake backend, which needs no checkpoint: one token per byte, and a ChatML template."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from onedraw.text.chat_template import ChatTemplate
from onedraw.text.tokenizer import Tokenizer

END, TURN, TURN_END = "<|end|>", "<|im_start|>", "<|im_end|>"
READABLE = "etaoin shrdlu cmfwypvbgk"  # The fake model prefers these characters, so that its output can be read.

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)


def fake_tokenizer() -> Tokenizer:
    """Return a tokenizer of 259 tokens: the 256 bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, TURN, TURN_END])
    return Tokenizer(backend, bos_id=None, eos_id=len(alphabet))


def fake_chat_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, bos_token="", eos_token=END)
