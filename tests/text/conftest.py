"""Strings that are hard to tokenize, and the tiny tokenizer as GGUF metadata."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

BY_HAND = [
    *("", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\n", "\r\n", " \n ", "\n \n", "\x00"),
    *("\x01\x02\x7f", "\ufeff", "\u200b"),
    *("Hello world", " Hello world", "Hello  world", "hello\nworld\n"),
    *("I'm you're we've he'd THEY'LL IT'S don't", "'s", "''s", "can’t"),
    *("3", "33", "333", "3333333333", "3.14159", "1,000,000", " 1", "  12", "\n12", "a1b22c333"),
    *("٣٤٥ १२३ ½ ² Ⅷ 一二三 ₂", "0x1F 1e-9"),
    *("émigré", "e\u0301migre\u0301", "a\u0300\u0301\u0302", "Ä̈pfel", "ﬁ ﬂ", "Å Å Å", "ñ n\u0303"),
    *("क्षत्रिय नमस्ते", "ไทยภาษา", "த஀மிழ்", "עִבְרִית"),
    *("日本語のテキスト", "中文字符，標點。", "한국어 한국어", "漢字かなカナ交じり文。", "မြန်မာ", "ខ្មែរ"),
    *("العربية مرحبا", "Ελληνικά ϗ", "Български нещо"),
    *("🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇯🇵", "😀😀😀", "a🙂b", "🦙.cpp", "\U0001f9d1\u200d\U0001f680"),
    *("☃️☺", "♥♥♥", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𓀀𓀁"),
    *("def f(x):\n    return x ** 2  # square\n", "if (a && b) { c++; }\n\t\telse { --d; }"),
    *("<div class=\"x\">&nbsp;</div>", "a->b::c<T>()"),
    *("SELECT * FROM t WHERE x = 'it''s';", "$\\int_0^1 x^2\\,dx$", "https://example.org/a?b=c&d=%20#e"),
    *("path\\to\\file", "{\"k\": [1, 2.5e3, null]}"),
    *("!!!!!!", "......", "------", "=======", "\"\"\"", "'''''''", "?!?!", "(((())))", "~`@#$%^&*()_+"),
    *("«»„“”‚‘’", "…—–", "№ § ¶ † ‡"),
    *("<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>", "a<|endoftext|>b", " <|im_end|> "),
    *("<|im_end|><|im_end|>", "<|im_start", "<|im_<|im_end|>"),
    *("<think>\n\n</think>\n\n", "<tool_call>{}</tool_call>", "<|MASK|>", "<|unknown|>", "<s></s><unk>"),
    *("<0x0A>", "[PAD5]", "▁▁ ▁a", "Ġ Ċ ĠĠ"),
    *("\u3000全角 space", "\u00a0nbsp\u00a0", "\u2028line\u2029para", "\u202eRTL\u202c", "a\u00adb"),
    *("tab\tbetween", "trailing   ", "   leading", "\v\f\x1c\x85"),
]  # fmt: skip
ALPHABETS = (
    "abcdefghij XYZ",
    "0123456789 .,",
    " \n\t\r",
    "'sStTrReEvVmMlLdD x",
    "(){}[]<>=+-*/;:\"'_#\n ab",
    "àéîõüß\u0300\u0301\u0302\u0308 ae",
    "日本語中文字한국어のカ、。 ",
    "नमस्तेक्षไทยعربي ",
    "🙂🎉👩👍🏽\u200d\ufe0f🇩🇪 a",
    "\x00\x01\x1b\x7f\u00a0\u200b\u2028\ufeff\ufffd a",
)


@pytest.fixture(scope="session")
def strings() -> list[str]:
    """More than a thousand: by hand, their neighbours joined, random ones over ten alphabets, random code points."""
    generator = random.Random(20)
    joined = [a + generator.choice(("", " ", "\n")) + b for a, b in itertools.pairwise(BY_HAND)]
    drawn = ["".join(generator.choices(alphabet, k=generator.randint(1, 40))) for alphabet in ALPHABETS for _ in range(60)]
    mixed = ["".join(generator.choices("".join(ALPHABETS), k=generator.randint(1, 60))) for _ in range(200)]
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    random_points = ["".join(map(chr, generator.choices(points, k=generator.randint(1, 20)))) for _ in range(200)]
    return [*BY_HAND, *joined, *drawn, *mixed, *random_points]


@pytest.fixture(scope="session")
def tiny_metadata(tiny_tokenizer_path: Path) -> dict[str, Any]:
    """The tiny tokenizer as the metadata of a GGUF file."""
    tokenizer = json.loads((tiny_tokenizer_path / "tokenizer.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {i: token for token, i in ids.items()} | special
    return {
        "general.architecture": "qwen3",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (tiny_tokenizer_path / "chat_template.jinja").read_text(encoding="utf-8"),
    }
