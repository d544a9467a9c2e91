"""What the engine knows of a device: a backend takes a plan and gives an outcome.

In: Plan. Out: Outcome. What a backend cannot do stands in its Capacity, is checked once at the border
(`engine/service.py`) and refused by name; nothing is silently downgraded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol, runtime_checkable

import numpy.typing as npt

from onedraw.errors import BadSetting
from onedraw.types import Outcome, Plan, Row

StepHandle = NewType("StepHandle", int)

STATE_DTYPE = "f32"


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that keep the same positions: all of them, or only those that the next position's window still sees."""

    pages: int
    window: int | None = None  # position i sees keys j with i - window < j <= i


@dataclass(frozen=True, slots=True)
class Capacity:
    """The numbers and abilities the engine plans with."""

    vocab: int
    max_context: int
    lanes: int
    groups: tuple[PageGroup, ...]  # the unbounded one first, where there is one
    page_size: int
    checkpoints: int = 0  # slots for the state and last logits of prompts
    chunk: int = 1  # prompt rows that do not reach the prompt's end stop at multiples of it
    recurrent: bool = False  # has state that only moves forward: pages alone do not restore a prefix
    returns_logits: bool = True  # can choose by any law; without it only plain argmax
    logits_per_position: bool = True  # can verify drafts
    max_drafts: int = 64  # drafts of one row in one turn
    draft_positions: int | None = None  # drafts of all rows in one turn, where a rollback buffer bounds them
    step_tokens: int | None = None  # tokens of one turn, where buffers between devices bound them
    stages: int = 1  # parts that the layers lie in, one behind the other
    max_in_flight: int = 1  # plans that may be under way at once; stages on devices of their own work on one each
    min_step_rows: int = 1  # sequences that ride together before a second plan is made: fewer would take as long by themselves
    async_tokens: int = 0  # tokens of a steady turn that `submit` only starts; 0: it computes every turn
    async_scheduling: bool = False  # a plan may follow one that is under way: its rows await the tokens of that one's rows
    lookahead: int = 0  # positions past a row that the backend's own drafter writes to; covered where pages allow
    drafter: str = ""  # the backend's own drafter, if it has one
    device: str = "cpu"
    dtype: str = "f32"
    activation: str = "f32"  # dtype of the residual stream
    kv_dtype: str = ""  # of keys and values; empty: that of the products

    def submits_async(self, rows: Sequence[Row]) -> bool:
        """`submit` of these rows returns at once."""
        tokens = sum(len(row.tokens) + len(row.drafts) for row in rows)
        return tokens <= self.async_tokens and all(is_plain_decode(row, recurrent=self.recurrent) for row in rows)


def is_plain_decode(row: Row, *, recurrent: bool) -> bool:
    """A row of a turn that repeats: it chooses, from one generated token, with what sampling kernels can do alone. Logprobs and
    constraints are left to the host's part of the sampler, and checkpoints and prompts come once per request."""
    plain = row.samples and len(row.tokens) == 1 and not (row.scores_prompt or row.copies or row.saves) and row.restore is None
    chooses = row.params.logprobs is None and row.params.constraint is None
    return plain and chooses and (row.start >= row.prompt_stop or not recurrent)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was looked at before anything is served."""

    check: str
    passed: bool


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Whether a row computes from its row on this machine."""

    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


class Backend(Protocol):
    """One device, or several under one roof. A sequence rides in one ticket at a time; tickets are collected in the order of
    their submission, and no more than `max_in_flight` are under way; with `async_scheduling` one more, whose rows await what
    the one before it chooses. With one ticket, `submit` may compute."""

    @property
    def capacity(self) -> Capacity: ...

    def submit(self, plan: Plan) -> StepHandle: ...

    def collect(self, ticket: StepHandle) -> Outcome: ...

    def close(self) -> None: ...


@runtime_checkable
class SupportsSnapshots(Protocol):
    """A backend whose checkpoints can leave it and come back, bit for bit. Names and shapes do not depend on a split."""

    @property
    def identity(self) -> str:
        """What computes the bits; where it is equal, equal inputs have equal bits."""
        ...

    def export(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        """Copies on the host: these pages of every group, and the slot's states and logits."""
        ...

    def adopt(self, slot: int | None, places: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Per group, stored page → page here; the slot's states and logits, where there is a slot. Raises KeyError or
        ValueError where the arrays are not this backend's."""
        ...


def require_state_dtype(dtype: str, buffer: str) -> None:
    """Recurrent state is kept in float32: it feeds on itself, so what a narrower buffer rounds away comes back in every
    later token, and a state that went through a checkpoint would differ from one that did not."""
    if dtype != STATE_DTYPE:
        raise BadSetting(f"--state-dtype: {dtype} cannot hold the {buffer}; recurrent state is kept in {STATE_DTYPE}")
