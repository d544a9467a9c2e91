"""Runs requests through an engine for every law: a schedule in, answers and counters out.

An answer holds the tokens and the checksum of the scores at every sampled position. A difference of 1e-7 in the scores almost
never changes a token, so comparing tokens alone would miss it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onedraw.backends.base import Backend
from onedraw.engine.checkpoint_offload import CheckpointOffload
from onedraw.engine.engine import Engine, Event
from onedraw.engine.scheduler import Scheduler
from onedraw.engine.stats import Stats
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.speculation.proposers import LONGEST_MATCH, Proposal, Proposer, chain
from onedraw.speculation.speculator import Speculator
from onedraw.types import Constraint, ConstraintSpec, Draft, DryParams, History, Logprobs, Request, SamplingParams


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    checksums: list[int | None] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached: int = 0

    def add_event(self, event: Event) -> None:
        for sampled in event.sampled:
            self.tokens.append(sampled.token)
            self.checksums.append(sampled.checksum)
            if sampled.logprobs is not None:
                self.logprobs.append(sampled.logprobs)
        if event.scored is not None:
            self.scored = [s.logprob for s in event.scored]
        self.finish = event.finish
        self.error = event.error.code if event.error else None
        self.cached = event.usage.cached


@dataclass(frozen=True)
class Schedule:
    """The engine's settings for one run, and the steps at which requests arrive or are cancelled."""

    step_tokens: int = 4096
    reuse: bool = False
    proposer: Proposer | None = None  # drafts as many tokens as fit
    speculator: Speculator | None = None  # instead of `proposer`: selects the proposer and the number of drafts
    arrivals: tuple[int, ...] = ()  # the step before which each request arrives; 0 if missing
    cancels: tuple[tuple[int, int], ...] = ()  # (step, index of the request)
    fair: bool = True  # lanes in turn; otherwise strict order of arrival
    turn_tokens: int = 64
    step_seconds: float | None = None  # how long a step may compute prompts while replies are generated
    allocator: type[Allocator] = Allocator
    scheduler: type[Scheduler] = Scheduler
    snapshots: SnapshotFolder | None = None  # closed at the end of the run
    snapshot_tokens: int = 8  # minimum prompt length for a snapshot
    async_scheduling: bool = (
        True  # a step may be submitted before the tokens of the previous one are known, if the backend allows it
    )


@dataclass(frozen=True)
class LiveConstraint(ConstraintSpec):
    """Carries a constraint that a test built itself."""

    constraint: Constraint


def run(backend: Backend, requests: Sequence[Request], schedule: Schedule) -> tuple[list[Answer], Stats]:
    """Run all requests in one engine until it is idle. Fails if a page or a lane is leaked."""
    capacity = replace(backend.capacity, async_scheduling=schedule.async_scheduling and backend.capacity.async_scheduling)
    allocator = schedule.allocator(capacity, reuse=schedule.reuse)
    proposers = [schedule.proposer] if schedule.proposer else []
    speculator = schedule.speculator or Speculator(proposers, draft_tokens=64)
    folder = schedule.snapshots
    offload = (
        None
        if folder is None
        else CheckpointOffload(folder, allocator=allocator, backend=backend, min_tokens=schedule.snapshot_tokens)
    )
    scheduler = schedule.scheduler(
        allocator=allocator,
        capacity=capacity,
        speculator=speculator,
        step_tokens=schedule.step_tokens,
        fetch=None if offload is None else offload.fetch,
        fair=schedule.fair,
        turn_tokens=schedule.turn_tokens,
        step_seconds=schedule.step_seconds,
    )
    engine = Engine(backend=backend, scheduler=scheduler, offload=offload)
    answers = [Answer() for _ in requests]
    pending = sorted(range(len(requests)), key=lambda i: schedule.arrivals[i] if i < len(schedule.arrivals) else 0)
    step = 0
    while pending or engine.busy:
        while pending and (pending[0] >= len(schedule.arrivals) or schedule.arrivals[pending[0]] <= step):
            index = pending.pop(0)
            spec = requests[index].constraint
            engine.add(requests[index], answers[index].add_event, spec.constraint if isinstance(spec, LiveConstraint) else None)
        for when, index in schedule.cancels:
            if when == step:
                engine.cancel(requests[index].id)
        engine.step()
        allocator.audit_all()
        step += 1
        assert step < 20_000, "the engine did not become idle"
    if folder is not None:
        folder.close()
    assert allocator.pages_held == 0
    assert allocator.lanes.available == capacity.lanes
    return answers, engine.stats()


def plain(make_backend: Callable[[], Backend], requests: Sequence[Request]) -> list[Answer]:
    """The run every variation is compared with: one request at a time, no drafts, empty caches, one step in flight."""
    return [run(make_backend(), [request], Schedule(async_scheduling=False))[0][0] for request in requests]


def same(got: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    """Whether answers are equal except for the number of prompt tokens found in a cache."""
    return [replace(a, cached=0) for a in got] == [replace(a, cached=0) for a in expected]


def random_params(rng: np.random.Generator, *, vocab: int, max_tokens: int, calm: bool = False) -> SamplingParams:
    """A mix of sampling parameters; `calm` leaves out parameters that can end a request early."""

    def maybe(value: float, neutral: float, p: float = 0.4) -> float:
        return value if rng.random() < p else neutral

    # A generator of its own for what was added later, so that the other parameters of a seed stay as they are: the laws' seeds
    # were picked for what they exercise.
    added = np.random.default_rng(rng.bit_generator.state["state"]["state"] % 2**32)
    stop = frozenset() if calm or rng.random() < 0.5 else frozenset(int(t) for t in rng.integers(0, vocab, 2))
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.0, 1.6])),
        top_k=int(maybe(int(rng.integers(1, 20)), 0)),
        top_p=maybe(float(rng.uniform(0.3, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.8, 1.5)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-0.5, 1.0)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-0.5, 1.0)), 0.0),
        dry=DryParams(multiplier=0.8, allowed_length=1, breakers=frozenset({3})) if rng.random() < 0.2 else None,
        logit_bias=((int(rng.integers(0, vocab)), float(rng.normal(0, 3))),) if rng.random() < 0.3 else (),
        seed=int(rng.integers(0, 2**50)),
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, max_tokens + 1)) if stop else 0,
        stop_ids=stop,
        bad_words=((int(rng.integers(0, vocab)), int(rng.integers(0, vocab))),) if rng.random() < 0.2 else (),
        logprobs=2 if rng.random() < 0.3 else None,
        logprob_token_ids=(vocab - 1, int(added.integers(0, vocab))) if added.random() < 0.5 else (),
        checksums=True,
    )


def random_requests(rng: np.random.Generator, *, count: int, vocab: int, longest: int, max_tokens: int) -> list[Request]:
    """Prompts of which some share a prefix, with mixed parameters."""
    stem = tuple(int(t) for t in rng.integers(0, vocab, longest))
    requests = []
    for i in range(count):
        length = int(rng.integers(1, longest + 1))
        shared = int(rng.integers(0, length + 1)) if rng.random() < 0.6 else 0
        prompt = stem[:shared] + tuple(int(t) for t in rng.integers(0, vocab, length - shared))
        params = random_params(rng, vocab=vocab, max_tokens=int(rng.integers(1, max_tokens + 1)))
        if rng.random() < 0.15:
            params = replace(params, prompt_logprobs=1)
        requests.append(Request(id=f"q{i}", prompt=prompt, params=params))
    return requests


def follow_ups(
    rng: np.random.Generator,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    *,
    vocab: int,
    longest: int,
    max_tokens: int,
) -> list[Request]:
    """Later requests: some of the prompts again with other parameters, and next turns of conversations."""
    later = []
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        kind = rng.random()
        if kind < 0.4 or answer.error:
            continue
        message = tuple(int(t) for t in rng.integers(0, vocab, int(rng.integers(1, 7))))
        prompt = request.prompt if kind < 0.7 else (*request.prompt, *answer.tokens, *message)
        params = random_params(rng, vocab=vocab, max_tokens=int(rng.integers(1, max_tokens + 1)))
        later.append(Request(id=f"q{len(requests)}.{number}", prompt=prompt[:longest], params=params))
    return later


@dataclass
class KnownAnswerProposer:
    """Drafts the known answers with errors at fixed positions: long accepted runs, rejections, empty drafts, too many drafts."""

    answers: dict[str, list[int]]
    vocab: int
    wrong_every: int = 4
    empty_every: int = 5
    tree: bool = False  # adds a wrong sibling before or after every right draft

    name = "known answers"

    def forget(self, request_id: str) -> None: ...

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        return Proposal(self._drafts(request, history), self.name, len(history) % (LONGEST_MATCH + 1))

    def _drafts(self, request: Request, history: History) -> tuple[Draft, ...]:
        done = len(history.output)
        if self.empty_every and len(history) % self.empty_every == 0:
            return ()
        right = self.answers[request.id][done : done + 6]
        tokens = [
            (token + 1) % self.vocab if self.wrong_every and (done + i) % self.wrong_every == 0 else token
            for i, token in enumerate(right)
        ]
        if len(history) % 7 == 0:
            tokens = [*tokens[:1], self.vocab + 5, *tokens[1:]]  # out of vocabulary: the scheduler cuts the drafts here
        return self._branched(tokens) if self.tree else chain(tuple(tokens))

    def _branched(self, tokens: list[int]) -> tuple[Draft, ...]:
        drafts: list[Draft] = []
        parent = -1
        for depth, token in enumerate(tokens):
            wrong = Draft((token + 7) % self.vocab, parent)
            if depth % 2:
                drafts.append(wrong)
                drafts.append(Draft((token + 9) % self.vocab, len(drafts) - 1))  # a child of the wrong draft
            drafts.append(Draft(token, parent))
            parent = len(drafts) - 1
            if not depth % 2:
                drafts.append(wrong)
        return tuple(drafts)
