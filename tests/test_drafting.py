"""Who guesses is who was asked for, and who does not fit its target is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.drafters import drafter_paths, make_speculator, proposer_names
from onedraw.build.fit_devices import longest_draft
from onedraw.build.llm import build_llm
from onedraw.errors import BadSetting, UnsupportedModel
from onedraw.llm.options import RequestOptions, make_generation
from onedraw.settings import Settings
from onedraw.types import History, Request, SamplingParams
from tests.support import tiny


@pytest.mark.parametrize(
    ("draft", "names"),
    [
        (("auto",), ("prediction", "ngram")),
        (("none",), ()),
        (("ngram",), ("ngram",)),
        (("ngram", "prediction"), ("prediction", "ngram")),  # in order of cost, however they were named
    ],
)
def test_who_guesses_on_the_host(draft: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert proposer_names(Settings(draft=draft)) == names


def test_a_forced_number_of_drafts_reaches_those_who_propose() -> None:
    request = Request(id="r", prompt=(1, 2, 3, 1, 2, 3, 1, 2), params=SamplingParams())
    history = History(request.prompt)
    guess = make_speculator(Settings(draft=("ngram",), draft_tokens=3)).propose(request, history, (), room=9, running=1)
    assert [draft.token for draft in guess.drafts] == [3, 1, 2]
    assert guess.source == "ngram"
    assert make_speculator(Settings(draft=("none",))).propose(request, history, (), room=9, running=1).drafts == ()


def test_what_is_no_word_is_a_drafter_for_the_backend(tmp_path: Path) -> None:
    settings = Settings(backend="fake", draft=("ngram", str(tmp_path)))
    assert drafter_paths(settings) == (tmp_path,)
    assert drafter_paths(Settings(draft=("ngram", "prediction"))) == ()
    with pytest.raises(BadSetting, match="runs no drafter"):
        build_llm(settings)


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: tiny.write_safetensors(name, folder / name) for name in ("qwen3", "llama")}
    other = tiny.write_safetensors("llama", folder / "other")
    config = json.loads((other / "tokenizer.json").read_text())
    config["model"]["vocab"] = dict(zip(config["model"]["vocab"], reversed(config["model"]["vocab"].values()), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(config))
    return {**found, "other": other}


def answer(**settings: Any) -> tuple[list[int], str, int]:
    with build_llm(Settings.of(max_context=128, self_check=False, **settings)) as llm:
        options = RequestOptions(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
        [reply] = llm.generate(make_generation(options, llm=llm, prompt=llm.encode("Hello there, how are you?")))
        return reply.token_ids, llm.service.capacity.drafter, reply.usage.kept


def test_a_smaller_model_drafts_and_changes_nothing(small_models: dict[str, Path]) -> None:
    model = str(small_models["qwen3"])
    plain, nobody, _ = answer(model=model, draft="none")
    own, drafter, kept = answer(model=model, draft=model, draft_tokens=4)
    other, _, _ = answer(model=model, draft=str(small_models["llama"]), draft_tokens=4)
    assert (nobody, drafter) == ("", "model")
    assert plain == own == other
    assert kept > 10  # the same weights guess well


def test_a_draft_model_with_another_tokenizer_is_refused(small_models: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        answer(model=str(small_models["qwen3"]), draft=str(small_models["other"]))


def test_a_block_drafter_of_another_shape_is_refused_with_both_numbers(small_models: dict[str, Path]) -> None:
    drafter = Path(__file__).parent / "fixtures" / "trained" / "trained_dflash_qwen3"
    with pytest.raises(UnsupportedModel, match=r"1024.*512|512.*1024"):
        answer(model=str(small_models["qwen3"]), draft=str(drafter))


def test_a_hybrid_opens_drafts_with_its_own_head_and_answers_alike(tmp_path: Path) -> None:
    """Under auto the head that comes with the checkpoint drafts; asking for one that is not there is refused by name."""
    folder = tiny.write_safetensors("qwen3_5_mtp", tmp_path / "mtp")
    replies = []
    for draft in (("auto",), ("none",)):
        with build_llm(Settings(model=str(folder), max_context=256, draft=draft, draft_tokens=3)) as llm:
            assert llm.service.capacity.drafter == ("mtp" if draft == ("auto",) else "")
            generation = make_generation(
                RequestOptions.of(max_tokens=12, seed=3), llm=llm, prompt=tuple(range(3, 80)), label="test"
            )
            (reply,) = llm.generate(generation)
            replies.append(reply.token_ids)
    assert replies[0] == replies[1]
    bare = tiny.write_safetensors("qwen3_5", tmp_path / "bare")
    with pytest.raises(UnsupportedModel, match="has no MTP head"):
        build_llm(Settings(model=str(bare), max_context=256, draft=("mtp",)))
    with pytest.raises(UnsupportedModel, match="its state only moves forward"):
        build_llm(Settings(model=str(folder), max_context=256, draft=(str(bare),)))


@pytest.mark.parametrize(("given", "expected"), [({}, 16), ({"draft": ("none",)}, 0), ({"draft_tokens": 5}, 5)])
def test_turns_are_rehearsed_with_as_many_drafts_as_will_come(given: dict[str, Any], expected: int) -> None:
    assert longest_draft(Settings(model="smollm2", **given)) == expected
