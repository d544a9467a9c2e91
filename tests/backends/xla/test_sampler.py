"""The sampler of the xla backend follows the sampling rule, and a row's bits do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.backends.xla import making

# isort: split
import jax
import jax.numpy as jnp

from onedraw.backends.sampled_rows import SamplingPosition, read_samples
from onedraw.backends.xla import sampler as sampler_module
from onedraw.backends.xla.sampler import DryHistories, XlaTokenCounts, sample_rows, sampling_inputs, threshold, uniform_bits
from onedraw.sampling.law import checksum_weights
from onedraw.sampling.noise import key
from onedraw.sampling.noise import uniform_bits as defined_bits
from onedraw.types import History, SampledToken, SamplingParams
from tests.backends.torch.sampling_cases import Case, random_case, wrong_rows

ROWS = 8
assert making.SIZES  # importing `making` skips this module without jax


class SlabSampler:
    """Samples slabs of logits as the backend does."""

    def __init__(self, vocab: int, *, lanes: int = 64) -> None:
        self.vocab, self.width, self.lanes = vocab, -(-vocab // 64) * 64, lanes
        self.device = jax.devices("cpu")[0]
        self.counts = XlaTokenCounts(width=self.width, lanes=lanes, device=self.device)
        self.histories = DryHistories()
        sums = np.pad(np.stack(checksum_weights(vocab)), ((0, 0), (0, self.width - vocab)))
        self.program = jax.jit(partial(sample_rows, vocab=vocab))
        self.sums = jnp.asarray(sums)

    def forget(self) -> None:
        self.counts = XlaTokenCounts(width=self.width, lanes=self.lanes, device=self.device)

    def sample(self, logits: np.ndarray, positions: Sequence[SamplingPosition]) -> list[SampledToken | None]:
        found: list[SampledToken | None] = []
        self.histories = DryHistories()  # cases reuse request ids for other histories
        self.counts.follow(positions)
        for start in range(0, len(positions), ROWS):
            part = positions[start : start + ROWS]
            rows = np.full((ROWS, self.width), -np.inf, dtype=np.float32)
            rows[: len(part), : self.vocab] = logits[start : start + ROWS]
            sizes = {"rows": ROWS, "vocab": self.vocab, "width": self.width, "lanes": self.lanes}
            inputs = sampling_inputs(part, self.histories, **sizes)
            results = np.asarray(self.program(rows, self.sums, (self.counts.output, self.counts.prompt), inputs))
            found += read_samples(results, part)
        return found


@pytest.fixture(scope="module")
def sampler() -> SlabSampler:
    return SlabSampler(100)


def case_of(seed: int, rows: int = 24, *, whole_numbers: bool = False) -> Case:
    return random_case(seed, rows=rows, vocab=100, whole_numbers=whole_numbers, tokens=6)


def test_every_row_follows_the_sampling_rule(sampler: SlabSampler) -> None:
    for seed in range(40):
        case = case_of(seed, whole_numbers=seed % 2 == 0)
        sampler.forget()
        assert wrong_rows(case, sampler.sample(case.logits.numpy(), case.positions)) == [], seed


def test_a_full_vocabulary_follows_the_sampling_rule() -> None:
    case = random_case(5, rows=16, vocab=49152)
    assert wrong_rows(case, SlabSampler(49152).sample(case.logits.numpy(), case.positions)) == []


def test_a_row_has_the_same_bits_alone_and_in_a_batch(sampler: SlabSampler) -> None:
    case = case_of(3)
    together = sampler.sample(case.logits.numpy(), case.positions)
    for row in range(0, 24, 5):
        assert sampler.sample(case.logits.numpy()[row : row + 1], case.positions[row : row + 1]) == [together[row]]


def test_a_row_with_non_finite_logits_gives_none_and_does_not_affect_others(sampler: SlabSampler) -> None:
    case = case_of(3, rows=8)
    logits = case.logits.numpy().copy()
    expected = sampler.sample(logits, case.positions)
    logits[2], logits[5], logits[6, 3] = np.nan, np.inf, np.nan
    found = sampler.sample(logits, case.positions)
    assert [row for row in range(8) if found[row] is None] == [2, 5, 6]
    assert all(found[row] == expected[row] for row in range(8) if row not in (2, 5, 6))


def test_the_noise_integers_equal_the_definition() -> None:
    keys = np.asarray([key(seed, position) for seed, position in ((0, 0), (2**53 - 1, 7), (42, 100000))], dtype=np.uint32)
    found = np.asarray(uniform_bits(jnp.asarray(keys), 1000))
    for row, (seed, position) in enumerate(((0, 0), (2**53 - 1, 7), (42, 100000))):
        assert np.array_equal(found[row], defined_bits(seed, position, 1000))


def test_a_threshold_is_the_smallest_value_that_reaches_the_target() -> None:
    rng = np.random.default_rng(0)
    deficit = np.round(rng.exponential(size=(8, 200)) * 4).astype(np.float32) / 4  # many ties
    target = rng.integers(1, 200, 8)
    found = np.asarray(threshold(jnp.asarray(deficit), jnp.ones((8, 200), jnp.int64), jnp.asarray(target)))
    assert found.tolist() == [float(np.sort(row)[count - 1]) for row, count in zip(deficit, target, strict=True)]


def test_more_sparse_entries_than_the_largest_size_get_a_larger_program(
    sampler: SlabSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "SPARSE", (2, 4))
    case = case_of(5)
    biased = replace(case.positions[0].params, logit_bias=tuple((token, 0.5) for token in range(37)))
    positions = [case.positions[0]._replace(params=biased), *case.positions[1:]]
    sizes = {"rows": ROWS, "vocab": sampler.vocab, "width": sampler.width, "lanes": sampler.lanes}
    assert len(sampling_inputs(positions[:1], DryHistories(), **sizes)["bias_at"]) == 40
    case = Case(case.logits, positions)
    assert wrong_rows(case, sampler.sample(case.logits.numpy(), positions)) == []


def test_penalties_follow_growing_histories_drafts_and_changing_lanes() -> None:
    """Including histories longer than COUNT_BATCH."""
    sampler, rng = SlabSampler(20, lanes=3), np.random.default_rng(1)
    params = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, checksums=True)
    histories = [History(tuple(rng.integers(0, 20, size=size).tolist())) for size in (4, 1300, 4, 4, 700)]
    for _ in range(12):
        positions = []
        for lane, request in enumerate(rng.permutation(5)[: rng.integers(1, 4)].tolist()):
            histories[request].output.extend(rng.integers(0, 20, size=rng.integers(0, 4)).tolist())
            drafts = tuple(rng.integers(0, 20, size=rng.integers(0, 3)).tolist())
            positions += [
                SamplingPosition(lane, params, histories[request], drafts[:n], f"r{request}") for n in range(len(drafts) + 1)
            ]
        case = Case(making_tensor(rng.normal(size=(len(positions), 20))), positions)
        assert wrong_rows(case, sampler.sample(case.logits.numpy(), positions)) == []


def making_tensor(values: np.ndarray) -> object:
    import torch

    return torch.from_numpy(values.astype(np.float32))
