"""An engine whose backend has lost its state tries to restore it for every new request, however often that has failed."""

from __future__ import annotations

import pytest

from onedraw.backends.base import StepHandle
from onedraw.backends.fake import FakeBackend
from onedraw.engine.engine import MOST_LOSSES, Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.errors import StateLost
from onedraw.memory.allocator import Allocator
from onedraw.speculation.speculator import Speculator
from onedraw.types import Plan, Request, SamplingParams
from tests.laws.harness import Answer, plain, same


class Unsteady(FakeBackend):
    """Has lost its state, and cannot be restored while `down`. If `dies`, it loses the state again in every step."""

    down = dies = False
    lost = True
    tries = 0

    def submit(self, plan: Plan) -> StepHandle:
        if self.lost or self.dies:
            raise StateLost("planted")
        return super().submit(plan)

    def recover(self) -> None:
        self.tries += 1
        if self.down:
            raise StateLost("planted")
        self.lost = False


def answered(engine: Engine, request: Request) -> Answer:
    answer = Answer()
    engine.add(request, answer.add_event)
    while engine.busy:
        engine.step()
        engine.scheduler.allocator.audit_all()
    return answer


@pytest.mark.parametrize("fault", ["down", "dies"])
def test_a_backend_that_comes_back_late_is_restored(fault: str) -> None:
    request = Request("q", (1, 2, 3), SamplingParams(seed=4, max_tokens=12, checksums=True))
    backend = Unsteady()
    setattr(backend, fault, True)
    allocator = Allocator(backend.capacity, reuse=True)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator(), step_tokens=4096)
    engine = Engine(backend=backend, scheduler=scheduler)
    for _ in range(2 * MOST_LOSSES):
        before = backend.tries
        assert answered(engine, request).error == "state_lost"
        assert backend.tries > before
    setattr(backend, fault, False)
    assert same([answered(engine, request)], plain(FakeBackend, [request]))
