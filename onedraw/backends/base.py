"""The backend protocol: a backend takes a plan and returns an outcome. The engine knows devices only through this file.

In: Plan. Out: Outcome. A capability that a backend lacks is a field of its Capacity; `engine/client.py` checks it once per
request and rejects the request with an error that names it. A row is the work of one sequence in one step; a lane is the slot of
a sequence's state on the device; a draft is a token that is proposed before it is sampled. A plan is in flight from its
submission until its outcome is collected.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol, runtime_checkable

import numpy.typing as npt

from onedraw.errors import BadSetting
from onedraw.types import MAX_DRAFTS, Outcome, Plan, Row

StepHandle = NewType("StepHandle", int)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """KV pages of layers with the same attention window. With a window, pages that no later position reads are freed."""

    pages: int
    window: int | None = None  # position i attends to keys j with i - window < j <= i; None: all keys


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes and capabilities of a backend, which the engine plans with."""

    vocab: int
    max_context: int
    lanes: int
    groups: tuple[PageGroup, ...]  # the one without a window first, if there is one
    page_size: int
    checkpoints: int = 0  # slots for the recurrent state and last logits of prompt prefixes
    chunk: int = 1  # a prompt row that does not reach the prompt's end stops at a multiple of this
    recurrent: bool = False  # whether the model has recurrent layers, so that pages alone do not restore a prefix
    returns_logits: bool = True  # whether every sampling parameter is supported; otherwise sampling is greedy
    logits_per_position: bool = True  # whether drafts can be verified, which needs logits after each of them
    scores_prompts: bool = True  # whether logprobs of prompt tokens are available
    max_drafts: int = MAX_DRAFTS  # most drafts of one row in one step
    draft_positions: int | None = None  # most drafts of all rows in one step, if a rollback buffer limits them
    step_tokens: int | None = None  # most tokens of one step, if memory was planned for that many
    stages: int = 1  # number of pipeline stages
    max_in_flight: int = 1  # most plans in flight; one per stage if the stages run in parallel
    min_step_rows: int = 1  # Up to this many rows go into one plan, since smaller plans would not run faster.
    async_tokens: int = 0  # `submit` of decode rows with this many tokens in all, or fewer, returns at once; 0: never
    async_scheduling: bool = False  # a plan may follow one in flight, with rows that await its sampled tokens
    lookahead: int = 0  # positions after a row that the backend's drafter writes to, as far as the row has pages
    drafter: str = ""  # name of the backend's own drafter
    device: str = "cpu"
    dtype: str = "f32"
    activation: str = "f32"  # dtype of the residual stream
    kv_dtype: str = ""  # dtype of keys and values; empty: the compute dtype

    def submits_async(self, rows: Sequence[Row]) -> bool:
        """Whether `submit` of these rows returns before they are computed."""
        tokens = sum(len(row.tokens) + len(row.drafts) for row in rows)
        return tokens <= self.async_tokens and all(is_plain_decode(row, recurrent=self.recurrent) for row in rows)


def is_plain_decode(row: Row, *, recurrent: bool) -> bool:
    """Whether a row computes one known token (and drafts) and samples, without checkpoints, page copies or prompt logprobs. In a
    model with recurrent layers the token must be a generated one. Steps of such rows can be captured as CUDA graphs, whatever
    their sampling parameters and constraints; other rows occur a few times per request."""
    plain = row.samples and len(row.tokens) == 1 and not (row.scores_prompt or row.copies or row.saves) and row.restore is None
    return plain and (row.start >= row.prompt_stop or not recurrent)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One comparison of the self-check at start."""

    check: str
    passed: bool


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Whether a row's results on this machine are independent of the other rows of its batch."""

    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


class Backend(Protocol):
    """Computes steps on one device or on several. Plans are collected in the order of their submission, and a sequence is in one
    plan at a time. At most `Capacity.max_in_flight` plans are in flight; with `async_scheduling` one more, whose rows await
    tokens that the plan before it samples. With one plan in flight, `submit` may compute.

    `submit` and `collect` raise OutOfMemory if the device has no memory for a plan. The states of its lanes are then undefined;
    everything else is as before, and other plans can be submitted."""

    @property
    def capacity(self) -> Capacity: ...

    def submit(self, plan: Plan) -> StepHandle: ...

    def collect(self, handle: StepHandle) -> Outcome: ...

    def close(self) -> None: ...


class ImmediateSteps:
    """`submit` and `collect` of a backend whose `submit` computes the whole step. Base class."""

    def __init__(self) -> None:
        self._handles = itertools.count()
        self._outcomes: dict[StepHandle, Outcome] = {}

    def submit(self, plan: Plan) -> StepHandle:
        handle = StepHandle(next(self._handles))
        self._outcomes[handle] = self._run(plan)
        return handle

    def collect(self, handle: StepHandle) -> Outcome:
        return self._outcomes.pop(handle)

    def _run(self, plan: Plan) -> Outcome:
        raise NotImplementedError


@runtime_checkable
class SupportsRecovery(Protocol):
    """A backend that can lose the state of all sequences: a process with some of its layers ends, or a program fails that had
    taken the state's memory. Then `submit` and `collect` raise StateLost, for every plan in flight, until `recover` is called."""

    def recover(self) -> None:
        """Make the backend usable again. The states of all lanes, pages and checkpoints are undefined afterwards. Called with no
        plan in flight. Raises StateLost if it cannot."""
        ...


@runtime_checkable
class SupportsWeightUpdates(Protocol):
    """A backend whose weights can be replaced while it runs."""

    def replace_weights(self, source: Any) -> None:
        """Replace the weights by those of `source`, a WeightSource with the same shapes and types. Called with no plan in flight.
        The states of all lanes, pages and checkpoints are undefined afterwards. If it raises, the weights are as before."""
        ...


@runtime_checkable
class SupportsSnapshots(Protocol):
    """A backend that can export checkpoints to the host and import them bit for bit. Array names and shapes do not depend on
    how the layers are split over devices."""

    @property
    def identity(self) -> str:
        """Names the kernels, hardware and libraries. Backends with equal identity compute equal bits from equal inputs."""
        ...

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        """Host copies of these pages of every group, and of the checkpoint slot's states and logits."""
        ...

    def import_checkpoint(
        self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Import what `export_checkpoint` returned. `page_maps`: per group, stored page → page here. `slot` None: pages only.
        Raises KeyError or ValueError if the arrays do not fit this backend."""
        ...


def require_state_dtype(dtype: str) -> None:
    """Recurrent state is float32 everywhere: rounding errors of a narrower dtype would accumulate over all later tokens, and a
    state restored from a checkpoint would differ from one that was never saved."""
    if dtype != "f32":
        raise BadSetting(
            f"--state-dtype: {dtype} is not supported for the states of recurrent layers; recurrent state is always f32"
        )
