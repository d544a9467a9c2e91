"""Constrained replies: drafts, trees, batches and small steps never change them, and a mask from a wrong history is caught."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.fake import FakeBackend
from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.sampling.law import sample
from onedraw.text.constraints.base import combine, token_mask
from onedraw.text.constraints.grammar import GrammarCompiler, GrammarConstraint
from onedraw.text.constraints.response_format import ChoiceFormat, JsonFormat, RegexFormat, ReplyFormat
from onedraw.text.constraints.thinking_budget import ThinkingBudget
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reasoning import ReasoningSyntax
from onedraw.text.reply_parser import PLAIN_TEXT, ReplySyntax
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Constraint, History, Request, Row, SampledToken, SamplingParams, TokenMask
from tests.backends.torch.sampling_cases import FixedMask
from tests.laws import test_torch
from tests.laws.harness import Answer, KnownAnswerProposer, LiveConstraint, Schedule, plain, random_params, run
from tests.support import tiny

TOKENIZER = fake_tokenizer()
VOCAB = TOKENIZER.vocab_size
THINK = ReasoningSyntax("<think>", "</think>", "\n</think>\n\n")


def budget(limit: int) -> Constraint:
    closing = TOKENIZER.encode(THINK.closing, add_special=False)
    return ThinkingBudget(THINK, limit=limit, closing=closing, token_bytes=TOKENIZER.token_bytes, thinking="open")


def backend() -> FakeBackend:
    return FakeBackend(vocab=VOCAB, pages=64, lanes=4, page_size=4, max_context=256)


def requests(constraints: Sequence[Constraint], *, max_tokens: int = 40, seed: int = 0) -> list[Request]:
    """One request per constraint and one without, each with its own random parameters and prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for number, constraint in enumerate([*constraints, None]):
        params = random_params(rng, vocab=VOCAB, max_tokens=max_tokens, calm=True)
        params = replace(params, bad_words=(), logit_bias=(), stop_ids=frozenset({256}))
        prompt = tuple(int(t) for t in rng.integers(0, 256, int(rng.integers(1, 9))))
        spec = None if constraint is None else LiveConstraint(constraint)
        made.append(Request(id=f"q{number}", prompt=prompt, params=params, constraint=spec))
    return made


def schedules(expected: Sequence[Answer]) -> dict[str, Schedule]:
    known = {f"q{i}": answer.tokens for i, answer in enumerate(expected)}
    return {
        "batched": Schedule(),
        "chain": Schedule(proposer=KnownAnswerProposer(known, VOCAB, empty_every=0)),
        "tree": Schedule(proposer=KnownAnswerProposer(known, VOCAB, empty_every=0, tree=True)),
        "tree, small steps": Schedule(proposer=KnownAnswerProposer(known, VOCAB, tree=True), step_tokens=7),
    }


@pytest.mark.parametrize("seed", range(4))
def test_drafts_never_change_where_thinking_ends(seed: int) -> None:
    def wanted() -> list[Request]:
        return requests([budget(n) for n in (0, 5, 11)], seed=seed)

    expected = plain(backend, wanted())
    for name, schedule in schedules(expected).items():
        answers, stats = run(backend(), wanted(), schedule)
        assert answers == expected, name
        assert schedule.proposer is None or 0 < stats.accepted_tokens < stats.draft_tokens, name
    closing = TOKENIZER.encode(THINK.closing, add_special=False)
    for answer, limit in zip(expected, (0, 5, 11), strict=False):
        begins = [start for start in range(limit, limit + 4) if answer.tokens[start : start + len(closing)] == closing]
        assert begins, "thinking did not end at its limit or at the end of the character that contains it"


class FailingConstraint:
    """Raises once the reply has `length` tokens, or once it differs from `only`."""

    def __init__(self, length: int, only: Sequence[int] | None = None) -> None:
        self._length, self._only = length, only

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        tokens = [*output, *drafts]
        if len(tokens) >= self._length or (self._only is not None and tokens != [*self._only[: len(tokens)]]):
            raise ValueError("planted")
        return None


def test_a_failing_constraint_fails_only_its_own_request() -> None:
    def wanted() -> list[Request]:
        return requests([FailingConstraint(7), budget(5), FailingConstraint(3)], seed=2)

    expected = plain(backend, wanted())
    assert [answer.error for answer in expected] == ["internal_error", None, "internal_error", None]
    assert [len(answer.tokens) for answer in (expected[0], expected[2])] == [7, 3]
    for name, schedule in schedules(expected).items():
        answers, stats = run(backend(), wanted(), schedule)
        assert answers == expected, name
        assert not stats.failed_steps


def test_a_constraint_that_fails_after_wrong_drafts_changes_nothing() -> None:
    expected = plain(backend, requests([FailingConstraint(1000)], seed=3))
    for name, schedule in schedules(expected).items():
        answers, stats = run(backend(), requests([FailingConstraint(1000, expected[0].tokens)], seed=3), schedule)
        assert answers == expected, name
        assert schedule.proposer is None or stats.accepted_tokens < stats.draft_tokens, name


def test_drafts_outside_the_tokenizers_vocabulary_change_nothing() -> None:
    """A model's head may have more rows than its tokenizer has tokens."""
    grammars = GrammarCompiler(TOKENIZER, (256,))
    size = VOCAB + 40

    def larger() -> FakeBackend:
        return FakeBackend(vocab=size, pages=64, lanes=4, page_size=4, max_context=256)

    def wanted() -> list[Request]:
        return requests(
            [grammars.constraint(RegexFormat("([a-f]{1,4}-[0-9]{1,3};)+", "x"), PLAIN_TEXT) for _ in range(3)], seed=4
        )

    expected = plain(larger, wanted())
    known = {f"q{i}": answer.tokens for i, answer in enumerate(expected)}
    for tree in (False, True):
        schedule = Schedule(proposer=KnownAnswerProposer(known, size, empty_every=0, tree=tree))
        answers, stats = run(larger(), wanted(), schedule)
        assert answers == expected
        assert 0 < stats.accepted_tokens < stats.draft_tokens


class MaskWithoutTheLastDraft(FakeBackend):
    """Planted fault: the mask of a position is computed without the draft just before it."""

    def sample(self, row: Row, logits: np.ndarray, drafts: tuple[int, ...]) -> SampledToken | None:
        constraint = row.history.constraint
        short = None if constraint is None else ShortHistory(constraint)
        return sample(logits, row.params, replace(row.history, constraint=short), drafts)


class ShortHistory:
    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        return self._constraint.allowed(output, drafts[:-1])


def test_a_mask_from_a_history_short_by_one_is_caught() -> None:
    def wanted() -> list[Request]:
        return requests([budget(n) for n in (0, 5, 11)])

    expected = plain(backend, wanted())
    faulty = MaskWithoutTheLastDraft(vocab=VOCAB, pages=64, lanes=4, page_size=4, max_context=256)
    for name in ("chain", "tree"):
        answers, _ = run(faulty, wanted(), schedules(expected)[name])
        assert answers != expected, name


def test_the_sampling_rule_samples_no_token_outside_the_mask() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    for seed in range(20):
        params = SamplingParams(temperature=1.5, seed=seed)
        sampled = sample(logits, params, History((1,), [65, 66], budget(2)))
        assert sampled is not None
        assert sampled.token == TOKENIZER.encode("\n", add_special=False)[0]


# ---------------------------------------------------------------------------------------------- grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMATS: tuple[ReplyFormat, ...] = (
    JsonFormat.of(SCHEMA, "x"),
    RegexFormat("([a-f]{2,4}-[0-9]{1,3};)+", "x"),
    ChoiceFormat(("yes, of course", "yes, perhaps", "no"), "x"),
)
GRAMMARS = GrammarCompiler(TOKENIZER, (256,))


def constraints() -> list[Constraint]:
    """One constraint per format, and one that starts after a thinking budget."""
    thinking = ReplySyntax(reasoning=THINK, thinking="open")
    without_thinking = [GRAMMARS.constraint(reply_format, PLAIN_TEXT) for reply_format in FORMATS]
    after_thinking = combine(budget(4), GRAMMARS.constraint(FORMATS[0], thinking))
    assert after_thinking is not None
    return [*without_thinking, after_thinking]


@pytest.mark.parametrize("seed", range(4))
def test_drafts_never_change_a_constrained_reply(seed: int) -> None:
    def wanted() -> list[Request]:
        return requests(constraints(), seed=10 + seed, max_tokens=60)

    expected = plain(backend, wanted())
    assert not any(answer.error for answer in expected)
    for name, schedule in schedules(expected).items():
        answers, stats = run(backend(), wanted(), schedule)
        assert answers == expected, name
        assert schedule.proposer is None or 0 < stats.accepted_tokens < stats.draft_tokens, name
    choice = TOKENIZER.decode(expected[2].tokens)
    assert choice in ("yes, of course", "yes, perhaps", "no")
    assert expected[2].finish == "stop"


def test_a_grammar_that_misses_the_last_draft_is_caught() -> None:
    def wanted() -> list[Request]:
        return requests(constraints(), seed=10, max_tokens=60)

    expected = plain(backend, wanted())
    faulty = MaskWithoutTheLastDraft(vocab=VOCAB, pages=64, lanes=4, page_size=4, max_context=256)
    for name in ("chain", "tree"):
        answers, _ = run(faulty, wanted(), schedules(expected)[name])
        assert answers != expected, name


class NotRolledBack(GrammarConstraint):
    """Planted fault: the matcher stays where the last draft took it."""

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        known = len(self._tokens)
        self._matcher.try_consume_tokens([*output, *drafts][known:])
        self._tokens = [*output, *drafts]
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)


def test_a_matcher_that_is_not_rolled_back_is_caught() -> None:
    reply_format = RegexFormat("([a-f]{2,4}-[0-9]{1,3};)+", "x")
    wanted = requests([GRAMMARS.constraint(reply_format, PLAIN_TEXT)], seed=10, max_tokens=60)
    expected = plain(backend, wanted)
    faulty = NotRolledBack(GRAMMARS._compile(reply_format, PLAIN_TEXT), VOCAB, "x")
    broken = [replace(wanted[0], constraint=LiveConstraint(faulty)), *wanted[1:]]
    for name in ("chain", "tree"):
        answers, _ = run(backend(), broken, schedules(expected)[name])
        assert answers != expected, name


# ---------------------------------------------------------------------- on torch


@pytest.mark.parametrize("ops", ["kernels", "torch"])
def test_drafts_never_change_a_constrained_reply_on_torch(ops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_torch.OPS, "kind", ops)
    folder = tiny.write_safetensors("qwen3", tmp_path / "hf")
    tokenizer = Tokenizer.from_folder(folder)
    grammars = GrammarCompiler(tokenizer, (tiny.IM_END,))

    def wanted() -> list[Request]:
        made = requests([grammars.constraint(reply_format, PLAIN_TEXT) for reply_format in FORMATS], seed=5, max_tokens=40)
        return [replace(r, params=replace(r.params, stop_ids=frozenset({tiny.IM_END}))) for r in made]

    expected = plain(lambda: test_torch.backend_of(folder), wanted())
    known = {r.id: answer.tokens for r, answer in zip(wanted(), expected, strict=True)}
    for tree in (False, True):
        proposer = KnownAnswerProposer(known, tiny.VOCAB, empty_every=0, tree=tree)
        answers, stats = run(test_torch.backend_of(folder), wanted(), Schedule(proposer=proposer))
        assert answers == expected
        assert 0 < stats.accepted_tokens < stats.draft_tokens
    text = tokenizer.decode(expected[1].tokens)
    assert re.fullmatch("([a-f]{2,4}-[0-9]{1,3};)+", text) or expected[1].finish == "length"


def test_the_torch_sampler_allows_only_tokens_of_the_mask_and_gives_the_bits_of_the_sampling_rule() -> None:
    """With a mask that is shorter than the vocabulary, one that is longer, and rows without a mask."""
    rng = np.random.default_rng(0)
    vocab = 203
    logits = rng.normal(0, 3, (6, vocab)).astype(np.float32)
    sampler = Sampler(vocab=vocab, lanes=6, device=torch.device("cpu"))
    positions = []
    for row in range(6):
        members = rng.choice(vocab, 9, replace=False)
        bits = token_mask([*members, 220] if row == 2 else members[members < 90], 256 if row == 2 else 96)
        params = SamplingParams(temperature=1.2, top_p=0.9, seed=row, checksums=True)
        history = History((1,), constraint=FixedMask(bits) if row % 3 else None)
        positions.append(SamplingPosition(row, params, history, (), f"q{row}"))
    sampled = sampler.sample(torch.from_numpy(logits), positions)
    for row, position in enumerate(positions):
        expected = sample(logits[row], position.params, position.history)
        assert sampled[row] == expected
