"""The sampler on an accelerator: the law's choices, and bits that depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.backends.torch.judge import choices, disagreements, make, random_case

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("whole_numbers", [False, True])
def test_every_row_is_chosen_by_the_law(whole_numbers: bool) -> None:
    for seed, vocab in enumerate((3, 64, 1000, 1000, 1000)):
        case = random_case(seed, rows=60, vocab=vocab, whole_numbers=whole_numbers, tokens=min(vocab, 6))
        assert disagreements(case, choices(make(vocab, device="cuda"), case, "cuda")) == []


@pytest.mark.parametrize("vocab", [1000, 49152, 151936])
def test_a_rows_bits_are_its_own_whatever_rows_and_neighbours(vocab: int) -> None:
    case = random_case(7, rows=60, vocab=vocab)
    alone = [choices(make(vocab, device="cuda"), case.rows([row]), "cuda")[0] for row in range(60)]
    rng = np.random.default_rng(0)
    for size in (2, 3, 17, 60):
        rows = rng.permutation(60)[:size].tolist()
        assert choices(make(vocab, device="cuda"), case.rows(rows), "cuda") == [alone[row] for row in rows]


def test_logits_that_are_no_distribution_leave_no_token() -> None:
    case = random_case(8, rows=3, vocab=500)
    case.logits[1, 7] = torch.nan
    found = choices(make(500, device="cuda"), case, "cuda")
    assert found[1] is None
