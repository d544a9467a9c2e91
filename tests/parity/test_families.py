"""Every family against `transformers`: tiny random checkpoints, safetensors and GGUF, logits to 1e-4, greedy tokens equal."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.types import Plan, Request, SamplingParams
from tests.laws.harness import Schedule, run
from tests.support import tiny, tiny_modern
from tests.support.torch_backend import make_backend, slice_row

LENGTH = 150  # past every window, past two blocks of keys and two chunks
NAMES = (*tiny.NAMES, *(name for name in tiny.MODERN if not name.endswith(tiny_modern.MTP)))


def hidden_logits(backend: TorchBackend, tokens: list[int], cuts: list[int], *, prompt: int = LENGTH) -> torch.Tensor:
    """Logits of every position, the text computed in parts."""
    from onedraw.backends.torch.runner.inputs import make_inputs

    out = []
    for start, stop in itertools.pairwise(cuts):
        row = slice_row(tokens, start, stop, prompt=prompt, groups=len(backend.capacity.groups))
        inputs = make_inputs(Plan((row,)), layout=backend.layout, device=torch.device("cpu"))
        hidden = backend.model.hidden(inputs, backend.states)
        out.append(backend.eager_runner.sampler.logits(hidden, list(range(stop - start))))
    return torch.cat(out)


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path, Path | None]:
    """The transformers model, its folder and its GGUF version."""
    folder = tmp_path_factory.mktemp(request.param)
    model, plain = tiny.build(request.param), tiny.write_safetensors(request.param, folder / "hf")
    return model, plain, tiny.write_gguf(request.param, folder / "model.gguf") if request.param in tiny.GGUF_MODELS else None


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_logits_match_transformers(pair: tuple[object, Path, Path | None], form: str, kernels: bool) -> None:
    model, folder, file = pair
    if form == "gguf" and file is None:
        pytest.skip("this variant has no form in GGUF")
    backend = make_backend(file if form == "gguf" and file else folder, kernels=kernels, page_size=16)
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, LENGTH).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]  # type: ignore[operator]
        whole = hidden_logits(backend, tokens, [0, LENGTH])[:, : tiny.VOCAB]
        chunked = hidden_logits(backend, tokens, [0, 64, 128, LENGTH])[:, : tiny.VOCAB]
        stepwise = hidden_logits(backend, tokens, [0, 70, *range(71, LENGTH + 1)], prompt=70)[:, : tiny.VOCAB]
    assert torch.equal(whole, chunked)
    assert torch.equal(whole, stepwise) or backend.capacity.recurrent  # Gated DeltaNet has two forms
    # Both sides round to float32: on hybrids and experts transformers itself is up to 2.6e-4 from the exact logits, of up
    # to 10, of the reference; so 1e-4 is relative to their magnitude.
    bound = 1e-4 * max(float(expected.abs().max()), 1.0)
    assert (whole - expected).abs().max() < bound
    assert (stepwise - expected).abs().max() < bound


def test_greedy_tokens_equal_transformers(pair: tuple[object, Path, Path | None]) -> None:
    model, folder, _ = pair
    prompt = np.random.default_rng(1).integers(0, tiny.VOCAB, 20).tolist()
    request = Request(id="g", prompt=tuple(prompt), params=SamplingParams(temperature=0.0, max_tokens=64))
    [answer], _ = run(make_backend(folder, kernels=True), [request], Schedule())
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(64):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))  # type: ignore[operator]
    assert answer.tokens == tokens[20:]
