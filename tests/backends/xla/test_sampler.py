"""The sampler of the xla backend is the law, and a row's bits do not depend on the rows beside it."""

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
from onedraw.backends.xla import sampler as wants
from onedraw.backends.xla.sampler import DryHistories, answer, reach, sampling_inputs, uniform_bits
from onedraw.backends.xla.token_counts import XlaTokenCounts
from onedraw.sampling.law import checksum_weights
from onedraw.sampling.noise import key
from onedraw.sampling.noise import uniform_bits as defined_bits
from onedraw.types import History, SampledToken, SamplingParams
from tests.backends.torch.judge import Case, disagreements, random_case

ROWS = 8
assert making.SIZES  # skips this module where jax is not installed


class Chooser:
    """What the backend does with a slab of logits."""

    def __init__(self, vocab: int, *, lanes: int = 64) -> None:
        self.vocab, self.width, self.lanes = vocab, -(-vocab // 64) * 64, lanes
        device = jax.devices("cpu")[0]
        self.counts = XlaTokenCounts(width=self.width, lanes=lanes, device=device)
        self.recalls = DryHistories()
        sums = np.pad(np.stack(checksum_weights(vocab)), ((0, 0), (0, self.width - vocab)))
        self.program = jax.jit(partial(answer, vocab=vocab))
        self.sums = jnp.asarray(sums)

    def forget(self) -> None:
        self.counts._marks = [None] * self.lanes

    def choose(self, logits: np.ndarray, positions: Sequence[SamplingPosition]) -> list[SampledToken | None]:
        found: list[SampledToken | None] = []
        self.recalls = DryHistories()  # cases use the same names of requests for other histories
        self.counts.follow(positions)
        for start in range(0, len(positions), ROWS):
            part = positions[start : start + ROWS]
            rows = np.full((ROWS, self.width), -np.inf, dtype=np.float32)
            rows[: len(part), : self.vocab] = logits[start : start + ROWS]
            sizes = {"rows": ROWS, "vocab": self.vocab, "width": self.width, "lanes": self.lanes}
            wants = sampling_inputs(part, self.recalls, **sizes)
            answers = np.asarray(self.program(rows, self.sums, (self.counts.output, self.counts.prompt), wants))
            found += read_samples(answers, part)
        return found


@pytest.fixture(scope="module")
def chooser() -> Chooser:
    return Chooser(100)


def case_of(seed: int, rows: int = 24, *, whole_numbers: bool = False) -> Case:
    return random_case(seed, rows=rows, vocab=100, whole_numbers=whole_numbers, tokens=6)


def test_every_row_is_chosen_by_the_law(chooser: Chooser) -> None:
    for seed in range(40):
        case = case_of(seed, whole_numbers=seed % 2 == 0)
        chooser.forget()
        assert disagreements(case, chooser.choose(case.logits.numpy(), case.positions)) == [], seed


def test_a_whole_vocabulary_is_chosen_by_the_law() -> None:
    case = random_case(5, rows=16, vocab=49152)
    assert disagreements(case, Chooser(49152).choose(case.logits.numpy(), case.positions)) == []


def test_a_row_has_the_same_bits_beside_any_other(chooser: Chooser) -> None:
    case = case_of(3)
    together = chooser.choose(case.logits.numpy(), case.positions)
    for row in range(0, 24, 5):
        assert chooser.choose(case.logits.numpy()[row : row + 1], case.positions[row : row + 1]) == [together[row]]


def test_a_row_without_a_token_says_so_and_harms_no_neighbour(chooser: Chooser) -> None:
    case = case_of(3, rows=8)
    logits = case.logits.numpy().copy()
    sound = chooser.choose(logits, case.positions)
    logits[2], logits[5], logits[6, 3] = np.nan, np.inf, np.nan
    found = chooser.choose(logits, case.positions)
    assert [row for row in range(8) if found[row] is None] == [2, 5, 6]
    assert all(found[row] == sound[row] for row in range(8) if row not in (2, 5, 6))


def test_the_integers_of_the_noise_are_the_definition() -> None:
    keys = np.asarray([key(seed, position) for seed, position in ((0, 0), (2**53 - 1, 7), (42, 100000))], dtype=np.uint32)
    found = np.asarray(uniform_bits(jnp.asarray(keys), 1000))
    for row, (seed, position) in enumerate(((0, 0), (2**53 - 1, 7), (42, 100000))):
        assert np.array_equal(found[row], defined_bits(seed, position, 1000))


def test_a_threshold_is_the_smallest_value_that_reaches_the_target() -> None:
    rng = np.random.default_rng(0)
    deficit = np.round(rng.exponential(size=(8, 200)) * 4).astype(np.float32) / 4  # many ties
    target = rng.integers(1, 200, 8)
    found = np.asarray(reach(jnp.asarray(deficit), jnp.ones((8, 200), jnp.int64), jnp.asarray(target)))
    assert found.tolist() == [float(np.sort(row)[count - 1]) for row, count in zip(deficit, target, strict=True)]


def test_more_entries_than_the_largest_program_holds_get_a_larger_one(chooser: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wants, "SPARSE", (2, 4))
    case = case_of(5)
    biased = replace(case.positions[0].params, logit_bias=tuple((token, 0.5) for token in range(37)))
    positions = [case.positions[0]._replace(params=biased), *case.positions[1:]]
    sizes = {"rows": ROWS, "vocab": chooser.vocab, "width": chooser.width, "lanes": chooser.lanes}
    assert len(sampling_inputs(positions[:1], DryHistories(), **sizes)["bias_at"]) == 40
    case = Case(case.logits, positions)
    assert disagreements(case, chooser.choose(case.logits.numpy(), positions)) == []


def test_penalties_follow_histories_through_growth_drafts_and_changing_lanes() -> None:
    """Also histories longer than one program adds."""
    chooser, rng = Chooser(20, lanes=3), np.random.default_rng(1)
    params = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, checksums=True)
    histories = [History(tuple(rng.integers(0, 20, size=size).tolist())) for size in (4, 1300, 4, 4, 700)]
    for _ in range(12):
        positions = []
        for lane, rider in enumerate(rng.permutation(5)[: rng.integers(1, 4)].tolist()):
            histories[rider].output.extend(rng.integers(0, 20, size=rng.integers(0, 4)).tolist())
            guesses = tuple(rng.integers(0, 20, size=rng.integers(0, 3)).tolist())
            positions += [
                SamplingPosition(lane, params, histories[rider], guesses[:n], f"r{rider}") for n in range(len(guesses) + 1)
            ]
        case = Case(making_tensor(rng.normal(size=(len(positions), 20))), positions)
        assert disagreements(case, chooser.choose(case.logits.numpy(), positions)) == []


def making_tensor(values: np.ndarray) -> object:
    import torch

    return torch.from_numpy(values.astype(np.float32))
