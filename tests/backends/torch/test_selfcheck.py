"""The self-check keeps to the pages and the context there are, however few: kernels do not look where they write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from onedraw.backends.torch import selfcheck
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.layers.linear import RowRule
from onedraw.backends.torch.ops import TorchOps
from onedraw.checkpoints.base import open_checkpoint
from onedraw.models.loading import describe
from onedraw.settings import default_cache_dir
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_safetensors("qwen3", tmp_path_factory.mktemp("selfcheck") / "hf")


@pytest.mark.parametrize("kind", ["kernels", "torch"])
@pytest.mark.parametrize(("pages", "page_size", "max_context"), [(1, 1, 1), (1, 16, 16), (2, 64, 5), (3, 8, 24), (8, 16, 16)])
def test_few_pages_and_a_short_context_are_not_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pages: int, page_size: int, max_context: int
) -> None:
    seen: list[Inputs] = []
    make = selfcheck.make_inputs
    monkeypatch.setattr(selfcheck, "make_inputs", lambda *given, **named: seen.append(make(*given, **named)) or seen[-1])
    described = describe(open_checkpoint(folder))
    ops = pick_ops("cpu", "f32", cache=default_cache_dir()) if kind == "kernels" else TorchOps(torch.device("cpu"))
    backend = TorchBackend(  # larger than the check is told, so that a wrong place is seen here and not by the allocator
        described.spec,
        described.weights,
        dtype="f32",
        device="cpu",
        lanes=1,
        pages=64,
        page_size=page_size,
        max_context=512,
        ops=ops,
        check=False,
    )
    stack, states = backend._stack, backend._states
    stack.max_context = max_context
    shape = dataclasses.replace(backend._shape, scratch=(pages,))
    with torch.inference_mode():
        report = selfcheck.self_check(stack, states, shape=shape)
    assert report.holds, report.findings
    assert seen
    for inputs in seen:
        assert int(inputs.positions.max()) < max(max_context, page_size)  # padding stands on the scratch page
        assert int(inputs.tables[0].max()) <= pages


def test_padding_finds_its_turn_where_the_context_is_shorter_than_a_page(folder: Path) -> None:
    """Where rows come in blocks of 64, padding stands at every position of a page."""
    described = describe(open_checkpoint(folder))
    ops = TorchOps(torch.device("cpu"))
    ops.rule = RowRule(block=64)
    backend = TorchBackend(
        described.spec, described.weights, dtype="f32", device="cpu", lanes=1, pages=1, page_size=64, max_context=5, ops=ops
    )
    assert backend.report is not None
    assert backend.report.holds
