"""A reply that a request forces has the scores of its generation, bit for bit: logprobs, raw and processed, masses and checksums.

The seed of a request that forces its whole reply is another one, since sampling must not matter there. One that forces the
beginning keeps the seed, and samples the rest of the same reply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from onedraw.backends.base import Backend
from onedraw.backends.fake import FakeBackend, Logits
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.engine.sequence import Sequence as EngineSequence
from onedraw.engine.stats import Stats
from onedraw.sampling.law import sample
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import RegexFormat
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reply_parser import PLAIN_TEXT
from onedraw.types import Draft, History, Request, Row, SampledToken, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, LiveConstraint, Schedule, plain, random_params, run, same
from tests.laws.test_fake import KINDS, VOCAB, Scenario, random_scenario
from tests.support import tiny
from tests.support.torch_backend import make_backend

SCENARIOS = 15  # of each kind
DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
WINDOWED = ("mistral",)  # its layers keep a short window, so that it needs too few pages for a preemption
MODERN = ("qwen3_5_odd", "qwen3_5_moe", "gemma4_e2b", "gemma4_26b", "laguna_odd")


def scored(request: Request) -> Request:
    return replace(request, params=replace(request.params, logprobs=2, logprobs_mode="both", logprob_token_ids=(0, VOCAB - 1)))


def forcing(request: Request, answer: Answer, count: int, *, speculate: bool = True) -> Request:
    forced = tuple(answer.tokens[:count])
    seed = request.params.seed + (count == len(answer.tokens))
    params = replace(request.params, seed=seed)
    return replace(request, id=f"{request.id}/{count}", forced=forced, params=params, speculate=speculate)


def forced_scenario(seed: int, kind: str) -> tuple[list[Request], list[Answer], Scenario]:
    """Every request of a scenario with its whole answer forced, and with a beginning of it."""
    scenario = random_scenario(seed, kind)
    sizes = {**scenario.backend, "lanes": 1, "pages": 128}
    requests = [scored(request) for request in scenario.requests]
    answers = plain(lambda: FakeBackend(**sizes), requests)
    found = [
        (forcing(request, answer, count, speculate=number % 5 != 0), answer)
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
        if answer.tokens
        for count in {len(answer.tokens), (len(answer.tokens) + number) // 2}
    ]
    return [one for one, _ in found], [answer for _, answer in found], scenario


def forced_equals(make: Callable[..., Backend], seed: int, kind: str) -> tuple[bool, Counter[str]]:
    requests, answers, scenario = forced_scenario(seed, kind)
    proposer = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, answers, strict=True)}, VOCAB, wrong_every=3)
    arrivals = tuple(i % 23 for i in range(len(requests)))
    got, stats = run(
        make(**scenario.backend), requests, Schedule(**{**scenario.schedule, "arrivals": arrivals, "proposer": proposer})
    )
    return same(got, answers), counted(requests, answers, stats)


def counted(requests: Sequence[Request], answers: Sequence[Answer], stats: Stats) -> Counter[str]:
    logprobs = [one for answer in answers for one in answer.logprobs]
    return Counter(
        forced=stats.forced_tokens,
        preemptions=stats.preemptions,
        hits=stats.prefix_hits,
        whole=sum(len(r.forced) == len(a.tokens) for r, a in zip(requests, answers, strict=True)),
        part=sum(0 < len(r.forced) < len(a.tokens) for r, a in zip(requests, answers, strict=True)),
        filtered=sum(one.mass is not None and one.mass < 1 for one in logprobs),
        adjusted=sum(one.processed is not None and one.processed != one.logprob for one in logprobs),
        asked=sum(len(one.asked) for one in logprobs),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_reply_has_the_scores_of_its_generation(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCENARIOS):
        equal, found = forced_equals(FakeBackend, seed, kind)
        assert equal, f"scenario {seed}"
        seen += found
    assert all(seen[name] > 0 for name in ("forced", "preemptions", "hits", "whole", "part", "filtered", "adjusted", "asked")), (
        seen
    )


def test_forced_tokens_are_verified_many_at_a_time_and_not_counted_as_drafts() -> None:
    request = scored(Request("q", (1, 2, 3), SamplingParams(seed=3, max_tokens=40)))
    [answer] = plain(FakeBackend, [request])
    got, stats = run(FakeBackend(), [forcing(request, answer, 40)], Schedule())
    assert same(got, [answer])
    assert stats.steps == 2  # the prompt with the first token, then all others
    assert (stats.forced_tokens, stats.draft_tokens, stats.accepted_tokens, stats.drafted_by) == (40, 0, 0, ())


def test_a_token_that_the_filters_exclude_has_no_processed_probability() -> None:
    request = scored(Request("q", (1, 2, 3), SamplingParams(top_k=3, seed=3, max_tokens=6)))
    [answer] = plain(FakeBackend, [request])
    ranked = [[token for token, _ in one.top] for one in answer.logprobs]
    other = next(token for token in range(VOCAB) if token not in (*ranked[0], answer.tokens[0]))
    [got], _ = run(FakeBackend(), [replace(request, forced=(other,), params=replace(request.params, top_k=2))], Schedule())
    assert got.tokens[0] == other
    assert got.logprobs[0].processed == -np.inf
    assert 0 < (got.logprobs[0].mass or 0) < (answer.logprobs[0].mass or 0) < 1


def test_a_constrained_reply_is_scored_under_its_grammar() -> None:
    tokenizer = fake_tokenizer()
    grammars = GrammarCompiler(tokenizer, (256,))
    sizes: dict[str, Any] = {**{"vocab": 259, "pages": 40, "lanes": 4, "page_size": 4}, "max_context": 128}

    def wanted(seed: int) -> Request:
        params = SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=0.7, seed=seed, max_tokens=40)
        params = replace(params, stop_ids=frozenset({256}), logprobs=2, logprobs_mode="both", checksums=True)
        return live(Request(f"q{seed}", tuple(range(40, 40 + 5 * seed)), params))

    def live(request: Request) -> Request:
        rule = grammars.constraint(RegexFormat("([a-f]{1,4}-[0-9]{1,3};){3,5}", "x"), PLAIN_TEXT)
        return replace(request, constraint=LiveConstraint(rule))

    requests = [wanted(seed) for seed in range(1, 5)]
    expected = plain(lambda: FakeBackend(**sizes), requests)
    got, stats = run(
        FakeBackend(**sizes),
        [live(forcing(request, answer, len(answer.tokens))) for request, answer in zip(requests, expected, strict=True)],
        Schedule(reuse=True),
    )
    assert same(got, expected)
    assert {answer.finish for answer in expected} >= {"stop"}
    assert stats.forced_tokens == sum(len(answer.tokens) for answer in expected)


# ---------------------------------------------------------------------------------------------- real models


def model_requests(seed: int) -> list[Request]:
    """Prompts of which some share a prefix, one of them twice, with mixed parameters."""
    rng = np.random.default_rng(seed)
    text = [tuple(int(t) for t in rng.integers(0, tiny.VOCAB, n)) for n in (150, 70, 40)]
    prompts = [text[0], text[0], text[0][:100] + text[1], text[2], text[0] + text[2]]
    return [
        scored(Request(f"q{i}-{seed}", prompt, random_params(rng, vocab=tiny.VOCAB, max_tokens=10 + i, calm=True)))
        for i, prompt in enumerate(prompts)
    ]


def forced_on(make: Callable[..., Backend], *, seed: int, few: int) -> Counter[str]:
    """Generate, then force the replies in other company: with drafts, one by one, few pages, cold and from the cache."""
    requests = model_requests(seed)
    expected = plain(lambda: make(lanes=1), requests)
    assert all(not answer.error for answer in expected)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, tiny.VOCAB)
    drafted, _ = run(make(), requests, Schedule(proposer=drafts, reuse=True, arrivals=(0, 20, 40, 60, 80)))
    assert same(drafted, expected)
    seen: Counter[str] = Counter()
    for speculate, backend, schedule in (
        (True, make(), Schedule()),
        (True, make(), Schedule(reuse=True, arrivals=(0, 4, 8, 12, 16))),
        (True, make(pages=few), Schedule(reuse=True, step_tokens=80)),
        (False, make(), Schedule(step_tokens=64)),
    ):
        forced = [
            forcing(request, answer, len(answer.tokens) - (number == 2), speculate=speculate)
            for number, (request, answer) in enumerate(zip(requests, expected, strict=True))
        ]
        got, stats = run(backend, forced, schedule)
        assert same(got, expected)
        seen += counted(forced, expected, stats)
    return seen


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", [*DENSE, *MODERN])
def test_every_family_scores_a_reply_as_it_generated_it(name: str, kernels: bool, tmp_path: Path) -> None:
    folder = tiny.write_safetensors(name, tmp_path / name)
    seen = forced_on(lambda **sizes: make_backend(folder, kernels=kernels, **sizes), seed=len(name), few=-(-202 // 8) + 9)
    exercised = {"forced", "hits", "whole", "part", "filtered", "adjusted"} | ({"preemptions"} if name not in WINDOWED else set())
    assert all(seen[what] > 0 for what in exercised), seen


# ---------------------------------------------------------------------------------------------- planted faults


class Resampling(FakeBackend):
    """Planted: the first draft of a row is kept by chance only, since its token is sampled."""

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        history = row.history
        free = History(history.prompt, history.output, history.constraint)
        return sample(logits, row.params, history if drafts else free, drafts)


class ShortHistory(FakeBackend):
    """Planted: the penalties of a position do not count the forced tokens of its own row."""

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        history = row.history
        cut = History(history.prompt, [*history.output, *[0] * len(drafts)], history.constraint, history.forced)
        return sample(logits, row.params, cut, ())


@pytest.mark.parametrize("fault", [Resampling, ShortHistory])
def test_faults_in_the_scores_are_caught(fault: type[FakeBackend]) -> None:
    assert not all(forced_equals(fault, seed, "pages")[0] for seed in range(SCENARIOS))


def test_prompt_form_for_forced_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EngineSequence.row

    def moved(self: EngineSequence, *, length: int, drafts: tuple[Draft, ...]) -> Row:
        row = right(self, length=length, drafts=drafts)
        return replace(row, prompt_stop=row.prompt_stop + len(self.request.forced))

    monkeypatch.setattr(EngineSequence, "row", moved)
    assert not all(forced_equals(FakeBackend, seed, "recurrent")[0] for seed in range(SCENARIOS))


def test_a_mass_of_the_kept_tokens_alone_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Planted in the torch sampler: positions that force a token describe the raw scores as the kept ones."""
    right = Sampler._describe_kept

    def raw(self: Sampler, answers: Tensor, rows: Tensor, law: Any, tokens: Tensor) -> None:
        right(self, answers, rows, replace(law, limit=None) if len(tokens) > 4 else law, tokens)

    monkeypatch.setattr(Sampler, "_describe_kept", raw)
    folder = tiny.write_safetensors("qwen3", tmp_path / "qwen3")
    with pytest.raises(AssertionError):
        forced_on(lambda **sizes: make_backend(folder, **sizes), seed=5, few=40)


# ---------------------------------------------------------------------------------------------- ten thousand tokens


@pytest.mark.long
@pytest.mark.parametrize("name", [*DENSE, *MODERN])
def test_ten_thousand_tokens_with_every_parameter(name: str, tmp_path: Path) -> None:
    folder = tiny.write_safetensors(name, tmp_path / name)
    rng = np.random.default_rng(8)
    requests = [
        scored(
            Request(
                f"q{i}",
                tuple(int(t) for t in rng.integers(0, tiny.VOCAB, int(rng.integers(1, 90)))),
                random_params(rng, vocab=tiny.VOCAB, max_tokens=210, calm=True),
            )
        )
        for i in range(50)
    ]
    expected, _ = run(make_backend(folder, lanes=8, pages=400), requests, Schedule())
    forced = [forcing(request, answer, len(answer.tokens)) for request, answer in zip(requests, expected, strict=True)]
    got, stats = run(make_backend(folder, lanes=8, pages=400), forced, Schedule())
    assert same(got, expected)
    assert stats.forced_tokens >= 10_000
