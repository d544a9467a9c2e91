"""The state of recurrent (Gated DeltaNet) layers, and how the tokens of a step read and write it.

In: sizes; then a step's Inputs. Out: tensors, allocated once, that the delta operations read and write: a state per lane and per
checkpoint, and the increments of a step's drafts; and the spans of a step, one per row. After every step a lane holds the state
after its kept tokens. Drafts are written to the rollback buffer, and only the commit (`ops/plain/recurrent_rollback.py`) brings
them to a lane. A lane is the slot of a sequence's recurrent state; a span is the tokens of one row, that is, of one sequence in
one step. Axes: T tokens, R rows, K taps, which are the inputs that the convolution reads at a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.runner.inputs import Inputs, Ints, Span, to_device
from onedraw.errors import OutOfMemory
from onedraw.models.spec import DeltaSpec
from onedraw.sampling.verify import draft_paths
from onedraw.speculation.draft_tree import chain_length
from onedraw.types import Draft

CHUNK = 64  # positions that the chunked form computes at once
ZERO = -1  # a tap before the beginning of the sequence, where the convolution reads zeros


class LaneBlock:
    """The states of all delta layers of one shape in common tensors, so that one operation can process all layers. All of them
    are float32, whatever the model's dtype. Owner: the model state."""

    def __init__(self, spec: DeltaSpec, layers: int, *, lanes: int, drafts: int, checkpoints: int, device: torch.device) -> None:
        self.spec = spec
        head = (spec.value_heads, spec.key_dim, spec.value_dim)
        window = (spec.conv - 1, spec.channels)
        try:
            self.states = _zeros(layers, lanes, *head, device=device)  # [layer, lane, value head, key dim, value dim]
            self.windows = _zeros(layers, lanes, *window, device=device)  # inputs of the convolution, oldest first
            self.saved_states = _zeros(layers, checkpoints, *head, device=device)
            self.saved_windows = _zeros(layers, checkpoints, *window, device=device)
            # The increment of a drafted position: state = state * decay + key ⊗ change; and its input to the convolution.
            self.decays = _zeros(layers, drafts, spec.value_heads, device=device)
            self.keys = _zeros(layers, drafts, spec.key_heads, spec.key_dim, device=device)
            self.changes = _zeros(layers, drafts, spec.value_heads, spec.value_dim, device=device)
            self.fed = _zeros(layers, drafts, spec.channels, device=device)
        except (RuntimeError, MemoryError):  # torch raises these when memory is exhausted
            raise OutOfMemory(
                f"the states of {lanes} lanes, {checkpoints} checkpoints and {drafts} drafts do not fit into the memory of "
                f"{device}; lower --max-batch, --checkpoint-memory or --draft-memory"
            ) from None


class LaneStore:
    """The state of one layer: views of its block. Owner: the model state."""

    def __init__(self, block: LaneBlock, layer: int) -> None:
        self.spec = block.spec
        self.states, self.windows = block.states[layer], block.windows[layer]
        self.saved_states, self.saved_windows = block.saved_states[layer], block.saved_windows[layer]
        self.decays, self.keys, self.changes = block.decays[layer], block.keys[layer], block.changes[layer]
        self.fed = block.fed[layer]

    @staticmethod
    def alone(spec: DeltaSpec, *, lanes: int, drafts: int, checkpoints: int, device: torch.device) -> LaneStore:
        """The store of a layer that shares no block."""
        return LaneStore(LaneBlock(spec, 1, lanes=lanes, drafts=drafts, checkpoints=checkpoints, device=device), 0)

    def restore(self, slots: Sequence[int], lanes: Sequence[int]) -> None:
        """Copy the states of checkpoints to lanes."""
        for slot, lane in zip(slots, lanes, strict=True):
            self.states[lane].copy_(self.saved_states[slot])
            self.windows[lane].copy_(self.saved_windows[slot])


def _zeros(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class KeptDrafts:
    """The drafts that the commit keeps in one lane. `places`: their slots in the rollback buffer, in order of position."""

    lane: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecurrentSpan:
    """The tokens of one row: first its known tokens, then its drafts."""

    first: int  # index of the row's first token among the tokens of the step
    lane: int
    fresh: bool  # whether the row begins at position 0, so that the lane's old state is ignored
    prompt: int  # how many of the known tokens belong to the prompt, which is computed in chunks
    known: int  # known tokens of the row in this step
    drafts: tuple[Draft, ...]
    held: int  # slot of the first draft in the rollback buffer
    saves: tuple[tuple[int, int], ...]  # checkpoints to save: (known tokens of the row before it, slot of the checkpoint)


@dataclass(frozen=True)
class RecurrentSpans:
    """The spans of a step, and which inputs the convolutions of width K read and keep.

    A tap is a row number of a table of convolution inputs: the T tokens of the step, then the K - 1 rows of each lane's window.
    """

    spans: tuple[RecurrentSpan, ...]
    host_taps: Ints  # [T, K]: the taps that the convolution reads at each token, oldest first
    host_closings: Ints  # [R, K - 1]: the taps of the window after the known tokens of each span
    host_kept: Ints  # [saves, K - 1]: the taps of the window of each checkpoint to save, in order of spans
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
        return torch.tensor([span.lane for span in self.spans], dtype=torch.long, device=self.device)

    @cached_property
    def slots(self) -> Tensor:
        return torch.tensor([slot for span in self.spans for _, slot in span.saves], dtype=torch.long, device=self.device)

    @cached_property
    def drafted(self) -> tuple[Tensor, Tensor]:
        """The indices of drafts among the tokens of the step, and their slots in the rollback buffer."""
        tokens = [span.first + span.known + i for span in self.spans for i in range(len(span.drafts))]
        places = [span.held + i for span in self.spans for i in range(len(span.drafts))]
        pair = torch.tensor([tokens, places], dtype=torch.long, device=self.device)
        return pair[0], pair[1]


def recurrent_spans(inputs: Inputs, *, conv: int) -> RecurrentSpans:
    spans = [span for span in inputs.spans if span.lane is not None and span.count]
    total, before = len(inputs.host_tokens), conv - 1
    taps = np.full((total, conv), ZERO, dtype=np.int64)
    closings, kept = [], []
    found: list[RecurrentSpan] = []
    for span in spans:
        one = _recurrent_span(span)
        found.append(one)
        opening = [ZERO] * before if one.fresh else [total + one.lane * before + i for i in range(before)]
        chain = chain_length(one.drafts)
        row = np.asarray([*opening, *range(one.first, one.first + one.known + chain)], dtype=np.int64)
        known = row[: before + one.known]
        taps[one.first : one.first + one.known + chain] = row[np.arange(one.known + chain)[:, None] + np.arange(conv)]
        if chain < len(one.drafts):
            node = one.first + one.known
            for index, path in enumerate(draft_paths(one.drafts)[1 + chain :], start=chain):
                taps[node + index] = [*known[-before:], *(node + i for i in path)][-conv:]
        closings.append(known[len(known) - before :])
        kept += [known[count : count + before] for count, _ in one.saves]
    empty = np.zeros((0, before), dtype=np.int64)
    return RecurrentSpans(
        spans=tuple(found),
        host_taps=taps,
        host_closings=np.stack(closings) if closings else empty,
        host_kept=np.stack(kept) if kept else empty,
        device=inputs.device,
    )


def _recurrent_span(span: Span) -> RecurrentSpan:
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
