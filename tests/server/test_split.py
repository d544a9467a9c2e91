"""A model on two devices gives the replies of one device; a backend without logits refuses sampling by name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onedraw.backends.fake import FakeBackend
from onedraw.build.drafters import make_speculator
from onedraw.build.llm import build_llm, make_service, model_card
from onedraw.llm.llm import LLM, idle_stats
from onedraw.settings import Settings
from onedraw.text.constraints.factory import ConstraintFactory
from onedraw.text.fake_tokenizer import fake_chat_template, fake_tokenizer
from tests.server.running import Served, serving
from tests.support import tiny

FORMS: tuple[dict[str, Any], ...] = (
    {"guided_choice": ["yes", "no", "maybe"]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"enum": [1, 2]}}}}},
)
SAMPLED = {"temperature": 0.7, "seed": 11, "max_tokens": 12, "logprobs": True, "presence_penalty": 0.4}


@pytest.mark.parametrize("name", ["gemma4_e4b", "qwen3_5"])
def test_two_devices_give_the_replies_of_one(name: str, tmp_path: Path) -> None:
    """Gemma is loaded from a GGUF file, Qwen from a folder."""
    gguf = name.startswith("gemma")
    path = tiny.write_gguf(name, tmp_path / "model.gguf") if gguf else tiny.write_safetensors(name, tmp_path / "hf")
    said = []
    for devices in ({"device": "cpu"}, {"devices": "cpu,cpu"}):
        settings = Settings(model=str(path), max_context=256, served_name="tiny", cache_dir=None, **devices)  # type: ignore[arg-type]
        with build_llm(settings) as llm, serving(llm) as served:
            assert llm.service.capacity.stages == len(settings.device_names)
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "Where does a layer run?"}], **SAMPLED}
            replies = [
                served.post("/v1/chat/completions", **asked).json() for _ in range(2)
            ]  # the second time from a prompt checkpoint
            held = [served.post("/v1/chat/completions", **asked, **form, n=2).json()["choices"] for form in FORMS]
        assert replies[0]["choices"] == replies[1]["choices"]
        said.append((replies[0]["choices"], held, replies[0]["system_fingerprint"]))
    assert said[0] == said[1]
    for choice in said[0][1][0]:
        assert choice["message"]["content"] in FORMS[0]["guided_choice"]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "frequency_penalty": 0.7, "logit_bias": {"7": 5.0}, "top_p": 0.8, "logprobs": 3},
    {"temperature": 1.0, "guided_json": SCHEMA, "max_tokens": 24},
    {"temperature": 1.0, "guided_regex": "([a-f]{2} ){3}", "n": 2},
    {"temperature": 0.9, "min_tokens": 12, "bad_words": ["a"], "min_p": 0.01},
    {"temperature": 0.7, "dry_multiplier": 0.8, "echo": True, "logprobs": 1},
    {"temperature": 1.0, "top_k": 1, "prediction": {"type": "content", "content": "a b a b a b"}},
]


def test_every_kind_of_request_is_served_by_overlapped_stages(tmp_path: Path) -> None:
    """The replies of concurrent requests on two overlapped stages equal those of each request alone on one device."""
    pytest.importorskip("llguidance")
    path = tiny.write_safetensors("qwen3", tmp_path / "hf")
    given: dict[str, Any] = {"model": str(path), "max_context": 256, "served_name": "tiny", "draft_tokens": 4}
    bodies = [
        {"model": "tiny", "prompt": f"{i} a b a b a b a b", "max_tokens": 12, "seed": i, **option}
        for i, option in enumerate(OPTIONS)
    ]

    def ask(served: Served, body: dict[str, Any]) -> Any:
        answer = served.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    with build_llm(Settings(device="cpu", **given)) as llm, serving(llm) as served:
        expected = [ask(served, body) for body in bodies]
    with build_llm(Settings(devices="cpu,cpu", overlap="on", **given)) as llm, serving(llm) as served:
        with ThreadPoolExecutor(len(bodies)) as crowd:
            got = list(crowd.map(partial(ask, served), bodies))
        stats = idle_stats(llm)
    assert got == expected
    assert stats.overlapped_steps
    assert stats.accepted_tokens


@pytest.fixture(scope="module")
def argmax_only() -> Iterator[Served]:
    """A fake backend that gives no logits."""
    tokenizer = fake_tokenizer()
    settings, constraints = Settings(backend="fake", model="fake"), ConstraintFactory(tokenizer, (tokenizer.eos_id or 0,))
    service = make_service(
        lambda: FakeBackend(vocab=tokenizer.vocab_size, max_context=512, pages=200, returns_logits=False),
        settings,
        make_speculator(settings),
        constraints=constraints,
    )
    card = model_card(
        settings, family="fake", weights="fake", capacity=service.capacity, eos=(tokenizer.eos_id or 0,), defaults={}
    )
    llm = LLM(service=service, tokenizer=tokenizer, template=fake_chat_template(), card=card, constraints=constraints)
    with llm, serving(llm) as served:
        yield served


def test_plain_greedy_is_served_without_logits(argmax_only: Served) -> None:
    for _ in range(2):
        answer = argmax_only.post("/v1/completions", model="fake", prompt="hello", temperature=0, max_tokens=4)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.7},
        {},  # the default temperature is 1
        {"temperature": 0.7, "top_k": 1},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0, "frequency_penalty": 0.1},
        {"temperature": 0, "presence_penalty": 0.1},
        {"temperature": 0, "logit_bias": {"5": 1.0}},
        {"temperature": 0, "min_tokens": 2, "max_tokens": 4},
        {"temperature": 0, "logprobs": 1},
        {"temperature": 0, "bad_words": ["x"]},
        {"temperature": 0, "dry_multiplier": 0.5},
        {"temperature": 0, "guided_regex": "[a-z]+"},
        {"temperature": 0, "echo": True, "logprobs": 0},
    ],
    ids=str,
)
def test_all_sampling_except_plain_greedy_is_refused_before_any_work(argmax_only: Served, option: dict[str, Any]) -> None:
    before = idle_stats(argmax_only.llm).steps
    answer = argmax_only.post("/v1/completions", **{"model": "fake", "prompt": "hello", "max_tokens": 4, **option})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "sampling_unsupported", answer.text
    assert idle_stats(argmax_only.llm).steps == before
