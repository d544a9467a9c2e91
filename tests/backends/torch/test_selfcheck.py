"""The self-check stays within the existing pages and context, since kernels do not check bounds, and compares across every row
count at which another kernel takes over."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onedraw.backends.torch import selfcheck
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops.cuda.experts import route_borders
from onedraw.backends.torch.ops.cuda.linear import MAX_TILED_ROWS, choose_tile, tile_borders
from onedraw.backends.torch.ops.cuda.packed import few_rows as packed_rows
from onedraw.backends.torch.ops.cuda.packed.ops import PackedOps
from onedraw.backends.torch.ops.plain.experts import ExpertBank
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec
from onedraw.settings import default_cache_dir
from tests.support import tiny
from tests.support.quantized_weights import random_tensor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_safetensors("qwen3", tmp_path_factory.mktemp("selfcheck") / "hf")


@pytest.mark.parametrize("kind", ["kernels", "torch"])
@pytest.mark.parametrize(("pages", "page_size", "max_context"), [(1, 1, 1), (1, 16, 16), (2, 64, 5), (3, 8, 24), (8, 16, 16)])
def test_few_pages_and_a_short_context_are_not_exceeded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pages: int, page_size: int, max_context: int
) -> None:
    seen: list[Inputs] = []
    make = selfcheck.make_inputs
    monkeypatch.setattr(selfcheck, "make_inputs", lambda *given, **named: seen.append(make(*given, **named)) or seen[-1])
    info = read_model_info(open_checkpoint(folder))
    ops = pick_ops("cpu", "f32", cache=default_cache_dir()) if kind == "kernels" else TorchOps(torch.device("cpu"))
    backend = TorchBackend(  # larger than the check knows, so that this test sees a wrong slot before the allocator does
        info.spec,
        info.weights,
        dtype="f32",
        device="cpu",
        lanes=1,
        pages=64,
        page_size=page_size,
        max_context=512,
        ops=ops,
        check=False,
    )
    stack, states = backend.model, backend.states
    stack.max_context = max_context
    layout = dataclasses.replace(backend.layout, scratch=(pages,))
    with torch.inference_mode():
        report = selfcheck.self_check(stack, states, layout=layout)
    assert report.passed, report.results
    assert seen
    for inputs in seen:
        assert int(inputs.positions.max()) < max(max_context, page_size)  # padding is written to the padding page
        assert int(inputs.tables[0].max()) <= pages


def test_padding_has_rotary_angles_if_the_context_is_shorter_than_a_page(folder: Path) -> None:
    """With blocks of 64 rows, padding rows have every position of a page."""
    info = read_model_info(open_checkpoint(folder))
    ops = TorchOps(torch.device("cpu"))
    ops.rule = RowRule(block=64)
    backend = TorchBackend(
        info.spec, info.weights, dtype="f32", device="cpu", lanes=1, pages=1, page_size=64, max_context=5, ops=ops
    )
    assert backend.report is not None
    assert backend.report.passed


# ------------------------------------------------------------------ borders: row counts at which another kernel is used


class Bordered(Linear):
    """A product whose rows change a low bit from `border` rows on if `differs`; `says`: whether it declares the border."""

    def __init__(self, border: int, *, says: bool, differs: bool) -> None:
        super().__init__(torch.randn(24, 32, generator=torch.Generator().manual_seed(3)), rule=RowRule(floor=2))
        self._border, self._says, self._differs = border, says, differs

    @property
    def borders(self) -> tuple[int, ...]:
        return (self._border,) if self._says else ()

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        return y * (1 + 2**-22) if self._differs and len(x) >= self._border else y


@pytest.mark.parametrize("border", [9, 65, 257, 1366])
def test_a_kernel_with_different_bits_past_its_border_is_found(border: int) -> None:
    assert not selfcheck._rows_agree(Bordered(border, says=True, differs=True), RowRule(floor=2))
    assert selfcheck._rows_agree(Bordered(border, says=True, differs=False), RowRule(floor=2))


def test_a_border_that_is_not_declared_is_not_compared() -> None:
    """Regression: packed weights changed kernels at 257 rows, and fewer than 128 rows were compared."""
    assert selfcheck._rows_agree(Bordered(257, says=False, differs=True), RowRule(floor=2))


def test_borders_that_no_product_of_this_width_can_reach_are_left_out() -> None:
    assert selfcheck._rows_compared([257, 65], 256) == [1, 2, 5, 16, 64, 65]
    assert selfcheck._rows_compared([257, 65], 257) == [1, 2, 5, 16, 64, 65, 256, 257]


def test_packed_products_declare_every_border(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "_multiprocessors", lambda device: 132)
    for shared, more in ((227 << 10, set()), (99 << 10, {46})):
        monkeypatch.setattr(packed_rows, "shared_memory", lambda device, shared=shared: shared)
        tensors = [random_tensor("w", (2048, 5120), "Q4_K", np.random.default_rng(0))]
        made = PackedOps(CPU, torch.float16).packed_linear(tensors, bias=None, pad=1, pad_columns=1)
        assert made is not None
        assert made.kind == "Q4_K"
        found = set(made.all_borders())
        assert found >= {9, 17, 25, 33, 65, 205, 257} | more, sorted(found)
        assert found <= {5, 9, 17, 25, 33, 49, 65, 205, 257} | more, sorted(found)


def test_products_of_plain_weights_declare_every_border() -> None:
    for n, k in ((1000, 576), (28672, 4096), (4096, 14336), (152064, 3584)):
        assert tile_borders(n, k, torch.bfloat16, 227 << 10) == (17, 33, 65, 129, 257)
    assert tile_borders(6144, 4096, torch.bfloat16, 227 << 10) == (17, 33, 65, 129)
    assert choose_tile(MAX_TILED_ROWS, 6144, 4096, torch.bfloat16, 227 << 10) == choose_tile(
        10**6, 6144, 4096, torch.bfloat16, 227 << 10
    )
    assert tile_borders(64, 64, torch.float32, 227 << 10) == (17, 33)


class OtherSteps(TorchOps):
    """Operations with another kernel for generated tokens in four rows or more, with different bits if `differs`."""

    def __init__(self, *, differs: bool) -> None:
        super().__init__(CPU)
        self._differs = differs

    def kernel_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        return (4, 100)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y = super().rms_norm(x, weight, eps)
        return y * (1 + 2**-20) if self._differs and len(x) == 4 else y


def backend_with(folder: Path, ops: TorchOps) -> TorchBackend:
    info = read_model_info(open_checkpoint(folder))
    sizes = {"lanes": 5, "pages": 20, "page_size": 16, "max_context": 20}
    return TorchBackend(info.spec, info.weights, dtype="f32", device="cpu", ops=ops, check=False, **sizes)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_generated_tokens_are_compared_across_the_borders_of_a_step(family: str, folder: Path, tmp_path: Path) -> None:
    place = folder if family == "qwen3" else tiny.write_safetensors(family, tmp_path / "hf")
    for differs in (False, True):
        backend = backend_with(place, OtherSteps(differs=differs))
        given = (backend.model, backend.states, backend.layout)
        with torch.inference_mode():
            counts = selfcheck._step_counts(*given)
            assert counts == ([3, 4] if family == "qwen3_5" else [3, 4, 99, 100])  # at most the number of lanes
            assert selfcheck._steps_agree(*given, counts) != differs


def test_comparisons_across_borders_are_reported(folder: Path) -> None:
    backend = backend_with(folder, OtherSteps(differs=True))
    with torch.inference_mode():
        report = selfcheck.self_check(backend.model, backend.states, layout=backend.layout)
    assert "a generated token alone and among 3, 4, 99, 100" in [one.check for one in report.results if not one.passed]


class OtherExperts:
    """Experts with different bits past a border if `differs`."""

    def __init__(self, bank: ExpertBank, *, differs: bool, kind: str) -> None:
        self._bank, self._differs, self.kind = bank, differs, kind

    @property
    def linears(self) -> list[Linear]:
        return []

    def borders(self, used: int) -> tuple[int, ...]:
        return (40,)

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        y = self._bank(h, ids, weights, scale)
        return y * (1 + 2**-20) if self._differs and len(h) >= 40 else y


def test_experts_are_compared_across_their_borders(tmp_path: Path) -> None:
    class Ops(TorchOps):
        differs, kinds, made = False, ["Q4_K"], 0

        def expert_bank(self, gate_up: list[Tensor], down: list[Tensor], activation: Activation) -> Any:
            self.made += 1
            bank = super().expert_bank(gate_up, down, activation)
            return OtherExperts(bank, differs=self.differs, kind=self.kinds[self.made % len(self.kinds)])

    place = tiny.write_safetensors("qwen3_moe", tmp_path / "hf")
    for differs in (False, True):
        ops = Ops(CPU)
        ops.differs = differs
        backend = backend_with(place, ops)
        ((experts, by),) = selfcheck._experts(backend.model.local_stages)
        with torch.inference_mode():
            assert selfcheck._experts_agree(experts, by) != differs
    ops.kinds = ["Q4_K", "Q6_K"]  # every kind has kernels of its own
    found = selfcheck._experts(backend_with(place, ops).model.local_stages)
    assert sorted(experts.bank.kind for experts, _ in found) == ops.kinds
    assert route_borders(256, 8) == (65, 1025)
