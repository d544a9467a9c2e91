"""Drafters on the device cannot change a token: DFlash, with chains and trees, and a draft model, against plain decoding."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.drafters.base import CANDIDATES, CompletedStep, Drafter
from onedraw.backends.torch.drafters.dflash import Context, DflashDrafter
from onedraw.backends.torch.drafters.draft_model import DraftModel, SmallModel
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import InputLayout
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import read_drafter_info
from onedraw.models.registry import read_model_info
from onedraw.settings import default_cache_dir
from onedraw.speculation.draft_tree import build_tree
from onedraw.speculation.proposers import NO_PROPOSAL, Proposal
from onedraw.speculation.speculator import DEVICE, Speculator
from onedraw.types import Draft, History, Request, SamplingParams
from tests.laws.harness import Schedule, plain, random_requests, run, same

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
VOCAB = 1024
CONTEXT = 400
Make = Callable[[Transformer, Sampler, InputLayout], Drafter]


def ops_of(kind: str) -> Ops:
    return pick_ops("cpu", "f32", cache=default_cache_dir()) if kind == "kernels" else TorchOps(torch.device("cpu"))


def dflash(budget: int, kind: type[DflashDrafter] = DflashDrafter) -> Make:
    info = read_drafter_info(open_checkpoint(TRAINED / "trained_dflash_qwen3"))

    def make(target: Transformer, sampler: Sampler, layout: InputLayout) -> Drafter:
        return kind(
            info.spec,
            info.weights,
            target=target,
            layout=layout,
            lanes=4,
            max_context=CONTEXT,
            arrange=lambda candidates: build_tree(candidates, budget),
            width=CANDIDATES if budget else 1,
        )

    return make


def draft_model(layers: int) -> Make:
    """The target itself, cut after its first layers: right often enough to keep, wrong often enough to reject."""

    def make(target: Transformer, sampler: Sampler, layout: InputLayout) -> Drafter:
        info = read_model_info(open_checkpoint(TRAINED / "trained_qwen3"))
        spec = dataclasses.replace(info.spec, layers=info.spec.layers[:layers])
        small = Transformer(
            spec,
            info.weights,
            dtype=torch.float32,
            stage_devices=[StageDevice(target.device, target.ops)],
            max_context=CONTEXT + 8,
        )
        return DraftModel(SmallModel(small, layout=layout), layout=layout, lanes=4, max_context=CONTEXT, length=4)

    return make


MAKERS: dict[str, Callable[[], Make]] = {
    "dflash chain": lambda: dflash(0),
    "dflash tree": lambda: dflash(20),
    "draft model": lambda: draft_model(4),
    "the target itself": lambda: draft_model(6),
}


def backend_of(make: Make | None, *, kind: str = "kernels", pages: int = 200, lanes: int = 4) -> TorchBackend:
    info = read_model_info(open_checkpoint(TRAINED / "trained_qwen3"))
    return TorchBackend(
        info.spec,
        info.weights,
        dtype="f32",
        device="cpu",
        lanes=lanes,
        pages=pages,
        page_size=8,
        max_context=CONTEXT,
        ops=ops_of(kind),
        check=False,
        make_drafter=make,
    )


def requests_of(seed: int, count: int = 6) -> list[Request]:
    rng = np.random.default_rng(seed)
    return random_requests(rng, count=count, vocab=VOCAB, longest=80, max_tokens=40)


@pytest.mark.parametrize("kind", ["kernels", "torch"])
@pytest.mark.parametrize("name", MAKERS)
def test_no_drafter_changes_tokens_or_scores(name: str, kind: str) -> None:
    requests = requests_of(11)
    one_lane = backend_of(None, kind=kind, lanes=1)
    expected = plain(lambda: one_lane, requests)
    longest = max(len(r.prompt) + r.params.max_tokens for r in requests)
    few = -(-longest // 8) + 6
    counted: Counter[str] = Counter()
    for variation, pages, schedule in (
        ("batched", 200, Schedule()),
        ("small steps, late arrivals", 200, Schedule(step_tokens=24, arrivals=(5, 0, 2, 9, 1, 3))),
        ("few pages, prefix hits", few, Schedule(step_tokens=60, reuse=True, arrivals=(0, 4, 8, 12, 16, 20))),
    ):
        got, stats = run(backend_of(MAKERS[name](), kind=kind, pages=pages), requests, schedule)
        assert same(got, expected), variation
        counted.update(kept=stats.accepted_tokens, preempted=stats.preemptions, hits=stats.prefix_hits)
        counted.update(rejected=stats.draft_tokens - stats.accepted_tokens)
    assert counted["kept"] > 0
    assert counted["preempted"] > 0
    assert counted["rejected"] > 0 or name == "the target itself"


def test_rows_with_and_without_drafts_share_a_batch() -> None:
    requests = [dataclasses.replace(r, speculate=i % 2 == 0) for i, r in enumerate(requests_of(12))]
    one_lane = backend_of(None, lanes=1)
    got, stats = run(backend_of(dflash(0)), requests, Schedule())
    assert same(got, plain(lambda: one_lane, requests))
    assert stats.accepted_tokens > 0


def test_most_drafts_of_the_target_itself_are_kept_with_shared_noise() -> None:
    """The same model with the same noise samples the same tokens, also at temperature 1."""
    prompt = tuple(np.random.default_rng(3).integers(8, VOCAB, 20).tolist())
    request = Request("x", prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=60))
    _, stats = run(backend_of(draft_model(6)), [request], Schedule())
    assert stats.draft_tokens > 0
    assert (
        stats.accepted_tokens > 0.6 * stats.draft_tokens
    )  # not all: only the likeliest tokens are ranked, and the drafter's sharpness s is varied


def test_a_long_answer_at_temperature_one_with_penalties_equals_plain_decoding() -> None:
    prompt = tuple(np.random.default_rng(4).integers(8, VOCAB, 12).tolist())
    params = SamplingParams(
        temperature=1.0,
        seed=9,
        max_tokens=380,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        checksums=True,
    )
    request = Request("long", prompt, params)
    [expected] = plain(lambda: backend_of(None, lanes=1), [request])
    [got], stats = run(backend_of(dflash(16)), [request], Schedule())
    assert same([got], [expected])
    assert stats.accepted_tokens > 20


def greedy_tokens_per_step(make: Make) -> float:
    tokens = steps = 0
    target = read_model_info(open_checkpoint(TRAINED / "trained_qwen3"))
    assert target.spec.vocab == VOCAB
    for seed in range(4):
        prompt = tuple(np.random.default_rng(seed).integers(8, VOCAB, 16).tolist())
        request = Request("g", prompt, SamplingParams(temperature=0.0, max_tokens=100))
        [answer], stats = run(backend_of(make), [request], Schedule())
        tokens, steps = tokens + len(answer.tokens) - 1, steps + stats.steps - 1
    return tokens / steps


class DrafterWithoutContext(DflashDrafter):
    """Does not store the features of committed positions: the text stays right, the drafter has no context."""

    def _write_context(self, contexts) -> None: ...  # type: ignore[no-untyped-def]


def test_the_trained_pair_keeps_as_many_drafts_as_it_was_trained_for() -> None:
    """A drafter without its context gives the right text and few kept drafts, so the test asserts tokens per step."""
    right = greedy_tokens_per_step(dflash(0))
    assert right > 1.4
    assert greedy_tokens_per_step(dflash(0, DrafterWithoutContext)) < right - 0.1


class LyingPolicy(Speculator):
    """Ignores every estimate: it carries any part of the backend's drafts, and lets the drafter draft any number, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__([])
        self.dice, self.limits = random.Random(seed), Counter[int]()

    def propose(self, request: Request, history: History, own: tuple[Draft, ...], **how: Any) -> Proposal:
        return Proposal(own[: self.dice.randrange(how["room"] + 1)], DEVICE) if own else NO_PROPOSAL

    def plan_drafter(self, requests: Sequence[Request], *, limit: int) -> list[int]:
        found = [self.dice.choice((0, 0, 0, 1, 2, limit)) for _ in requests]
        self.limits.update(found)
        return found


@pytest.mark.parametrize("name", MAKERS)
def test_no_policy_can_change_a_token(name: str) -> None:
    requests = requests_of(14)
    expected = plain(lambda: backend_of(None, lanes=1), requests)
    policy = LyingPolicy(3)
    got, stats = run(backend_of(MAKERS[name](), pages=60), requests, Schedule(speculator=policy, arrivals=(0, 3, 6, 9, 12, 15)))
    assert same(got, expected)
    assert stats.accepted_tokens > 0
    assert len(policy.limits) >= 4, "the drafter was stopped, limited and let run"


class Listener(Speculator):
    """Lets the drafter draft every `every` steps, notes its drafts by position, and carries none."""

    def __init__(self, every: int) -> None:
        super().__init__([])
        self.every, self.steps = every, 0
        self.drafts: dict[int, tuple[Draft, ...]] = {}

    def propose(self, request: Request, history: History, own: tuple[Draft, ...], **how: Any) -> Proposal:
        if own and request.id == "w":
            self.drafts[len(history)] = own
        return NO_PROPOSAL

    def plan_drafter(self, requests: Sequence[Request], *, limit: int) -> list[int]:
        self.steps += 1
        return [limit if self.steps % self.every == 0 and request.id == "w" else 0 for request in requests]


def listen(every: int, kind: type[DflashDrafter] = DflashDrafter, *, company: int = 0) -> dict[int, tuple[Draft, ...]]:
    """The drafts of one request by position. While it runs, `company` others come with long prompts."""
    prompt = tuple(np.random.default_rng(6).integers(8, VOCAB, 20).tolist())
    request = Request("w", prompt, SamplingParams(temperature=0.0, max_tokens=200))
    listener = Listener(every)
    others = [Request(f"o{i}", (*range(8, 60), 8 + i), SamplingParams(temperature=0.0, max_tokens=9)) for i in range(company)]
    arrivals = tuple(20 * index for index in range(company + 1))
    run(backend_of(dflash(0, kind)), [request, *others], Schedule(speculator=listener, arrivals=arrivals))
    return listener.drafts


class DrafterThatForgetsWaitingContext(DflashDrafter):
    def _keep(self, contexts: Sequence[Context], features: Sequence[Tensor]) -> None:
        pass


@pytest.mark.parametrize("most", [1, 2**20], ids=["no room to wait", "room for a reply"])
def test_context_that_waited_gives_the_drafts_of_context_written_at_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no drafts are wanted, features wait and are written together: 90 steps here, or fewer where they find no room."""
    monkeypatch.setattr("onedraw.backends.torch.drafters.dflash.MOST_WAITING_BYTES", most)
    always, now_and_then = listen(1), listen(90)
    assert len(always) > 150
    assert len(now_and_then) >= 2
    assert all(always[at] == drafts for at, drafts in now_and_then.items())
    if most > 1:
        assert any(always[at] != drafts for at, drafts in listen(90, DrafterThatForgetsWaitingContext).items())


class AuditedDrafter(DflashDrafter):
    """Checks that no features that wait were overwritten."""

    waited = 0

    def draft(self, step: CompletedStep) -> list[tuple[Draft, ...]]:
        found = super().draft(step)
        numbers = [number for context in self._waiting.values() for number in context.stored]
        assert len(set(numbers)) == len(numbers)
        assert all(self._stored - len(self._store) <= number < self._stored for number in numbers)
        AuditedDrafter.waited = max(AuditedDrafter.waited, len(numbers))
        return found


@pytest.mark.parametrize("places", [1, 3, 40, 4000])
def test_features_wait_only_until_the_store_is_full(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With company, so that the features of several rows share the store."""
    most = places * 2 * 64 * 4  # bytes of the features of two layers
    monkeypatch.setattr("onedraw.backends.torch.drafters.dflash.MOST_WAITING_BYTES", most)
    AuditedDrafter.waited = 0
    always, now_and_then = listen(1, company=4), listen(90, AuditedDrafter, company=4)
    assert AuditedDrafter.waited <= places
    assert AuditedDrafter.waited > min(places, 60) // 2
    assert len(now_and_then) >= 2
    assert all(always[at] == drafts for at, drafts in now_and_then.items())


def test_a_drafter_with_pages_for_its_windows_drafts_as_one_with_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply of 28 pages, of which a window sees six. With fewer pages than that, a window loses positions."""
    monkeypatch.setattr("onedraw.backends.memory_plan.DRAFTER_WINDOW", 32)
    found = listen(1)
    monkeypatch.setattr("onedraw.backends.torch.drafters.context_pages.drafter_pages", lambda window, **given: 200)
    expected = listen(1)
    assert len(expected) > 150
    assert found == expected
    monkeypatch.setattr("onedraw.backends.torch.drafters.context_pages.drafter_pages", lambda window, **given: 3)
    assert listen(1) != expected


class CountingDrafter(DflashDrafter):
    """Counts the positions whose context is written."""

    written = 0

    def _write_context(self, contexts: Sequence[Context], features: Sequence[Tensor]) -> None:
        CountingDrafter.written += sum(context.count for context in contexts)
        super()._write_context(contexts, features)


@pytest.mark.parametrize(
    ("every", "expected"),
    [(1000, 20), (90, 20 + 179), (1, 20 + 197)],  # there is no room for drafts after the last token but one
    ids=["never drafts", "drafts after 90 and 180 steps", "drafts to the end"],
)
def test_context_after_the_last_drafts_of_a_reply_is_not_written(every: int, expected: int) -> None:
    CountingDrafter.written = 0
    listen(every, CountingDrafter)
    assert CountingDrafter.written == expected


# ---------------------------------------------------------------------- planted faults


@pytest.mark.parametrize("fault", ["no compaction", "noise position", "sibling's path"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(13)
    expected = plain(lambda: backend_of(None, lanes=1), requests)
    match fault:
        case "no compaction":
            monkeypatch.setattr("onedraw.backends.torch.state.model_state.ModelState.move_kept_pages", lambda self, paths: None)
        case "noise position":
            monkeypatch.setattr(SamplingPosition, "at", property(lambda position: len(position.history)))
        case "sibling's path":
            from onedraw.backends.torch.runner import inputs

            chained = lambda drafts: tuple(tuple(range(i)) for i in range(len(drafts) + 1))  # noqa: E731
            monkeypatch.setattr(inputs, "draft_paths", chained)
    got, _ = run(backend_of(dflash(20)), requests, Schedule())
    assert not same(got, expected)


def test_drafts_are_valid_trees() -> None:
    seen: list[tuple[Draft, ...]] = []
    make = dflash(12)

    class RecordingBackend(TorchBackend):
        def collect(self, handle):  # type: ignore[no-untyped-def]
            outcome = super().collect(handle)
            seen.extend(row.next_drafts for row in outcome.rows)
            return outcome

    backend = backend_of(make)
    backend.__class__ = RecordingBackend
    run(backend, requests_of(14), Schedule())
    assert any(len(drafts) > 7 for drafts in seen)  # more nodes than the block is deep: the tree branches
    for drafts in seen:
        assert len(drafts) <= 12
        assert all(-1 <= draft.parent < index for index, draft in enumerate(drafts))
        assert len({(d.parent, d.token) for d in drafts}) == len(drafts)


def test_a_drafter_of_few_tokens_counts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties count the tokens of the history. Those that the drafter does not propose have no count, and once had no place."""
    monkeypatch.setattr("onedraw.backends.torch.drafters.dflash.SMALL_VOCAB", 320)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=60, frequency_penalty=0.3, repetition_penalty=1.1, checksums=True)
    prompt = (*range(1000, 1020), *range(8, 40))
    request = Request("few", prompt, params)
    [expected] = plain(lambda: backend_of(None, lanes=1), [request])
    [got], stats = run(backend_of(dflash(0)), [request], Schedule())
    assert same([got], [expected])
    assert stats.draft_tokens > 0
