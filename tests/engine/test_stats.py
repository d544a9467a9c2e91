"""Counters: differences between two values, and the engine's own counts."""

from __future__ import annotations

from onedraw.backends.fake import FakeBackend
from onedraw.engine.engine import Engine, Event
from onedraw.engine.scheduler import Scheduler
from onedraw.engine.stats import DraftStats, Stats
from onedraw.memory.allocator import Allocator
from onedraw.speculation.proposers import PredictionProposer
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request, Row, RowOutcome, SamplingParams


def run(*requests: Request, observed: list[tuple[Row, RowOutcome]] | None = None) -> tuple[dict[str, list[Event]], Stats]:
    """All requests through an engine that drafts four predicted tokens per row."""
    backend = FakeBackend()
    capacity = backend.capacity
    allocator = Allocator(capacity, reuse=False)
    speculator = Speculator([PredictionProposer()], draft_tokens=4)
    scheduler = Scheduler(allocator=allocator, capacity=capacity, speculator=speculator, step_tokens=512)
    observer = None if observed is None else lambda row, outcome: observed.append((row, outcome))
    engine = Engine(backend=backend, scheduler=scheduler, observer=observer)
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request, events[request.id].append)
    while engine.busy:
        engine.step()
    return events, engine.stats()


def request(name: str = "r", *, predicted: tuple[int, ...] = (), stop: int | None = None) -> Request:
    params = SamplingParams(max_tokens=16, seed=5, stop_ids=frozenset() if stop is None else frozenset({stop}))
    return Request(id=name, prompt=(1, 2, 3), params=params, predicted=predicted)


def tokens(events: list[Event]) -> tuple[int, ...]:
    return tuple(token.token for event in events for token in event.sampled)


def test_since_is_the_difference_of_two_stats() -> None:
    early = Stats(steps=3, propose_seconds=0.5, accepted_per_position=(4, 1), drafted_by=(DraftStats("ngram", 5, 9, 5),))
    late = Stats(
        steps=10,
        propose_seconds=0.75,
        accepted_per_position=(6, 1, 1),
        drafted_by=(DraftStats("ngram", 6, 12, 6), DraftStats("device", 2, 8, 2)),
    )
    assert late.since(early) == Stats(
        steps=7,
        propose_seconds=0.25,
        accepted_per_position=(2, 0, 1),
        drafted_by=(DraftStats("ngram", 1, 3, 1), DraftStats("device", 2, 8, 2)),
    )
    assert late.since(Stats()) == late


def test_the_engine_counts_drafts_and_kept_drafts_by_source() -> None:
    answer = tokens(run(request())[0]["r"])
    events, stats = run(request(predicted=answer))
    assert tokens(events["r"]) == answer
    # The prompt's row samples one token, then three rows of four kept drafts and one new token.
    assert stats.drafted_by == (DraftStats("prediction", 3, 12, 12),)
    assert stats.accepted_per_position[:5] == (3, 3, 3, 3, 0)
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (3, 12, 12)
    assert stats.propose_seconds > 0
    usage = events["r"][-1].usage
    assert (usage.kept, usage.rejected) == (12, 0)
    assert [event.kept for event in events["r"]] == [0, 4, 4, 4]


def test_a_draft_behind_a_stop_id_is_not_counted_as_kept() -> None:
    """Verification keeps all four drafts, but two of them are not part of the reply."""
    answer = tokens(run(request())[0]["r"])
    stop = answer[2]
    assert stop not in answer[:2]
    events, stats = run(request(predicted=answer, stop=stop))
    assert tokens(events["r"]) == answer[:3]
    assert stats.accepted_tokens == 4
    last = events["r"][-1]
    assert (last.usage.kept, last.usage.rejected, last.kept) == (2, 2, 2)


def test_an_observer_sees_every_row_that_carried_drafts_and_no_other() -> None:
    answer = tokens(run(request())[0]["r"])
    observed: list[tuple[Row, RowOutcome]] = []
    run(request("plain"), request("drafted", predicted=answer), observed=observed)
    assert {row.request_id for row, _ in observed} == {"drafted"}
    assert [len(row.drafts) for row, _ in observed] == [4, 4, 4]
    assert [len(outcome.sampled) for _, outcome in observed] == [5, 5, 5]
