"""The torch backend: a plan in, an outcome out, on a CPU or a CUDA device.

In: a spec, a source of weights, sizes, perhaps a drafter. Out: outcomes. inputs → stack → sampler → verification →
commit → guesses. A commit brings kept drafts home: a tree's path to its positions, a state's steps to its lane; the
rejected rest is never read again. Where stages have threads of their own several plans are under way, each in one stage
at a time, and the last stage's thread chooses, commits and guesses. Turns that repeat are recorded where all devices can
(`steady.py`): `submit` starts such a turn on every stage and does not wait for it.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.answers import Position, read_choices
from onedraw.backends.base import Capacity, PageGroup, Ticket
from onedraw.backends.outcome import row_outcome
from onedraw.backends.plan import LOGITS_BYTES
from onedraw.backends.precision import kv_precision
from onedraw.backends.staging import FEWEST_ROWS, most_tokens
from onedraw.backends.torch.boundary import current
from onedraw.backends.torch.codes import KV_DTYPES
from onedraw.backends.torch.device import DTYPES, hardware_name
from onedraw.backends.torch.feed import ArenaFull
from onedraw.backends.torch.graphs import MOST, Graphs, Recorder, Straight
from onedraw.backends.torch.inputs import Bucket, Inputs, Shape, make_inputs
from onedraw.backends.torch.layers.linear import strictest
from onedraw.backends.torch.line import Line
from onedraw.backends.torch.loader import LANE, WeightSource, padded
from onedraw.backends.torch.ops import Ops, TorchOps
from onedraw.backends.torch.part import Part
from onedraw.backends.torch.ranking import Turned
from onedraw.backends.torch.runs import CHUNK
from onedraw.backends.torch.sampler import Sampler
from onedraw.backends.torch.selfcheck import RowCheck, self_check
from onedraw.backends.torch.stack import Site, Stack, Stream, Watch
from onedraw.backends.torch.state import KeptLogits, Sizes, State
from onedraw.backends.torch.steady import STEPS, Steady, SteadyTurns, bucket_of, fault_of, faults_of
from onedraw.models.spec import ModelSpec
from onedraw.sampling.law import NO_TOKEN
from onedraw.sampling.verify import hypotheses
from onedraw.types import Choice, Draft, Logprobs, Outcome, Plan, Row, RowOutcome

GPU_ROWS = 64  # rows of one token that a GPU computes in about the time of one


class Drafter(Protocol):
    """Guesses on the device, from what the target computed. It may be wrong; it cannot change a token."""

    @property
    def name(self) -> str: ...

    @property
    def captures(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it wants."""
        ...

    @property
    def lookahead(self) -> int:
        """Positions past a row that it writes to."""
        ...

    @property
    def state(self) -> State:
        """Its pages, numbered like those of the target's first group."""
        ...

    def open(self, rows: Sequence[Row]) -> None:
        """Before a turn: copy what rows want copied."""
        ...

    def guess(self, turn: Turned) -> list[tuple[Draft, ...]]:
        """Take in what the turn settled and guess on: drafts per row for the row after it."""
        ...


@dataclass(frozen=True, slots=True)
class Pick:
    """A position to choose at: after a token of the turn, or after the prompt of a checkpoint."""

    row: int
    token: int | None  # of the turn; None: the logits lie in the checkpoint `restore`
    position: Position
    restore: int | None
    keep: int | None  # the checkpoint that wants these logits


@dataclass(slots=True)
class Turn:
    """A plan on its way. Owner: the stage it is in."""

    plan: Plan
    inputs: Inputs
    watch: Watch
    held: int  # its first place in the rollback buffer
    bucket: Bucket | None = None  # what stages that record pad it to, beside others that do not
    stream: Stream | None = None  # once it has entered
    seconds: float = 0.0  # in stages, not between them


@dataclass(frozen=True, slots=True)
class Started:
    """A steady turn under way. Owner: the backend, until it is collected."""

    plan: Plan
    steady: Steady
    begin: float


class TorchBackend:
    """Complete when constructed: weights loaded, pages allocated, self-check done."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: str,
        device: str = "cpu",
        lanes: int,
        pages: int | tuple[int, ...],
        page_size: int,
        max_context: int,
        drafts: int = 0,
        checkpoints: int = 0,
        ops: Ops | None = None,
        sites: Sequence[Site] = (),
        activation: str | None = None,
        kv_dtype: str | None = None,
        rows: int = FEWEST_ROWS,
        check: bool = True,
        line: Line | None = None,
        tickets: int = 1,
        make_drafter: Callable[[Stack, Sampler, Shape], Drafter] | None = None,
        progress: Callable[[int, int], None] | None = None,
        recorder: Recorder | None = None,
        ahead: bool | None = None,
    ) -> None:
        sites = sites or [Site(torch.device(device), ops or TorchOps(torch.device(device)))]
        self._stack = Stack(
            spec,
            source,
            dtype=DTYPES[dtype],
            activation=DTYPES[activation or dtype],
            sites=sites,
            rows=rows,
            max_context=max_context,
            progress=progress,
        )
        self._first, self._device = sites[0].device, self._stack.device
        windows = spec.windows
        sizes = Sizes(
            pages=(pages,) * len(windows) if isinstance(pages, int) else pages,
            page_size=page_size,
            windows=windows,
            lanes=lanes,
            drafts=drafts if spec.recurrent else 0,
            checkpoints=checkpoints,
        )
        kept_as = kv_precision(kv_dtype or "auto", products=dtype)
        self._states = self._stack.states(sizes, KV_DTYPES[kept_as])
        self._kept = KeptLogits(checkpoints, padded(spec.vocab, LANE), self._device)
        self._shape = Shape(page_size, sizes.pages, strictest([site.ops.rule for site in sites]), windows)
        self.report: RowCheck | None = None
        if check:
            with current(self._device):
                self.report = _checked(self._stack, self._states, self._shape)
            self._shape = replace(self._shape, rule=self.report.rule)
        self._sampler = sites[-1].ops.sampler(vocab=spec.vocab, lanes=lanes, device=self._device)
        with current(self._device):
            self._drafter = None if make_drafter is None else make_drafter(self._stack, self._sampler, self._shape)
        self._slice = max(LOGITS_BYTES // (4 * spec.vocab), 1)
        self._steady: SteadyTurns | None = None
        recorders: list[Recorder | None] = _recorders(sites, recorder)
        self._locks = _locks(sites) if line is not None else [nullcontext() for _ in sites]
        self._parts: list[Part | None] = [  # beside stages that record nothing; where all do, they belong to the steady turns
            None if one is None else Part(self._stack, i, state, one, tokens=STEPS[-1], lock=self._locks[i])
            for i, (state, one) in enumerate(zip(self._states, recorders, strict=True))
        ]
        parts = [part for part in self._parts if part is not None]
        if len(parts) == len(sites):
            self._parts = [None] * len(sites)
            self._steady = SteadyTurns(self._stack, parts, self._sampler, self._shape, lanes=lanes, tickets=tickets)
        self._capacity = Capacity(
            vocab=spec.vocab,
            max_context=max_context,
            lanes=lanes,
            groups=tuple(PageGroup(count, window) for count, window in zip(sizes.pages, windows, strict=True)),
            page_size=page_size,
            checkpoints=checkpoints,
            chunk=CHUNK if spec.recurrent else 1,
            recurrent=spec.recurrent,
            draft_positions=drafts // tickets if spec.recurrent else None,
            stages=len(sites),
            tickets=tickets,
            starts=self._steady is not None and self._device.type == "cuda",
            ticket_rows=GPU_ROWS if self._device.type == "cuda" else 1,
            # A drafter looks at what a turn left before the next one runs, and a thread of its own would read histories late.
            ahead=(self._keeps_tokens if ahead is None else ahead) and self._drafter is None and tickets == 1 and line is None,
            lookahead=0 if self._drafter is None else self._drafter.lookahead,
            drafter="" if self._drafter is None else self._drafter.name,
            turn_tokens=most_tokens(rows, chunk=CHUNK) if len(sites) > 1 else None,
            device="+".join(sorted({site.ops.name for site in sites})),
            dtype=dtype,
            activation=activation or dtype,
            kv_dtype=kept_as,
        )
        assert tickets == 1 or line is not None, "stages that work at once have threads of their own"
        self._tickets = itertools.count()
        self._berths, self._berth_of = list(range(tickets)), dict[Ticket, int]()
        self._line, self._under_way = line, dict[Ticket, Future[Outcome] | Started]()
        self._plans, self._back = dict[Ticket, Plan](), 0.0  # under way; when the last steady turn was collected
        self._hang_up = None
        if line is not None:
            self._hang_up = weakref.finalize(self, line.close)
            self._hang_up.atexit = False  # a stage that computes while the program ends is not waited for

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @torch.inference_mode()
    def rehearse(self, tell: Callable[[str], None]) -> None:
        """Record turns that will come, where turns are recorded. Before the first request."""
        if self._steady is not None:
            with current(self._device):
                self._steady.rehearse(self._capacity.lanes, self._watch(), tell)

    def submit(self, plan: Plan) -> Ticket:
        ticket = Ticket(next(self._tickets))
        awaits = any(row.awaits for row in plan.rows)
        bucket = None if self._steady is None else self._steady.serves(plan)
        if awaits and bucket is not None and not (self._keeps_tokens and isinstance(self._latest, Started)):
            plan = self._heard(plan)
        berth = 0 if awaits else self._berths.pop()  # who awaits a token has no drafts, and so needs no place for them
        try:
            started = None if bucket is None else self._begin(plan, bucket, berth=berth)
            if started is None and awaits:
                plan = self._heard(plan)
            self._under_way[ticket] = self._board(plan, berth=berth) if started is None else started
        except BaseException:
            if not awaits:  # a plan that did not get under way holds none
                self._berths.append(berth)
            raise
        self._plans[ticket] = plan
        if not awaits:
            self._berth_of[ticket] = berth
        return ticket

    def collect(self, ticket: Ticket) -> Outcome:
        turn = self._under_way.pop(ticket)
        self._plans.pop(ticket)
        try:
            return self._arrive(turn) if isinstance(turn, Started) else turn.result()
        finally:
            if ticket in self._berth_of:
                self._berths.append(self._berth_of.pop(ticket))

    @property
    def _keeps_tokens(self) -> bool:
        """Steady turns find their tokens on the device. Layers with inputs of their own look them up on the host."""
        return self._steady is not None and not self._stack.spec.inputs

    @property
    def _latest(self) -> Future[Outcome] | Started:
        """Of what is under way."""
        return self._under_way[max(self._under_way)]

    def _heard(self, plan: Plan) -> Plan:
        """The plan with the tokens that its rows await; waits for them."""
        before = self._latest
        chosen: dict[int, int] = {}
        if isinstance(before, Started):
            steady = before.steady
            steady.wait()
            chosen = {row.lane: int(token) for row, token in zip(before.plan.rows, steady.answers[:, 0].tolist())}
        else:
            for row, outcome in zip(self._plans[max(self._under_way)].rows, before.result().rows, strict=True):
                chosen[row.lane] = outcome.chosen[-1].token if outcome.chosen else NO_TOKEN
        rows = (replace(row, tokens=(max(chosen[row.lane], 0),)) if row.awaits else row for row in plan.rows)
        return Plan(tuple(rows))

    def close(self) -> None:
        """Let go of weights and pages now, whoever still holds this object."""
        if self._hang_up is not None:
            self._hang_up()
        self._under_way.clear()
        for name in ("_stack", "_states", "_sampler", "_drafter", "_steady", "_parts"):
            self.__dict__.pop(name, None)

    # ------------------------------------------------------------------ to and from the disk

    @property
    def identity(self) -> str:
        """What computes the bits: operations, hardware, library and how rows are offered to it; not the split."""
        stages = self._stack.stages
        parts = sorted({f"{stage.ops.name} on {hardware_name(stage.device)}" for stage in stages})
        tiles = sorted({str(getattr(stage.ops, "tile_heights", "")) for stage in stages})
        return f"{', '.join(parts)}; torch {torch.__version__}; {self._shape.rule}; {tiles}"

    @torch.inference_mode()
    def export(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        found = {"logits": self._kept.rows[slot].cpu().clone()}
        for name, state in self._remembering():
            found |= {f"{name}.{part}": tensor for part, tensor in state.export(slot, pages).items()}
        return {name: as_stored(tensor) for name, tensor in found.items()}

    @torch.inference_mode()
    def adopt(self, slot: int | None, places: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, state in self._remembering():
            own = {part.removeprefix(f"{name}."): array for part, array in arrays.items() if part.startswith(f"{name}.")}
            state.adopt(slot, places, {part: as_tensor(array, self._stack.dtype) for part, array in own.items()})
        if slot is not None and "logits" in arrays:
            self._kept.keep(slot, as_tensor(arrays["logits"], torch.float32).to(self._device))

    def _remembering(self) -> list[tuple[str, State]]:
        """Everything with pages: the stages under one name, since layers have numbers of their own, and the drafter."""
        own = [("layer", state) for state in self._states]
        return own if self._drafter is None else [*own, ("drafter", self._drafter.state)]

    # ------------------------------------------------------------------ one turn

    def _held(self, berth: int) -> int:
        """Plans under way at once have places of their own in the rollback buffer; this is the first."""
        return berth * (self._capacity.draft_positions or 0)

    def _board(self, plan: Plan, *, berth: int) -> Future[Outcome]:
        """A turn that goes kernel by kernel: through all stages now, or on their threads."""
        held = self._held(berth)
        inputs, watch = make_inputs(plan, shape=replace(self._shape, held=held), device=self._first), self._watch()
        records = any(self._parts) and watch.finite is None
        turn = Turn(plan, inputs, watch, held, bucket_of(plan, recurrent=self._capacity.recurrent) if records else None)
        steps = [partial(self._step, turn, number) for number in range(len(self._states))]
        return _done(steps) if self._line is None else self._line.start(steps)

    def _watch(self) -> Watch:
        return Watch(() if self._drafter is None else self._drafter.captures, finite=self._narrow())

    @torch.inference_mode()
    def _begin(self, plan: Plan, bucket: Bucket, *, berth: int) -> Started | None:
        """A steady turn, begun in all stages and not waited for; None where it brings too much."""
        begin = time.perf_counter()
        assert self._steady is not None
        with current(self._device):
            steady = self._steady.begin(plan, bucket, self._watch(), held=self._held(berth))
        return None if steady is None else Started(plan, steady, begin)

    @torch.inference_mode()
    def _arrive(self, started: Started) -> Outcome:
        """What a steady turn chose; what it kept is home already."""
        plan, steady, worked = started.plan, started.steady, started.steady.worked
        steady.wait()
        begin, self._back = max(started.begin, self._back), time.perf_counter()
        choices = iter(read_choices(steady.answers.numpy(), steady.positions))
        chosen = {i: [next(choices) for _ in range(1 + len(row.drafts))] for i, row in enumerate(plan.rows)}
        turn = Turn(plan, steady.inputs, worked.watch, held=0)
        with current(self._device):
            rows = self._conclude(turn, worked.hidden, chosen, {}, faults=steady.faults)
        return Outcome(rows, time.perf_counter() - begin)

    @torch.inference_mode()
    def _step(self, turn: Turn, number: int) -> Outcome | None:
        """A plan through one stage, on that stage's thread where it has one; through the last: what became of it."""
        begin = time.perf_counter()
        with self._locks[number], current(self._stack.stages[number].device):
            self._states[number].open(turn.plan.rows)
            turn.stream = self._advance(turn, number)
            rows = self._finish(turn, self._stack.leave(turn.stream)) if number == len(self._states) - 1 else None
        turn.seconds += time.perf_counter() - begin
        return None if rows is None else Outcome(rows, turn.seconds)

    def _advance(self, turn: Turn, number: int) -> Stream:
        part = self._parts[number]
        if part is not None and turn.bucket is not None:
            with suppress(ArenaFull):
                return part.advance(turn.stream, turn.plan, turn.bucket, replace(self._shape, held=turn.held), turn.watch)
        stream = self._stack.enter(turn.inputs) if turn.stream is None else turn.stream
        return self._stack.advance(stream, number, turn.inputs, self._states[number], watch=turn.watch)

    def _finish(self, turn: Turn, hidden: Tensor) -> tuple[RowOutcome, ...]:
        """Choose, commit what was kept on every stage, guess on."""
        scored = self._score(turn.plan, turn.inputs, hidden)
        return self._conclude(turn, hidden, self._choose(turn.plan, turn.inputs, hidden), scored)

    def _conclude(
        self,
        turn: Turn,
        hidden: Tensor,
        chosen: Mapping[int, Sequence[Choice | None]],
        scored: Mapping[int, tuple[Logprobs, ...]],
        *,
        faults: Sequence[int] | None = None,
    ) -> tuple[RowOutcome, ...]:
        """`faults`: of a steady turn, which has brought home what it kept, the first layer of each token that was not finite."""
        plan, inputs, watch = turn.plan, turn.inputs, turn.watch
        rows = tuple(row_outcome(row, chosen.get(i, []), scored.get(i, ())) for i, row in enumerate(plan.rows))
        if any(row.barren for row in rows):
            found = faults_of(watch) if faults is None else faults
            rows = tuple(
                replace(row, fault=fault_of(found, inputs.spans[i])) if row.barren else row for i, row in enumerate(rows)
            )
        if faults is None:
            for state, stage in zip(self._states, self._stack.stages, strict=True):
                with current(stage.device):
                    state.commit(plan.rows, [row.kept for row in rows], stage.ops, turn.held)
        if self._drafter is not None:
            with self._locks[-1]:
                self._drafter.open(plan.rows)
                guesses = self._drafter.guess(Turned(plan, inputs, hidden, watch.features, rows))
            rows = tuple(replace(row, guesses=own) for row, own in zip(rows, guesses, strict=True))
        return rows

    def _narrow(self) -> list[Tensor] | None:
        """Models trained in bf16 may leave the range of f16, so where there is any every layer is looked at."""
        return [] if torch.float16 in (self._stack.dtype, self._stack.activation) else None

    def _logits(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """Logits of these tokens of the turn: [C', V'], the first C rows wanted."""
        padding = self._shape.rule.padded(len(tokens)) - len(tokens)
        index = torch.tensor([*tokens, *tokens[-1:] * padding], dtype=torch.long, device=self._device)
        return self._stack.logits(hidden.index_select(0, index))[: len(tokens)]

    def _choose(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> dict[int, list[Choice | None]]:
        """Per choosing row, a choice after its last known token and after each draft."""
        picks: list[Pick] = []
        for i, (row, span) in enumerate(zip(plan.rows, inputs.spans, strict=False)):  # padding has spans of its own
            if not row.chooses:
                continue
            for k, drafts in enumerate(hypotheses(row.drafts)):
                drafts = (*row.tokens, *drafts) if row.awaits else drafts  # what it awaited is not in the history yet
                position = Position(row.lane, row.params, row.history, drafts, row.request_id)
                kept = next((save.slot for save in row.saves if save.position == row.stop), None) if k == 0 else None
                picks.append(Pick(i, span.first + len(row.tokens) - 1 + k if row.tokens else None, position, row.restore, kept))
        chosen: dict[int, list[Choice | None]] = {}
        for start in range(0, len(picks), self._slice):
            part = picks[start : start + self._slice]
            choices = self._sampler.choose(self._picked(hidden, part), [pick.position for pick in part])
            for pick, choice in zip(part, choices, strict=True):
                chosen.setdefault(pick.row, []).append(choice)
        return chosen

    def _picked(self, hidden: Tensor, picks: list[Pick]) -> Tensor:
        """Logits of these picks [C, V']: computed, or from checkpoints; those that checkpoints want are kept."""
        computed = [pick.token for pick in picks if pick.token is not None]
        logits = self._logits(hidden, computed) if computed else self._kept.rows[:0]
        if len(computed) < len(picks):
            places, found = iter(range(len(computed))), logits
            logits = torch.stack(
                [self._kept.rows[pick.restore or 0] if pick.token is None else found[next(places)] for pick in picks]
            )
        for pick, row in zip(picks, logits, strict=True):
            if pick.keep is not None:
                self._kept.keep(pick.keep, row)
        return logits

    def _score(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> dict[int, tuple[Logprobs, ...]]:
        """Per scoring row, the logprobs of the prompt tokens its positions predict."""
        scored: dict[int, tuple[Logprobs, ...]] = {}
        for i, (row, span) in enumerate(zip(plan.rows, inputs.spans, strict=False)):
            if not row.scores:
                continue
            targets = row.history.prompt[row.start + 1 : row.stop + 1]
            found: list[Logprobs] = []
            step = min(self._slice, 64)
            for start in range(0, len(targets), step):
                part = targets[start : start + step]
                logits = self._logits(hidden, list(range(span.first + start, span.first + start + len(part))))
                found.extend(self._sampler.score(logits, part, row.params.prompt_logprobs or 0))
            scored[i] = tuple(found)
        return scored


def _recorders(sites: Sequence[Site], given: Recorder | None) -> list[Recorder | None]:
    """One per device, for the stages that record."""
    made: dict[torch.device, Recorder] = {}
    for device, stages in Counter(site.device for site in sites if site.ops.records).items():
        made[device] = Graphs(device, stages * MOST) if device.type == "cuda" else Straight()
    return [None if not site.ops.records else made[site.device] if given is None else given for site in sites]


def _locks(sites: Sequence[Site]) -> list[AbstractContextManager[Any]]:
    """Who launches work on a GPU has it alone: operations keep what goes from one kernel to the next in places of their own,
    and a thread that records must not meet another's launches. CPUs are left to their threads."""
    made = {site.device: threading.RLock() for site in sites}
    return [made[site.device] if site.device.type == "cuda" else nullcontext() for site in sites]


def _done(steps: Sequence[Callable[[], Outcome | None]]) -> Future[Outcome]:
    """One step after the other, here and now."""
    done: Future[Outcome] = Future()
    for step in steps:
        found = step()
    assert found is not None
    done.set_result(found)
    return done


def as_stored(tensor: Tensor) -> npt.NDArray[Any]:
    """numpy knows no bf16: its bits are stored as integers."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 and dtype == torch.bfloat16 else tensor


@torch.inference_mode()
def _checked(stack: Stack, states: Sequence[State], shape: Shape) -> RowCheck:
    return self_check(stack, states, shape=shape)
