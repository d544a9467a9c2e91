"""A pipeline stage in another process, as the engine's process sees it.

In: the calls of a local `Stage` and its `ModelState`. Out: the same results; the other process (`worker.py`) runs the same code.
The residual stream goes from stage to stage without the engine: between two remote stages the engine holds a `RemoteStream`,
which says where it is, and receives it at the next local stage. Kept drafts are committed by one message, to which no answer is
awaited, since the messages of a stage arrive in order. Axes: T tokens of a step, E hidden width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from onedraw.backends.base import CheckResult
from onedraw.backends.torch.ops.base import HostCommit
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.remote.link import CONTROL, PROBED, REPLY, STREAM, Link
from onedraw.backends.torch.remote.messages import (
    CommitDrafts,
    ExportCheckpoint,
    ImportCheckpoint,
    KeptPathData,
    NamedArray,
    PrepareRows,
    RunLayers,
    StageMessage,
    StageReply,
    UseRule,
    decode_reply,
    encode,
    packed_ints,
    span_data,
)
from onedraw.backends.torch.remote.stream_buffer import StreamBuffer, stream_bytes
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.runner.pipeline import LayerProbe, ResidualStream, StageBoundary, StageStream
from onedraw.backends.torch.state.model_state import StateSizes
from onedraw.errors import OutOfMemory, StateLost
from onedraw.types import Row


class OpenLink(Protocol):
    """The owner of the link to the remote stages, which replaces the link after a failure."""

    @property
    def link(self) -> Link:
        """The open link to the remote stages. Raises StateLost if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The facts about a stage that its process reports when the layers are loaded. All must be the same after a restart."""

    weights: str  # fingerprint of the checkpoint
    name: str  # name of the Ops
    hardware: str
    choices: tuple[str, ...]  # the kernel variants that this process's Ops have chosen and that decide how results are rounded
    rule: RowRule
    borders: tuple[int, ...]  # row counts from which attention, delta layers or norms use other kernels


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The sizes and the dtype of a model's residual stream, from which its buffers are laid out."""

    hidden: int
    layers: int  # number of layers of the model
    inputs: int  # width of the input that each layer has of its own (per-layer embeddings); 0 if layers have none
    rows: int  # most rows of a step
    dtype: torch.dtype

    def own(self, start: int) -> tuple[int, int] | None:
        """For the stream before layer `start`: the number of layers still to run, and the width of the input that each of them
        has of its own. None if layers have no such inputs."""
        return (self.layers - start, self.inputs) if self.inputs else None

    def memory(self, start: int) -> Tensor:
        """A buffer for the stream before layer `start`."""
        inputs = (self.layers - start) * self.inputs
        return torch.zeros(stream_bytes(self.rows, hidden=self.hidden, inputs=inputs, dtype=self.dtype), dtype=torch.uint8)

    def buffer(self, memory: Tensor, start: int, count: int) -> StreamBuffer:
        return StreamBuffer(memory, count=count, hidden=self.hidden, own=self.own(start), dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class ProbedStage:
    """The data that one stage sends to the engine in a step, because the step's probe asks for it."""

    rank: int
    features: int  # number of residual streams that it sends, each after a layer that the probe names
    finite: int  # number of layers after which it sends, for every token, whether it is finite

    def receive(self, link: Link, rows: int, shape: StreamShape) -> tuple[list[Tensor], list[Tensor]]:
        features = torch.empty(self.features, rows, shape.hidden, dtype=shape.dtype)
        finite = torch.empty(self.finite, rows, dtype=torch.uint8)
        for found in (features, finite):
            if found.numel():
                link.receive(found, self.rank, PROBED)
        return list(features), list(finite.bool())


@dataclass(frozen=True, slots=True)
class RemoteStream:
    """The residual stream after a remote stage, on its way to the next stage."""

    stage: RemoteStage
    step: int
    count: int  # rows of the step without padding
    rows: int  # rows with padding
    left: int
    probed: tuple[ProbedStage, ...]  # the remote stages since the last local one

    def cross(self, boundary: StageBoundary, rows: int, probe: LayerProbe) -> ResidualStream:
        """Receive the stream and the data of the probe, and copy the stream across the boundary to the next stage."""
        buffer = self.stage.receive(self.step, self.count, self.rows, self.probed)
        shape, link = self.stage.shape, self.stage.owner.link
        for probed in self.probed:
            features, finite = probed.receive(link, self.rows, shape)
            probe.features.extend(features)
            if probe.finite is not None:
                probe.finite.extend(finite)
        return ResidualStream(*boundary.cross(buffer.x, buffer.own, rows), self.left)


_steps = itertools.count(1)  # gives each step a number, over all remote pipelines


@dataclass(slots=True, eq=False)
class RemoteStage:
    """Layers [start, stop) in another process. Owner: the model. `device`: where its results arrive in this process."""

    owner: OpenLink
    rank: int
    start: int
    stop: int
    shape: StreamShape
    sizes: StateSizes
    facts: StageFacts
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _rule: RowRule | None = None  # the row rule in use; None: that of `facts`
    _largest_tile: bool = False  # whether attention uses only the largest tile
    _memory: Tensor | None = None  # where the stage's stream arrives, if the next stage is in this process

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def rule(self) -> RowRule:
        return self.facts.rule

    @property
    def state(self) -> RemoteState:
        return RemoteState(self)

    def advance(self, before: StageStream, inputs: Inputs, *, probe: LayerProbe) -> RemoteStream:
        """Order the stage to run its layers, and send it the stream, unless that comes from another remote stage."""
        rows = span_data(inputs)
        count = sum(row.count for row in rows)
        run = range(self.start, min(self.stop, self.start + before.left))
        wanted = tuple(layer for layer in probe.layers if layer in run)
        step = before.step if isinstance(before, RemoteStream) else next(_steps)
        self.post(RunLayers(step, rows, before.left, wanted, probe.finite is not None))
        if isinstance(before, ResidualStream):
            assert count <= self.shape.rows, f"a step of {count} rows is sent to a stage with room for {self.shape.rows}"
            self._send(step, count, before)
        own = ProbedStage(self.rank, len(wanted), len(run) if probe.finite is not None else 0)
        earlier = before.probed if isinstance(before, RemoteStream) else ()
        left = max(before.left - (self.stop - self.start), 0)
        return RemoteStream(self, step, count, len(inputs.host_tokens), left, (*earlier, own))

    def _send(self, step: int, count: int, stream: ResidualStream) -> None:
        shape = self.shape
        inputs = (shape.layers - self.start) * shape.inputs
        size = stream_bytes(count, hidden=shape.hidden, inputs=inputs, dtype=shape.dtype)
        buffer = shape.buffer(torch.zeros(size, dtype=torch.uint8), self.start, count)
        assert stream.x.dtype == shape.dtype, f"a stream of {stream.x.dtype} is sent as {shape.dtype}"
        buffer.fill(step, stream.x, stream.own)
        self.owner.link.send(buffer.memory, self.rank, STREAM)

    def receive(self, step: int, count: int, rows: int, probed: Sequence[ProbedStage]) -> StreamBuffer:
        """The stream after this stage. Raises the error of the stage that failed in this step, if one did."""
        link = self.owner.link
        if self._memory is None:
            self._memory = self.shape.memory(self.stop)
        buffer = self.shape.buffer(self._memory, self.stop, count)
        link.receive(buffer.memory, self.rank, STREAM)
        if buffer.step != step:
            raise StateLost(f"stage {self.rank} sent step {buffer.step} and not {step}")
        if (failed := buffer.failed) is None:
            return buffer
        rank, memory, text = failed
        for earlier in itertools.takewhile(lambda one: one.rank != rank, probed):
            # Stages before the failed one have sent the probe's data of this step: read it, or the next step would get it.
            earlier.receive(link, rows, self.shape)
        raise OutOfMemory(text) if memory else RuntimeError(f"stage {rank} failed: {text}")

    def commit(self, drafts: HostCommit) -> None:
        """Order the stage to commit kept drafts. Rows without kept drafts need no commit."""
        paths = tuple(KeptPathData.of(path) for path in drafts.kept if path.path)
        if paths:
            self.post(CommitDrafts(paths))

    def use_rule(self, rule: RowRule, *, check: bool, largest_tile: bool = False) -> list[CheckResult]:
        """Have the stage use this row rule, and compare results under it if `check`."""
        self._rule, self._largest_tile = rule, self._largest_tile or largest_tile
        reply = self.ask(UseRule(rule.floor, rule.block, check, largest_tile))
        return [CheckResult(name, passed) for name, passed in reply.checks]

    def use_rule_again(self) -> None:
        """After a restart, have the stage use the row rule that it used before."""
        if self._rule is not None:
            self.use_rule(self._rule, check=False, largest_tile=self._largest_tile)

    def post(self, message: StageMessage) -> None:
        self.owner.link.send_message(encode(message), self.rank, CONTROL)

    def ask(self, message: StageMessage) -> StageReply:
        self.post(message)
        return decode_reply(self.owner.link.receive_message(self.rank, REPLY))


@dataclass(frozen=True, slots=True)
class RemoteState:
    """The state of a remote stage: its pages, recurrent states and rollback buffer are in the other process."""

    stage: RemoteStage

    @property
    def sizes(self) -> StateSizes:
        return self.stage.sizes

    def open(self, rows: Sequence[Row]) -> None:
        copies = tuple((copy.group, copy.source, copy.target) for row in rows for copy in row.copies)
        restored = tuple((row.restore, row.lane) for row in rows if row.restore is not None)
        if copies or restored:
            self.stage.post(PrepareRows(copies, restored))

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        reply = self.stage.ask(ExportCheckpoint(slot, tuple(packed_ints(group) for group in pages)))
        if reply.error:
            raise RuntimeError(f"stage {self.stage.rank} could not export a checkpoint: {reply.error}")
        return {array.name: array.tensor() for array in reply.arrays}

    def import_checkpoint(self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, Tensor]) -> None:
        # Each stage takes the layers that it has; arrays of other stages are not sent.
        own = {str(layer) for layer in range(self.stage.start, self.stage.stop)}
        given = tuple(NamedArray.of(name, tensor) for name, tensor in arrays.items() if name.partition(".")[0] in own)
        reply = self.stage.ask(ImportCheckpoint(slot, tuple(dict(one) for one in page_maps), given))
        if reply.error:
            raise ValueError(reply.error)
