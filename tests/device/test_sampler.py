"""The sampler on an accelerator: the law's choices, and bits that depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.torch.sampler import Sampler
from tests.backends.torch.judge import choices, disagreements, make, random_case

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS: list[type[Sampler]] = [Sampler]
if torch.cuda.is_available():
    from onedraw.backends.torch.kernels.sampler import TritonSampler

    KINDS.append(TritonSampler)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_every_row_is_chosen_by_the_law(whole_numbers: bool, kind: type[Sampler]) -> None:
    for seed, vocab in enumerate((3, 64, 1000, 1000, 1000)):
        case = random_case(seed, rows=60, vocab=vocab, whole_numbers=whole_numbers, tokens=min(vocab, 6))
        assert disagreements(case, choices(make(vocab, device="cuda", kind=kind), case, "cuda")) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1000, 49152, 151936])
def test_a_rows_bits_are_its_own_whatever_rows_and_neighbours(vocab: int, kind: type[Sampler]) -> None:
    case = random_case(7, rows=60, vocab=vocab)
    alone = [choices(make(vocab, device="cuda", kind=kind), case.rows([row]), "cuda")[0] for row in range(60)]
    rng = np.random.default_rng(0)
    for size in (2, 3, 17, 60):
        rows = rng.permutation(60)[:size].tolist()
        assert choices(make(vocab, device="cuda", kind=kind), case.rows(rows), "cuda") == [alone[row] for row in rows]


@pytest.mark.parametrize("vocab", [3, 1000, 49152, 151936, 248320])
def test_kernels_choose_what_the_plain_sampler_chooses_bit_by_bit(vocab: int) -> None:
    """Tokens, logprobs and checksums; logits in bf16 as a head gives them, too."""
    for seed in range(3):
        case = random_case(seed, rows=40, vocab=vocab, whole_numbers=seed == 1, tokens=min(vocab, 50))
        plain, fast = make(vocab, device="cuda"), make(vocab, device="cuda", kind=KINDS[-1])
        assert choices(fast, case, "cuda") == choices(plain, case, "cuda")
        rounded = case.logits.to("cuda", torch.bfloat16)
        assert fast.choose(rounded, case.positions) == plain.choose(rounded.float(), case.positions)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_no_distribution_leave_no_token(kind: type[Sampler]) -> None:
    case = random_case(8, rows=3, vocab=500)
    case.logits[1, 7] = torch.nan
    found = choices(make(500, device="cuda", kind=kind), case, "cuda")
    assert found[1] is None
