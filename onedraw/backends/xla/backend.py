"""The OpenXLA backend: runs plans by programs that jax compiles.

In: a spec, a source of weights, sizes, jax devices; then plans. Out: outcomes. A step is: inputs → stages → sampling → commit,
each a compiled program on the devices; the host waits only for the sampled tokens. Drafts are kept by the rule of
`sampling/verify.py`. A row is the work of one sequence in one step; a lane is the slot of its state; a pick is a token of the
step after which a token is sampled; a slab is as many picks as are sampled at once. Axes: T tokens of a step, C picked tokens, E
hidden width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jaxlib.version import __version__ as jaxlib_version

from onedraw.backends.base import Capacity, ImmediateSteps, PageGroup, SelfCheck
from onedraw.backends.sampled_rows import Integers, SamplingPosition, read_samples, row_outcome
from onedraw.backends.xla.inputs import (
    CHUNK,
    XlaInputs,
    compiled_shapes,
    conv_width,
    make_inputs,
    product_rows,
    round_up,
)
from onedraw.backends.xla.model import XlaStage
from onedraw.backends.xla.platform import OPTIONS, Array, hardware_name
from onedraw.backends.xla.sampler import DryHistories, XlaTokenCounts, sample, sampling_inputs, score
from onedraw.backends.xla.selfcheck import self_check
from onedraw.backends.xla.state import no_copies
from onedraw.backends.xla.weights import VECTOR, Weights
from onedraw.errors import OutOfMemory, StateLost
from onedraw.models.source import WeightSource
from onedraw.models.spec import ModelSpec
from onedraw.sampling.law import checksum_weights
from onedraw.sampling.logprobs import read_logprobs
from onedraw.sampling.verify import draft_prefixes
from onedraw.types import Logprobs, Outcome, Plan, Row, SampledToken

DRAFTS = 64  # default of the maximum number of drafts in a step, over all rows


@dataclass(frozen=True, slots=True)
class XlaStageDevice:
    """The device of a pipeline stage. Its layers begin after those of the previous stage and end before layer `stop`; None: with
    the last layer."""

    device: jax.Device
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class SamplePick:
    """A position to sample at: after a token of the step, or after the prompt of a checkpoint, whose logits are saved."""

    row: int  # index of the row in the plan
    token: int  # index of the token in the step
    position: SamplingPosition
    restore: int  # checkpoint slot whose saved logits are used instead of the token's; -1 stands for none
    keep: int  # checkpoint slot in which the logits are saved; the padding slot if none


class XlaBackend(ImmediateSteps):
    """A backend whose weights are loaded, pages allocated and programs compiled when its constructor returns."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: str = "f32",
        activation: str | None = None,
        stage_devices: Sequence[XlaStageDevice],
        lanes: int,
        pages: int | tuple[int, ...],
        page_size: int,
        max_context: int,
        step_tokens: int = 512,
        drafts: int = DRAFTS,
        checkpoints: int = 0,
        warm: bool = True,
        check: bool = True,
        notify: Callable[[str], None] = lambda line: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the model. `warm`: compile all programs now; otherwise each is compiled when a step first needs it. `check`: run
        the self-check. `notify` receives lines for the user. `progress` is called after each loaded layer with its number and the
        total."""
        super().__init__()
        self._spec, self._stage_devices = spec, tuple(stage_devices)
        self._conv = conv_width(spec)
        self._width = round_up(spec.vocab, VECTOR)
        platform = stage_devices[-1].device.platform
        self.shape = compiled_shapes(
            lanes=lanes,
            page_size=page_size,
            pages=(pages,) * len(spec.windows) if isinstance(pages, int) else pages,
            windows=spec.windows,
            max_context=max_context,
            step_tokens=step_tokens,
            drafts=drafts,
            checkpoints=checkpoints,
            rows=product_rows(platform, dtype),
        )
        self._stages: list[XlaStage] = []
        starts = [0, *(one.stop or 0 for one in stage_devices)]
        for start, stage_device in zip(starts, stage_devices, strict=False):
            stop = len(spec.layers) if stage_device.stop is None else stage_device.stop
            sizes: dict[str, Any] = {
                "dtype": dtype,
                "activation": activation or dtype,
                "device": stage_device.device,
                "progress": progress,
            }
            self._stages.append(XlaStage(spec, source, self.shape, **sizes, start=start, stop=stop))
        last = stage_devices[-1].device
        put = partial(jax.device_put, device=last)
        sums = np.stack(checksum_weights(spec.vocab))
        self._sums = put(np.pad(sums, ((0, 0), (0, self._width - spec.vocab))))
        self._allocate_sampling()
        self._dry_histories = DryHistories()
        self._make_programs()
        self._capacity = Capacity(
            vocab=spec.vocab,
            max_context=max_context,
            lanes=lanes,
            groups=tuple(PageGroup(count, window) for count, window in zip(self.shape.pages, spec.windows, strict=True)),
            page_size=page_size,
            checkpoints=checkpoints,
            chunk=CHUNK if spec.recurrent else 1,
            recurrent=spec.recurrent,
            max_drafts=min(64, drafts),
            draft_positions=drafts,
            step_tokens=self.shape.mixed.tokens - CHUNK,
            stages=len(stage_devices),
            device=f"xla-{platform}",
            dtype=dtype,
            activation=activation or dtype,
        )
        if warm:
            self._warm(notify)
        self.report = self._checked(notify) if check else None

    def _allocate_sampling(self) -> None:
        last = self._stage_devices[-1].device
        self._saved_logits = jax.device_put(np.zeros((self.shape.checkpoints + 1, self._width), np.float32), last)
        self._counts = XlaTokenCounts(width=self._width, lanes=self.shape.lanes, device=last)

    def _make_programs(self) -> None:
        sampling = partial(sample, rows=self.shape.slab, spec=self._spec)
        self._sample = jax.jit(sampling, donate_argnums=(2, 3), compiler_options=OPTIONS)
        self._score = jax.jit(partial(score, spec=self._spec), compiler_options=OPTIONS)

    def _warm(self, notify: Callable[[str], None]) -> None:
        """Compile every program now by running empty steps. jax caches compiled programs on disk."""
        pick_tokens = np.zeros(self.shape.picks, dtype=np.int32)
        decode, mixed = (
            make_inputs((), self.shape, conv=self._conv, bucket=bucket) for bucket in (self.shape.decode, self.shape.mixed)
        )
        notify(f"xla: compiling 1 of 5: decode steps of {decode.bucket.tokens} tokens")
        self._forward(decode, pick_tokens)
        notify(f"xla: compiling 2 of 5: mixed steps of up to {mixed.bucket.tokens} tokens")
        _, picked, increments = self._forward(mixed, pick_tokens)
        notify("xla: compiling 3 of 5: sampling")
        sampled, _ = self._sample_picks(picked, [], slabs=1)
        notify("xla: compiling 4 of 5: page and checkpoint copies")
        for stage in self._stages:
            stage.copy(no_copies(self.shape))
        notify("xla: compiling 5 of 5: commit of drafts")
        for stage, changes in zip(self._stages, increments, strict=True):
            if self.shape.drafts:
                stage.commit(changes, sampled, mixed)
        jax.block_until_ready([stage.state for stage in self._stages])

    def _checked(self, notify: Callable[[str], None]) -> SelfCheck:
        """Run the self-check. If it fails, compile the programs again with one fixed number of rows in all matrix products, and
        repeat the check."""
        report = self_check(self)
        if not report.passed and self.shape != self.shape.uniform:
            notify("xla: results depend on the number of rows on this machine; compiling again with a fixed number of rows")
            self.shape = self.shape.uniform
            for stage in self._stages:
                stage.reshape(self.shape)
            report = self_check(self)
        return report

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def close(self) -> None:
        """Free weights and pages now, even if references to this object remain."""
        self._outcomes.clear()
        for stage in self._stages:
            stage.close()
        for array in (self._saved_logits, self._sums, *self._counts.arrays):
            array.delete()

    # ------------------------------------------------------------------ state after a failed program

    def recover(self) -> None:
        """Allocate the state anew. Call it when a step raised StateLost."""
        try:
            for stage in self._stages:
                stage.allocate_again()
            for array in (self._saved_logits, *self._counts.arrays):
                array.delete()
            self._allocate_sampling()
        except (RuntimeError, OutOfMemory) as error:
            raise StateLost(f"the state cannot be allocated again: {error}") from error

    def _has_state(self) -> bool:
        try:
            jax.block_until_ready([*(stage.state for stage in self._stages), self._saved_logits, self._counts.arrays])
        except RuntimeError:  # an array was deleted, or the program that was to compute it failed
            return False
        return True

    # ------------------------------------------------------------------ one step

    def _run(self, plan: Plan) -> Outcome:
        try:
            return self._compute(plan)
        except Exception as error:
            # A program takes the memory of its donated arrays when it starts, and returns new arrays only if it succeeds.
            if self._has_state():
                raise
            raise StateLost(f"a program failed in the middle of a step: {error}") from error

    def _compute(self, plan: Plan) -> Outcome:
        begin = time.perf_counter()
        rows = plan.rows
        for stage in self._stages:
            stage.open(rows)
        inputs = make_inputs(rows, self.shape, conv=self._conv)
        picks = self._picks(rows, inputs)
        pick_tokens = np.zeros(self.shape.picks, dtype=np.int32)
        pick_tokens[: len(picks)] = [pick.token for pick in picks]
        x, picked, increments = self._forward(inputs, pick_tokens)
        sampled, results = self._sample_picks(picked, picks)
        if int(inputs.drafts["count"]) and (inputs.branches or self._spec.recurrent):
            for stage, changes in zip(self._stages, increments, strict=True):
                stage.commit(changes, sampled, inputs)
        scored = self._scored(rows, inputs, x)
        samples: dict[int, list[SampledToken | None]] = {}
        positions, read = [pick.position for pick in picks], list[SampledToken | None]()
        for part in results:
            read += read_samples(np.asarray(part), positions[len(read) :])
        for pick, token in zip(picks, read, strict=True):
            samples.setdefault(pick.row, []).append(token)
        outcomes = (row_outcome(row, samples.get(i, []), scored.get(i, ())) for i, row in enumerate(rows))
        return Outcome(tuple(outcomes), time.perf_counter() - begin)

    def _forward(self, inputs: XlaInputs, pick_tokens: Any) -> tuple[Array, Array, list[list[Weights]]]:
        """Run all stages. Returns the residuals [T, E], the residuals [C, E] of picked tokens, and the state increments of
        drafts, stage by stage."""
        stream = self._stages[0].opened(inputs.arrays["tokens"])
        picked: Any = None
        increments = []
        for stage in self._stages:
            changes, stream, picked = stage.run(stream, inputs, pick_tokens)
            increments.append(changes)
        return stream.x, picked, increments

    def _picks(self, rows: Sequence[Row], inputs: XlaInputs) -> list[SamplePick]:
        """For each row that samples, one pick after its last known token and one after each draft."""
        picks = []
        no_slot = self.shape.checkpoints
        for i, (row, first) in enumerate(zip(rows, inputs.firsts, strict=True)):
            if not row.samples:
                continue
            for k, drafts in enumerate(draft_prefixes(row.drafts)):
                position = SamplingPosition(row.lane, row.params, row.history, drafts, row.request_id)
                keep = next((save.slot for save in row.saves if save.position == row.stop), no_slot) if k == 0 else no_slot
                restore = -1 if row.tokens or row.restore is None else row.restore
                picks.append(SamplePick(i, max(first + len(row.tokens) - 1 + k, 0), position, restore, keep))
        return picks

    def _sample_picks(self, picked: Array, picks: Sequence[SamplePick], *, slabs: int = 0) -> tuple[Array, list[Array]]:
        """Sample all picks, slab by slab. Returns the sampled tokens, and the result rows of each slab; both stay on the device.
        `slabs`: the least number of slabs to run, for compiling without picks."""
        rows = self.shape.slab
        self._counts.follow([pick.position for pick in picks])
        sampled = jax.device_put(np.zeros(self.shape.picks, dtype=np.int32), self._stage_devices[-1].device)
        results = []
        for start in range(0, max(len(picks), slabs * rows), rows):
            part = picks[start : start + rows]
            padding = rows - len(part)
            slab = {
                "offset": np.int32(start),
                "restore": np.asarray([*(pick.restore for pick in part), *[-1] * padding], dtype=np.int32),
                "keep": np.asarray([*(pick.keep for pick in part), *[self.shape.checkpoints] * padding], dtype=np.int32),
            }
            sizes = {"rows": rows, "vocab": self._spec.vocab, "width": self._width, "lanes": self.shape.lanes}
            params = sampling_inputs([pick.position for pick in part], self._dry_histories, **sizes)
            given = (self._head, self._sums, self._saved_logits, sampled, self._counts.arrays, picked, slab, params)
            self._saved_logits, sampled, found = self._sample(*given)
            results.append(found)
        return sampled, results

    @property
    def _head(self) -> dict[str, Any]:
        last = self._stages[-1].weights
        return {"norm": last["norm"], "head": last["head"]}

    def _scored(self, rows: Sequence[Row], inputs: XlaInputs, x: Array) -> dict[int, tuple[Logprobs, ...]]:
        """For each row with prompt logprobs, by row number: the logprobs of the prompt tokens that the row's positions
        predict."""
        scored: dict[int, tuple[Logprobs, ...]] = {}
        step = self.shape.slab
        for i, (row, first) in enumerate(zip(rows, inputs.firsts, strict=True)):
            if not row.scores_prompt:
                continue
            targets = row.history.prompt[row.start + 1 : row.stop + 1]
            top = min(row.params.prompt_logprobs or 0, self._spec.vocab)
            found: list[Logprobs] = []
            for start in range(0, len(targets), step):
                part = np.asarray(targets[start : start + step], dtype=np.int64)
                index = np.minimum(np.arange(first + start, first + start + step), first + len(row.tokens) - 1).astype(np.int32)
                padded = np.pad(part, (0, step - len(part)))
                results: Integers = np.asarray(self._score(self._head, x, index, padded, np.int32(top)))
                found += [read_logprobs(line, top) for line in results[: len(part)]]
            scored[i] = tuple(found)
        return scored

    # ------------------------------------------------------------------ snapshots

    @property
    def identity(self) -> str:
        """Everything that affects the bits of results: hardware, libraries and the rows of matrix products. The split over
        devices does not affect them."""
        parts = sorted({hardware_name(one.device) for one in self._stage_devices})
        rows = f"products of {self.shape.decode.rows} and {self.shape.mixed.rows} rows"
        return f"xla on {', '.join(parts)}; jax {jax.__version__}, jaxlib {jaxlib_version}; {rows}"

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        found = {"logits": np.asarray(self._saved_logits)[slot].copy()}
        for stage in self._stages:
            found |= {f"layer.{name}": array for name, array in stage.export_checkpoint(slot, pages).items()}
        return found

    def import_checkpoint(
        self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        for stage in self._stages:
            stage.import_checkpoint(slot, page_maps, {name.removeprefix("layer."): array for name, array in arrays.items()})
        if slot is not None and "logits" in arrays:
            self._saved_logits = self._saved_logits.at[slot].set(arrays["logits"])
