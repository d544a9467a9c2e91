"""One stage's part of a steady turn: what the stage reads, laid out in an arena of its own, and its work, recorded.

In: a turn's inputs, and what the stage before left. Out: what this one leaves, still on its device. A stage other than the last
brings its kept drafts home in a second work, once the last has chosen: the choices cross into a buffer that keeps its place.
One thread starts all parts of a turn, and the next turn's behind them, so the order on each device is the order of turns: a
part may still read its arena, and the rows at its entrance, when the next turn is already on its way there. Beside a stage
that records nothing (on a CPU) a part goes by itself, in the turn's own order (`advance`), and the host brings drafts home.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.model.transformer import LayerProbe, ResidualStream, StageInputs, Transformer
from onedraw.backends.torch.ops.base import DeviceCommit
from onedraw.backends.torch.runner.cuda_graphs import GraphCache
from onedraw.backends.torch.runner.inputs import Bucket, InputLayout, Inputs, fed_inputs
from onedraw.backends.torch.runner.stage_boundary import current_device
from onedraw.backends.torch.runner.staging_buffers import StagingBuffer
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.types import Plan

ARENA_BYTES = 16 * 2**20
NOTHING = np.zeros(0, dtype=np.int32)
NOBODY: AbstractContextManager[Any] = nullcontext()
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GraphStageInputs:
    """What a stage's work reads beside weights and state."""

    bucket: Bucket
    inputs: Inputs
    ready: StageInputs
    rows: Tensor  # [R, 5]
    parents: Tensor  # [T]


class GraphStage:
    """Owner: the backend. `tokens`: of a turn at most. `lock`: held while work is started, where others start some there.
    `sides`: of the arena, one more than turns may be under way."""

    def __init__(
        self,
        model: Transformer,
        number: int,
        state: ModelState,
        recorder: GraphCache,
        *,
        tokens: int,
        lock: AbstractContextManager[Any] = NOBODY,
        sides: int = 2,
    ) -> None:
        stage = model.stages[number]
        self.device = stage.device
        self._model, self._number, self._state, self._recorder = model, number, state, recorder
        capture = stage.ops.capture
        assert capture is not None, "stages without capture run eagerly"
        self._ops, self._capture = stage.ops, capture
        self._lock = lock
        self.arena = StagingBuffer(stage.device, ARENA_BYTES, sides=sides)
        self._samples = torch.zeros(tokens, dtype=torch.int64, device=stage.device)
        # Turns that run kernel by kernel, perhaps on threads of their own, have the stage's own entrance.
        self._entrance = None if number == 0 else model.boundary(number, rows=tokens)

    def lay(self, inputs: Inputs, bucket: Bucket, rows: npt.NDArray[Any], parents: npt.NDArray[Any]) -> GraphStageInputs:
        arena = self.arena
        arena.begin()
        own = inputs if inputs.staging is arena else replace(inputs, staging=arena)
        ready = self._model.prepare(own, self._number)  # the tokens come first
        arena.note((self._number, bucket))
        return GraphStageInputs(bucket, own, ready, arena.put(rows), arena.put(parents))

    def send(self, captures: Hashable) -> Hashable:
        self.arena.note(captures)
        with current_device(self.device):
            return self.arena.send()

    def record(self, signature: Hashable | None, work: Callable[[], Result]) -> Result:
        """Without a signature it is done and not recorded."""
        with self._lock, current_device(self.device):
            return work() if signature is None else self._recorder.run(signature, work)

    def enter(self, before: ResidualStream | None, bucket: Bucket) -> ResidualStream | None:
        """Over the way from the stage before, into memory that keeps its place."""
        if before is None or self._entrance is None:
            return None
        with current_device(self.device):
            x, own = self._entrance.cross(before.x, before.own, bucket.tokens)
        return ResidualStream(x, own, before.left)

    def pass_through(
        self, laid: GraphStageInputs, entered: ResidualStream | None, last: Tensor | None, watch: LayerProbe
    ) -> ResidualStream:
        """`last`: what each lane chose last, where tokens may await it."""
        ready = laid.ready if last is None else replace(laid.ready, tokens=self._capture.resolve_tokens(laid.ready.tokens, last))
        return self._model.pass_stage(self._number, ready, entered, self._state, watch=watch)

    def advance(
        self, before: ResidualStream | None, plan: Plan, bucket: Bucket, layout: InputLayout, watch: LayerProbe
    ) -> ResidualStream:
        """The whole of it, for a stage beside others that record nothing: `Transformer.advance` for a steady turn. What comes out
        lies in memory of its own. May raise `ArenaFull`, before anything is done."""
        laid = self.lay(fed_inputs(plan, layout=layout, staging=self.arena, bucket=bucket), bucket, NOTHING, NOTHING)
        signature, entered = self.send(watch.captures), self.enter(before, bucket)

        def work() -> tuple[ResidualStream, LayerProbe]:
            own = LayerProbe(watch.captures)
            return self.pass_through(laid, entered, None, own), own

        stream, seen = self.record(signature, work)
        with current_device(self.device):
            watch.features.extend(feature.to(self._model.device, copy=True) for feature in seen.features)
            return ResidualStream(stream.x.clone(), None if stream.own is None else stream.own.clone(), stream.left)

    def commit(self, laid: GraphStageInputs, samples: Tensor) -> None:
        """Commit kept drafts; samples [T] on this device."""
        prepared = laid.ready.prepared
        tables = {spec: prepared.attention(spec).page_table for spec in self._state.addresses}
        drafts = DeviceCommit(samples, laid.ready.tokens, laid.parents, laid.rows, laid.bucket, tables)
        self._ops.commit(self._state, drafts)

    def commit_late(self, signature: Hashable, laid: GraphStageInputs, answers: Tensor) -> None:
        """The same from the answers [T, columns] of the last stage, on any device."""
        if not self._state.commits(laid.bucket):
            return
        with self._lock, current_device(self.device):
            samples = self._samples[: len(answers)]
            samples.copy_(answers[:, 0])
            self._recorder.run(("commit", signature), lambda: self.commit(laid, samples))
