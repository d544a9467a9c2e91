"""Choosing in C: the law's choices on every path, and bits that depend on the row alone."""

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
from tests.backends.torch.judge import Case, choices, disagreements, random_case

LIBRARY = builder.build(default_cache_dir()).library
if LIBRARY is None:
    pytest.skip("no C compiler", allow_module_level=True)
PATHS = supported_instruction_sets(LIBRARY)


def made(vocab: int, *, path: str = PATHS[0], threads: int = 2, kind: type[CpuSampler] = CpuSampler) -> CpuSampler:
    assert LIBRARY is not None
    return kind(Kernels(LIBRARY, threads=threads, instruction_set=path), vocab=vocab, lanes=512, device=torch.device("cpu"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_every_row_is_chosen_by_the_law(whole_numbers: bool, path: str) -> None:
    for seed in range(60):
        vocab = (3, 64, 100, 1000, 5000)[seed % 5]
        case = random_case(seed, rows=12, vocab=vocab, whole_numbers=whole_numbers, tokens=min(vocab, 6))
        assert disagreements(case, choices(made(vocab, path=path), case)) == [], seed


@pytest.mark.parametrize("path", PATHS)
def test_a_whole_vocabulary_is_chosen_by_the_law(path: str) -> None:
    case = random_case(5, rows=16, vocab=49152)
    assert disagreements(case, choices(made(49152, path=path), case)) == []


@pytest.mark.parametrize("path", PATHS)
def test_noise_is_the_noise_of_the_definition(path: str) -> None:
    """One token at a time is lifted until it wins: the gap it needs is the difference of two noises."""
    vocab, sampler = 257, made(257, path=path)
    for seed in range(40):
        noise = gumbel(seed, 1, vocab).astype(np.float64)
        best, other = int(noise.argmax()), int(np.random.default_rng(seed).integers(vocab))
        if best == other:
            continue
        gap = noise[best] - noise[other]
        logits = torch.zeros(2, vocab)
        logits[0, other], logits[1, other] = gap * (1 - 1e-6) - 3e-6, gap * (1 + 1e-6) + 3e-6
        place = SamplingPosition(0, SamplingParams(seed=seed), History((1,)), (), "r")
        assert [choice.token for choice in sampler.sample(logits, [place, place]) if choice] == [best, other]


def invariant(case: Case, make: Callable[[int], CpuSampler]) -> bool:
    """Tokens, logprobs and checksums, bit for bit: alone, and in batches of any size and order, on 1 to 3 threads."""
    rows = len(case.positions)
    alone = [choices(make(1), case.rows([row]))[0] for row in range(rows)]
    assert sum(choice is not None for choice in alone) > rows // 2
    rng = np.random.default_rng(0)
    for threads in (1, 2, 3):
        for size in (2, 3, rows // 2, rows):
            some = rng.permutation(rows)[:size].tolist()
            if choices(make(threads), case.rows(some)) != [alone[row] for row in some]:
                return False
    return True


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("vocab", "rows"), [(1000, 120), (1024, 120), (49152, 12)])
def test_a_rows_bits_are_its_own(vocab: int, rows: int, path: str) -> None:
    assert invariant(random_case(21, rows=rows, vocab=vocab), lambda threads: made(vocab, path=path, threads=threads))


class KeyedByRow(CpuSampler):
    """A planted fault: noise that follows the row's place in the batch."""

    def _row_parameters(self, positions: list[SamplingPosition]) -> np.ndarray:  # type: ignore[override]
        table = super()._row_parameters(positions)
        table["first"] += np.arange(len(table), dtype=np.uint32)
        return table


def test_noise_keyed_by_row_is_caught() -> None:
    assert not invariant(random_case(21, rows=60, vocab=500), lambda threads: made(500, threads=threads, kind=KeyedByRow))


@pytest.mark.parametrize("path", PATHS)
def test_a_row_without_a_token_says_so_and_harms_no_neighbour(path: str) -> None:
    case = random_case(8, rows=5, vocab=700)
    expected = choices(made(700, path=path), case)
    for row, wrong in ((1, torch.nan), (3, torch.inf)):
        case.logits[row, 7] = wrong
    found = choices(made(700, path=path), case)
    assert (found[1], found[3]) == (None, None)
    assert [found[row] for row in (0, 2, 4)] == [expected[row] for row in (0, 2, 4)]


def test_the_parameters_of_a_row_have_the_size_the_kernel_reads() -> None:
    assert ROW_PARAMETERS.itemsize == 40
