"""A step's tokens as recurrent layers read them: the lane each row starts from, the form of each token, the taps of the
convolution.

In: Inputs. Out: RecurrentSpans, made once per step and convolution width. A span is the tokens of one row: first prompt
positions in the chunked form, in chunks on absolute multiples; then generated positions in the recurrent form; then drafts,
each from its parent's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.runner.inputs import Inputs, Ints, Span, to_device
from onedraw.sampling.verify import draft_paths
from onedraw.speculation.draft_tree import chain_length
from onedraw.types import Draft

CHUNK = 64  # positions that the chunked form takes at once
ZERO = -1  # a tap before the sequence begins


@dataclass(frozen=True, slots=True)
class RecurrentSpan:
    """One row's tokens [first, first + known + drafts) of the step."""

    first: int
    lane: int
    fresh: bool  # begins at position 0: the lane's old state is ignored
    prompt: int  # how many of the known tokens are in the chunked form
    known: int
    drafts: tuple[Draft, ...]
    held: int  # slot of the first draft in the rollback buffer
    saves: tuple[tuple[int, int], ...]  # (known tokens before it, slot of the checkpoint)


@dataclass(frozen=True)
class RecurrentSpans:
    """Taps are rows of [the step's tokens, then K - 1 window rows per lane]; ZERO means zeros."""

    runs: tuple[RecurrentSpan, ...]
    host_taps: Ints  # [T, K] what the convolution reads at each token, oldest first
    host_closings: Ints  # [R, K - 1] the window after each run's known tokens
    host_kept: Ints  # [saves, K - 1] the window of each checkpoint, saves in order of runs
    device: torch.device

    @cached_property
    def taps(self) -> Tensor:
        return to_device(self.host_taps, self.device)

    @cached_property
    def closings(self) -> Tensor:
        return to_device(self.host_closings, self.device)

    @cached_property
    def kept(self) -> Tensor:
        return to_device(self.host_kept, self.device)

    @cached_property
    def lanes(self) -> Tensor:
        return torch.tensor([run.lane for run in self.runs], dtype=torch.long, device=self.device)

    @cached_property
    def slots(self) -> Tensor:
        return torch.tensor([slot for run in self.runs for _, slot in run.saves], dtype=torch.long, device=self.device)

    @cached_property
    def drafted(self) -> tuple[Tensor, Tensor]:
        """Tokens of the step that are drafts, and their slots in the rollback buffer."""
        tokens = [run.first + run.known + i for run in self.runs for i in range(len(run.drafts))]
        places = [run.held + i for run in self.runs for i in range(len(run.drafts))]
        pair = torch.tensor([tokens, places], dtype=torch.long, device=self.device)
        return pair[0], pair[1]


def recurrent_spans(inputs: Inputs, *, conv: int) -> RecurrentSpans:
    spans = [span for span in inputs.spans if span.lane is not None and span.count]
    total, before = len(inputs.host_tokens), conv - 1
    taps = np.full((total, conv), ZERO, dtype=np.int64)
    closings, kept = [], []
    runs = []
    for span in spans:
        run = _run(span)
        runs.append(run)
        opening = [ZERO] * before if run.fresh else [total + run.lane * before + i for i in range(before)]
        chain = chain_length(run.drafts)
        row = np.asarray([*opening, *range(run.first, run.first + run.known + chain)], dtype=np.int64)
        line = row[: before + run.known]
        taps[run.first : run.first + run.known + chain] = row[np.arange(run.known + chain)[:, None] + np.arange(conv)]
        if chain < len(run.drafts):
            node = run.first + run.known
            for index, path in enumerate(draft_paths(run.drafts)[1 + chain :], start=chain):
                taps[node + index] = [*line[-before:], *(node + i for i in path)][-conv:]
        closings.append(line[len(line) - before :])
        kept += [line[count : count + before] for count, _ in run.saves]
    empty = np.zeros((0, before), dtype=np.int64)
    return RecurrentSpans(
        runs=tuple(runs),
        host_taps=taps,
        host_closings=np.stack(closings) if closings else empty,
        host_kept=np.stack(kept) if kept else empty,
        device=inputs.device,
    )


def _run(span: Span) -> RecurrentSpan:
    assert span.lane is not None
    known = span.count - len(span.drafts)
    prompt = min(max(span.prompt_stop - span.start, 0), known)
    if prompt and span.start % CHUNK:
        raise AssertionError(f"a prompt row starts at {span.start}, which is no multiple of {CHUNK}")
    if prompt < known and span.start + prompt < span.prompt_stop:
        raise AssertionError("a row leaves its prompt before the prompt ends")
    if prompt == known and span.start + known < span.prompt_stop and (span.start + known) % CHUNK:
        raise AssertionError(f"a prompt row stops at {span.start + known}, inside a chunk")
    return RecurrentSpan(
        first=span.first,
        lane=span.lane,
        fresh=span.start == 0,
        prompt=prompt,
        known=known,
        drafts=span.drafts,
        held=span.held,
        saves=tuple((save.position - span.start, save.slot) for save in span.saves),
    )
