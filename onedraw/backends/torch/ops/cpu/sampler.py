"""The sampler of `backends/torch/sampling/sampler.py` with its vocabulary-wide steps in one call into C (sampling.c).

In: scores and the sampling parameters of each row. Out: the same tokens, with the kernels' exponentials and logarithms. As in
every sampler, bias, penalties, bans and sets of allowed tokens are applied to the scores before, and logprobs are computed
afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.ops.cpu.library import LONG, POINTER, Kernels
from onedraw.backends.torch.sampling.sampler import FilteredScores, Sampler
from onedraw.sampling.law import NO_TOKEN, filters
from onedraw.sampling.noise import key
from onedraw.types import SamplingParams

ROW_PARAMETERS = np.dtype(
    [
        *(("top_p", "f8"), ("top_k", "i8"), ("divisor", "f4"), ("limit", "f4")),
        *(("first", "u4"), ("second", "u4"), ("greedy", "i4"), ("padding", "i4")),
    ]
)


class _SamplingArguments(ctypes.Structure):
    """The ctypes mirror of `sampling_arguments` in sampling.h."""

    _fields_ = (
        *((name, POINTER) for name in ("scores", "raw")),
        *((name, LONG) for name in ("stride", "raw_stride", "vocab", "width")),
        *((name, POINTER) for name in ("parameters", "deficits", "limits", "tokens", "masses")),
    )


class CpuSampler(Sampler):
    def __init__(self, kernels: Kernels, *, vocab: int, lanes: int, device: torch.device) -> None:
        super().__init__(vocab=vocab, lanes=lanes, device=device)
        self._kernels = kernels

    def _chosen(self, raw: Tensor, scores: Tensor, positions: Sequence[SamplingPosition]) -> tuple[FilteredScores, Tensor]:
        adjusted = scores is not raw
        raw = raw.contiguous()
        scores = scores.contiguous() if adjusted else raw
        parameters = self._row_parameters(positions)
        rows = len(positions)
        deficits = self._scratch.take("deficit", (rows, self._width), torch.float32)
        masses = self._scratch.take("masses", (self._kernels.threads, self._width), torch.int64)
        limits = torch.empty(rows, dtype=torch.float32, device="cpu")
        tokens = torch.empty(rows, dtype=torch.int64, device="cpu")
        arguments = _SamplingArguments(
            scores=scores.data_ptr(),
            raw=raw.data_ptr() if adjusted else None,
            stride=scores.stride(0),
            raw_stride=raw.stride(0),
            vocab=self._vocab,
            width=self._width,
            parameters=parameters.ctypes.data,
            deficits=deficits.data_ptr(),
            limits=limits.data_ptr(),
            tokens=tokens.data_ptr(),
            masses=masses.data_ptr(),
        )
        self._kernels.sample(ctypes.addressof(arguments), rows, self._kernels.thread_pool)
        return FilteredScores(deficits, limits[:, None], tokens != NO_TOKEN), tokens.clamp_(min=0)

    def _row_parameters(self, positions: Sequence[SamplingPosition]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        return np.array([self._parameters_of(p.params, p.at) for p in positions], dtype=ROW_PARAMETERS)

    def _parameters_of(self, params: SamplingParams, index: int) -> tuple[float, ...]:
        """A row's entry of the table `ROW_PARAMETERS`, in the order of its fields."""
        asked = filters(params, self._vocab)
        first, second = (0, 0) if params.greedy else key(params.seed, index)
        return (asked.top_p, asked.top_k, asked.divisor, asked.limit, first, second, params.greedy, 0)
