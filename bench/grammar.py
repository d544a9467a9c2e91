"""Measure what structured output costs per token: computing the allowed tokens, and verifying and rolling back drafts.

    python -m bench.grammar [--tokenizer FILE_OR_FOLDER] [--peer] [--json]

The default is the tokenizer of the default model. Each response format is followed along a valid reply: first token by token as
in plain decoding, then in steps of eight drafts of which half are correct, as in verification, where every position needs the set
of allowed tokens and the incorrect half is rolled back. Times are those of `Constraint.allowed`, the only call of the engine.
With --peer the same replies are run through xgrammar, which must be installed.
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
class Example:
    """A response format and a reply that fits it."""

    name: str
    reply_format: ReplyFormat
    reply: str


EXAMPLES = (
    Example("JSON schema, nested", JsonFormat.of(ORDER, "schema"), json.dumps(VALUE)),
    Example("any JSON object", JsonFormat.of(ANY_OBJECT, "schema"), json.dumps(VALUE, indent=2)),
    Example("regular expression", RegexFormat(r"(\d{4}-\d{2}-\d{2} wind \d+ knots, sea (calm|rough)\n)+", "regex"), LOG),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of one library on one example, in microseconds; `compile` in milliseconds."""

    format: str
    library: str
    tokens: int
    compile: float
    median: float
    p99: float
    worst: float
    drafted: float  # per position, in steps of drafts with rollback


Mask = Callable[[list[int], list[int]], object]  # (output, drafts) -> allowed tokens


def measure(name: str, library: str, make: Callable[[], Mask], tokens: list[int]) -> Cost:
    begin = time.perf_counter()
    mask = make()
    compiled = time.perf_counter() - begin
    times = []
    for length in range(len(tokens) + 1):
        begin = time.perf_counter()
        mask(tokens[:length], [])
        times.append(1e6 * (time.perf_counter() - begin))
    drafted, positions = 0.0, 0
    allowed_tokens = make()
    for output, drafts in draft_steps(tokens):
        begin = time.perf_counter()
        for length in range(len(drafts) + 1):
            allowed_tokens(output, drafts[:length])
        drafted += time.perf_counter() - begin
        positions += len(drafts) + 1
    times.sort()
    worst, p99 = times[-1], times[int(0.99 * len(times))]
    return Cost(name, library, len(tokens), 1e3 * compiled, statistics.median(times), p99, worst, 1e6 * drafted / positions)


def draft_steps(tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (output, drafts) of every step. The first half of the drafts is correct, the second is the start of the reply."""
    known = 0
    while known + DRAFTS < len(tokens):
        half = DRAFTS // 2
        yield tokens[:known], [*tokens[known : known + half], *tokens[:half]]
        known += half + 1


def llguidance_masks(tokenizer: Tokenizer, reply_format: ReplyFormat) -> Callable[[], Mask]:
    eos = (tokenizer.eos_id if tokenizer.eos_id is not None else 0,)
    compiler = GrammarCompiler(tokenizer, eos)

    def make() -> Mask:  # compiles in the first call, which `measure` times; the compiler keeps the grammar for the second
        return compiler.constraint(reply_format, PLAIN_TEXT).allowed

    return make


def xgrammar_masks(tokenizer: Tokenizer, reply_format: ReplyFormat) -> Callable[[], Mask]:
    """Compute the masks with xgrammar and the same vocabulary; roll back to the prefix shared with the previous call."""
    import xgrammar

    from onedraw.text.constraints.base import common_prefix

    token_bytes = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(token_bytes, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[tokenizer.eos_id])

    def make() -> Mask:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled: Any
        if isinstance(reply_format, JsonFormat):
            compiled = compiler.compile_json_schema(reply_format.schema)
        else:
            assert isinstance(reply_format, RegexFormat)
            compiled = compiler.compile_regex(reply_format.pattern)
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
    source = Path(path) if path is not None else Path(resolve_model("smollm2", default_cache_dir()))
    if source.is_dir():
        return source.name, Tokenizer.from_folder(source)
    checkpoint = open_checkpoint(source)
    try:
        return source.name, Tokenizer.from_gguf(checkpoint.config)
    finally:
        checkpoint.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a GGUF file, or a folder with tokenizer.json")
    parser.add_argument("--peer", action="store_true", help="also measure xgrammar")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name, tokenizer = read_tokenizer(options.tokenizer)
    libraries = {"llguidance": llguidance_masks} | ({"xgrammar": xgrammar_masks} if options.peer else {})
    costs = []
    for example in EXAMPLES:
        tokens = tokenizer.encode(example.reply, add_special=False)
        costs += [
            measure(example.name, library, masks(tokenizer, example.reply_format), tokens) for library, masks in libraries.items()
        ]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    print(f"{name}, {tokenizer.vocab_size} tokens")
    for cost in costs:
        times = f"mask median {cost.median:6.1f} µs, p99 {cost.p99:7.1f}, worst {cost.worst:8.1f}"
        drafted = f"drafted {cost.drafted:6.1f} µs per position"
        print(f"{cost.format:20s} {cost.library:10s} {cost.tokens:4d} tokens: compile {cost.compile:7.2f} ms, {times}; {drafted}")


if __name__ == "__main__":
    main()
