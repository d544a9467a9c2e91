"""The contract on a GPU: tokens and checksums of tiny models with every kind of layer, in bf16.

`python -m tests.device.make_families` writes the checkpoints; it needs transformers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run

pytestmark = pytest.mark.device
FOLDER = Path(__file__).parents[2] / "build" / "tiny"
NAMES = ("llama", "qwen3", "qwen3_5", "qwen3_5_moe", "gemma4_e4b", "gemma4_26b", "laguna")
VOCAB = 512


def backend_of(
    name: str, *, dtype: str = "bf16", lanes: int = 4, pages: int = 200, drafts: int = 64, kv_dtype: str | None = None
) -> TorchBackend:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not (FOLDER / name).is_dir():
        pytest.skip(f"build/tiny/{name} is missing: run python -m tests.device.make_families")
    info = read_model_info(open_checkpoint(FOLDER / name))
    return TorchBackend(
        info.spec,
        info.weights,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device="cuda:0",
        lanes=lanes,
        pages=pages,
        page_size=16,
        max_context=512,
        drafts=drafts,
        checkpoints=8,
        ops=pick_ops("cuda:0", dtype, cache=FOLDER),
    )


def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    text = [tuple(int(t) for t in rng.integers(0, VOCAB, n)) for n in (150, 70, 90, 40)]
    prompts = [text[0], text[0], text[0] + text[1], text[0][:100] + text[2], text[3], text[0][:128], text[3]]
    made = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3],
            repetition_penalty=1.1,
            frequency_penalty=0.3,
            presence_penalty=0.2,
            top_p=0.95 if i % 2 else 1.0,
            seed=i,
            max_tokens=12,
            checksums=True,
        )
        made.append(Request(f"q{i}", prompt, params))
    return made


def same(got: list[Answer], expected: list[Answer]) -> bool:
    return [dataclasses.replace(a, cached=0) for a in got] == [dataclasses.replace(a, cached=0) for a in expected]


def schedules_agree(name: str, *, kv_dtype: str | None = None) -> list[Answer]:
    """Compare every schedule with the plain run and return its answers; fail if some feature was not exercised."""
    submitted = requests()
    alone = backend_of(name, lanes=1, kv_dtype=kv_dtype)
    assert alone.report is not None
    assert alone.report.passed, alone.report.results
    expected = plain(lambda: alone, submitted)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(submitted, expected, strict=True)}, VOCAB)
    trees = dataclasses.replace(drafts, tree=True)
    late = tuple(range(0, 16 * len(submitted), 16))
    counted: Counter[str] = Counter()
    for label, pages, schedule in (
        ("batched", 200, Schedule()),
        ("small steps", 200, Schedule(step_tokens=64, arrivals=(5, 0, 2, 9, 1, 3))),
        ("checkpoints", 200, Schedule(reuse=True, arrivals=late)),
        ("drafts", 200, Schedule(proposer=drafts, reuse=True)),
        ("trees, few pages", 26, Schedule(proposer=trees, step_tokens=80, reuse=True)),
    ):
        backend = backend_of(name, pages=pages, kv_dtype=kv_dtype)
        got, stats = run(backend, submitted, schedule)
        assert same(got, expected), label
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
        if backend.capacity.async_scheduling:
            counted.update(ahead=stats.steps_ahead)
        counted.update(trees=stats.draft_trees, hits=stats.prefix_hits, whole=stats.whole_prompts)
    assert all(counted.values()), counted
    return expected


@pytest.mark.parametrize("name", NAMES)
def test_no_schedule_changes_a_bit_on_the_device(name: str) -> None:
    schedules_agree(name)
