"""Matrix products through cuBLAS, at the row counts where it gives the bits of the Triton kernel.

In: a weight [N, K]. Out: the row counts at which cuBLAS may compute its products. cuBLAS picks an algorithm by the shape of the
product, and some algorithms split K. So every row count is compared by itself when the weight is loaded, and cuBLAS is called
with these counts only. The counts below 512 are the sizes to which captured steps are padded. Axes: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import linear
from onedraw.backends.torch.runner.inputs import PADDED

LIBRARY_ROWS = (*(count for count in PADDED if count > 64), 512, 1024, 2048)  # the row counts to compare, in ascending order
WHOLE_ROWS = LIBRARY_ROWS[-1]  # products of more rows are cut into parts of this many rows
CHECK_BYTES = 256 * 2**20  # most bytes of the result of a compared product
CHECK_SEEDS = (3, 4, 5)
# Weights with fewer outputs are not compared. In bf16, only about one result in 5,000 differs when a sum of 4,096 products is
# split: with this many outputs, nine compared products of 96 rows have about 170 such results.
LEAST_COLUMNS = 1024
# Where the bits agree, cuBLAS is used from this many rows on, and for large weights with fewer rows too, although a bias, a
# residual or an activation then takes a separate kernel.
ALL_WEIGHTS_FROM = 512
LARGE_WEIGHT = 2**24  # elements from which a weight counts as large

Product = Callable[[Tensor, Tensor], Tensor]  # a function of x [T, K] and a weight [N, K] that returns [T, N]


def forbid_split_sums() -> None:
    """Forbid cuBLAS to split K, and to add partial sums in the dtype of the result. Only cuBLASLt has a setting against splitting
    K."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # partial sums in bf16, split K
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def multiply(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight.t(), out=out)


def is_faster(rows: int, weight: Tensor) -> bool:
    """Whether cuBLAS is faster than the Triton kernel."""
    return rows >= ALL_WEIGHTS_FROM or weight.numel() >= LARGE_WEIGHT


_AGREEMENTS: dict[tuple[int, int, torch.dtype, torch.device], tuple[int, ...]] = {}


def library_rows(weight: Tensor) -> tuple[int, ...]:
    """The row counts at which cuBLAS gives the bits of the Triton kernel; compared once per shape."""
    # Where all rows are aligned to 16 bytes, no choice of cuBLAS depends on where a product's rows begin.
    fits = len(weight) >= LEAST_COLUMNS and all(size % 8 == 0 for size in weight.shape)
    if weight.device.type != "cuda" or weight.dtype == torch.float32 or not fits:
        return ()
    shape = (*weight.shape, weight.dtype, weight.device)
    if shape not in _AGREEMENTS:
        found = agreeing_rows(weight, multiply, linear)
        if found is None:
            return ()
        _AGREEMENTS[shape] = found
    return _AGREEMENTS[shape]


def agreeing_rows(
    weight: Tensor, library: Product, kernel: Product, counts: Sequence[int] = LIBRARY_ROWS
) -> tuple[int, ...] | None:
    """The row counts at which `library` has the bits of `kernel`, for random rows at several places of a larger product. None
    if this weight cannot show a difference, because its sums over K are the same in reverse order."""
    counts = [count for count in counts if count * len(weight) * weight.itemsize <= CHECK_BYTES]
    most, agreeing = max(counts, default=0), list(counts)
    for seed in CHECK_SEEDS if counts else ():
        x = _random_rows(most, weight, seed)
        expected = kernel(x, weight)
        few = weight[:256]
        if same_bits(kernel(x.flip(1), few.flip(1)), expected[:, : len(few)]):
            return None
        agreeing = [
            count
            for count in agreeing
            if all(
                same_bits(library(x[start : start + count], weight), expected[start : start + count])
                for start in {0, min(1, most - count), most - count}
            )
        ]
    return tuple(agreeing)


def _random_rows(count: int, weight: Tensor, seed: int) -> Tensor:
    """Return random rows [count, K]. With every second seed columns differ widely in magnitude, as those of activations do."""
    generator = torch.Generator(device=weight.device).manual_seed(seed)
    x = torch.randn(count, weight.shape[1], generator=generator, device=weight.device)
    if seed % 2 == 0:
        x *= torch.randn(weight.shape[1], generator=generator, device=weight.device).exp2()
    return x.to(weight.dtype)


def same_bits(x: Tensor, y: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[x.itemsize]
    return torch.equal(x.contiguous().view(integers), y.contiguous().view(integers))
