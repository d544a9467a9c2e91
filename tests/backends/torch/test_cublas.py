"""cuBLAS serves a product only at row counts where a comparison found the bits of the Triton kernel. Here both are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.ops.cuda import cublas
from onedraw.backends.torch.ops.cuda.cublas import LIBRARY_ROWS, agreeing_rows, is_faster, library_rows, same_bits
from onedraw.backends.torch.ops.cuda.ops import TritonLinear
from onedraw.backends.torch.runner.inputs import PADDED
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info
from tests.support import tiny

COUNTS = (6, 8, 12, 32)
Product = Callable[[Tensor, Tensor], Tensor]


def weight() -> Tensor:
    """In float32, where few numbers show a difference."""
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(1))


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Every sum from the first to the last number of K, in float32, whatever the number of rows."""
    y = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        y += x[:, k, None].float() * weight[None, :, k].float()
    return y.to(x.dtype)


def split_in_two(x: Tensor, weight: Tensor) -> Tensor:
    """Two partial sums over halves of K, added in float32."""
    half = x.shape[1] // 2
    y = torch.zeros(2, len(x), len(weight))
    for k in range(half):
        for part, at in enumerate((k, half + k)):
            y[part] += x[:, at, None].float() * weight[None, :, at].float()
    return (y[0] + y[1]).to(x.dtype)


def where(other: Callable[[Tensor], bool]) -> Product:
    """A library that splits K for the products that `other` names."""
    return lambda x, weight: (split_in_two if other(x) else in_order)(x, weight)


def in_the_last_row(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([in_order(x[:-1], weight), split_in_two(x[-1:], weight)])


def test_a_library_that_adds_in_the_same_order_may_serve_every_count() -> None:
    assert agreeing_rows(weight(), in_order, in_order, COUNTS) == COUNTS


@pytest.mark.parametrize("fault", [split_in_two, in_the_last_row])
def test_a_library_that_splits_k_is_refused(fault: Product) -> None:
    assert agreeing_rows(weight(), fault, in_order, COUNTS) == ()


def test_a_library_that_splits_k_at_one_count_is_refused_there() -> None:
    assert agreeing_rows(weight(), where(lambda x: len(x) == 12), in_order, COUNTS) == (6, 8, 32)


def test_a_library_that_splits_k_for_rows_at_one_place_is_refused() -> None:
    """12 rows start at three places of the random rows; where they are in memory tells the place."""
    assert agreeing_rows(weight(), where(lambda x: x.storage_offset() == 20 * 64), in_order, COUNTS) == (6, 8, 32)


def test_a_difference_that_only_rows_with_outliers_show_is_found() -> None:
    found = agreeing_rows(weight(), where(lambda x: float(x.abs().amax()) > 6), in_order, COUNTS)
    assert found == ()


def test_a_weight_that_cannot_show_a_difference_tells_nothing() -> None:
    assert agreeing_rows(torch.zeros(40, 64), split_in_two, in_order, COUNTS) is None


def test_counts_whose_result_is_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "CHECK_BYTES", 12 * 40 * 4)
    assert agreeing_rows(weight(), in_order, in_order, COUNTS) == (6, 8, 12)
    monkeypatch.setattr(cublas, "CHECK_BYTES", 100)
    assert agreeing_rows(weight(), in_order, in_order, COUNTS) == ()


def test_the_identity_names_the_products_that_cublas_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = read_model_info(open_checkpoint(tiny.write_safetensors("qwen3", tmp_path / "hf")))
    backend = TorchBackend(info.spec, info.weights, dtype="f32", lanes=1, pages=4, page_size=16, max_context=20, check=False)
    plain = backend.identity
    assert "cuBLAS" not in plain
    product = object.__new__(TritonLinear)
    product.out_features, product.in_features, product.library_rows = 6144, 4096, (96, 128)
    monkeypatch.setattr(backend.model, "linears", lambda: [product, product])
    assert backend.identity.count("6144 x 4096 by cuBLAS at 96 128 rows") == 1
    product.library_rows = ()
    assert "cuBLAS" not in backend.identity


def test_signs_of_zero_and_nan_are_bits() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_every_size_of_captured_steps_above_64_rows_is_compared() -> None:
    assert set(LIBRARY_ROWS) >= {count for count in PADDED if count > 64}
    assert list(LIBRARY_ROWS) == sorted(set(LIBRARY_ROWS))
    assert library_rows(weight()) == ()  # no cuBLAS on a CPU


def test_small_weights_keep_the_kernel_at_few_rows() -> None:
    large, small = torch.empty(6144, 4096, device="meta"), torch.empty(2048, 4096, device="meta")
    assert is_faster(128, large)
    assert not is_faster(256, small)
    assert is_faster(512, small)
