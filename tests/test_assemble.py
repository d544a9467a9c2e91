"""Settings become a running model, under the name its caller gave it, or say what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from onedraw.assemble import drafter_paths, make_speculator, open_door, proposer_names
from onedraw.errors import BadSetting, NoRoom
from onedraw.settings import Settings
from onedraw.types import History, Request, SamplingParams


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct", "smollm2"])
def test_a_model_is_served_under_the_name_it_was_asked_for(name: str) -> None:
    with open_door(Settings(model=name, backend="fake")) as door:
        assert door.card.name == name


@pytest.mark.parametrize(("path", "name"), [("tiny-v1.5.gguf", "tiny-v1.5"), ("folder-0.6B", "folder-0.6B")])
def test_a_path_is_served_under_its_last_part(tmp_path: Path, path: str, name: str) -> None:
    (tmp_path / path).touch()
    with open_door(Settings(model=str(tmp_path / path), backend="fake")) as door:
        assert door.card.name == name


def test_pages_for_less_than_one_sequence_are_refused_at_the_start() -> None:
    with pytest.raises(NoRoom, match="needs 4 pages"):
        open_door(Settings(backend="fake", max_context=64, kv_memory=3))


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


def test_a_forced_number_of_drafts_reaches_those_who_guess() -> None:
    request = Request(id="r", prompt=(1, 2, 3, 1, 2, 3, 1, 2), params=SamplingParams())
    history = History(request.prompt)
    guess = make_speculator(Settings(draft=("ngram",), draft_tokens=3)).guess(request, history, (), room=9, running=1)
    assert [draft.token for draft in guess.drafts] == [3, 1, 2]
    assert guess.source == "ngram"
    assert make_speculator(Settings(draft=("none",))).guess(request, history, (), room=9, running=1).drafts == ()


def test_what_is_no_word_is_a_drafter_for_the_backend(tmp_path: Path) -> None:
    settings = Settings(backend="fake", draft=("ngram", str(tmp_path)))
    assert drafter_paths(settings) == (tmp_path,)
    assert drafter_paths(Settings(draft=("ngram", "prediction"))) == ()
    with pytest.raises(BadSetting, match="runs no drafter"):
        open_door(settings)
