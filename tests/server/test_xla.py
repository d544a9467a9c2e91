"""The server with the xla backend through the `openai` client: every field has its effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.backends.xla import making

# isort: split
from onedraw.build.llm import build_llm
from onedraw.settings import Settings
from tests.server.running import Served, serving
from tests.support import tiny

assert making.SIZES  # skips this module where jax is not installed
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"], "additionalProperties": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_safetensors("qwen2", tmp_path_factory.mktemp("served") / "qwen2")


def llm_settings(folder: Path, lanes: int) -> Settings:
    sizes = {"max_context": 256, "turn_tokens": 64, "checkpoint_memory": 2**16, "self_check": False}
    return Settings.of(model=str(folder), backend="xla", max_batch=lanes, cache_dir=folder.parent, **sizes)


@pytest.fixture(scope="module")
def xla(folder: Path) -> Iterator[Served]:
    with build_llm(llm_settings(folder, 4)) as llm, serving(llm) as served:
        yield served


def said(served: Served, prompt: str = "def main(", **request_options: Any) -> str:
    named = ("temperature", "seed", "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias")
    known = {name: request_options.pop(name) for name in named if name in request_options}
    options = {"max_tokens": 24, **known}
    answer = served.client().completions.create(model=served.model, prompt=prompt, extra_body=request_options, **options)
    return str(answer.choices[0].text)


def test_temperature_zero_is_greedy_and_seeds_repeat(xla: Served) -> None:
    greedy = said(xla, temperature=0)
    assert greedy == said(xla, temperature=0, seed=5) == said(xla, temperature=0.9, top_k=1)
    assert said(xla, temperature=1, seed=42) == said(xla, temperature=1, seed=42)
    assert said(xla, temperature=1, seed=42) != said(xla, temperature=1, seed=7)
    assert said(xla, temperature=1.2, seed=42) != greedy


def test_every_option_has_its_effect(xla: Served) -> None:
    plain = said(xla, temperature=0)
    for given in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.9},
        {"logit_bias": {"77": 50}},
    ):
        assert said(xla, temperature=0, **given) != plain, given
    assert said(xla, temperature=1, seed=1, min_p=1.0) == plain
    assert said(xla, temperature=1, seed=1, top_p=1e-6) == plain
    assert said(xla, temperature=0, bad_words=[plain[:1]])[:1] != plain[:1]


def test_logprobs_come_with_their_alternatives(xla: Served) -> None:
    client = xla.client()
    answer = client.completions.create(model=xla.model, prompt="def main(", temperature=0, max_tokens=4, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    for own, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert own is not None
        assert max(top.values()) == own <= 0


def test_a_reply_follows_its_schema(xla: Served) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    messages: Any = [{"role": "user", "content": "A pet."}]
    client = xla.client()
    answer = client.chat.completions.create(
        model=xla.model, messages=messages, temperature=1.2, seed=3, max_tokens=120, response_format=shape
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


@pytest.mark.parametrize("lanes", [4, 8])
def test_twice_as_many_requests_as_lanes_get_the_replies_of_each_alone(xla: Served, folder: Path, lanes: int) -> None:
    request_options = [{"prompt": f"import {'x' * i}", "temperature": (0, 1.0)[i % 2], "seed": i} for i in range(2 * lanes)]
    alone = [said(xla, **option) for option in request_options]
    if lanes == 4:
        assert crowded(xla, request_options) == alone
        return
    with build_llm(llm_settings(folder, lanes)) as llm, serving(llm) as served:
        assert crowded(served, request_options) == alone


def crowded(served: Served, request_options: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(len(request_options)) as pool:
        return list(pool.map(lambda option: said(served, **option), request_options))


def test_the_card_names_device_and_dtype(xla: Served) -> None:
    assert xla.llm.card.device == "xla-cpu"
