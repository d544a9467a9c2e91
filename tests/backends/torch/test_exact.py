"""Elementwise operations whose bits do not depend on shape, position or threads, and selection without sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.backends.torch.sampling import sampler as noise
from onedraw.backends.torch.sampling.exact import Scratch, apply_elementwise, first_best, likeliest, masses, padded, reach
from onedraw.sampling import law
from onedraw.sampling.noise import gumbel, key, uniform_bits

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.log1p, torch.tanh, torch.sigmoid])
def test_a_value_has_the_same_bits_at_any_position(threads: int, function: Callable[..., torch.Tensor]) -> None:
    values = torch.rand(997, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([apply_elementwise(function, value[None]) for value in values])
    for offset, length in ((0, 997), (1, 996), (13, 70), (500, 497)):
        assert torch.equal(apply_elementwise(function, values[offset : offset + length]), alone[offset : offset + length])
    many = values.repeat(101)  # larger than the size at which torch uses threads, and unaligned
    assert torch.equal(apply_elementwise(function, many), alone.repeat(101))
    square = values[:990].reshape(10, 99).t()  # not contiguous
    assert torch.equal(apply_elementwise(function, square), alone[:990].reshape(10, 99).t())
    inside = many.clone()
    assert torch.equal(apply_elementwise(function, inside, out=inside), alone.repeat(101))


def test_padding_fills_whole_vectors() -> None:
    assert [padded(n) for n in (1, 64, 65, 49152)] == [64, 64, 128, 49152]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_reach_finds_the_same_threshold_as_sorting(data: st.DataObject) -> None:
    levels = st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.0000001, 3.0, 27.5, 1e30, float("inf")])
    rows = data.draw(st.integers(1, 3))
    width = data.draw(st.integers(1, 40))
    deficit = np.array([[data.draw(levels) for _ in range(width)] for _ in range(rows)], dtype=np.float32)
    weights = np.array([[data.draw(st.integers(0, 2**40)) for _ in range(width)] for _ in range(rows)])
    weights[:, 0] += 1
    target = np.array([data.draw(st.integers(1, int(row.sum()))) for row in weights])
    expected = [
        min(level for level in row if weight[row <= level].sum() >= goal)
        for row, weight, goal in zip(deficit, weights, target, strict=True)
    ]
    found = reach(torch.from_numpy(deficit), torch.from_numpy(weights), torch.from_numpy(target), Scratch(CPU))
    assert found.tolist() == [float(level) for level in expected]


def test_the_first_of_the_largest_is_found_at_any_width() -> None:
    generator = torch.Generator().manual_seed(3)
    for width in (64, 4096, 65536):
        values = torch.randint(-3, 4, (7, width), generator=generator).to(torch.float32)
        values[0] = -torch.inf
        values[0, width // 2 :] = -5.0
        expected = values.numpy().argmax(1).tolist()
        assert first_best(values.clone()).tolist() == expected


def test_the_most_likely_tokens_are_listed_best_first_and_equal_ones_by_id() -> None:
    deficit = torch.tensor([[2.0, 0.0, 1.0, 0.0, torch.inf, 1.0]])
    keys = likeliest(deficit, 6)[0]
    assert (keys & 0xFFFFFFFF).tolist() == [1, 3, 2, 5, 0, 4]


def test_probability_masses_equal_the_sampling_rule_to_the_last_bit_of_the_exponential() -> None:
    deficit = torch.rand(4, 1024, generator=torch.Generator().manual_seed(5)) * 40
    deficit[:, 0] = 0
    found, expected = masses(deficit, Scratch(CPU)).numpy(), law.masses(deficit.numpy())
    assert (found[:, 0] == 2**40).all()
    assert np.all(np.abs(found - expected) <= np.maximum(1, expected * 2.0**-22))


def test_the_noise_has_the_integers_of_its_definition_and_its_values_to_the_last_bit() -> None:
    places = [(0, 0), (2**53 - 1, 5), (77, 2**31), (78, 123)]
    words = noise.key_words([key(*place) for place in places], CPU)
    bits = noise.uniform_bits(*words, 5056, Scratch(CPU)).clone()
    values = noise.gumbel(*words, 5056, Scratch(CPU))
    for row, place in enumerate(places):
        assert bits[row].tolist() == uniform_bits(*place, 5056).tolist()
        np.testing.assert_allclose(values[row].numpy(), gumbel(*place, 5056), rtol=1e-6, atol=3e-7)


def test_every_noise_value_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2^24 possible integers are tried."""
    monkeypatch.setattr(noise, "uniform_bits", lambda *_: torch.arange(2**24, dtype=torch.int32).reshape(1, -1))
    found = noise.gumbel(torch.zeros(1, 1), torch.zeros(1, 1), 2**24, Scratch(CPU))
    assert torch.isfinite(found).all()
    assert -2.86 < found.min() < found.max() < 17.33
    assert float(found[0, 2**23] - found[0, 2**23 - 1]) < 1e-5  # no jump where the two formulas meet
    assert (found.diff() > -5e-7).all()
