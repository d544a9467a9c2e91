"""describe: a checkpoint's own recommendations and those of the catalogue."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from onedraw.build.checkpoint import describe
from onedraw.build.llm import build_llm
from onedraw.checkpoints.catalogue import CATALOGUE
from onedraw.checkpoints.open import open_checkpoint
from onedraw.llm.request_options import generation_from_keywords
from onedraw.settings import Settings
from onedraw.types import SamplingParams
from tests.support import tiny


@pytest.mark.parametrize("model", CATALOGUE.values(), ids=CATALOGUE)
def test_every_recommended_value_is_a_valid_sampling_parameter(model) -> None:
    SamplingParams(**model.sampling)


def test_what_a_folder_recommends_itself_comes_first(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("llama", tmp_path / "folder")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    with closing(open_checkpoint(folder)) as checkpoint:
        assert describe(Settings(model="HuggingFaceTB/SmolLM2-360M-Instruct"), checkpoint).defaults == {
            "temperature": 0.6,
            "top_p": 0.9,
        }
        assert describe(Settings(model=str(folder)), checkpoint).defaults == {"temperature": 0.6}


@pytest.mark.weights
def test_a_request_to_smollm2_overrides_what_its_authors_recommend() -> None:
    with build_llm(Settings(model="smollm2", max_context=256)) as llm:
        assert llm.card.defaults == {"temperature": 0.2, "top_p": 0.9}
        (choice,) = llm.prepare(generation_from_keywords(llm, "The sea", {"temperature": 1.5}))
        assert (choice.request.params.temperature, choice.request.params.top_p) == (1.5, 0.9)
