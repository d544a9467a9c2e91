"""The sampler of `backends/torch/sampler.py` with its vocabulary-wide work in Triton kernels.

In: logits and positions. Out: the same choices: tokens, logprobs and checksums. What the host knows of the rows becomes one
table; logprobs, which few ask for, are described by the plain sampler from the kernels' deficits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.answers import CHECKSUM, TOKEN, Position
from onedraw.backends.torch.counts import LaneCounts
from onedraw.backends.torch.kernels.triton_sample import COLUMNS, TOP_K, Chosen, Wishes, choose
from onedraw.backends.torch.sampler import Law, Sampler, _deficits, _divisor
from onedraw.sampling.adjust import adjustment, inside
from onedraw.sampling.law import NO_TOKEN, checksum_weights, min_p_limit
from onedraw.sampling.noise import key
from onedraw.types import SamplingParams


class TritonSampler(Sampler):
    def _slab(self, logits: Tensor, positions: Sequence[Position], columns: int) -> Tensor:
        if any(p.params.constraint is not None for p in positions):  # the plain sampler chooses alike, and takes sets of tokens
            return super()._slab(logits, positions, columns)
        weights = self._checksum_weights() if any(p.params.checksums for p in positions) else None
        chosen, checksums = choose(logits, self.wishes(positions), vocab=self._vocab, width=self._width, weights=weights)
        answers = torch.zeros(len(positions), columns, dtype=torch.int64, device=self._device)
        answers[:, TOKEN] = chosen.tokens
        if checksums is not None:
            answers[:, CHECKSUM] = checksums
        self._report(answers, logits, chosen, positions)
        return answers

    def _report(self, answers: Tensor, logits: Tensor, chosen: Chosen, positions: Sequence[Position]) -> None:
        """Logprobs of the rows that ask for them."""
        tokens = chosen.tokens.clamp(min=0)
        for mode in ("raw", "processed"):
            asking = [i for i, p in enumerate(positions) if p.params.logprobs is not None and p.params.logprobs_mode == mode]
            if not asking:
                continue
            rows = self._rows(asking, len(positions))
            if mode == "raw":
                raw = self._padded(logits.float())
                self._describe(answers, rows, _deficits(raw if rows is None else raw[rows]), tokens)
            else:
                law = Law(chosen.deficits, chosen.limits[:, None], chosen.tokens != NO_TOKEN)
                self._describe(answers, rows, law.kept(rows), tokens)

    def wishes(self, positions: Sequence[Position]) -> Wishes:
        """Everything the kernels need to know of the rows, in three small copies at most."""
        table = np.zeros((len(positions), COLUMNS), dtype=np.int64)
        tokens: list[int] = []
        values: list[float] = []
        adjusted = False
        for row, p in enumerate(positions):
            host = adjustment(p.params, p.history, p.drafts, self._recall(p))
            bias = [(t, v) for t, v in p.params.logit_bias if 0 <= t < self._vocab]
            kinds = [bias, list(host.penalized), [(t, 0.0) for t in inside(host.banned, self._vocab)]]
            kinds.append([(t, 0.0) for t in p.drafts] if p.params.counts_history else [])
            fences = [len(tokens)]
            for kind in kinds:
                tokens += [token for token, _ in kind]
                values += [value for _, value in kind]
                fences.append(len(tokens))
            adjusted |= fences[-1] > fences[0] or p.params.counts_history
            first, second = key(p.params.seed, p.index)
            table[row, :6].view(np.float64)[:] = _numbers(p.params)
            table[row, TOP_K:] = [
                p.params.top_k if p.params.temperature > 0 and 0 < p.params.top_k < self._vocab else 0,
                first,
                second,
                p.params.greedy,
                p.lane if p.params.counts_history else -1,
                *fences,
            ]
        counts = self._follow([p for p in positions if p.params.counts_history])
        return Wishes(
            table=torch.from_numpy(table).to(self._device),
            tokens=torch.tensor(tokens or [0], dtype=torch.int32).to(self._device),
            values=torch.tensor(values or [0.0], dtype=torch.float32).to(self._device),
            output=None if counts is None else counts[0],
            prompt=None if counts is None else counts[1],
            counted=bool(table[:, TOP_K].any()),
            shared=any(p.params.temperature > 0 and p.params.top_p < 1 for p in positions),
            adjusted=adjusted,
        )

    def _follow(self, counting: Sequence[Position]) -> tuple[Tensor, Tensor] | None:
        """The lanes' counts, brought up to date; drafts are counted by the kernel."""
        if not counting:
            return None
        if self._counts is None:
            self._counts = LaneCounts(vocab=self._width, lanes=self._lanes, device=self._device)
        self._counts._follow(counting)
        return self._counts._output, self._counts._prompt

    def _checksum_weights(self) -> Tensor:
        """[2, V]"""
        if self._weights is None:
            self._weights = torch.from_numpy(np.stack(checksum_weights(self._vocab))).to(self._device)
        return self._weights


def _numbers(params: SamplingParams) -> list[float]:
    hot = params.temperature > 0
    return [
        _divisor(params.temperature),
        min_p_limit(params.min_p) if hot else np.inf,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        params.top_p if hot else 1.0,
    ]
