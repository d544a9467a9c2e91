"""The sampler in C follows the sampling rule with every instruction set, and its bits depend on the row alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.ops.cpu import library as builder
from onedraw.backends.torch.ops.cpu.library import Kernels, supported_instruction_sets
from onedraw.backends.torch.ops.cpu.ops import ROW_PARAMETERS, CpuSampler
from onedraw.sampling.noise import gumbel
from onedraw.settings import default_cache_dir
from onedraw.types import History, SamplingParams
from tests.backends.torch.sampling_cases import Case, random_case, sample_all, wrong_rows

LIBRARY = builder.build(default_cache_dir()).library
if LIBRARY is None:
    pytest.skip("no C compiler", allow_module_level=True)
PATHS = supported_instruction_sets(LIBRARY)


def made(vocab: int, *, path: str = PATHS[0], threads: int = 2, kind: type[CpuSampler] = CpuSampler) -> CpuSampler:
    assert LIBRARY is not None
    return kind(Kernels(LIBRARY, threads=threads, instruction_set=path), vocab=vocab, lanes=512, device=torch.device("cpu"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_every_row_follows_the_sampling_rule(whole_numbers: bool, path: str) -> None:
    for seed in range(60):
        vocab = (3, 64, 100, 1000, 5000)[seed % 5]
        case = random_case(seed, rows=12, vocab=vocab, whole_numbers=whole_numbers, tokens=min(vocab, 6))
        assert wrong_rows(case, sample_all(made(vocab, path=path), case)) == [], seed


@pytest.mark.parametrize("path", PATHS)
def test_a_full_vocabulary_follows_the_sampling_rule(path: str) -> None:
    case = random_case(5, rows=16, vocab=49152)
    assert wrong_rows(case, sample_all(made(49152, path=path), case)) == []


@pytest.mark.parametrize("path", PATHS)
def test_the_noise_equals_its_definition(path: str) -> None:
    """The logit at which a token is first sampled shows the difference of the noise of two tokens."""
    vocab, sampler = 257, made(257, path=path)
    for seed in range(40):
        noise = gumbel(seed, 1, vocab).astype(np.float64)
        best, other = int(noise.argmax()), int(np.random.default_rng(seed).integers(vocab))
        if best == other:
            continue
        gap = noise[best] - noise[other]
        logits = torch.zeros(2, vocab)
        logits[0, other], logits[1, other] = gap * (1 - 1e-6) - 3e-6, gap * (1 + 1e-6) + 3e-6
        position = SamplingPosition(0, SamplingParams(seed=seed), History((1,)), (), "r")
        assert [choice.token for choice in sampler.sample(logits, [position, position]) if choice] == [best, other]


def invariant(case: Case, make: Callable[[int], CpuSampler]) -> bool:
    """Compare tokens, logprobs and checksums bit for bit: alone, and in batches of any size and order, on 1 to 3 threads."""
    rows = len(case.positions)
    alone = [sample_all(make(1), case.rows([row]))[0] for row in range(rows)]
    assert sum(choice is not None for choice in alone) > rows // 2
    rng = np.random.default_rng(0)
    for threads in (1, 2, 3):
        for size in (2, 3, rows // 2, rows):
            some = rng.permutation(rows)[:size].tolist()
            if sample_all(make(threads), case.rows(some)) != [alone[row] for row in some]:
                return False
    return True


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("vocab", "rows"), [(1000, 120), (1024, 120), (49152, 12)])
def test_a_row_has_the_same_bits_in_any_batch(vocab: int, rows: int, path: str) -> None:
    assert invariant(random_case(21, rows=rows, vocab=vocab), lambda threads: made(vocab, path=path, threads=threads))


class KeyedByRow(CpuSampler):
    """Planted fault: the noise depends on the index of the row in the batch."""

    def _row_parameters(self, positions: list[SamplingPosition]) -> np.ndarray:  # type: ignore[override]
        table = super()._row_parameters(positions)
        table["first"] += np.arange(len(table), dtype=np.uint32)
        return table


def test_noise_keyed_by_row_is_caught() -> None:
    assert not invariant(random_case(21, rows=60, vocab=500), lambda threads: made(500, threads=threads, kind=KeyedByRow))


@pytest.mark.parametrize("path", PATHS)
def test_a_row_without_an_allowed_token_returns_none_and_does_not_affect_others(path: str) -> None:
    case = random_case(8, rows=5, vocab=700)
    expected = sample_all(made(700, path=path), case)
    for row, wrong in ((1, torch.nan), (3, torch.inf)):
        case.logits[row, 7] = wrong
    found = sample_all(made(700, path=path), case)
    assert (found[1], found[3]) == (None, None)
    assert [found[row] for row in (0, 2, 4)] == [expected[row] for row in (0, 2, 4)]


def test_the_parameters_of_a_row_have_the_size_that_the_kernel_reads() -> None:
    assert ROW_PARAMETERS.itemsize == 40
