"""A reply that is cut after any of its tokens and continued from them has the same tokens and scores as the whole reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from onedraw.backends.fake import FakeBackend, Logits
from onedraw.engine.sequence import Sequence as EngineSequence
from onedraw.sampling.law import sample
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import RegexFormat
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reply_parser import PLAIN_TEXT
from onedraw.types import Constraint, Draft, History, Request, Row, RowOutcome, SampledToken, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, LiveConstraint, Schedule, plain, run, same
from tests.laws.test_fake import KINDS, VOCAB, Scenario, random_scenario

SCENARIOS = 12  # of each kind


def cut(
    requests: Sequence[Request], answers: Sequence[Answer], renew: Callable[[Request], Request] = lambda request: request
) -> tuple[list[Request], list[Answer], dict[str, list[int]]]:
    """Every request with every beginning of its answer, the rest that is expected, and the whole answer by request id."""
    continued, rests, whole = [], [], {}
    for request, answer in zip(requests, answers, strict=True):
        for count in range(len(answer.tokens) + 1):
            given = tuple(answer.tokens[:count])
            continued.append(replace(renew(request), id=f"{request.id}/{count}", given=given))
            rest = replace(answer, tokens=answer.tokens[count:], checksums=answer.checksums[count:])
            rests.append(replace(rest, logprobs=answer.logprobs[count:]))
            whole[continued[-1].id] = answer.tokens
    return continued, rests, whole


class Noting(FakeBackend):
    """Notes after how many tokens a cut would fall between two tokens of one row."""

    inside: set[tuple[str, int]]

    def run(self, row: Row) -> RowOutcome:
        outcome = super().run(row)
        self.inside.update((row.request_id, len(row.history.output) + 1 + i) for i in range(len(outcome.kept)))
        return outcome


def continued_equals(scenario: Scenario, make: type[FakeBackend], seed: int, *, drafting: bool) -> tuple[bool, Counter[str]]:
    requests, rests, whole = cut(scenario.requests, scenario.expected)
    proposer = KnownAnswerProposer(whole, VOCAB, wrong_every=3, empty_every=5, tree=bool(seed % 2)) if drafting else None
    schedule = Schedule(**{**scenario.schedule, "arrivals": tuple(i % 23 for i in range(len(requests))), "proposer": proposer})
    got, stats = run(make(**scenario.backend), requests, schedule)
    seen: Counter[str] = Counter(cuts=len(requests), preemptions=stats.preemptions, kept=stats.accepted_tokens)
    seen.update(
        hits=stats.prefix_hits, given=stats.given_tokens, over=sum(bool(r.given) and not a.tokens for r, a in zip(requests, got))
    )
    seen.update(over_scored=sum(bool(r.given) and not a.tokens and bool(a.scored) for r, a in zip(requests, got)))
    seen.update(penalized=sum(bool(r.given) and r.params.counts_history for r in requests))
    return same(got, rests), seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafting", [False, True])
def test_a_continued_reply_is_the_rest_of_the_whole_one(kind: str, drafting: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCENARIOS):
        scenario = random_scenario(seed, kind)
        Noting.inside = set()
        answers = {request.id: answer.tokens for request, answer in zip(scenario.requests, scenario.expected, strict=True)}
        scenario.run(Noting, proposer=KnownAnswerProposer(answers, VOCAB) if drafting else None)
        seen["inside"] += len(Noting.inside)
        equal, found = continued_equals(scenario, FakeBackend, seed, drafting=drafting)
        assert equal, f"scenario {seed}"
        seen += found
    expected = {"cuts", "given", "over", "over_scored", "preemptions", "hits", "penalized"} | (
        {"inside", "kept"} if drafting else set()
    )
    assert all(seen[name] > 0 for name in expected), seen


def test_a_constrained_reply_is_continued_in_the_state_of_its_grammar() -> None:
    tokenizer = fake_tokenizer()
    grammars = GrammarCompiler(tokenizer, (256,))
    sizes: dict[str, Any] = {
        "vocab": 259,
        "pages": 40,
        "lanes": 4,
        "page_size": 4,
        "max_context": 128,
        "recurrent": True,
        "chunk": 4,
    }

    def constraint() -> Constraint:
        return grammars.constraint(RegexFormat("([a-f]{1,4}-[0-9]{1,3};){3,5}", "x"), PLAIN_TEXT)

    def wanted(seed: int) -> Request:
        params = SamplingParams(
            temperature=1.2,
            frequency_penalty=0.7,
            seed=seed,
            max_tokens=40,
            stop_ids=frozenset({256}),
            logprobs=2,
            checksums=True,
        )
        return Request(f"q{seed}", tuple(range(40, 40 + 5 * seed)), params, constraint=LiveConstraint(constraint()))

    requests = [wanted(seed) for seed in range(1, 5)]
    expected = plain(lambda: FakeBackend(**sizes), requests)
    assert {answer.finish for answer in expected} >= {"stop"}
    continued, rests, whole = cut(requests, expected, lambda one: replace(one, constraint=LiveConstraint(constraint())))
    for one in continued:
        assert isinstance(one.constraint, LiveConstraint)
        assert one.constraint.constraint.legal(one.given) == len(one.given)
    proposer = KnownAnswerProposer(whole, 259, wrong_every=4)
    got, stats = run(FakeBackend(**sizes), continued, Schedule(reuse=True, proposer=proposer))
    assert same(got, rests)
    assert min(stats.preemptions, stats.accepted_tokens, stats.given_tokens) > 0


# ---------------------------------------------------------------------------------------------- planted faults


def holds(make: type[FakeBackend], kinds: Sequence[str]) -> bool:
    return all(
        continued_equals(random_scenario(seed, kind), make, seed, drafting=False)[0]
        for kind in kinds
        for seed in range(SCENARIOS)
    )


def test_a_prompt_end_moved_by_the_given_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EngineSequence.row

    def moved(self: EngineSequence, *, length: int, drafts: tuple[Draft, ...]) -> Row:
        row = right(self, length=length, drafts=drafts)
        return replace(row, prompt_stop=row.prompt_stop + len(self.request.given))

    monkeypatch.setattr(EngineSequence, "row", moved)
    assert not holds(FakeBackend, ("recurrent",))


class GivenAsPrompt(FakeBackend):
    """Planted: penalties do not see the given tokens as output."""

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        history, count = row.history, int(row.request_id.split("/")[1])
        moved = History((*history.prompt, *history.output[:count]), history.output[count:], history.constraint)
        return sample(logits, row.params, moved, drafts)


def test_penalties_without_the_given_history_are_caught() -> None:
    assert holds(FakeBackend, ("pages",))
    assert not holds(GivenAsPrompt, ("pages",))
