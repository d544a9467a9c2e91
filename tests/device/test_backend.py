"""The contract on a GPU: tokens and checksums of a random model on the torch backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.cuda_graphs import CudaGraphs
from onedraw.backends.torch.runner.pipeline import Pipeline, StageDevice
from onedraw.checkpoints.random_weights import random_weights
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.settings import default_cache_dir
from onedraw.types import Request, SamplingParams
from tests.laws.harness import KnownAnswerProposer, Schedule, plain, random_requests, run

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 1000
SPEC = ModelSpec(
    family="llama",
    layers=tuple(
        LayerSpec(
            AttentionSpec(heads=6, kv_heads=2, head_dim=64, rope=RopeSpec(1e4, 64), scale=0.125, window=window), MlpSpec(704)
        )
        for window in (None, 40, None, 40)
    ),
    hidden=256,
    vocab=VOCAB,
    eps=1e-5,
    tied=False,
    max_context=512,
)


def backend_of(dtype: str, *, lanes: int = 4, pages: int = 200, ops: Ops | None = None) -> TorchBackend:
    sizes: dict[str, Any] = {"lanes": lanes, "pages": pages, "page_size": 16, "max_context": 512}
    return TorchBackend(SPEC, random_weights(SPEC, seed=1), dtype=dtype, device="cuda:0", ops=ops, **sizes)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_no_schedule_changes_a_bit_on_the_device(dtype: str) -> None:
    requests = random_requests(np.random.default_rng(5), count=6, vocab=VOCAB, longest=150, max_tokens=12)
    alone = backend_of(dtype, lanes=1)
    assert alone.report is not None
    assert alone.report.passed, alone.report
    expected = plain(lambda: alone, requests)
    longest = max(len(r.prompt) + r.params.max_tokens for r in requests)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, VOCAB)
    few = -(-longest // 16) + 4
    for name, backend, schedule in (
        ("batched", backend_of(dtype), Schedule()),
        ("small steps", backend_of(dtype), Schedule(step_tokens=7)),
        ("prefix hits", backend_of(dtype), Schedule(reuse=True, arrivals=(0, 3, 6, 9, 12, 15))),
        ("few pages, drafts", backend_of(dtype, pages=few), Schedule(reuse=True, proposer=drafts)),
    ):
        got, _ = run(backend, requests, schedule)
        assert [dataclasses.replace(a, cached=0) for a in got] == [dataclasses.replace(a, cached=0) for a in expected], name


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("cuts", [(1,), (1, 3)])
def test_stages_on_one_device_give_the_bits_of_one_stage(dtype: str, cuts: tuple[int, ...]) -> None:
    requests = random_requests(np.random.default_rng(6), count=5, vocab=VOCAB, longest=150, max_tokens=12)
    alone = backend_of(dtype, lanes=1)
    expected = plain(lambda: alone, requests)
    got, _ = run(split_of(dtype, ["cuda:0"] * (len(cuts) + 1), cuts), requests, Schedule(reuse=True))
    assert [dataclasses.replace(a, cached=0) for a in got] == [dataclasses.replace(a, cached=0) for a in expected]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
def test_steps_in_flight_on_stages_give_the_bits_of_one_stage(dtype: str, cuts: tuple[int, ...]) -> None:
    """With the kernels of the device, like the plain run."""
    requests = random_requests(np.random.default_rng(8), count=6, vocab=VOCAB, longest=150, max_tokens=12)
    ops = lambda: pick_ops("cuda:0", dtype, cache=default_cache_dir())  # noqa: E731
    whole = backend_of(dtype, lanes=1, ops=ops())
    expected = plain(lambda: whole, requests)
    count = len(cuts) + 1
    stage_devices = [StageDevice.named("cuda:0", ops(), stop=stop) for stop in (*cuts, None)]
    sizes: dict[str, Any] = {"rows": 4096, "lanes": 4, "pages": 200, "page_size": 16, "max_context": 512}
    split = TorchBackend(
        *(SPEC, random_weights(SPEC, seed=1)),
        dtype=dtype,
        stage_devices=stage_devices,
        pipeline=Pipeline([lambda: None] * count),
        max_in_flight=count,
        **sizes,
    )
    got, stats = run(split, requests, Schedule(reuse=True, step_tokens=64))  # prompts get their own plans
    split.close()
    assert [dataclasses.replace(a, cached=0) for a in got] == [dataclasses.replace(a, cached=0) for a in expected]
    assert stats.overlapped_steps


@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
@pytest.mark.parametrize("drafting", ["none", "chains", "trees"])
def test_captured_steps_on_stages_have_the_bits_of_one_stage(cuts: tuple[int, ...], drafting: str) -> None:
    prompts = np.random.default_rng(9).integers(0, VOCAB, (4, 60)).tolist()
    params = [SamplingParams(temperature=0.4 * i, seed=i, max_tokens=24, checksums=True) for i in range(4)]
    requests = [Request(f"q{i}", tuple(prompt[i:]), one) for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))]
    ops = lambda: pick_ops("cuda:0", "bf16", cache=default_cache_dir())  # noqa: E731
    expected = plain(lambda: backend_of("bf16", lanes=1, ops=ops()), requests)
    known = {r.id: a.tokens for r, a in zip(requests, expected, strict=True)}
    drafts = None if drafting == "none" else KnownAnswerProposer(known, VOCAB, tree=drafting == "trees")
    stage_devices = [StageDevice.named("cuda:0", ops(), stop=stop) for stop in (*cuts, None)]
    sizes: dict[str, Any] = {"rows": 4096, "lanes": 4, "pages": 200, "page_size": 16, "max_context": 512}
    split = TorchBackend(SPEC, random_weights(SPEC, seed=1), dtype="bf16", stage_devices=stage_devices, **sizes)
    for _ in range(2):  # the second run replays what the first captured
        got, stats = run(split, requests, Schedule(proposer=drafts))
        assert got == expected
        assert drafts is None or stats.accepted_tokens
    assert split.graph_runner is not None
    recorder = split.graph_runner.graphs
    assert isinstance(recorder, CudaGraphs)
    assert recorder.replayed >= len(stage_devices) * (stats.steps - 1)


@pytest.mark.parametrize("names", [["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids="-".join)
def test_a_stage_on_the_cpu_gives_the_tokens_of_the_gpu(names: list[str]) -> None:
    """In float32: bits differ between CPU and GPU, tokens do not."""
    requests = random_requests(np.random.default_rng(7), count=4, vocab=VOCAB, longest=100, max_tokens=12)
    expected = [answer.tokens for answer in plain(lambda: backend_of("f32", lanes=1), requests)]
    got, _ = run(split_of("f32", names, (2,)), requests, Schedule())
    assert [answer.tokens for answer in got] == expected


def split_of(dtype: str, names: list[str], cuts: tuple[int, ...]) -> TorchBackend:
    stage_devices = [
        StageDevice.named(name, TorchOps(torch.device(name)), stop=stop) for name, stop in zip(names, (*cuts, None), strict=True)
    ]
    weights = random_weights(SPEC, seed=1)
    return TorchBackend(
        SPEC, weights, dtype=dtype, stage_devices=stage_devices, rows=4096, lanes=4, pages=200, page_size=16, max_context=512
    )
