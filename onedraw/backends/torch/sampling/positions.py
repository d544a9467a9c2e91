"""The positions of a step that sample or are scored, their logits, and their samples.

In: a plan, its inputs and the hidden states of its tokens. Out: samples and logprobs by row. Logits are computed for a slice of
positions at a time, or read from a checkpoint that contains the logits of its prompt's last position. A row is the work of one
sequence in one step. Axes: C positions, V' vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.memory_plan import LOGITS_BYTES
from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.state.model_state import CheckpointLogits
from onedraw.sampling.verify import draft_prefixes
from onedraw.types import Logprobs, Plan, Row, SampledToken

SCORED = 64  # prompt positions whose logprobs are computed at a time, which bounds memory


@dataclass(frozen=True, slots=True)
class RowPosition:
    """A position at which a token is sampled: after a token of the step, or after the prompt of a checkpoint."""

    row: int
    token: int | None  # index of the token in the step; None: the logits are in the checkpoint `restore`
    position: SamplingPosition
    restore: int | None
    keep: int | None  # the checkpoint to which these logits are saved; None: they are not saved


class PositionSampler:
    """Computes logits at the positions of a step, and samples or scores them. `rule`: to how many hidden states a product with
    the output head is padded. Owner: the backend."""

    def __init__(self, model: Transformer, sampler: Sampler, kept: CheckpointLogits, rule: RowRule) -> None:
        self._model, self._sampler, self._kept, self._rule = model, sampler, kept, rule
        self._slice = max(LOGITS_BYTES // (4 * model.spec.vocab), 1)

    def logits(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """Logits [C, V'] of these tokens of the step."""
        padding = self._rule.padded(len(tokens)) - len(tokens)
        index = torch.tensor([*tokens, *tokens[-1:] * padding], dtype=torch.long, device=self._model.device)
        return self._model.logits(hidden.index_select(0, index))[: len(tokens)]

    def sample(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> dict[int, list[SampledToken | None]]:
        """For each row that samples, a token after its last known token and after each draft."""
        wanted = [
            one
            for i, (row, span) in enumerate(zip(plan.rows, inputs.spans, strict=False))  # spans of padding are last
            for one in _row_positions(i, row, span.first)
        ]
        sampled: dict[int, list[SampledToken | None]] = {}
        for start in range(0, len(wanted), self._slice):
            part = wanted[start : start + self._slice]
            tokens = self._sampler.sample(self._logits_at(part, hidden), [one.position for one in part])
            for one, token in zip(part, tokens, strict=True):
                sampled.setdefault(one.row, []).append(token)
        return sampled

    def _logits_at(self, wanted: Sequence[RowPosition], hidden: Tensor) -> Tensor:
        """Logits [C, V'] of these positions, computed or from checkpoints. Logits at the position of a checkpoint that is being
        saved are stored with it."""
        computed = [one.token for one in wanted if one.token is not None]
        logits = self.logits(hidden, computed) if computed else self._kept.rows[:0]
        if len(computed) < len(wanted):
            places, found = iter(range(len(computed))), logits
            logits = torch.stack(
                [self._kept.rows[one.restore or 0] if one.token is None else found[next(places)] for one in wanted]
            )
        for one, row in zip(wanted, logits, strict=True):
            if one.keep is not None:
                self._kept.keep(one.keep, row)
        return logits

    def score(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> dict[int, tuple[Logprobs, ...]]:
        """For each row that scores its prompt, the logprobs of the prompt tokens that its positions predict."""
        scored: dict[int, tuple[Logprobs, ...]] = {}
        for i, (row, span) in enumerate(zip(plan.rows, inputs.spans, strict=False)):
            if not row.scores_prompt:
                continue
            targets = row.history.prompt[row.start + 1 : row.stop + 1]
            found: list[Logprobs] = []
            step = min(self._slice, SCORED)
            for start in range(0, len(targets), step):
                part = targets[start : start + step]
                logits = self.logits(hidden, list(range(span.first + start, span.first + start + len(part))))
                found.extend(self._sampler.score(logits, part, row.params.prompt_logprobs or 0))
            scored[i] = tuple(found)
        return scored


def _row_positions(index: int, row: Row, first: int) -> Iterator[RowPosition]:
    """The positions of one row, whose tokens begin at `first`: after its last known token, and after each draft."""
    if not row.samples:
        return
    kept = next((save.slot for save in row.saves if save.position == row.stop), None)
    for k, drafts in enumerate(draft_prefixes(row.drafts)):
        drafts = (*row.tokens, *drafts) if row.awaits_token else drafts  # sampled, but not read by the host yet
        position = SamplingPosition(row.lane, row.params, row.history, drafts, row.request_id)
        token = first + len(row.tokens) - 1 + k if row.tokens else None
        yield RowPosition(index, token, position, row.restore, kept if k == 0 else None)
