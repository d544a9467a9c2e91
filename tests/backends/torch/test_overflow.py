"""A request whose numbers overflow fails alone: its neighbours and the next owners of its pages are not affected."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.model.layer import FeedForward
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info
from onedraw.settings import default_cache_dir
from onedraw.types import History, Plan, Request, Row, RowOutcome, SamplingParams
from tests.laws.harness import Schedule
from tests.laws.harness import run as served
from tests.support import tiny
from tests.support.torch_backend import make_backend

BROKEN = 77  # the token whose embedding is not a number any more
PROMPT = tuple(range(5, 45))
PARAMS = SamplingParams(checksums=True, prompt_logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_safetensors("llama", tmp_path_factory.mktemp("overflow") / "hf")


@pytest.fixture(params=["kernels", "packed", "torch", "bf16"])
def backend(request: pytest.FixtureRequest, folder: Path) -> TorchBackend:
    packed = request.param == "packed"
    path = tiny.write_gguf("llama", folder / "packed.gguf", kind="Q8_0") if packed else folder
    info = read_model_info(open_checkpoint(path))
    kernels = request.param in ("kernels", "packed")
    dtype = {"bf16": "bf16", "packed": "packed"}.get(request.param, "f32")
    made = TorchBackend(
        info.spec,
        info.weights,
        dtype=dtype,
        device="cpu",
        lanes=2,
        pages=12,
        page_size=16,
        max_context=64,
        ops=pick_ops("cpu", dtype, cache=default_cache_dir()) if kernels else TorchOps(torch.device("cpu")),
        check=False,
    )
    rows = made.model._embedding
    made.model._embedding = lambda tokens, thread_pool=None: torch.where(tokens[:, None] == BROKEN, torch.inf, rows(tokens))
    return made


def row(prompt: tuple[int, ...], pages: tuple[int, ...], *, lane: int = 0) -> Row:
    return Row(
        request_id=str(lane),
        lane=lane,
        pages=(pages,),
        start=0,
        tokens=prompt,
        drafts=(),
        prompt_stop=len(prompt),
        samples=True,
        params=PARAMS,
        history=History(prompt),
        scores_prompt=True,
    )


def run(backend: TorchBackend, *rows: Row) -> tuple[RowOutcome, ...]:
    return backend.collect(backend.submit(Plan(rows))).rows


def test_the_next_owner_of_its_pages_is_not_affected(backend: TorchBackend) -> None:
    (clean,) = run(backend, row(PROMPT, (0, 1, 2)))
    (failed,) = run(backend, row((*PROMPT[:3], BROKEN, *PROMPT[4:], 9, 9, 9), (3, 4, 5)))
    assert failed.no_token_left
    assert run(backend, row(PROMPT, (3, 4, 5))) == (clean,)


def test_earlier_tokens_of_its_own_prompt_are_not_affected(backend: TorchBackend) -> None:
    """Those pages are shared with requests that have the same prefix."""
    run(backend, row(PROMPT, (0, 1, 2)))
    run(backend, row((*PROMPT[:35], BROKEN, *PROMPT[36:]), (3, 4, 5)))
    for layer in backend.states[0].stores:
        for store in (layer.keys, layer.values):
            pages = store.view(13, -1)
            assert torch.equal(pages[:2], pages[3:5])


def test_a_neighbour_in_the_step_is_not_affected(backend: TorchBackend) -> None:
    (clean,) = run(backend, row(PROMPT, (0, 1, 2)))
    failed, beside = run(backend, row((BROKEN,) * 20, (6, 7), lane=1), row(PROMPT, (3, 4, 5)))
    assert failed.no_token_left
    assert beside == clean


class Loud:
    """A feed-forward whose output is far larger than in training."""

    def __init__(self, inner: FeedForward) -> None:
        self._inner, self.linears = inner, inner.linears

    def __call__(self, h: torch.Tensor, residual: torch.Tensor, ops: Ops, *, add: bool = False) -> torch.Tensor:
        output = self._inner(h, residual, ops) * 1e5
        return residual + output.to(residual.dtype) if add else output


@pytest.mark.parametrize(("dtype", "activation"), [("f32", "f16"), ("f16", "f16"), ("bf16", "f16")])
def test_a_stream_that_leaves_the_range_of_f16_names_the_layer_and_is_never_served(
    folder: Path, dtype: str, activation: str
) -> None:
    backend = make_backend(folder, kernels=False, check=False, dtype=dtype, activation=activation)
    layers = backend.model.stages[0].layers
    layers[1] = dataclasses.replace(layers[1], feed_forward=Loud(layers[1].feed_forward))  # type: ignore[arg-type]
    [failed] = run(backend, dataclasses.replace(row(PROMPT, (0, 1, 2, 3, 4)), scores_prompt=False))
    assert failed.no_token_left
    assert not failed.sampled
    assert failed.fault.startswith("layer 1 left the range of f16; run with")
    request = Request("q", PROMPT, SamplingParams(max_tokens=3))
    [answer], _ = served(backend, [request], Schedule())
    assert (answer.tokens, answer.error) == ([], "not_finite")


def test_an_overflow_in_a_later_stage_names_the_layer_by_its_number_in_the_model(folder: Path) -> None:
    backend = make_backend(folder, kernels=False, check=False, dtype="f16", activation="f16", cuts=(1,))
    layers = backend.model.stages[1].layers
    layers[1] = dataclasses.replace(layers[1], feed_forward=Loud(layers[1].feed_forward))  # type: ignore[arg-type]
    [failed] = run(backend, dataclasses.replace(row(PROMPT, (0, 1, 2, 3, 4)), scores_prompt=False))
    assert (failed.sampled, failed.fault[:8]) == ((), "layer 2 ")


def test_the_same_model_is_served_with_a_wider_stream(folder: Path) -> None:
    backend = make_backend(folder, kernels=False, check=False, dtype="bf16", activation="bf16")
    layers = backend.model.stages[0].layers
    layers[1] = dataclasses.replace(layers[1], feed_forward=Loud(layers[1].feed_forward))  # type: ignore[arg-type]
    [answer], _ = served(backend, [Request("q", PROMPT, SamplingParams(max_tokens=3))], Schedule())
    assert (len(answer.tokens), answer.error) == (3, None)


@pytest.mark.parametrize("fields", [{}, {"top_k": 3, "min_p": 0.1}, {"repetition_penalty": 1.3}])
def test_nan_logits_are_not_reported_as_the_callers_error(folder: Path, fields: dict[str, float]) -> None:
    backend = make_backend(folder, kernels=False, check=False, dtype="f32")
    rows = backend.model._embedding
    backend.model._embedding = lambda tokens, thread_pool=None: torch.where(tokens[:, None] == BROKEN, torch.nan, rows(tokens))
    [answer], _ = served(backend, [Request("q", (*PROMPT, BROKEN), SamplingParams(max_tokens=3, **fields))], Schedule())
    assert (answer.tokens, answer.error) == ([], "not_finite")
    banned = SamplingParams(max_tokens=3, bad_words=((5,),))
    [answer], _ = served(backend, [Request("q", (*PROMPT, BROKEN), banned)], Schedule())
    assert answer.error == "no_token_left", "which it may be"
