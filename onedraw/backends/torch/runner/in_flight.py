"""Plans between `submit` and `collect`: their tickets, their berths, and what the latest of them chose.

In: plans that set off, each with its turn (a steady one that was started, or a future). Out: the same by ticket. A berth is a
plan's share of the rollback buffer: plans that are under way at once have places of their own there.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, replace

from onedraw.backends.base import StepHandle
from onedraw.backends.torch.runner.graph_runner import CapturedStep
from onedraw.sampling.law import NO_TOKEN
from onedraw.types import Outcome, Plan


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A steady turn under way. Owner: the backend, until it is collected."""

    plan: Plan
    steady: CapturedStep
    begin: float


@dataclass(frozen=True, slots=True)
class InFlightStep:
    plan: Plan
    turn: Future[Outcome] | StartedStep
    berth: int | None  # None: it has no drafts

    def sampled(self) -> dict[int, int]:
        """By lane, the token that each row chose last; waits for it."""
        if isinstance(self.turn, StartedStep):
            steady = self.turn.steady
            steady.wait()
            return {row.lane: int(token) for row, token in zip(self.plan.rows, steady.answers[:, 0].tolist())}
        rows = zip(self.plan.rows, self.turn.result().rows, strict=True)
        return {row.lane: outcome.sampled[-1].token if outcome.sampled else NO_TOKEN for row, outcome in rows}


class InFlightSteps:
    """Owner: the backend."""

    def __init__(self, berths: int) -> None:
        self._tickets = itertools.count()
        self.berths = list(range(berths))  # free ones
        self.plans: dict[StepHandle, InFlightStep] = {}

    @property
    def latest(self) -> InFlightStep:
        return self.plans[max(self.plans)]

    def take_berth(self) -> int:
        return self.berths.pop()

    def give_berth_back(self, berth: int | None) -> None:
        if berth is not None:
            self.berths.append(berth)

    def enter(self, plan: Plan, turn: Future[Outcome] | StartedStep, berth: int | None) -> StepHandle:
        ticket = StepHandle(next(self._tickets))
        self.plans[ticket] = InFlightStep(plan, turn, berth)
        return ticket

    def leave(self, ticket: StepHandle) -> InFlightStep:
        """Its berth is given back when the turn has arrived."""
        return self.plans.pop(ticket)

    def heard(self, plan: Plan) -> Plan:
        """The plan with the tokens that its rows await; waits for them."""
        chosen = self.latest.sampled()
        rows = (replace(row, tokens=(max(chosen[row.lane], 0),)) if row.awaits_token else row for row in plan.rows)
        return Plan(tuple(rows))
