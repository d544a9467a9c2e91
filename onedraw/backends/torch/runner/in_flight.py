"""Steps between `submit` and `collect`: their handles, their slots, and the tokens that the latest of them sampled.

In: plans that were started. Out: the same by handle. A slot is a step's share of the rollback buffer: steps that are in flight
at once write their drafts to places of their own.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from onedraw.backends.base import StepHandle
from onedraw.backends.torch.runner.step import StepResult
from onedraw.sampling.law import NO_TOKEN
from onedraw.types import Outcome, Plan


@dataclass(frozen=True, slots=True)
class InFlightStep:
    plan: Plan
    running: Future[Outcome | StepResult]
    slot: int | None  # None: its rows await tokens, so they have no drafts
    captured: bool  # its tokens are on the device, where the next step can read them
    begin: float = field(default_factory=time.perf_counter)

    def last_tokens(self) -> dict[int, int]:
        """By lane, the token that each row sampled last; waits for it."""
        found = self.running.result()
        if not isinstance(found, Outcome):
            found.wait()
            return found.last_tokens()
        rows = zip(self.plan.rows, found.rows, strict=True)
        return {row.lane: outcome.sampled[-1].token if outcome.sampled else NO_TOKEN for row, outcome in rows}


class InFlightSteps:
    """Owner: the backend."""

    def __init__(self, slots: int) -> None:
        self._handles = itertools.count()
        self.free_slots = list(range(slots))
        self.steps: dict[StepHandle, InFlightStep] = {}

    @property
    def latest(self) -> InFlightStep:
        return self.steps[max(self.steps)]

    def take_slot(self) -> int:
        return self.free_slots.pop()

    def return_slot(self, slot: int | None) -> None:
        if slot is not None:
            self.free_slots.append(slot)

    def add(self, step: InFlightStep) -> StepHandle:
        handle = StepHandle(next(self._handles))
        self.steps[handle] = step
        return handle

    def remove(self, handle: StepHandle) -> InFlightStep:
        """Its slot is returned once its outcome is there."""
        return self.steps.pop(handle)

    def with_tokens(self, plan: Plan) -> Plan:
        """The plan with the tokens that its rows await from the latest step; waits for them."""
        tokens = self.latest.last_tokens()
        rows = (replace(row, tokens=(max(tokens[row.lane], 0),)) if row.awaits_token else row for row in plan.rows)
        return Plan(tuple(rows))
