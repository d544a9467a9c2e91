"""The process of a remote stage: it loads its layers, then runs them in every step, until its link closes.

In: `StageSizes` and a checkpoint, then messages of the engine (`messages.py`) and residual streams of the stage before. Out:
residual streams for the stage after it, and replies. The layers, pages, recurrent states, rollback buffer and boundary are those
of a local stage, and run by the same code. If a step raises, the error is sent with the stream, so the step fails in the engine's
process and this process keeps running. A row is the work of one sequence in one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onedraw.backends.torch.device import DTYPES, hardware_name, is_out_of_memory
from onedraw.backends.torch.ops.base import HostCommit, Ops
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.remote.link import CONTROL, ENGINE, FOREVER, PROBED, REPLY, STREAM, Link
from onedraw.backends.torch.remote.messages import (
    CommitDrafts,
    ExportCheckpoint,
    ImportCheckpoint,
    NamedArray,
    PrepareRows,
    RunLayers,
    StageReply,
    UseRule,
    decode_message,
    encode,
    unpacked_ints,
)
from onedraw.backends.torch.remote.stage import StageFacts, StreamShape
from onedraw.backends.torch.remote.stream_buffer import stream_bytes
from onedraw.backends.torch.runner.inputs import InputLayout, lay_out
from onedraw.backends.torch.runner.pipeline import LayerProbe, ResidualStream, StageDevice, current_device, load_stage
from onedraw.backends.torch.selfcheck import check_experts, check_products, use_largest_tile
from onedraw.backends.torch.state.kv_pages import KV_DTYPES
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.errors import StateLost
from onedraw.models.source import WeightSource
from onedraw.models.spec import ModelSpec

log = logging.getLogger("onedraw")


@dataclass(frozen=True, slots=True)
class StageSizes:
    """The layers of a stage, and the sizes and dtypes that it shares with the other stages."""

    start: int
    stop: int
    dtype: str
    activation: str
    kv_dtype: str
    max_context: int
    rows: int
    state: StateSizes


class StageWorker:
    """One stage with its state. When it is constructed, its weights are loaded. Owner: the process of the stage."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        sizes: StageSizes,
        *,
        weights: str,
        device: str,
        ops: Ops,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`weights`: the fingerprint of the checkpoint."""
        place, activation = StageDevice.named(device, ops, stop=sizes.stop), DTYPES[sizes.activation]
        with current_device(place.device):
            self._stage = load_stage(
                place,
                torch.device("cpu"),
                spec,
                source,
                start=sizes.start,
                dtype=DTYPES[sizes.dtype],
                activation=activation,
                max_context=sizes.max_context,
                rows=sizes.rows,
                progress=progress,
            )
            self._state = ModelState(
                self._stage.specs,
                sizes.state,
                dtype=KV_DTYPES[sizes.kv_dtype],
                device=place.device,
                first=sizes.start,
            )
        state = sizes.state
        self._layout = InputLayout(state.page_size, state.pages, ops.rule, state.windows)
        self._shape = StreamShape(spec.hidden, len(spec.layers), spec.inputs, sizes.rows, activation)
        self._memory = self._shape.memory(sizes.start)
        choices = {*ops.choices.texts(), *(text for linear in self._stage.linears for text in linear.choices)}
        self.facts = StageFacts(
            weights=weights,
            name=ops.name,
            hardware=hardware_name(place.device),
            choices=tuple(sorted(choices)),
            rule=ops.rule,
            borders=tuple(ops.kernel_borders(set(self._stage.mixers))),
        )

    def serve(self, link: Link, *, source: int, target: int) -> None:
        """Answer messages until the link closes. `source`, `target`: the ranks of the stages before and after this one."""
        with torch.inference_mode(), current_device(self._stage.device):
            try:
                while True:
                    self._serve_one(link, source, target)
            except StateLost as ended:
                log.info("the stage's link ended: %s", ended)
            finally:
                link.close()

    def _serve_one(self, link: Link, source: int, target: int) -> None:
        match decode_message(link.receive_message(ENGINE, CONTROL, FOREVER)):
            case RunLayers() as step:
                self._run(link, step, source, target)
            case PrepareRows(copies, restored):
                self._state.prepare(copies=copies, restored=restored)
            case CommitDrafts(paths):
                self._stage.commit(self._state, HostCommit([path.kept() for path in paths]))
            case UseRule() as rule:
                link.send_message(encode(self._use_rule(rule)), ENGINE, REPLY)
            case ExportCheckpoint() as export:
                link.send_message(encode(self._export(export)), ENGINE, REPLY)
            case ImportCheckpoint() as given:
                link.send_message(encode(self._import(given)), ENGINE, REPLY)

    def _run(self, link: Link, step: RunLayers, source: int, target: int) -> None:
        """Receive the residual stream of a step, run the layers, and send the resulting stream."""
        shape, start, stop = self._shape, self._stage.start, self._stage.stop
        count = sum(row.count for row in step.rows)
        entered = shape.buffer(self._memory, start, count)
        link.receive(entered.memory, source, STREAM)
        if entered.step != step.step:
            raise StateLost(f"step {entered.step} arrived in place of step {step.step}")
        left = shape.buffer(self._sent(count), stop, count)
        if (failed := entered.failed) is not None:
            left.fail(step.step, failed[0], memory=failed[1], text=failed[2])
            link.send(left.memory, target, STREAM)
            return
        probe = LayerProbe(step.layers, finite=[] if step.finite else None)
        try:
            stream = self._advance(step, ResidualStream(entered.x, entered.own, step.left), probe)
            left.fill(step.step, stream.x, stream.own)
        except StateLost:
            raise
        except Exception as error:
            memory = is_out_of_memory(error)
            if not memory:
                log.exception("layers %d to %d failed in a step", start, stop - 1)
            left.fail(step.step, link.place.rank, memory=memory, text=f"{type(error).__name__}: {error}")
            link.send(left.memory, target, STREAM)
            return
        link.send(left.memory, target, STREAM)
        features = torch.stack(probe.features).cpu() if probe.features else torch.empty(0)
        finite = torch.stack(probe.finite).to(torch.uint8).cpu() if probe.finite else torch.empty(0)
        for found in (features, finite):
            if found.numel():
                link.send(found, ENGINE, PROBED)

    def _advance(self, step: RunLayers, before: ResidualStream, probe: LayerProbe) -> ResidualStream:
        spans = [row.span() for row in step.rows]
        pages = [tuple(unpacked_ints(group) for group in row.pages) for row in step.rows]
        tokens = [0] * sum(span.count for span in spans)  # only the embedding reads token ids, and it is in the engine's process
        inputs = lay_out(tokens, spans, pages, layout=self._layout, device=self._stage.device)
        return self._stage.advance(before, inputs, self._state, probe=probe)

    def _sent(self, count: int) -> Tensor:
        """Memory in which the stream of `count` rows leaves this stage. The link keeps it until the stream is received."""
        shape = self._shape
        inputs = (shape.layers - self._stage.stop) * shape.inputs
        return torch.zeros(stream_bytes(count, hidden=shape.hidden, inputs=inputs, dtype=shape.dtype), dtype=torch.uint8)

    def _use_rule(self, given: UseRule) -> StageReply:
        rule = RowRule(given.floor, given.block)
        self._layout = replace(self._layout, rule=rule)
        if given.largest_tile:
            use_largest_tile([self._stage])
        if not given.check:
            return StageReply()
        for linear in self._stage.linears:
            linear.rule = rule
        found = [*check_products(self._stage.linears, rule), *check_experts([self._stage])]
        return StageReply(checks=tuple((one.check, one.passed) for one in found))

    def _export(self, export: ExportCheckpoint) -> StageReply:
        try:
            arrays = self._state.export_checkpoint(export.slot, [unpacked_ints(group) for group in export.pages])
        except Exception as error:
            return StageReply(error=f"{type(error).__name__}: {error}")
        return StageReply(arrays=tuple(NamedArray.of(name, tensor) for name, tensor in arrays.items()))

    def _import(self, given: ImportCheckpoint) -> StageReply:
        try:
            arrays = {array.name: array.tensor() for array in given.arrays}
            self._state.import_checkpoint(given.slot, given.page_maps, arrays)
        except Exception as error:
            return StageReply(error=f"{type(error).__name__}: {error}")
        return StageReply()
