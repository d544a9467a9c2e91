"""The xla backend against `transformers` and against the torch backend: logits to 1e-4, greedy and sampled tokens equal."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backends.xla.making import xla_backend

# isort: split
from onedraw.backends.xla.backend import XlaBackend
from onedraw.backends.xla.inputs import make_inputs
from onedraw.backends.xla.sampler import logits_of
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Schedule, run
from tests.support import tiny
from tests.support.torch_backend import make_backend, slice_row

LENGTH = 150  # past every window, past a block of keys and two chunks
FAMILIES = (
    *("llama31", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe"),
    *("gemma4_31b", "gemma4_26b", "gemma4_e2b", "laguna_odd"),
)


def logits(backend: XlaBackend, tokens: list[int], cuts: list[int], *, prompt: int = LENGTH) -> torch.Tensor:
    """Logits of every position, the text computed in parts."""
    out = []
    for start, stop in itertools.pairwise(cuts):
        row = slice_row(tokens, start, stop, prompt=prompt, groups=len(backend.capacity.groups))
        inputs = make_inputs([row], backend.shape, conv=backend._conv)
        x, _, _ = backend._forward(inputs, np.zeros(backend.shape.picks, dtype=np.int32))
        rows = np.asarray(x)[: stop - start]
        rows = np.pad(rows, ((0, -len(rows) % 8), (0, 0)))
        found = [np.asarray(logits_of(backend._head, part, spec=backend._spec)) for part in np.split(rows, len(rows) // 8)]
        out.append(np.concatenate(found)[: stop - start, : tiny.VOCAB])
    return torch.from_numpy(np.concatenate(out))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path, XlaBackend]:
    folder = tiny.write_safetensors(request.param, tmp_path_factory.mktemp(request.param) / "hf")
    return tiny.build(request.param), folder, xla_backend(folder, page_size=16)


def test_logits_match_transformers(pair: tuple[object, Path, XlaBackend]) -> None:
    model, _, backend = pair
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, LENGTH).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]  # type: ignore[operator]
    whole = logits(backend, tokens, [0, LENGTH])
    chunked = logits(backend, tokens, [0, 64, 128, LENGTH])
    stepwise = logits(backend, tokens, [0, 70, *range(71, LENGTH + 1)], prompt=70)
    assert torch.equal(whole, chunked)
    assert torch.equal(whole, stepwise) or backend.capacity.recurrent  # Gated DeltaNet has two forms
    bound = 1e-4 * max(float(expected.abs().max()), 1.0)
    assert (whole - expected).abs().max() < bound
    assert (stepwise - expected).abs().max() < bound


def test_tokens_equal_the_torch_backends(pair: tuple[object, Path, XlaBackend]) -> None:
    _, folder, backend = pair
    prompts = np.random.default_rng(1).integers(0, tiny.VOCAB, (6, 20)).tolist()
    params = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=1.0, seed=42, max_tokens=40),
        SamplingParams(temperature=1.2, seed=7, min_p=0.05, max_tokens=40),
        SamplingParams(temperature=0.8, seed=3, top_k=20, repetition_penalty=1.2, max_tokens=40),
        SamplingParams(temperature=0.8, seed=4, top_p=0.8, frequency_penalty=0.5, presence_penalty=0.2, max_tokens=40),
        SamplingParams(temperature=0.0, logit_bias=((9, 3.0),), bad_words=((9, 9),), max_tokens=40, logprobs=3),
    ]
    requests = [Request(f"r{i}", tuple(p), w) for i, (p, w) in enumerate(zip(prompts, params, strict=True))]
    got, _ = run(backend, requests, Schedule())
    expected, _ = run(make_backend(folder, kernels=False, check=False), requests, Schedule())
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    found, wanted = ([entry.logprob for entry in answers[5].logprobs] for answers in (got, expected))
    assert len(found) == 40
    assert found == pytest.approx(wanted, abs=1e-4)
