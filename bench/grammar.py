"""What holding a reply to a form costs per token: making the set of allowed tokens, and walking drafts back and forth.

    python -m bench.grammar [--tokenizer FILE_OR_FOLDER] [--peer] [--json]

Without a tokenizer the default model's is used. Each form is followed along a reply that fits it, token by token, as in
plain decoding; then in turns of eight drafts of which half are right, as in verification, where every position needs a set
and the wrong half is rolled back. Times are of `Constraint.allowed`, which is all that the engine asks for. With --peer the
same replies go through xgrammar, if it is installed, with its own masks and rollback.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onedraw.checkpoints.download import resolve_model
from onedraw.checkpoints.open import open_checkpoint
from onedraw.settings import default_cache_dir
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import ANY_OBJECT, JsonFormat, RegexFormat, ReplyFormat
from onedraw.text.reply_parser import PLAIN_TEXT
from onedraw.text.tokenizer import Tokenizer

DRAFTS = 8
ORDER = {
    "type": "object",
    "properties": {
        "customer": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "email": {"type": "string", "format": "email"}},
            "required": ["name", "email"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "article": {"type": "string", "maxLength": 60},
                    "count": {"type": "integer", "minimum": 1, "maximum": 999},
                    "price": {"type": "number"},
                    "colour": {"enum": ["red", "green", "blue", None]},
                },
                "required": ["article", "count", "price", "colour"],
                "additionalProperties": False,
            },
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["customer", "lines", "note"],
    "additionalProperties": False,
}
VALUE = {
    "customer": {"name": "Ada Lovelace of Ockham Park", "email": "ada@example.org"},
    "lines": [
        {"article": f"brass gear with {n} teeth, polished", "count": n, "price": n * 1.25, "colour": colour}
        for n, colour in zip((12, 24, 36, 48, 60), ("red", None, "blue", "green", "red"), strict=True)
    ],
    "note": "Please deliver to the back door; the engine stands in the second room on the left.",
}
LOG = "".join(f"2026-11-{day:02d} wind {day * 3 % 40} knots, sea {'calm' if day % 2 else 'rough'}\n" for day in range(1, 15))


@dataclass(frozen=True, slots=True)
class Form:
    name: str
    guide: ReplyFormat
    reply: str


FORMS = (
    Form("JSON schema, nested", JsonFormat.of(ORDER, "schema"), json.dumps(VALUE)),
    Form("any JSON object", JsonFormat.of(ANY_OBJECT, "schema"), json.dumps(VALUE, indent=2)),
    Form("regular expression", RegexFormat(r"(\d{4}-\d{2}-\d{2} wind \d+ knots, sea (calm|rough)\n)+", "regex"), LOG),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds; `compile` in milliseconds."""

    form: str
    who: str
    tokens: int
    compile: float
    median: float
    p99: float
    worst: float
    drafted: float  # per position, in turns of drafts with rollback


Mask = Callable[[list[int], list[int]], object]  # (output, drafts) → the allowed set


def measure(name: str, who: str, make: Callable[[], Mask], tokens: list[int]) -> Cost:
    begin = time.perf_counter()
    mask = make()
    compiled = time.perf_counter() - begin
    times = []
    for length in range(len(tokens) + 1):
        begin = time.perf_counter()
        mask(tokens[:length], [])
        times.append(1e6 * (time.perf_counter() - begin))
    drafted, positions = 0.0, 0
    walking = make()
    for output, drafts in turns(tokens):
        begin = time.perf_counter()
        for length in range(len(drafts) + 1):
            walking(output, drafts[:length])
        drafted += time.perf_counter() - begin
        positions += len(drafts) + 1
    times.sort()
    worst, p99 = times[-1], times[int(0.99 * len(times))]
    return Cost(name, who, len(tokens), 1e3 * compiled, statistics.median(times), p99, worst, 1e6 * drafted / positions)


def turns(tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Drafts of which the first half is right: the second half is the reply's own, from another place."""
    known = 0
    while known + DRAFTS < len(tokens):
        half = DRAFTS // 2
        yield tokens[:known], [*tokens[known : known + half], *tokens[:half]]
        known += half + 1


def ours(tokenizer: Tokenizer, guide: ReplyFormat) -> Callable[[], Mask]:
    eos = (tokenizer.eos_id if tokenizer.eos_id is not None else 0,)
    grammars = GrammarCompiler(tokenizer, eos)

    def make() -> Mask:
        grammars._compiled.clear()
        return grammars.constraint(guide, PLAIN_TEXT).allowed

    return make


def peer(tokenizer: Tokenizer, guide: ReplyFormat) -> Callable[[], Mask]:
    """xgrammar with the same vocabulary, following by the same rule."""
    import xgrammar

    from onedraw.text.constraints.base import common_prefix

    words = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(words, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[tokenizer.eos_id])

    def make() -> Mask:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled: Any
        if isinstance(guide, JsonFormat):
            compiled = compiler.compile_json_schema(guide.schema)
        else:
            assert isinstance(guide, RegexFormat)
            compiled = compiler.compile_regex(guide.pattern)
        matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=1024)
        bits = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
        known: list[int] = []

        def mask(output: list[int], drafts: list[int]) -> object:
            tokens = [*output, *drafts]
            common = common_prefix(known, tokens)
            if common < len(known):
                matcher.rollback(len(known) - common)
                del known[common:]
            for token in tokens[common:]:
                if not matcher.accept_token(token):
                    return None
                known.append(token)
            matcher.fill_next_token_bitmask(bits)
            return bits

        return mask

    return make


def read_tokenizer(path: str | None) -> tuple[str, Tokenizer]:
    place = Path(path) if path is not None else Path(resolve_model("smollm2", default_cache_dir()))
    if place.is_dir():
        return place.name, Tokenizer.from_folder(place)
    checkpoint = open_checkpoint(place)
    try:
        return place.name, Tokenizer.from_gguf(checkpoint.config)
    finally:
        checkpoint.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a GGUF file or a folder with tokenizer.json")
    parser.add_argument("--peer", action="store_true", help="also measure xgrammar")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name, tokenizer = read_tokenizer(options.tokenizer)
    makers = {"llguidance": ours} | ({"xgrammar": peer} if options.peer else {})
    costs = []
    for form in FORMS:
        tokens = tokenizer.encode(form.reply, add_special=False)
        costs += [measure(form.name, who, maker(tokenizer, form.guide), tokens) for who, maker in makers.items()]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    print(f"{name}, {tokenizer.vocab_size} tokens")
    for cost in costs:
        times = f"mask median {cost.median:6.1f} µs, p99 {cost.p99:7.1f}, worst {cost.worst:8.1f}"
        drafted = f"drafted {cost.drafted:6.1f} µs a position"
        print(f"{cost.form:20s} {cost.who:10s} {cost.tokens:4d} tokens: compile {cost.compile:7.2f} ms, {times}; {drafted}")


if __name__ == "__main__":
    main()
