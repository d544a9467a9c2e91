"""Every family against `transformers`: tiny random checkpoints, safetensors and GGUF, logits to 1e-4, greedy tokens equal."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops import TorchOps
from onedraw.checkpoints.base import open_checkpoint
from onedraw.models.loading import describe
from onedraw.settings import default_cache_dir
from onedraw.types import History, Plan, Request, Row, SamplingParams
from tests import tiny
from tests.laws.harness import Schedule, run

LENGTH = 150  # past the window of 32, past two blocks of keys


def backend_of(path: Path, *, kernels: bool, pages: int = 64) -> TorchBackend:
    described = describe(open_checkpoint(path))
    return TorchBackend(
        described.spec,
        described.weights,
        dtype="f32",
        device="cpu",
        lanes=4,
        pages=pages,
        page_size=16,
        max_context=512,
        ops=pick_ops("cpu", "f32", cache=default_cache_dir()) if kernels else TorchOps(torch.device("cpu")),
    )


def hidden_logits(backend: TorchBackend, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of every position, the text computed in parts."""
    from onedraw.backends.torch.inputs import make_inputs

    out = []
    for start, stop in itertools.pairwise(cuts):
        row = Row(
            request_id="x",
            lane=0,
            pages=(tuple(range(20)),),
            start=start,
            tokens=tuple(tokens[start:stop]),
            drafts=(),
            prompt_stop=len(tokens),
            chooses=False,
            params=SamplingParams(),
            history=History(tuple(tokens)),
        )
        inputs = make_inputs(Plan((row,)), shape=backend._shape, device=torch.device("cpu"))
        hidden = backend._stack.hidden(inputs, backend._state)
        out.append(backend._logits(hidden, list(range(stop - start))))
    return torch.cat(out)


@pytest.fixture(scope="module", params=tiny.NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path, Path]:
    """The transformers model, its folder and its GGUF twin."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.build(request.param)
    return model, tiny.write_safetensors(request.param, folder / "hf"), tiny.write_gguf(request.param, folder / "model.gguf")


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_logits_match_transformers(pair: tuple[object, Path, Path], form: str, kernels: bool) -> None:
    model, folder, file = pair
    backend = backend_of(folder if form == "safetensors" else file, kernels=kernels)
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, LENGTH).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]  # type: ignore[operator]
        whole = hidden_logits(backend, tokens, [0, LENGTH])[:, : tiny.VOCAB]
        stepwise = hidden_logits(backend, tokens, [0, 70, *range(71, LENGTH + 1)])[:, : tiny.VOCAB]
    assert torch.equal(whole, stepwise)
    assert (whole - expected).abs().max() < 1e-4


def test_greedy_tokens_equal_transformers(pair: tuple[object, Path, Path]) -> None:
    model, folder, _ = pair
    prompt = np.random.default_rng(1).integers(0, tiny.VOCAB, 20).tolist()
    request = Request(id="g", prompt=tuple(prompt), params=SamplingParams(temperature=0.0, max_tokens=64))
    [answer], _ = run(backend_of(folder, kernels=True), [request], Schedule())
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(64):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))  # type: ignore[operator]
    assert answer.tokens == tokens[20:]
