"""The sampler on a GPU: tokens by the sampling rule, and bits that depend on the row alone."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.types import History, SamplingParams
from tests.backends.torch.sampling_cases import Case, make_sampler, random_case, sample_all, wrong_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]

DEVICE = "cpu" if INTERPRETED else "cuda"
KINDS: list[type[Sampler]] = [Sampler]
if torch.cuda.is_available() or INTERPRETED:
    from onedraw.backends.torch.ops.cuda import top_k_top_p as top_k_top_p
    from onedraw.backends.torch.ops.cuda.sampler import TritonSampler

    KINDS.append(TritonSampler)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_every_row_is_sampled_by_the_rule(whole_numbers: bool, kind: type[Sampler]) -> None:
    """With logprobs and token masks on some of the rows; one vocabulary is longer than a block of the kernels."""
    for seed, vocab in enumerate((3, 3000) if INTERPRETED else (3, 64, 1000, 1000, 3000)):
        case = random_case(seed, rows=12 if INTERPRETED else 60, vocab=vocab, whole_numbers=whole_numbers, tokens=min(vocab, 6))
        for mode in ("raw", "processed", "both"):
            assert any(p.params.logprobs is not None and p.params.logprobs_mode == mode for p in case.positions)
        assert any(p.asked for p in case.positions)
        assert any(p.history.forced for p in case.positions)
        assert any(p.history.constraint is not None for p in case.positions)
        assert wrong_rows(case, sample_all(make_sampler(vocab, device=DEVICE, kind=kind), case, DEVICE)) == []


@pytest.mark.parametrize("count", [3, 40, 128])
def test_the_most_likely_tokens_of_equal_logits_are_the_lowest_ids(count: int) -> None:
    """More ties than a block of the kernels has tokens, and as many tokens as may be requested."""
    vocab = 5000
    logits = torch.zeros(3, vocab)
    logits[1, 4000:] = 1.0
    logits[2] = -torch.inf
    logits[2, 7] = 0.0
    params = [SamplingParams(temperature=0.0, logprobs=count), SamplingParams(logprobs=count, seed=1)]
    case = Case(logits, [SamplingPosition(i, params[i % 2], History((1,), []), (), str(i)) for i in range(3)])
    found = sample_all(make_sampler(vocab, device=DEVICE, kind=KINDS[-1]), case, DEVICE)
    tops = [[token for token, _ in one.logprobs.top] for one in found if one is not None and one.logprobs is not None]
    assert tops == [list(range(count)), list(range(4000, 4000 + count)), [7]]
    assert found == sample_all(make_sampler(vocab, device=DEVICE), case, DEVICE)


def test_masks_applied_to_the_rows_of_neighbours_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from onedraw.backends.torch.ops.cuda.sampler import TokenMasks

    case = random_case(1, rows=12, vocab=100)
    assert sum(p.history.constraint is not None for p in case.positions)
    real = TokenMasks.rows
    monkeypatch.setattr(TokenMasks, "rows", lambda self, count: np.roll(real(self, count), 1))
    assert wrong_rows(case, sample_all(make_sampler(100, device=DEVICE, kind=KINDS[-1]), case, DEVICE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1000, 49152, 151936])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(vocab: int, kind: type[Sampler]) -> None:
    case = random_case(7, rows=60, vocab=vocab)
    alone = [sample_all(make_sampler(vocab, device="cuda", kind=kind), case.rows([row]), "cuda")[0] for row in range(60)]
    rng = np.random.default_rng(0)
    for size in (2, 3, 17, 60):
        rows = rng.permutation(60)[:size].tolist()
        assert sample_all(make_sampler(vocab, device="cuda", kind=kind), case.rows(rows), "cuda") == [alone[row] for row in rows]


@pytest.mark.parametrize("vocab", [3, 1000, 49152, 151936, 248320])
def test_kernels_sample_the_same_bits_as_the_plain_sampler(vocab: int) -> None:
    """Tokens, logprobs and checksums; also for bf16 logits, as an output head gives them."""
    for seed in range(3):
        case = random_case(seed, rows=40, vocab=vocab, whole_numbers=seed == 1, tokens=min(vocab, 50))
        plain, fast = make_sampler(vocab, device="cuda"), make_sampler(vocab, device="cuda", kind=KINDS[-1])
        assert sample_all(fast, case, "cuda") == sample_all(plain, case, "cuda")
        rounded = case.logits.to("cuda", torch.bfloat16)
        assert fast.sample(rounded, case.positions) == plain.sample(rounded.float(), case.positions)


FILTERS = [
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
    {"min_p": 0.2, "top_p": 0.7},
    {"temperature": 0.05, "top_k": 100, "top_p": 0.95},
    {"temperature": 30.0, "top_p": 0.95},
    {},
]


@pytest.mark.parametrize("short", [64, 4096])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0, 100.0])
def test_limits_are_found_with_any_number_of_tokens_near_them(spread: float, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lists that hold all tokens near the limit, and with lists that overflow."""
    monkeypatch.setattr(top_k_top_p, "SHORT_LIST", short)
    vocab = 150 if INTERPRETED else 60_000
    logits = torch.from_numpy(np.random.default_rng(1).normal(scale=spread, size=(10, vocab)).astype(np.float32))
    logits[:, ::7] = -torch.inf
    parameters = [
        SamplingParams(checksums=True, seed=i, **filters) for i, filters in enumerate(FILTERS[:: 5 if INTERPRETED else 1])
    ]
    logits = logits[: len(parameters)]
    case = Case(logits, [SamplingPosition(i, p, History((1,), []), (), str(i)) for i, p in enumerate(parameters)])
    plain, fast = make_sampler(vocab, device=DEVICE), make_sampler(vocab, device=DEVICE, kind=KINDS[-1])
    expected = sample_all(plain, case, DEVICE)
    assert sample_all(fast, case, DEVICE) == expected
    few = case.rows([0, 1])
    assert sample_all(make_sampler(vocab, device=DEVICE, kind=KINDS[-1]), few, DEVICE) == expected[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_no_distribution_leave_no_token(kind: type[Sampler]) -> None:
    case = random_case(8, rows=3, vocab=500)
    case.logits[1, 7] = torch.nan
    found = sample_all(make_sampler(500, device="cuda", kind=kind), case, "cuda")
    assert found[1] is None
