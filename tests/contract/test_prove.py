"""`prove` finds differences, reports their positions, and never reports "same" for a variation that did not happen."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onedraw.backends.base import StepHandle
from onedraw.backends.fake import FakeBackend, Logits
from onedraw.build.drafters import make_speculator
from onedraw.build.llm import build_llm, make_service
from onedraw.contract.prove import ProofRow, ProofTable, drive, first_difference, prove
from onedraw.contract.variations import PROMPTS, Evidence, constrained, drafting, requests, variations
from onedraw.engine.stats import Stats
from onedraw.errors import BadSetting
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.sampling.law import sample
from onedraw.settings import Settings
from onedraw.speculation.proposers import chain
from onedraw.types import CheckpointSave, Constraint, Draft, Plan, ReplyToken, Row, RowOutcome, SampledToken, TokenMask
from tests.support import tiny

FAKE = Settings(model="fake", backend="fake", threads=1)


def results(table: ProofTable) -> dict[str, str]:
    return {f.name: f.result for f in table.findings}


def build_with(kind: type[FakeBackend], **sizes: Any) -> Callable[[Settings], LLM]:
    """Return a function that opens the fake model with another backend."""

    def build(settings: Settings) -> LLM:
        with build_llm(settings) as model:
            capacity = model.service.capacity
        backend = kind(
            vocab=capacity.vocab,
            pages=capacity.groups[0].pages,
            lanes=capacity.lanes,
            page_size=capacity.page_size,
            max_context=capacity.max_context,
            **sizes,
        )
        service = make_service(lambda: backend, settings, make_speculator(settings), constraints=model.constraints)
        return LLM(
            service=service, tokenizer=model.tokenizer, template=model.template, card=model.card, constraints=model.constraints
        )

    return build


class KeyedByLane(FakeBackend):
    """Planted fault: the noise depends on the lane, so a batch changes tokens."""

    def run(self, row: Row) -> RowOutcome:
        return super().run(replace(row, params=replace(row.params, seed=row.params.seed + row.lane)))


class NoiseByDraft(FakeBackend):
    """Planted fault: the noise depends on the number of drafts before a position."""

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        params = replace(row.params, seed=row.params.seed + len(drafts))
        return sample(logits, params, row.history, drafts)


class OtherHistory(FakeBackend):
    """Planted fault: the history has a wrong token for every draft before a position, so penalties apply to wrong tokens."""

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        return sample(logits, row.params, row.history, (0,) * len(drafts))


class LogprobsBesideOthers(FakeBackend):
    """Planted fault: in a step with several rows, logprobs lack the most likely token."""

    def submit(self, plan: Plan) -> StepHandle:
        self.rows = len(plan.rows)
        return super().submit(plan)

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        sampled = super().sample(row, logits, drafts)
        if sampled is None or sampled.logprobs is None or self.rows == 1:
            return sampled
        return replace(sampled, logprobs=replace(sampled.logprobs, top=sampled.logprobs.top[1:]))


class MasksBesideOthers(LogprobsBesideOthers):
    """Planted fault: in a step with several rows, the masks are those of the previous position."""

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        history = row.history
        if history.constraint is not None and history.output and self.rows > 1:
            history = replace(history, constraint=Stale(history.constraint))
        return sample(logits, row.params, history, drafts)


class Stale:
    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        return self._constraint.allowed([*output, *drafts][:-1], ())


class LowBits(FakeBackend):
    """Planted fault: rows outside the first lane have other low bits, too small to change a token."""

    def run(self, row: Row) -> RowOutcome:
        outcome = super().run(row)
        if row.lane == 0:
            return outcome
        return replace(outcome, sampled=tuple(replace(c, checksum=(c.checksum or 0) ^ 1) for c in outcome.sampled))


class StaleLogits(FakeBackend):
    """Planted fault: a checkpoint slot keeps the first logits that were saved in it."""

    def save(self, row: Row, save: CheckpointSave, state: bytes, logits: Logits | None) -> None:
        before = self._kept[0].logits
        super().save(row, save, state, logits if before is None else before)


@pytest.fixture(scope="module")
def honest() -> ProofTable:
    return prove(FAKE)


# The fake model may end its replies before later requests arrive, and then nothing is preempted: `tests/laws` exercises these.
TIMED = ("preempted for other callers", "drafts, batched, few pages")


def without_timed(found: dict[str, str]) -> dict[str, str]:
    """The rows whose exercise does not depend on when requests arrive. The others are never different."""
    assert {found.get(name, "same") for name in TIMED} <= {"same", "not exercised"}
    return {name: verdict for name, verdict in found.items() if name not in TIMED}


def test_every_variation_of_the_fake_model_is_the_same(honest: ProofTable) -> None:
    found = without_timed(results(honest))
    threads = found.pop("2 threads")
    assert set(found.values()) == {"same"}
    assert threads == "not exercised"  # the fake model uses no CPU threads
    assert honest.holds


def test_requests_sent_at_once_run_in_one_batch_however_fast_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(FAKE, max_batch=8)
    with build_llm(settings) as model:
        submit = model.service.submit

        def slowly(requests: Any) -> None:
            submit(requests)
            time.sleep(0.05)  # The fake model would finish a reply in this time.

        monkeypatch.setattr(model.service, "submit", slowly)
        asked = requests(model, new_tokens=4)
        _, evidence = drive(model, asked[:4], "at once", settings=settings)
    assert evidence.counted.mixed_steps >= 4  # every token of the four replies was sampled in a batch


def test_the_quick_table_exercises_the_same_variations() -> None:
    assert without_timed(results(prove(FAKE, quick=True))) == without_timed(results(prove(FAKE)))


def test_sampling_from_checkpoints_is_the_same() -> None:
    row = "the same prompt again, from its last logits"
    recurrent = {"recurrent": True, "chunk": 16, "checkpoints": 4}
    found = results(prove(FAKE, quick=True, build=build_with(FakeBackend, **recurrent)))
    assert found[row] == found["prefix cache hit"] == "same"
    assert "different" not in found.values()
    assert results(prove(FAKE, quick=True, build=build_with(StaleLogits, **recurrent)))[row] == "different"


class AnothersLogits(FakeBackend):
    """Planted fault: a restored snapshot has the last logits of another prompt."""

    def import_checkpoint(self, slot: int | None, page_maps: Any, arrays: Mapping[str, Any]) -> None:
        changed = {name: array[::-1] if name == "logits" else array for name, array in arrays.items()}
        super().import_checkpoint(slot, page_maps, changed)


RESTORED = "restored from disk, after a restart"
REQUESTED = "logprobs and constraints beside plain rows"


def test_a_restart_with_snapshots_is_the_same_and_a_planted_fault_is_found() -> None:
    assert results(prove(FAKE, quick=True, build=build_with(FakeBackend, checkpoints=16)))[RESTORED] == "same"
    found = results(prove(FAKE, quick=True, build=build_with(AnothersLogits, checkpoints=16)))
    assert found.pop(RESTORED) == "different"
    assert "different" not in found.values()


def some_rows(monkeypatch: pytest.MonkeyPatch, *wanted: str) -> None:
    """Limit the table to a few variations, so that the test is quick."""
    chosen = lambda base, threads: tuple(v for v in variations(base, threads=threads) if v.name in wanted)  # noqa: E731
    monkeypatch.setattr("onedraw.contract.prove.variations", chosen)


HALVES, TOGETHER = "split in two", "split in two, overlapped"


@pytest.mark.parametrize(("name", "kv"), [("qwen3", "auto"), ("qwen3_5", "auto"), ("qwen3", "fp8"), ("qwen3_5", "int4")])
def test_splits_and_restarts_of_a_real_model_are_the_same(
    name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model=str(tiny.write_safetensors(name, tmp_path / name)), device="cpu", threads=1, kv_dtype=kv)
    some_rows(monkeypatch, HALVES, TOGETHER, RESTORED)
    assert results(prove(settings, quick=True)) == dict.fromkeys((RESTORED, HALVES, TOGETHER), "same")


def test_a_split_that_rounds_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onedraw.backends.torch.runner.pipeline import StageBoundary

    real = StageBoundary.cross
    monkeypatch.setattr(StageBoundary, "cross", lambda self, x, *given: real(self, x.bfloat16().float(), *given))
    settings = Settings(model=str(tiny.write_safetensors("qwen3", tmp_path / "hf")), device="cpu", threads=1)
    some_rows(monkeypatch, HALVES, TOGETHER)
    assert results(prove(settings, quick=True)) == {HALVES: "different", TOGETHER: "different"}


def test_a_variation_that_cannot_be_built_is_not_exercised_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(settings: Settings) -> LLM:
        if settings.cache_budget:
            raise BadSetting("this disk is full")
        return build_llm(settings)

    some_rows(monkeypatch, RESTORED)
    (finding,) = prove(FAKE, quick=True, build=build).findings
    assert str(finding) == "not exercised (this disk is full)"


def test_overlapped_stages_of_a_split_are_the_same() -> None:
    names = [v.name for v in variations(Settings(devices="cpu,cpu"), threads=1) if "split" in v.name]
    assert names == ["split, stages overlapped"]


def test_noise_that_depends_on_the_batch_is_found() -> None:
    table = prove(FAKE, quick=True, build=build_with(KeyedByLane))
    assert not table.holds
    assert results(table)["batched, at once, random order"] == "different"
    assert results(table)["alone again, after a restart"] == "same"


@pytest.mark.parametrize("fault", [LogprobsBesideOthers, MasksBesideOthers])
def test_requests_with_logprobs_and_masks_are_the_same_in_a_batch_and_a_planted_fault_is_found(
    fault: type[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    some_rows(monkeypatch, REQUESTED)
    assert results(prove(FAKE, quick=True)) == {REQUESTED: "same"}
    assert results(prove(FAKE, quick=True, build=build_with(fault))) == {REQUESTED: "different"}


def test_requests_of_one_kind_do_not_exercise_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    some_rows(monkeypatch, REQUESTED)
    monkeypatch.setattr("onedraw.contract.variations.PROMPTS", PROMPTS[:4])
    assert results(prove(FAKE, quick=True)) == {REQUESTED: "not exercised"}


def test_a_difference_too_small_for_any_token_is_found_by_the_checksums() -> None:
    table = prove(FAKE, quick=True, build=build_with(LowBits))
    assert results(table)["batched, at once, random order"] == "different"


@pytest.mark.parametrize("fault", [NoiseByDraft, OtherHistory])
def test_drafts_that_change_an_answer_are_found(fault: type[FakeBackend]) -> None:
    found = results(prove(FAKE, build=build_with(fault)))
    assert found["drafts: prediction, right"] == "different"
    assert found["drafts, batched, few pages"] == "different"
    assert found["batched, at once, random order"] == "same"


def test_every_drafter_in_use_has_its_row(honest: ProofTable) -> None:
    rows = [name for name in results(honest) if name.startswith("drafts")]
    assert rows == [
        "drafts: ngram",
        "drafts: prediction, right",
        "drafts: prediction, wrong",
        "drafts: constrained output",
        "drafts, continued after a cut",
        "drafts, batched, few pages",
    ]
    assert [v.name for v in drafting(replace(FAKE, draft=("ngram",)))] == [
        "drafts: ngram",
        "drafts, continued after a cut",
        "drafts, batched, few pages",
    ]
    assert drafting(replace(FAKE, draft=("none",))) == ()


def test_a_drafter_given_by_path_has_its_own_row(tmp_path: Path) -> None:
    file = tmp_path / "guesser.gguf"
    file.touch()
    names = [v.name for v in drafting(replace(FAKE, draft=("auto", str(file))))]
    assert "drafts: guesser.gguf" in names
    assert "drafts: built-in drafter" in names


class HalfRightDrafter(FakeBackend):
    """A backend with a drafter whose drafts are right half of the time: the token it would sample, or the next id."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self._capacity = replace(self._capacity, drafter="parrot")

    def run(self, row: Row) -> RowOutcome:
        outcome = super().run(row)
        token = outcome.sampled[-1].token if outcome.sampled else 0
        beside = Draft((token + 1) % 2, parent=-1)  # turns the chain into a tree
        return replace(outcome, next_drafts=(*chain((token, (token + row.stop) % 2)), beside))


def test_a_drafter_of_the_backend_has_its_rows() -> None:
    found = results(prove(FAKE, build=build_with(HalfRightDrafter)))
    assert found["drafts: built-in drafter"] == "same"
    assert found["drafts: built-in drafter, as a tree"] == "same"


def test_the_first_difference_is_an_absolute_position() -> None:
    plain = Reply(prompt_ids=(1, 2, 3), tokens=[ReplyToken(5, checksum=1), ReplyToken(6, checksum=2)], finish="length")
    other = replace(plain, tokens=[ReplyToken(5, checksum=1), ReplyToken(6, checksum=9)])
    assert first_difference(plain, plain) is None
    assert first_difference(plain, other) == 1
    assert first_difference(plain, replace(plain, tokens=plain.tokens[:1])) == 1
    assert first_difference(plain, replace(plain, finish="stop")) == 2
    assert str(ProofRow("x", "different", request=2, position=4)) == "different (first at request 2, position 4)"


def test_a_row_is_same_only_if_its_variation_happened() -> None:
    cold = replace(FAKE, prefix_cache=False, draft=("none",))
    with build_llm(cold) as llm:
        generations = requests(llm, new_tokens=4)
        _, alone = drive(llm, generations, "one by one", settings=cold)
        _, together = drive(llm, generations, "at once", settings=cold)
    exercised = {v.name: v.exercised for v in variations(FAKE, threads=1)}
    happened_alone = {name: check(alone, alone) for name, check in exercised.items()}
    assert [name for name, happened in happened_alone.items() if happened] == ["alone again, after a restart"]
    assert exercised["batched, at once, random order"](alone, together)


def test_the_requests_differ_in_length_params_and_seed_and_some_share_a_prefix() -> None:
    with build_llm(FAKE) as llm:
        generations = requests(llm, new_tokens=4)
    assert len({len(a.prompt) for a in generations}) == len(generations)
    assert len({a.params.seed for a in generations}) == len(generations)
    assert len({replace(a.params, seed=0) for a in generations}) == len(generations)
    assert len({a.prompt[:50] for a in generations}) < len(generations)
    assert any(a.params.greedy for a in generations)
    assert all(a.params.checksums for a in generations)


def test_a_short_context_shortens_the_prompts() -> None:
    with build_llm(replace(FAKE, max_context=64)) as llm:
        assert max(len(a.prompt) for a in requests(llm, new_tokens=12)) == 52


def test_the_variation_with_the_thread_count_of_the_plain_run_is_omitted() -> None:
    assert [v.name for v in variations(FAKE, threads=1) if "thread" in v.name] == ["2 threads"]
    assert [v.name for v in variations(FAKE, threads=4) if "thread" in v.name] == ["1 thread", "2 threads"]


@pytest.mark.parametrize(("device", "exercised"), [("cpu-kernels", True), ("cpu-torch", True), ("cuda-torch", False)])
def test_another_number_of_threads_is_a_variation_if_a_cpu_computes(device: str, exercised: bool) -> None:
    """Whether a CPU computes is read from the device name, such as `cpu-kernels`."""
    settings = Settings(threads=1)
    plain = Evidence(Stats(), replies=1, pieces=0, cached=0, settings=settings, device=device)
    (row,) = (v for v in variations(settings, threads=1) if v.name == "2 threads")
    assert row.exercised(plain, replace(plain, settings=replace(settings, threads=2))) == exercised
    assert not row.exercised(plain, plain)


@pytest.mark.long
@pytest.mark.weights
def test_every_variation_of_the_default_model_is_the_same() -> None:
    assert set(results(prove(Settings(model="smollm2", threads=1))).values()) == {"same"}


def test_without_llguidance_the_other_variations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setitem(sys.modules, "llguidance", None)
    table = prove(FAKE, quick=True, notify=told.append)
    assert told[0] == "llguidance is not installed: no constrained replies"
    assert table.requests == sum(not constrained(options) for _, options in PROMPTS)
    assert table.holds
    assert results(table)["drafts: constrained output"] == "not exercised"


def test_the_requests_of_prove_have_explicit_values_whatever_a_model_recommends() -> None:
    with build_llm(Settings(backend="fake")) as llm:
        plain = [generation.params for generation in requests(llm, new_tokens=4)]
        llm.card = replace(llm.card, defaults={"temperature": 0.2, "top_p": 0.9, "top_k": 3, "repetition_penalty": 1.5})
        assert [generation.params for generation in requests(llm, new_tokens=4)] == plain


class GivenIsPrompt(FakeBackend):
    """Planted: the tokens of a reply that is computed again count as prompt, so recurrent layers compute them in another form."""

    def run(self, row: Row) -> RowOutcome:
        return super().run(
            replace(row, prompt_stop=max(row.prompt_stop, row.stop - 1) if len(row.tokens) > 1 else row.prompt_stop)
        )


CONTINUED = ("continued after a cut", "continued after a cut, few pages, prefix cache", "drafts, continued after a cut")


def test_continued_replies_are_proved_and_a_moved_prompt_end_is_found(honest: ProofTable) -> None:
    assert {name: results(honest)[name] for name in CONTINUED} == dict.fromkeys(CONTINUED, "same")
    found = results(prove(FAKE, quick=True, build=build_with(GivenIsPrompt, recurrent=True)))
    assert found["continued after a cut"] == "different"
    assert found["batched, at once, random order"] == "same"


def test_replies_that_are_not_cut_do_not_exercise_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onedraw.contract.variations._cut", lambda number, reply: ((),))
    some_rows(monkeypatch, CONTINUED[0])
    assert results(prove(FAKE, quick=True)) == {CONTINUED[0]: "not exercised"}
