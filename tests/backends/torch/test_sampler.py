"""The batched sampler follows the sampling rule, and the bits of a row depend on the row alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.sampling import sampler as noise
from onedraw.backends.torch.sampling.sampler import CountedHistory, LaneCounts, Sampler
from onedraw.sampling.logprobs import logprobs
from onedraw.sampling.noise import key
from onedraw.types import History, SampledToken, SamplingParams
from tests.backends.torch.sampling_cases import Case, make_sampler, random_case, sample_all, wrong_rows

seeds = st.integers(0, 2**32 - 1)


# ── the sampling rule ─────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 12), st.sampled_from([3, 64, 100, 1000]), st.booleans())
def test_every_row_follows_the_sampling_rule(seed: int, rows: int, vocab: int, whole_numbers: bool) -> None:
    case = random_case(seed, rows=rows, vocab=vocab, whole_numbers=whole_numbers, tokens=min(vocab, 6))
    assert wrong_rows(case, sample_all(make_sampler(vocab), case)) == []


@pytest.mark.long
def test_ten_thousand_rows_follow_the_sampling_rule() -> None:
    for seed in range(400):
        case = random_case(seed, rows=25, vocab=200, whole_numbers=seed % 2 == 0, tokens=8)
        assert wrong_rows(case, sample_all(make_sampler(200), case)) == [], seed


def test_a_full_vocabulary_follows_the_sampling_rule() -> None:
    case = random_case(5, rows=16, vocab=49152)
    assert wrong_rows(case, sample_all(make_sampler(49152), case)) == []


def test_of_equal_values_after_noise_the_lowest_id_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "uniform_bits", lambda first, *_: torch.full((len(first), 128), 5_000_000, dtype=torch.int32))
    logits = torch.zeros(2, 100)
    logits[:, 0] = -1
    found = make_sampler(100).sample(
        logits, [SamplingPosition(lane, SamplingParams(), History((1,)), (), "r") for lane in range(2)]
    )
    assert [choice.token for choice in found if choice] == [1, 1]


def test_columns_past_the_vocabulary_are_never_sampled() -> None:
    case = random_case(1, rows=20, vocab=100)
    wide = torch.cat([case.logits, torch.full((20, 156), 1e9)], 1)
    assert make_sampler(100).sample(wide, case.positions) == sample_all(make_sampler(100), case)


def test_the_logits_are_not_modified() -> None:
    case = random_case(2, rows=20, vocab=128)
    before = case.logits.clone()
    sample_all(make_sampler(128), case)
    assert torch.equal(case.logits, before)


def test_a_row_without_an_allowed_token_returns_none_and_does_not_affect_others() -> None:
    case = random_case(3, rows=12, vocab=64)
    sound = sample_all(make_sampler(64), case)
    for row, fault in ((2, torch.nan), (5, torch.inf), (7, -torch.inf)):
        case.logits[row] = fault
    case.logits[9, 3] = -torch.nan
    found = sample_all(make_sampler(64), case)
    assert [row for row in range(12) if found[row] is None] == [2, 5, 7, 9]
    assert all(found[row] == sound[row] for row in range(12) if row not in (2, 5, 7, 9))


def test_an_empty_batch_samples_nothing() -> None:
    assert make_sampler(64).sample(torch.empty(0, 64), []) == []
    assert make_sampler(64).score(torch.empty(0, 64), [], 3) == []


def test_prompt_logprobs_are_the_raw_logprobs_of_the_model() -> None:
    case = random_case(4, rows=30, vocab=300)
    tokens = [row * 7 % 300 for row in range(30)]
    found = make_sampler(300).score(case.logits, tokens, 5)
    for row, given_ in enumerate(found):
        expected = logprobs(case.logits[row].numpy(), tokens[row], 5)
        assert given_.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [token for token, _ in given_.top] == [token for token, _ in expected.top]
    assert found[3:5] == make_sampler(300).score(case.logits[3:5], tokens[3:5], 5)


# ── growing histories and reused lanes ────────────────────────────────────────────────────────────────────────────


def grow(sampler: Sampler, seed: int) -> list[int]:
    """Decode on three lanes: histories grow by several tokens, drafts change, and one request leaves its
    lane to another one and returns. Return the number of rows per step that differ from the sampling rule."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, checksums=True)
    histories = [History(tuple(rng.integers(0, 20, size=4).tolist())) for _ in range(5)]
    wrong = []
    for _ in range(12):
        riders = rng.permutation(5)[: rng.integers(1, 4)].tolist()
        positions = []
        for lane, rider in enumerate(riders):
            histories[rider].output.extend(rng.integers(0, 20, size=rng.integers(0, 4)).tolist())
            guesses = tuple(rng.integers(0, 20, size=rng.integers(0, 3)).tolist())
            for count in range(len(guesses) + 1):
                positions.append(SamplingPosition(lane, params, histories[rider], guesses[:count], f"request-{rider}"))
        logits = rng.normal(size=(len(positions), 20)).astype(np.float32)
        case = Case(torch.from_numpy(logits), positions)
        wrong.append(len(wrong_rows(case, sample_all(sampler, case))))
    return wrong


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_penalties_follow_growing_histories_drafts_and_changing_lanes(seed: int) -> None:
    assert sum(grow(make_sampler(20, lanes=3), seed)) == 0


def test_a_reused_request_id_with_another_prompt_starts_with_new_counts() -> None:
    sampler = make_sampler(8, lanes=1)
    params = SamplingParams(temperature=0, frequency_penalty=5)
    logits = torch.tensor([[3.0, 2, 0, 0, 0, 0, 0, 0]])
    for prompt, output, expected in (((1,), [0], 1), ((2,), [1, 1], 0)):
        (found,) = sampler.sample(logits, [SamplingPosition(0, params, History(prompt, output), (), "same")])
        assert found == SampledToken(expected)


# ── planted faults ──────────────────────────────────────────────────────────────────────────────────────


class KeyedByRow(Sampler):
    """Planted fault: the noise depends on the index of the row in the batch."""

    def _keys(self, positions: Sequence[SamplingPosition]) -> list[tuple[int, int]]:
        return [key(row, p.at) for row, p in enumerate(positions)]


class ShortByOne(Sampler):
    """Planted fault: histories lack their last token."""

    def _adjusted(self, raw: torch.Tensor, positions: Sequence[SamplingPosition]) -> torch.Tensor:
        return super()._adjusted(raw, [p._replace(drafts=p.drafts[:-1]) for p in positions])


def test_noise_keyed_by_row_is_caught() -> None:
    case = random_case(11, rows=40, vocab=100)
    assert wrong_rows(case, sample_all(make_sampler(100, kind=KeyedByRow), case))
    rows = sample_all(make_sampler(100, kind=KeyedByRow), case)
    assert rows[::-1] != sample_all(make_sampler(100, kind=KeyedByRow), case.rows(range(39, -1, -1)))


def test_a_history_short_by_one_is_caught() -> None:
    case = random_case(12, rows=40, vocab=100, tokens=6)
    assert wrong_rows(case, sample_all(make_sampler(100, kind=ShortByOne), case))


def test_penalties_applied_to_another_row_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(13, rows=40, vocab=100, tokens=6)
    honest = LaneCounts.read

    def leaking(self: LaneCounts, places: Sequence[SamplingPosition]) -> tuple[torch.Tensor, torch.Tensor]:
        output, seen = honest(self, places)
        return output.roll(1, 0), seen.roll(1, 0)

    monkeypatch.setattr(LaneCounts, "read", leaking)
    assert wrong_rows(case, sample_all(make_sampler(100), case))


def test_logprobs_of_the_tokens_that_a_neighbour_asks_for_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(13, rows=40, vocab=100)
    assert sum(bool(p.asked) for p in case.positions) > 1
    honest = noise.asked_columns
    monkeypatch.setattr(noise, "asked_columns", lambda asked, **size: np.roll(honest(asked, **size), 1, axis=0))
    assert wrong_rows(case, sample_all(make_sampler(100), case))


def test_token_counts_of_the_previous_request_of_a_lane_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedHistory, "is_prefix_of", lambda mark, place: mark.known <= len(place.history))
    assert sum(sum(grow(make_sampler(20, lanes=3), seed)) for seed in range(3)) > 0


def test_drafts_that_stay_in_the_token_counts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LaneCounts.read

    def keeping(self: LaneCounts, places: Sequence[SamplingPosition]) -> tuple[torch.Tensor, torch.Tensor]:
        output, seen = honest(self, places)
        self.output[[place.lane for place in places]] = output
        return output, seen

    monkeypatch.setattr(LaneCounts, "read", keeping)
    assert sum(sum(grow(make_sampler(20, lanes=3), seed)) for seed in range(3)) > 0


# ── batch invariance ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_invariance(case: Case, counts: Sequence[int], threads: Sequence[int]) -> None:
    """Compare tokens, logprobs and checksums bit for bit: alone, in batches of any size and order, with any number of threads."""
    vocab = case.logits.shape[1]
    torch.set_num_threads(1)
    alone = [sample_all(make_sampler(vocab), case.rows([row]))[0] for row in range(len(case.positions))]
    assert sum(choice is not None for choice in alone) > len(alone) // 2
    rng = np.random.default_rng(0)
    for count in threads:
        torch.set_num_threads(count)
        for size in counts:
            rows = rng.permutation(len(case.positions))[:size].tolist()
            assert sample_all(make_sampler(vocab), case.rows(rows)) == [alone[row] for row in rows], (count, size)


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("vocab", [1000, 1024])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(vocab: int) -> None:
    check_invariance(random_case(21, rows=300, vocab=vocab), counts=(1, 2, 3, 7, 16, 64, 299, 300), threads=(1, 2, 3))


@pytest.mark.usefixtures("threads_restored")
def test_a_row_has_the_same_bits_in_any_batch_with_a_full_vocabulary() -> None:
    check_invariance(random_case(22, rows=13, vocab=49152), counts=(2, 5, 11, 13), threads=(1, 2, 3))


@pytest.mark.long
@pytest.mark.usefixtures("threads_restored")
def test_a_row_has_the_same_bits_in_any_batch_with_vocabularies_of_any_size() -> None:
    for seed, vocab in enumerate((49152, 50257, 151936, 32001)):
        check_invariance(random_case(seed, rows=40, vocab=vocab), counts=(2, 3, 17, 40), threads=(1, 2, 3))


def test_prompt_scores_are_equal_however_many_rows_are_scored() -> None:
    case = random_case(23, rows=50, vocab=5000)
    tokens = [row * 97 % 5000 for row in range(50)]
    alone = [make_sampler(5000).score(case.logits[row : row + 1], tokens[row : row + 1], 3)[0] for row in range(50)]
    assert make_sampler(5000).score(case.logits, tokens, 3) == alone


class LastPlace(Sampler):
    """Planted fault: scores in a batch of several rows differ in the last bit."""

    def _adjusted(self, raw: torch.Tensor, positions: Sequence[SamplingPosition]) -> torch.Tensor:
        scores = super()._adjusted(raw, positions)
        return scores if len(positions) == 1 else scores * (1 + 2**-23)


@pytest.mark.usefixtures("threads_restored")
def test_a_difference_in_the_last_bit_of_the_scores_is_caught() -> None:
    """It changes almost no token, so only the checksums show it."""
    case = random_case(25, rows=20, vocab=1000)
    together = sample_all(make_sampler(1000, kind=LastPlace), case)
    alone = [sample_all(make_sampler(1000, kind=LastPlace), case.rows([row]))[0] for row in range(20)]
    pairs = [(a, b) for a, b in zip(together, alone, strict=True) if a is not None and b is not None]
    assert sum(a.token != b.token for a, b in pairs) < 3
    assert any(a.checksum != b.checksum for a, b in pairs)
