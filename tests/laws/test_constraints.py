"""Constrained replies: drafts, trees, batches and small turns never change them, and a mask from another history is caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from onedraw.backends.fake import FakeBackend
from onedraw.sampling.law import choice
from onedraw.text.budget import ThinkingBudget
from onedraw.text.channels import Reasoning
from onedraw.text.toy import toy_tokenizer
from onedraw.types import Bits, Choice, Constraint, History, Request, Row, SamplingParams
from tests.laws.harness import Answer, Clairvoyant, Schedule, plain, random_params, run

TOKENIZER = toy_tokenizer()
VOCAB = TOKENIZER.vocab_size
THINK = Reasoning("<think>", "</think>", "\n</think>\n\n")


def budget(limit: int) -> Constraint:
    closing = TOKENIZER.encode(THINK.closing, add_special=False)
    return ThinkingBudget(THINK, limit=limit, closing=closing, spell=TOKENIZER.token_bytes, reasoning_open=True)


def backend() -> FakeBackend:
    return FakeBackend(vocab=VOCAB, pages=64, lanes=4, page_size=4, max_context=256)


def requests(constraints: Sequence[Constraint], *, max_tokens: int = 40, seed: int = 0) -> list[Request]:
    """Mixed parameters, one request per constraint and one without, each with a walk of its own."""
    rng = np.random.default_rng(seed)
    made = []
    for number, constraint in enumerate([*constraints, None]):
        params = random_params(rng, vocab=VOCAB, max_tokens=max_tokens, calm=True)
        params = replace(params, bad_words=(), logit_bias=(), constraint=constraint, stop_ids=frozenset({256}))
        prompt = tuple(int(t) for t in rng.integers(0, 256, int(rng.integers(1, 9))))
        made.append(Request(id=f"q{number}", prompt=prompt, params=params))
    return made


def again(wanted: Sequence[Request]) -> list[Request]:
    return [
        replace(r, params=replace(r.params, constraint=None if r.params.constraint is None else r.params.constraint.fresh()))
        for r in wanted
    ]


def schedules(expected: Sequence[Answer]) -> dict[str, Schedule]:
    truth = {f"q{i}": answer.tokens for i, answer in enumerate(expected)}
    return {
        "batched": Schedule(),
        "chain": Schedule(proposer=Clairvoyant(truth, VOCAB, silent_every=0)),
        "tree": Schedule(proposer=Clairvoyant(truth, VOCAB, silent_every=0, tree=True)),
        "tree, small turns": Schedule(proposer=Clairvoyant(truth, VOCAB, tree=True), turn_tokens=7),
    }


@pytest.mark.parametrize("seed", range(4))
def test_drafts_never_change_where_thinking_ends(seed: int) -> None:
    wanted = requests([budget(n) for n in (0, 5, 11)], seed=seed)
    expected = plain(backend, again(wanted))
    for name, schedule in schedules(expected).items():
        answers, stats = run(backend(), again(wanted), schedule)
        assert answers == expected, name
        assert schedule.proposer is None or 0 < stats.accepted_tokens < stats.draft_tokens, name
    closing = TOKENIZER.encode(THINK.closing, add_special=False)
    for answer, limit in zip(expected, (0, 5, 11), strict=False):
        assert answer.tokens[limit : limit + len(closing)] == closing


class Forgetful(FakeBackend):
    """Planted fault: the mask of a position is made without the draft just before it."""

    def choose(self, row: Row, logits: np.ndarray, drafts: tuple[int, ...]) -> Choice | None:
        constraint = row.params.constraint
        late = None if constraint is None else Late(constraint)
        return choice(logits, replace(row.params, constraint=late), row.history, drafts)


class Late:
    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> Bits | None:
        return self._constraint.allowed(output, drafts[:-1])

    def fresh(self) -> Constraint:
        return Late(self._constraint.fresh())


def test_a_mask_from_a_history_short_by_one_is_caught() -> None:
    wanted = requests([budget(n) for n in (0, 5, 11)])
    expected = plain(backend, again(wanted))
    faulty = Forgetful(vocab=VOCAB, pages=64, lanes=4, page_size=4, max_context=256)
    for name in ("chain", "tree"):
        answers, _ = run(faulty, again(wanted), schedules(expected)[name])
        assert answers != expected, name


def test_the_law_lets_no_other_token_through() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    for seed in range(20):
        params = SamplingParams(temperature=1.5, seed=seed, constraint=budget(2))
        chosen = choice(logits, params, History((1,), [65, 66]))
        assert chosen is not None
        assert chosen.token == TOKENIZER.encode("\n", add_special=False)[0]
