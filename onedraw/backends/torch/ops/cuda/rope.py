"""Before attention: heads are normed, turned, and keys and values go to their pages. One kernel for all of it.

In: the projections of a turn [T, ≥ (H + 2K) * D], positions, where each token's key goes. Out: queries [T, H * D]; the
page stores are written. Roundings stand where separate operations would round.

A value that is not finite lies in the pages as a key of NaN and a value of zero, as `PageStore.write` has it. Pages of 8 bits
get codes and scales, as `codes.py` has them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.kv_quant import codes_of
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel
from onedraw.backends.torch.state.kv_pages import LARGEST, PageStore

HEADS_PER_PROGRAM = 4


@triton.jit
def _normed(x, mean, weight, at, inside, eps, kind: tl.constexpr, HAS: tl.constexpr, WIDE: tl.constexpr):
    """x [heads, D] float32 times rsqrt(mean of squares); rounded as RMSNorm rounds."""
    scaled = x * tl.rsqrt(mean + eps)[:, None]
    if HAS:
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        scaled = scaled * factor if WIDE else scaled.to(kind).to(tl.float32) * factor
    return scaled.to(kind).to(tl.float32)


@triton.jit
def _finite(x):
    """Which heads of x [heads, D] have finite numbers alone."""
    return tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 1) == 0


@triton.jit
def _write(keys, values, key_scales, value_scales, key, value, place, slot, mask, there, kind: tl.constexpr,
           LARGEST: tl.constexpr):  # fmt: skip
    """A token's keys and values to their pages, as numbers or as codes and scales; what is not finite as NaN and zero."""
    sound = _finite(value)
    if LARGEST > 0:
        key = key.to(tl.float32)
        sound = sound & _finite(key)
        codes: tl.constexpr = keys.dtype.element_ty
        key_codes, key_scale = codes_of(tl.where(sound[:, None], key, 0.0), codes, LARGEST)
        value_codes, value_scale = codes_of(tl.where(sound[:, None], value.to(kind).to(tl.float32), 0.0), codes, LARGEST)
        tl.store(keys + place, key_codes, mask=mask)
        tl.store(values + place, value_codes, mask=mask)
        tl.store(key_scales + slot, tl.where(sound, key_scale, float("nan")), mask=there)
        tl.store(value_scales + slot, value_scale, mask=there)
    else:
        tl.store(keys + place, tl.where(sound[:, None], key, float("nan")).to(kind), mask=mask)
        tl.store(values + place, tl.where(sound[:, None], value, 0.0).to(kind), mask=mask)


@triton.jit
def _prepare(
    x,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    turns,
    positions,
    rows,
    slots,
    table,
    q_norm,
    k_norm,
    x_stride,
    table_width,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    PER: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    WIDE: tl.constexpr,
    V_NORM: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS query heads, then KV key heads, then KV value heads; any of the first two counts may be 0."""
    token = tl.program_id(0).to(tl.int64)
    Q_BLOCKS: tl.constexpr = (HEADS + PER - 1) // PER
    block = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    # The other number of each pair that turns; past the turning dimensions the number itself.
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    turning = d < 2 * HALF
    angle = tl.where(d < HALF, d, d - HALF)
    position = tl.load(positions + token)
    cos = tl.load(turns + (position * 2).to(tl.int64) * HALF + angle, mask=turning, other=1.0).to(tl.float32)
    sin = tl.load(turns + (position * 2 + 1).to(tl.int64) * HALF + angle, mask=turning, other=0.0).to(tl.float32)
    sin = tl.where(d < HALF, -sin, sin)
    kind = queries.dtype.element_ty
    lane = tl.arange(0, PER)
    is_query = block < Q_BLOCKS
    head = tl.where(is_query, block * PER, (block - Q_BLOCKS) * PER) + lane
    limit = tl.where(is_query, HEADS, KV)
    column = tl.where(is_query, head, HEADS + head)
    mask = (head < limit)[:, None] & inside[None, :]
    base = x + token * x_stride + column[:, None] * D
    begin_kernel(PDL)  # positions and their turns no kernel of the turn writes
    own = tl.load(base + d[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(base + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    raw = own
    if Q_NORM or K_NORM or V_NORM:
        mean = tl.sum(own * own, 1) * (1.0 / D)
    if is_query:
        if Q_NORM:
            own = _normed(raw, mean, q_norm, d, inside, eps, kind, True, WIDE)
            other = _normed(other, mean, q_norm, partner, inside, eps, kind, True, WIDE)
    else:
        if K_NORM:
            own = _normed(raw, mean, k_norm, d, inside, eps, kind, True, WIDE)
            other = _normed(other, mean, k_norm, partner, inside, eps, kind, True, WIDE)
    first = (own * cos[None, :]).to(kind).to(tl.float32)
    second = (other * sin[None, :]).to(kind).to(tl.float32)
    turned = tl.where(turning[None, :], first + second, own).to(kind)
    if is_query:
        tl.store(queries + token * (HEADS * D) + head[:, None] * D + d[None, :], turned, mask=mask)
    else:
        slot = tl.load(slots + token)
        page = tl.load(table + tl.load(rows + token).to(tl.int64) * table_width + slot // PAGE).to(tl.int64)
        slot_of_head = (page * KV + head) * PAGE + slot % PAGE
        place = slot_of_head[:, None] * D + d[None, :]
        if KEYS_AS_VALUES:
            value = raw
        else:
            value = tl.load(base + KV * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        if V_NORM:
            square = mean if KEYS_AS_VALUES else tl.sum(value * value, 1) * (1.0 / D)
            value = _normed(value, square, k_norm, d, inside, eps, kind, False, WIDE)
        there = head < limit
        _write(keys, values, key_scales, value_scales, turned, value, place, slot_of_head, mask, there, kind, LARGEST)


def prepare_heads(
    x: Tensor,
    store: PageStore,
    *,
    turns: Tensor,
    positions: Tensor,
    rows: Tensor,
    slots: Tensor,
    table: Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    v_norm: bool = False,
    keys_as_values: bool = False,
    writes: bool = True,
    pdl: bool = False,
) -> Tensor:
    """x [T, …] with q, k, v side by side → turned queries [T, H * D]. `writes`: keys and values go to their pages."""
    count = len(x)
    queries = torch.empty(count, heads * dim, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(heads, HEADS_PER_PROGRAM) + (triton.cdiv(kv_heads, HEADS_PER_PROGRAM) if writes else 0)
    if count and blocks:
        weight = q_norm if q_norm is not None else k_norm
        _prepare[(count, blocks)](
            x,
            queries,
            store.keys,
            store.values,
            store.key_scales,
            store.value_scales,
            turns,
            positions,
            rows,
            slots,
            table,
            q_norm,
            k_norm,
            x.stride(0),
            table.shape[1],
            eps,
            HEADS=heads,
            KV=kv_heads,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            HALF=turns.shape[-1],
            PAGE=page_size,
            PER=HEADS_PER_PROGRAM,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            WIDE=weight is not None and weight.dtype == torch.float32,
            V_NORM=v_norm,
            KEYS_AS_VALUES=keys_as_values,
            LARGEST=LARGEST.get(store.keys.dtype, 0.0),
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return queries
