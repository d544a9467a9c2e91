"""How often each lane's request has seen each token, for the penalties.

In: positions with their histories. Out: counts per row. A lane's buffer follows its history by a cursor, so a decode step adds
one token; drafts are added to a copy, for their own position only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onedraw.backends.sampled_rows import CountedHistory, SamplingPosition


class LaneCounts:
    """Owner: the sampler. The buffers exist from the first position that has penalties."""

    def __init__(self, *, vocab: int, lanes: int, device: torch.device) -> None:
        # One lane more than there are: padding of a step is counted there, and never read.
        self.output = torch.zeros(lanes + 1, vocab, dtype=torch.int32, device=device)
        self.prompt = torch.zeros(lanes + 1, vocab, dtype=torch.bool, device=device)
        self._marks: list[CountedHistory | None] = [None] * lanes
        self._device = device

    def read(self, places: Sequence[SamplingPosition]) -> tuple[Tensor, Tensor]:
        """Counts in the output, and whether a token is in prompt or output, drafts included.   [C, V] each"""
        _add(self.output, self.grown(places))
        lanes = torch.tensor([place.lane for place in places], device=self._device)
        counts = self.output[lanes]
        _add(counts, [(row, token) for row, place in enumerate(places) for token in place.drafts])
        return counts, (counts > 0).logical_or_(self.prompt[lanes])

    def grown(self, places: Sequence[SamplingPosition]) -> list[tuple[int, int]]:
        """The tokens that these lanes' histories grew by since the last call, as (lane, token): the caller adds them to `output`.
        Lanes of other requests are cleared first."""
        grown: list[tuple[int, int]] = []
        before: SamplingPosition | None = None
        for place in places:
            if before is not None and place.history is before.history and place.lane == before.lane:
                continue  # another position of the same row
            before = place
            history, mark = place.history, self._marks[place.lane]
            known = len(history)
            if mark is None or not mark.is_prefix_of(place):
                self._open(place.lane, history.prompt)
                start = len(history.prompt)
            else:
                start = mark.known
            grown.extend((place.lane, token) for token in history.slice(start, known))
            self._marks[place.lane] = CountedHistory(place.request_id, history.prompt, known)
        return grown

    def forget(self, places: Sequence[SamplingPosition]) -> None:
        """Clear these lanes at their next use, since the tokens that `grown` returned for them were not added."""
        for place in places:
            self._marks[place.lane] = None

    def _open(self, lane: int, prompt: tuple[int, ...]) -> None:
        self.output[lane] = 0
        self.prompt[lane] = False
        self.prompt[lane, torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True


def _add(counts: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """One more for each (row, token); a pair that occurs twice counts twice."""
    if pairs:
        rows, tokens = torch.tensor(pairs, device=counts.device).unbind(1)
        one = torch.ones((), dtype=counts.dtype, device=counts.device)
        counts.index_put_((rows, tokens), one, accumulate=True)
