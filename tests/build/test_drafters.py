"""Selection of drafters, and errors for drafters that do not fit their target."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.drafters import drafter_names, make_speculator, proposer_names, select_drafter
from onedraw.build.fit_devices import longest_draft
from onedraw.build.llm import build_llm
from onedraw.checkpoints import catalogue
from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import BadSetting, ModelNotFound, UnsupportedModel
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings
from onedraw.types import History, Request, SamplingParams
from tests.support import tiny


@pytest.mark.parametrize(
    ("draft", "names"),
    [
        (("auto",), ("prediction", "ngram")),
        (("none",), ()),
        (("ngram",), ("ngram",)),
        (("ngram", "prediction"), ("prediction", "ngram")),  # cheapest first, in whatever order they were named
    ],
)
def test_host_proposers_follow_the_draft_setting(draft: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert proposer_names(Settings(draft=draft)) == names


def test_draft_tokens_sets_the_length_of_proposals() -> None:
    request = Request(id="r", prompt=(1, 2, 3, 1, 2, 3, 1, 2), params=SamplingParams())
    history = History(request.prompt)
    proposal = make_speculator(Settings(draft=("ngram",), draft_tokens=3)).propose(request, history, (), room=9, running=1)
    assert [draft.token for draft in proposal.drafts] == [3, 1, 2]
    assert proposal.source == "ngram"
    assert make_speculator(Settings(draft=("none",))).propose(request, history, (), room=9, running=1).drafts == ()


def test_paths_in_draft_are_device_drafters(tmp_path: Path) -> None:
    settings = Settings(backend="fake", draft=("ngram", str(tmp_path)))
    assert drafter_names(settings) == (str(tmp_path),)
    assert drafter_names(Settings(draft=("ngram", "prediction"))) == ()
    with pytest.raises(BadSetting, match="no drafters on the device"):
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
        [reply] = llm.run(make_generation(options, llm=llm, prompt=llm.encode("Hello there, how are you?")))
        return reply.token_ids, llm.service.capacity.drafter, reply.usage.kept


def test_a_draft_model_does_not_change_the_tokens(small_models: dict[str, Path]) -> None:
    model = str(small_models["qwen3"])
    plain, no_drafter, _ = answer(model=model, draft="none")
    own, drafter, kept = answer(model=model, draft=model, draft_tokens=4)
    other, _, _ = answer(model=model, draft=str(small_models["llama"]), draft_tokens=4)
    assert (no_drafter, drafter) == ("", "model")
    assert plain == own == other
    assert kept > 10  # the draft model has the weights of the target


def test_a_draft_model_with_another_tokenizer_is_rejected(small_models: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        answer(model=str(small_models["qwen3"]), draft=str(small_models["other"]))


def test_a_dflash_drafter_of_another_shape_is_rejected_with_both_sizes(small_models: dict[str, Path]) -> None:
    drafter = Path(__file__).parents[1] / "fixtures" / "trained" / "trained_dflash_qwen3"
    with pytest.raises(UnsupportedModel, match=r"1024.*512|512.*1024"):
        answer(model=str(small_models["qwen3"]), draft=str(drafter))


def test_auto_drafts_with_the_mtp_head_of_the_checkpoint(tmp_path: Path) -> None:
    """The tokens are the same with and without it; --draft mtp without an MTP head is an error."""
    folder = tiny.write_safetensors("qwen3_5_mtp", tmp_path / "mtp")
    replies = []
    for draft in (("auto",), ("none",)):
        with build_llm(Settings(model=str(folder), max_context=256, draft=draft, draft_tokens=3)) as llm:
            assert llm.service.capacity.drafter == ("mtp" if draft == ("auto",) else "")
            generation = make_generation(
                RequestOptions.of(max_tokens=12, seed=3), llm=llm, prompt=tuple(range(3, 80)), label="test"
            )
            (reply,) = llm.run(generation)
            replies.append(reply.token_ids)
    assert replies[0] == replies[1]
    bare = tiny.write_safetensors("qwen3_5", tmp_path / "bare")
    with pytest.raises(UnsupportedModel, match="has no MTP head"):
        build_llm(Settings(model=str(bare), max_context=256, draft=("mtp",)))
    with pytest.raises(UnsupportedModel, match="its recurrent state cannot be rolled back"):
        build_llm(Settings(model=str(folder), max_context=256, draft=(str(bare),)))


@pytest.mark.parametrize(("given", "expected"), [({}, 16), ({"draft": ("none",)}, 0), ({"draft_tokens": 5}, 5)])
def test_longest_draft_follows_the_settings(given: dict[str, Any], expected: int) -> None:
    assert longest_draft(Settings(model="smollm2", **given)) == expected


def test_a_downloaded_drafter_of_the_catalogue_is_used_and_a_missing_or_unfit_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Path(__file__).parents[1] / "fixtures" / "trained"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("trained_dflash_qwen3", "trained_dflash_qwen3_5"):
        repository = tmp_path / f"models--some--{name}"
        (repository / "snapshots").mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        (repository / "snapshots" / ("a" * 40)).symlink_to(trained / name)
    for name, drafter in (("fit", "trained_dflash_qwen3"), ("unfit", "trained_dflash_qwen3_5"), ("missing", "nowhere")):
        monkeypatch.setitem(catalogue.CATALOGUE, name, catalogue.CatalogueModel("some/model", "1M", drafter=f"some/{drafter}"))
    with closing(open_checkpoint(trained / "trained_qwen3")) as checkpoint:
        info = read_model_info(checkpoint)
        found = {name: select_drafter(Settings(model=name), info, checkpoint) for name in ("fit", "unfit", "missing")}
        assert found["fit"] == tmp_path / "models--some--trained_dflash_qwen3" / "snapshots" / ("a" * 40)
        assert (found["unfit"], found["missing"]) == (None, None)
        assert select_drafter(Settings(model="fit", draft=("ngram",)), info, checkpoint) is None
        by_hub_id = Settings(model="missing", draft=("ngram", "some/trained_dflash_qwen3"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert select_drafter(by_hub_id, info, checkpoint) == found["fit"]
        with pytest.raises(ModelNotFound, match="some/nowhere could not be downloaded"):
            select_drafter(Settings(draft=("some/nowhere",)), info, checkpoint)
        with pytest.raises(BadSetting, match=r"'nowhere' is neither auto, .* nor the path or hub id"):
            Settings(draft=("nowhere",))
