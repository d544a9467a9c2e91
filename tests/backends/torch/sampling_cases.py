"""Random logits and sampling parameters, and a comparison of a sampler with the sampling rule. Needs torch, numpy and pytest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.sampling.law import law, sample
from onedraw.sampling.noise import gumbel
from onedraw.text.constraints.base import token_mask
from onedraw.types import DryParams, History, Logprobs, SampledToken, SamplingParams, TokenMask

NEAR = 5e-6  # values this close after adding noise may be ordered differently by backends, whose logarithms differ


@dataclass(frozen=True)
class Case:
    logits: torch.Tensor  # [C, V] float32
    positions: list[SamplingPosition]

    def rows(self, rows: Sequence[int]) -> Case:
        return Case(self.logits[list(rows)], [self.positions[row] for row in rows])


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Draw every parameter, each often neutral, so that rows of one batch use different features."""

    def maybe(value: Any, otherwise: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else otherwise

    def tokens(largest: int) -> list[int]:
        return rng.integers(0, vocab, size=rng.integers(1, largest + 1)).tolist()

    return SamplingParams(
        temperature=float(rng.choice([0, 0.3, 0.7, 1, 1, 1.5, 100])),
        top_k=maybe(int(rng.choice([1, 2, 5, 40, vocab])), 0),
        top_p=maybe(float(rng.choice([0.1, 0.5, 0.9, 0.99])), 1.0),
        min_p=maybe(float(rng.choice([0.01, 0.1, 1])), 0.0),
        repetition_penalty=maybe(float(rng.choice([0.7, 1.1, 2])), 1.0),
        frequency_penalty=maybe(float(rng.choice([-0.5, 0.3, 2])), 0.0),
        presence_penalty=maybe(float(rng.choice([-0.5, 0.3, 2])), 0.0),
        dry=maybe(DryParams(multiplier=1.0, allowed_length=1, range=int(rng.choice([0, 8]))), None),
        logit_bias=maybe(tuple((token, float(rng.choice([-np.inf, -2, 5]))) for token in set(tokens(4))), ()),
        seed=int(rng.integers(0, 2**53)),
        min_tokens=maybe(5, 0),
        stop_ids=frozenset(tokens(2)),
        bad_words=maybe((tuple(tokens(2)), tuple(tokens(1))), ()),
        logprobs=maybe(int(rng.choice([0, 1, 5, 20])), None, 0.5),
        logprobs_mode=("raw", "processed", "both")[int(rng.integers(3))],
        logprob_token_ids=maybe(tuple(tokens(6)), ()),
        checksums=bool(rng.random() < 0.7),
    )


@dataclass(frozen=True)
class FixedMask:
    """A constraint that always allows the same tokens."""

    bits: TokenMask

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
        return self.bits


def random_case(seed: int, *, rows: int, vocab: int, whole_numbers: bool = False, tokens: int | None = None) -> Case:
    """`whole_numbers`: round the logits, so that many are equal. `tokens`: number of distinct tokens in the histories."""
    rng = np.random.default_rng(seed)
    distinct = vocab if tokens is None else tokens
    logits = rng.normal(scale=rng.choice([1, 3, 8]), size=(rows, vocab)).astype(np.float32)
    if whole_numbers:
        logits = np.round(logits)  # some become -0.0
    positions = []
    for row in range(rows):
        length = rng.integers(1, 12), rng.integers(0, 12), rng.integers(0, 4)
        prompt, output, drafts = (rng.integers(0, distinct, size=n).tolist() for n in length)
        constraint = FixedMask(token_mask(rng.integers(0, vocab, size=rng.integers(1, 10)).tolist(), vocab))
        history = History(tuple(prompt), output, constraint if rng.random() < 0.2 else None)
        if rng.random() < 0.3:
            history.forced = (*output, *drafts, int(rng.integers(0, vocab)))
        positions.append(SamplingPosition(row, random_params(rng, vocab), history, tuple(drafts), f"request-{row}"))
    return Case(torch.from_numpy(logits), positions)


def make_sampler(vocab: int, *, lanes: int = 512, device: str = "cpu", kind: type[Sampler] = Sampler) -> Sampler:
    return kind(vocab=vocab, lanes=lanes, device=torch.device(device))


def sample_all(sampler: Sampler, case: Case, device: str = "cpu") -> list[SampledToken | None]:
    return sampler.sample(case.logits.to(device), case.positions)


def wrong_rows(case: Case, found: Sequence[SampledToken | None]) -> list[int]:
    """Return the rows whose sampled token, logprobs or checksum differ from the sampling rule."""
    rows = zip(case.logits.numpy(), case.positions, found, strict=True)
    return [row for row, (logits, position, sampled) in enumerate(rows) if not _agrees(logits, position, sampled)]


def _agrees(logits: np.ndarray, position: SamplingPosition, found: SampledToken | None) -> bool:
    arguments = logits, position.params, position.history, position.drafts
    expected = sample(*arguments)
    if expected is None or found is None:
        return expected is found
    if expected.token != found.token:
        if position.params.greedy:
            return False
        values = law(*arguments) + gumbel(position.params.seed, position.at, len(logits))
        return bool(abs(values[expected.token] - values[found.token]) < NEAR)
    return expected.checksum == found.checksum and _same_logprobs(expected.logprobs, found.logprobs)


def _same_logprobs(expected: Logprobs | None, found: Logprobs | None) -> bool:
    if expected is None or found is None:
        return expected is found
    same_ids = [token for token, _ in (*expected.top, *expected.asked)] == [token for token, _ in (*found.top, *found.asked)]
    if (expected.processed is None) != (found.processed is None):
        return False
    first, second = (
        [
            one.logprob,
            *(value for _, value in (*one.top, *one.asked)),
            *(() if one.processed is None else (one.processed, one.mass or 0.0)),
        ]
        for one in (expected, found)
    )
    return same_ids and all(a == b or abs(a - b) < 1e-5 for a, b in zip(first, second, strict=True))
