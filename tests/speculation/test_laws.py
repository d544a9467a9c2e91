"""No proposer changes an answer: each against plain decoding, with mixed parameters, schedules, hits and preemptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onedraw.backends.fake import FakeBackend
from onedraw.speculation.proposers import LONGEST_MATCH, NgramProposer, PredictionProposer, Proposal, Proposer, chain
from onedraw.speculation.speculator import DEVICE, SpeculationStats, Speculator
from onedraw.types import Draft, History, Request, Row, RowOutcome
from tests.laws.harness import Answer, Schedule, plain, random_requests, run

VOCAB = 13  # so small that texts are repetitive
LAW = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**40)
Numbers = dict[str, Any]


def random_scenario(seed: int) -> tuple[list[Request], Numbers, Numbers, list[Answer]]:
    """Requests, their backend, the engine's sizes, and the answers of plain decoding."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, count=int(rng.integers(1, 6)), vocab=VOCAB, longest=24, max_tokens=24)
    page_size = int(rng.choice([1, 2, 4]))
    least = -(-(max(len(r.prompt) + r.params.max_tokens for r in requests) + 1) // page_size)
    backend: Numbers = {
        "vocab": VOCAB,
        "page_size": page_size,
        "lanes": int(rng.integers(1, 6)),
        "pages": int(least + rng.integers(0, 2 * least + 1)),
        "max_context": 64,
        "recurrent": bool(rng.random() < 0.3),
        "favoured": tuple(int(t) for t in rng.integers(0, VOCAB, 2)) if rng.random() < 0.6 else (),
    }
    schedule: Numbers = {
        "step_tokens": int(rng.integers(1, 60)),
        "reuse": bool(rng.random() < 0.7),
        "arrivals": tuple(int(t) for t in rng.integers(0, 12, len(requests))),
    }
    expected = plain(lambda: FakeBackend(**{**backend, "lanes": 1, "pages": 128}), requests)
    return requests, backend, schedule, expected


def hold(
    backend: FakeBackend, requests: list[Request], schedule: Numbers, expected: list[Answer], speculator: Speculator
) -> Counter[str]:
    """Compare a run with drafts to plain decoding. Returns counts of what the run exercised."""
    got, stats = run(backend, requests, Schedule(**schedule, speculator=speculator))
    assert [replace(a, cached=0) for a in got] == [replace(a, cached=0) for a in expected]
    spoken: SpeculationStats = speculator.stats()
    assert (spoken.drafts, spoken.draft_tokens, spoken.accepted_tokens) == (
        stats.drafts,
        stats.draft_tokens,
        stats.accepted_tokens,
    )
    assert sum(spoken.accepted_per_position) <= spoken.accepted_tokens
    return Counter(
        kept=stats.accepted_tokens,
        rejected=stats.draft_tokens - stats.accepted_tokens,
        preemptions=stats.preemptions,
        hits=stats.prefix_hits,
        mixed=stats.mixed_steps,
        stopped=sum(a.finish == "stop" for a in got),
        **{f"kept by {source}": kept for source, (_, _, kept) in spoken.by_source.items()},
    )


def exercised(law: Callable[..., Counter[str]], *needed: str) -> Counter[str]:
    """Run a law in many worlds; fail if they exercised nothing."""
    counted: Counter[str] = Counter()

    @LAW
    @given(seed=SEEDS, length=st.sampled_from([None, 1, 5, 64]))
    def every_world(seed: int, length: int | None) -> None:
        counted.update(law(seed, length))

    every_world()
    for what in ("kept", "preemptions", "hits", "mixed", "stopped", *needed):
        assert counted[what] > 0, f"{what} never happened"
    return counted


# ---------------------------------------------------------------------- the proposers of the package


def test_ngram_drafts_never_change_an_answer() -> None:
    def law(seed: int, length: int | None) -> Counter[str]:
        requests, backend, schedule, expected = random_scenario(seed)
        proposer = NgramProposer(shortest=1, reach=3 + seed % 40)
        return hold(FakeBackend(**backend), requests, schedule, expected, Speculator([proposer], draft_tokens=length))

    exercised(law, "rejected")


def predict(kind: str, truth: list[int], rng: np.random.Generator) -> tuple[int, ...]:
    noise = [int(t) for t in rng.integers(0, VOCAB, 8)]
    match kind:
        case "right":
            return tuple(truth)
        case "longer":
            return (*truth, *noise, *noise, *noise, *noise, *noise)
        case "partly":
            cut = int(rng.integers(0, len(truth) + 1))
            return (*truth[:cut], *noise[: int(rng.integers(0, 4))], *truth[cut + int(rng.integers(0, 3)) :])
        case "wrong":
            return tuple((token + 1) % VOCAB for token in truth)
        case "alien":
            return (*truth[:2], VOCAB + 7, -3, *truth[2:])
        case _:
            return ()


@pytest.mark.parametrize("kind", ["right", "longer", "partly", "wrong", "alien", "mixed"])
def test_predictions_never_change_an_answer(kind: str) -> None:
    def law(seed: int, length: int | None) -> Counter[str]:
        requests, backend, schedule, expected = random_scenario(seed)
        rng = np.random.default_rng(seed + 1)
        kinds = ("right", "longer", "partly", "wrong", "alien", "empty")
        requests = [
            replace(r, predicted=predict(str(rng.choice(kinds)) if kind == "mixed" else kind, a.tokens, rng))
            for r, a in zip(requests, expected, strict=True)
        ]
        speculator = Speculator([PredictionProposer()], draft_tokens=length)
        return hold(FakeBackend(**backend), requests, schedule, expected, speculator)

    counted = exercised(law)
    assert (counted["rejected"] == 0) == (kind == "right")


def test_an_empty_prediction_drafts_nothing() -> None:
    requests, backend, schedule, expected = random_scenario(11)
    counted = hold(FakeBackend(**backend), requests, schedule, expected, Speculator([PredictionProposer()]))
    assert counted["kept"] == counted["rejected"] == 0


# ---------------------------------------------------------------------- an adversarial proposer


@dataclass
class Adversary:
    """Has the answers, and in each step either drafts correctly or makes one of the mistakes a proposer can make."""

    answers: dict[str, list[int]]
    name: str = "adversary"

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        return Proposal(self._drafts(request, history, room), self.name, len(history) % (LONGEST_MATCH + 1))

    def _drafts(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        done = len(history.output)
        truth = self.answers[request.id][done:]
        right = chain(tuple(truth[:room]))
        match (done * 7 + len(request.prompt)) % 8:
            case 0 | 1:
                return right
            case 2:
                return chain(tuple((token + 1) % VOCAB for token in truth[:room]))
            case 3:
                return ()
            case 4:
                return chain((*truth, *range(VOCAB), *range(VOCAB)))  # longer than the room
            case 5:
                return chain((*truth[:1], VOCAB, *truth[2:room]))  # out of the vocabulary
            case 6:
                return (*right[:2], Draft(0, parent=50), *right[2:])  # a parent that does not exist
            case _:
                return (*right[:1], Draft(-1, -1), Draft(1, -2), Draft(1, parent=3))

    def forget(self, request_id: str) -> None: ...


def adversary_for(requests: list[Request], expected: list[Answer]) -> Adversary:
    return Adversary({r.id: a.tokens for r, a in zip(requests, expected, strict=True)})


def test_an_adversarial_proposer_never_changes_an_answer() -> None:
    def law(seed: int, length: int | None) -> Counter[str]:
        requests, backend, schedule, expected = random_scenario(seed)
        speculator = Speculator([adversary_for(requests, expected)], draft_tokens=length)
        return hold(FakeBackend(**backend), requests, schedule, expected, speculator)

    exercised(law, "rejected")


# ---------------------------------------------------------------------- all sources together


class GuessingBackend(FakeBackend):
    """Drafts itself: the answer, wrong at every fifth position."""

    answers: dict[str, list[int]]

    def run(self, row: Row) -> RowOutcome:
        outcome = super().run(row)
        done = len(row.history.output) + len(outcome.sampled)
        truth = self.answers[row.request_id][done : done + 6]
        return replace(outcome, next_drafts=chain(tuple((t + ((done + i) % 5 == 0)) % VOCAB for i, t in enumerate(truth))))


def test_several_proposers_and_the_backends_drafter_never_change_an_answer() -> None:
    def law(seed: int, length: int | None) -> Counter[str]:
        requests, numbers, schedule, expected = random_scenario(seed)
        rng = np.random.default_rng(seed + 1)
        requests = [
            replace(
                r, predicted=predict(str(rng.choice(["partly", "wrong", "empty"])), a.tokens, rng), speculate=rng.random() < 0.8
            )
            for r, a in zip(requests, expected, strict=True)
        ]
        backend = GuessingBackend(**numbers)
        backend.answers = adversary_for(requests, expected).answers
        proposers: list[Proposer] = [PredictionProposer(), NgramProposer()]
        return hold(backend, requests, schedule, expected, Speculator(proposers, draft_tokens=length))

    exercised(law, "rejected", "kept by prediction", "kept by ngram", f"kept by {DEVICE}")


class LyingClock(Speculator):
    """Learns random times of steps, so that it begins, stops and probes drafts at random."""

    def __init__(self, proposers: list[Proposer], seed: int) -> None:
        super().__init__(proposers)
        self.dice = np.random.default_rng(seed)

    def record_step(self, *, seconds: float, drafter_seconds: float = 0.0, **work: int) -> None:
        lies = self.dice.choice([0.0, 1e-9, 1e-3, 1.0, 1e6], 2).tolist()
        super().record_step(seconds=lies[0], drafter_seconds=lies[1], **work)


def test_no_clock_can_change_an_answer() -> None:
    def law(seed: int, length: int | None) -> Counter[str]:
        requests, numbers, schedule, expected = random_scenario(seed)
        backend = GuessingBackend(**numbers)
        backend.answers = adversary_for(requests, expected).answers
        speculator = LyingClock([PredictionProposer(), NgramProposer()], seed)
        return hold(backend, requests, schedule, expected, speculator)

    exercised(law, "rejected", "kept by ngram", f"kept by {DEVICE}")


# ---------------------------------------------------------------------- a planted fault


class BelievesDrafts(FakeBackend):
    """Keeps the first draft without verification."""

    def sample(self, row: Row, logits: Any, drafts: tuple[int, ...]) -> Any:
        choice = super().sample(row, logits, drafts)
        if choice is not None and not drafts and row.drafts:
            return replace(choice, token=row.drafts[0].token)
        return choice


def test_a_backend_that_keeps_drafts_unverified_is_caught() -> None:
    caught = 0
    for seed in range(12):
        requests, backend, schedule, expected = random_scenario(seed)
        try:
            hold(BelievesDrafts(**backend), requests, schedule, expected, Speculator([NgramProposer(1)], draft_tokens=4))
        except AssertionError:
            caught += 1
    assert caught > 6
