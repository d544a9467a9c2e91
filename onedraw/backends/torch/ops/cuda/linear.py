"""Matrix products with Triton: y = x Wᵀ, with optional bias, residual and gated activation.

In: rows x [T, K] and a weight [N, K]. Out: [T, N]. One kernel serves any number of rows: the program that computes a tile adds up
all of K from front to back, so the order of the sum, and with it every bit of the result, is the same for every shape of a tile.

The epilogue rounds where separate operations would round: after the product, after the bias, after the residual. So fusing them
changes no bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.triton_math import apply_activation, launch_dependents, wait_for_inputs

MAX_TILED_ROWS = 512  # `choose_tile` has one tile for all larger row counts
SMALL_SHARED = 99 * 1024  # bytes of shared memory per block on sm86 and sm89


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile and pipeline sizes of a product. None of them changes a bit of the result."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 1  # row blocks per group: neighbouring programs of a group read the same weights, which the L2 cache then holds
    # Whether the weight is the left MMA operand. The left operand has the larger minimum height, so fewer padding rows are
    # computed if the few rows of x are on the right.
    swapped: bool = False

    def shared(self, itemsize: int) -> int:
        """An upper bound of the bytes of shared memory."""
        return (self.rows + self.columns) * self.depth * itemsize * self.stages


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    residual,
    y,
    rows,
    n,
    x_stride,
    residual_stride,
    y_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,
    EVEN_N: tl.constexpr,
    IEEE: tl.constexpr,
    SWAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    program = tl.program_id(0).to(tl.int64)
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    if GROUP == 1:
        block_m = program // blocks_n
        block_n = program % blocks_n
    else:
        group = program // (GROUP * blocks_n)
        group_rows = tl.minimum(blocks_m - group * GROUP, GROUP)
        index = program % (GROUP * blocks_n)
        block_m = group * GROUP + index % group_rows
        block_n = index // group_rows
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_mask = m < rows
    column_mask = columns < n
    safe_columns = columns if EVEN_N else tl.where(column_mask, columns, 0)
    x_ptrs = x + m[:, None] * x_stride + k[None, :]
    if SWAPPED:
        w_ptrs = weight + safe_columns[:, None] * K + k[None, :]
        k_index = k[None, :]
        accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        w_ptrs = weight + safe_columns[None, :] * K + k[:, None]
        k_index = k[:, None]
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            left = tl.load(x_ptrs + start, mask=row_mask[:, None], other=0.0)
            right = tl.load(w_ptrs + start)
        else:
            left = tl.load(x_ptrs + start, mask=row_mask[:, None] & (k[None, :] < K - start), other=0.0)
            right = tl.load(w_ptrs + start, mask=k_index < K - start, other=0.0)
        if SWAPPED:
            accumulator = tl.dot(right, tl.trans(left), accumulator, input_precision="ieee" if IEEE else "tf32")
        else:
            accumulator = tl.dot(left, right, accumulator, input_precision="ieee" if IEEE else "tf32")
    if SWAPPED:
        accumulator = tl.trans(accumulator)
    launch_dependents(PDL)
    dtype = y.dtype.element_ty
    out = accumulator.to(dtype)
    if HAS_BIAS:
        out = (out.to(tl.float32) + tl.load(bias + safe_columns)[None, :].to(tl.float32)).to(dtype)
    mask = row_mask[:, None] if EVEN_N else row_mask[:, None] & column_mask[None, :]
    if HAS_RESIDUAL:
        add = tl.load(residual + m[:, None] * residual_stride + safe_columns[None, :], mask=mask, other=0.0)
        out = (out.to(tl.float32) + add.to(tl.float32)).to(dtype)
    if GATE == 0:
        tl.store(y + m[:, None] * y_stride + columns[None, :], out, mask=mask)
    else:
        gate, up = tl.split(tl.reshape(out, (BLOCK_M, BLOCK_N // 2, 2)))
        activated = apply_activation(gate.to(tl.float32), GATE).to(dtype)
        half_columns = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        result = (activated.to(tl.float32) * up.to(tl.float32)).to(dtype)
        tl.store(
            y + m[:, None] * y_stride + half_columns[None, :], result, mask=row_mask[:, None] & (half_columns * 2 < n)[None, :]
        )


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: int = 0,
    out: Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> Tensor:
    """The product of x [T, K], whose inner stride is 1, with a weight: [T, N], written to `out` if given (which may be columns
    of a wider tensor). With `gate` (the number of an activation in `apply_activation`), the weight's rows alternate between gate
    and up projection, and the result is activation(gate) * up, [T, N / 2], rounded as by a separate product and activation."""
    (rows, depth), n = x.shape, weight.shape[0]
    y = torch.empty(rows, n // 2 if gate else n, dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return y
    tile = tile or choose_tile(rows, n, depth, x.dtype, shared_memory(x.device))
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),)
    _linear[grid](
        x,
        weight,
        bias,
        residual,
        y,
        rows,
        n,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        y.stride(0),
        K=depth,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        GROUP=tile.group,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATE=gate,
        EVEN_N=n % tile.columns == 0,
        IEEE=x.dtype == torch.float32,
        SWAPPED=tile.swapped,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )
    return y


def launch_options(pdl: bool) -> dict[str, Any]:
    """Options of programmatic dependent launch (PDL), where the start of a kernel overlaps the end of the kernel before it. Every
    kernel waits before it loads data that another kernel of the step writes."""
    return {"launch_pdl": True} if pdl else {}


@lru_cache(maxsize=8)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may use; SMALL_SHARED under Triton's interpreter, or if torch does not report them."""
    if device.type != "cuda":
        return SMALL_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", SMALL_SHARED))


# ------------------------------------------------------------------ tile choice


def _plain(rows: int, columns: int, depth: int, stages: int, warps: int = 4) -> Tile:
    return Tile(rows, columns, depth, warps, stages)


def _swapped(rows: int, columns: int, depth: int, stages: int, warps: int = 4) -> Tile:
    return Tile(rows, columns, depth, warps, stages, swapped=True)


SkinnyTiles = tuple[Tile, Tile, Tile]  # tiles for up to 16, 32 and 64 rows
# Tiles by (N, K), measured on an H200 in bf16 with weights that are not in the L2 cache (bench/gpu_tiles.py products).
SKINNY_TILES: dict[tuple[int, int], SkinnyTiles] = {
    (6144, 4096): (_plain(16, 64, 256, 4), _swapped(32, 64, 128, 7), _plain(64, 64, 128, 5)),
    (4096, 4096): (_plain(16, 32, 512, 4), _swapped(32, 64, 128, 7), _plain(64, 32, 128, 5)),
    (28672, 4096): (_plain(16, 64, 256, 3), _swapped(32, 64, 128, 4), _swapped(64, 128, 128, 4, 8)),
    (4096, 14336): (_plain(16, 32, 512, 4), _swapped(32, 64, 128, 7), _plain(64, 32, 256, 4)),
    (128256, 4096): (_plain(16, 32, 256, 4), _swapped(32, 128, 128, 4, 8), _swapped(64, 128, 128, 4, 8)),
    (16480, 5120): (_plain(16, 64, 128, 4), _swapped(32, 128, 128, 4, 8), _swapped(64, 128, 128, 4)),
    (14336, 5120): (_swapped(16, 128, 128, 4), _swapped(32, 128, 128, 4), _swapped(64, 128, 128, 4, 8)),
    (5120, 6144): (_swapped(16, 64, 256, 5), _swapped(32, 64, 128, 7), _swapped(64, 64, 128, 6)),
    (34816, 5120): (_plain(16, 32, 256, 4), _swapped(32, 128, 64, 3), _swapped(64, 64, 128, 6)),
    (5120, 17408): (_swapped(16, 64, 256, 5), _swapped(32, 64, 128, 7), _swapped(64, 64, 128, 6)),
    (248320, 5120): (_plain(16, 64, 256, 5), _swapped(32, 128, 128, 4), _swapped(64, 128, 128, 4, 8)),
}


@lru_cache(maxsize=4096)
def choose_tile(rows: int, n: int, k: int, dtype: torch.dtype, shared: int) -> Tile:
    """The tile for a product of `rows` rows that fits in `shared` bytes of shared memory."""
    if dtype == torch.float32:  # float32 products use no tensor cores, so small tiles are better; the order along K is the same
        return Tile(16 if rows <= 16 else 32, 32, 32, 4, 2, group=8 if rows > 32 else 1)
    if rows <= 64:
        low, middle, high = SKINNY_TILES.get((n, k)) or _default_skinny_tiles(n)
        tile = low if rows <= 16 else middle if rows <= 32 else high
    elif rows <= 128:
        tile = _tile_of_128_rows(n)
    elif rows <= 256:
        tile = _tile_of_256_rows(n)
    else:
        tile = Tile(128, 128, 64, 8, 4, group=8)
    return fit_tile(tile, dtype.itemsize, shared)


def tile_borders(n: int, k: int, dtype: torch.dtype, shared: int) -> tuple[int, ...]:
    """The row counts, up to MAX_TILED_ROWS, whose tile differs from that of one row less."""
    tiles = [choose_tile.__wrapped__(rows, n, k, dtype, shared) for rows in range(1, MAX_TILED_ROWS + 1)]
    return tuple(rows for rows, (before, here) in enumerate(pairwise(tiles), start=2) if before != here)


def _default_skinny_tiles(n: int) -> SkinnyTiles:
    """Tiles of shapes that were not measured. Products with few columns get narrow, deep tiles: they have about one program per
    multiprocessor, and a deep tile gives that program enough loads in flight."""
    if n <= 4608:
        return _plain(16, 32, 512, 4), _swapped(32, 64, 128, 7), _plain(64, 32, 128, 5)
    if n <= 12288:
        return _plain(16, 64, 256, 4), _swapped(32, 64, 128, 7), _swapped(64, 64, 128, 6)
    return _plain(16, 64, 128, 4), _swapped(32, 64, 128, 4), _swapped(64, 128, 128, 4, 8)


# Tiles for 65 to 256 rows, measured on an H200 in bf16 with weights that are not in the L2 cache (bench/gpu_tiles.py many_rows):
# the smallest tile with which one program per multiprocessor computes the whole product, and for wider products the largest tile.
FILLED = 132  # multiprocessors of the H200: as many programs fill the device


def _tile_of_128_rows(n: int) -> Tile:
    if 2 * -(-n // 64) <= FILLED:
        return _swapped(64, 64, 128, 6)
    return _swapped(128, 64, 128, 4, 8) if -(-n // 64) <= FILLED else _swapped(128, 128, 128, 3, 8)


def _tile_of_256_rows(n: int) -> Tile:
    if 2 * -(-n // 64) <= FILLED:
        return Tile(128, 64, 64, 4, 4, group=8)
    return Tile(128, 128, 64, 8, 4, group=8) if 2 * -(-n // 128) <= FILLED else Tile(128, 256, 64, 8, 3, group=8)


def fit_tile(tile: Tile, itemsize: int, shared: int) -> Tile:
    """Reduce stages and depth until the tile fits, or neither can be reduced further; the order of the sum stays the same."""
    while tile.shared(itemsize) > shared:
        if tile.stages > 3 or (tile.stages > 2 and tile.depth <= 64):
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.depth > 32:
            tile = replace(tile, depth=tile.depth // 2)
        else:
            break
    return tile
