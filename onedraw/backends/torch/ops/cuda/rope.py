"""Norms of query, key and value heads, rotary embedding, and the write to the KV pages, in one kernel.

In: the projections of a step [T, ≥ (H + 2K) * D], positions, and the slot of each token's key. Out: queries [T, H * D]; keys and
values are written to their pages. Results are rounded where separate operations would round. Axes: T tokens, H query heads, K key
and value heads, D the size of a head.

A head whose value vector is not finite is stored as a key of NaN and a value of zero, as `PageStore.write` does. Quantized pages
store codes and scales (`kv_quant.py`); codes have no NaN, so there the key's scale is NaN, also for a key that is not finite. For
codes of 4 bits, queries, keys and values go through a Hadamard transform (`hadamard.py`). PDL is programmatic dependent launch: a
kernel may start while the one before it ends, and waits before it reads what that one writes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.hadamard import exponent_of, transform_heads
from onedraw.backends.torch.ops.cuda.kv_quant import quantize_heads
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel
from onedraw.backends.torch.state.kv_pages import LARGEST, SCALES, PageStore

HEADS_PER_PROGRAM = 4


@triton.jit
def _scale_to_rms(x, mean, weight, at, inside, eps, dtype: tl.constexpr, HAS_WEIGHT: tl.constexpr, FP32_WEIGHT: tl.constexpr):
    """Normalize heads: x [heads, D] float32 times 1 / sqrt(mean + eps), where `mean` is the mean of squares, and times the
    weight; rounded as RMSNorm rounds."""
    scaled = x * tl.rsqrt(mean + eps)[:, None]
    if HAS_WEIGHT:
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        scaled = scaled * factor if FP32_WEIGHT else scaled.to(dtype).to(tl.float32) * factor
    return scaled.to(dtype).to(tl.float32)


@triton.jit
def _all_finite(x):
    """Whether all values of each head of x [heads, D] are finite."""
    return tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 1) == 0


@triton.jit
def _write_kv(keys, values, key_scales, value_scales, key, value, d, head_slot, head_mask, dtype: tl.constexpr, D: tl.constexpr,
              LARGEST: tl.constexpr, SCALES: tl.constexpr, EXPONENT: tl.constexpr):  # fmt: skip
    """Store a token's keys and values, quantized if LARGEST (the largest code) > 0, and before that transformed if EXPONENT > 0.
    A head whose value, or if quantized whose key, is not finite is stored as a NaN key and a zero value."""
    if LARGEST > 0:
        key, value = key.to(tl.float32), value.to(dtype).to(tl.float32)
        if EXPONENT > 0:
            key, value = transform_heads(key, EXPONENT, 1), transform_heads(value, EXPONENT, 1)
        finite = _all_finite(value) & _all_finite(key)
        code_dtype: tl.constexpr = keys.dtype.element_ty
        key_codes, key_scale = quantize_heads(tl.where(finite[:, None], key, 0.0), code_dtype, LARGEST, SCALES)
        value_codes, value_scale = quantize_heads(tl.where(finite[:, None], value, 0.0), code_dtype, LARGEST, SCALES)
        WIDTH: tl.constexpr = D // 2 if EXPONENT > 0 else D  # bytes of the codes of a head
        place = tl.arange(0, key_codes.shape[1])
        offsets = head_slot[:, None] * WIDTH + place[None, :]
        mask = head_mask[:, None] & (place < WIDTH)[None, :]
        tl.store(keys + offsets, key_codes, mask=mask)
        tl.store(values + offsets, value_codes, mask=mask)
        tl.store(key_scales + head_slot, tl.where(finite, key_scale, float("nan")), mask=head_mask)
        tl.store(value_scales + head_slot, value_scale, mask=head_mask)
    else:
        finite = _all_finite(value)
        offsets = head_slot[:, None] * D + d[None, :]
        mask = head_mask[:, None] & (d < D)[None, :]
        tl.store(keys + offsets, tl.where(finite[:, None], key, float("nan")).to(dtype), mask=mask)
        tl.store(values + offsets, tl.where(finite[:, None], value, 0.0).to(dtype), mask=mask)


@triton.jit
def _norm_rope_and_cache(
    x,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    cos_sin,
    positions,
    rows,
    slots,
    page_table,
    q_norm,
    k_norm,
    x_stride,
    table_width,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    FP32_WEIGHT: tl.constexpr,
    V_NORM: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALES: tl.constexpr,
    EXPONENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process some heads of one token. Columns of x: HEADS query heads, then KV_HEADS key heads, then KV_HEADS value heads. HEADS
    may be 0."""
    token = tl.program_id(0).to(tl.int64)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    block = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    # The other dimension of each rotated pair; past the rotary dimensions it is the dimension itself, which is not rotated.
    partner = tl.where(d < ROTARY_HALF, d + ROTARY_HALF, tl.where(d < 2 * ROTARY_HALF, d - ROTARY_HALF, d))
    is_rotary = d < 2 * ROTARY_HALF
    angle = tl.where(d < ROTARY_HALF, d, d - ROTARY_HALF)
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + (position * 2).to(tl.int64) * ROTARY_HALF + angle, mask=is_rotary, other=1.0).to(tl.float32)
    sin = tl.load(cos_sin + (position * 2 + 1).to(tl.int64) * ROTARY_HALF + angle, mask=is_rotary, other=0.0).to(tl.float32)
    sin = tl.where(d < ROTARY_HALF, -sin, sin)
    dtype = queries.dtype.element_ty
    head_offset = tl.arange(0, BLOCK_HEADS)
    is_query = block < Q_BLOCKS
    head = tl.where(is_query, block * BLOCK_HEADS, (block - Q_BLOCKS) * BLOCK_HEADS) + head_offset
    limit = tl.where(is_query, HEADS, KV_HEADS)
    column = tl.where(is_query, head, HEADS + head)
    mask = (head < limit)[:, None] & inside[None, :]
    base = x + token * x_stride + column[:, None] * D
    begin_kernel(PDL)  # no kernel of the step writes positions, cos and sin, so they are loaded before the PDL wait
    current = tl.load(base + d[None, :], mask=mask, other=0.0).to(tl.float32)
    paired = tl.load(base + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    raw = current
    if Q_NORM or K_NORM or V_NORM:
        mean = tl.sum(current * current, 1) * (1.0 / D)
    if is_query:
        if Q_NORM:
            current = _scale_to_rms(raw, mean, q_norm, d, inside, eps, dtype, True, FP32_WEIGHT)
            paired = _scale_to_rms(paired, mean, q_norm, partner, inside, eps, dtype, True, FP32_WEIGHT)
    else:
        if K_NORM:
            current = _scale_to_rms(raw, mean, k_norm, d, inside, eps, dtype, True, FP32_WEIGHT)
            paired = _scale_to_rms(paired, mean, k_norm, partner, inside, eps, dtype, True, FP32_WEIGHT)
    cos_part = (current * cos[None, :]).to(dtype).to(tl.float32)
    sin_part = (paired * sin[None, :]).to(dtype).to(tl.float32)
    rotated = tl.where(is_rotary[None, :], cos_part + sin_part, current).to(dtype)
    if is_query:
        if EXPONENT > 0:
            rotated = transform_heads(rotated.to(tl.float32), EXPONENT, 0).to(dtype)
        tl.store(queries + token * (HEADS * D) + head[:, None] * D + d[None, :], rotated, mask=mask)
    else:
        slot = tl.load(slots + token)
        page = tl.load(page_table + tl.load(rows + token).to(tl.int64) * table_width + slot // PAGE_SIZE).to(tl.int64)
        head_slot = (page * KV_HEADS + head) * PAGE_SIZE + slot % PAGE_SIZE
        if KEYS_AS_VALUES:
            value = raw
        else:
            value = tl.load(base + KV_HEADS * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        if V_NORM:
            square = mean if KEYS_AS_VALUES else tl.sum(value * value, 1) * (1.0 / D)
            value = _scale_to_rms(value, square, k_norm, d, inside, eps, dtype, False, FP32_WEIGHT)
        head_mask = head < limit
        _write_kv(
            keys, values, key_scales, value_scales, rotated, value, d, head_slot, head_mask, dtype, D, LARGEST, SCALES, EXPONENT
        )


def norm_rope_and_cache(
    x: Tensor,
    store: PageStore,
    *,
    cos_sin: Tensor,
    positions: Tensor,
    rows: Tensor,
    slots: Tensor,
    page_table: Tensor,
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
    """Norm, rope and cache: x [T, …] with the columns of q, k and v side by side → rotated queries [T, H * D]. `writes`: also
    store keys and values. `keys_as_values`: x has no columns of v; the values are the keys before norm and rope."""
    count = len(x)
    queries = torch.empty(count, heads * dim, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(heads, HEADS_PER_PROGRAM) + (triton.cdiv(kv_heads, HEADS_PER_PROGRAM) if writes else 0)
    if count and blocks:
        weight = q_norm if q_norm is not None else k_norm
        _norm_rope_and_cache[(count, blocks)](
            x,
            queries,
            store.keys,
            store.values,
            store.key_scales,
            store.value_scales,
            cos_sin,
            positions,
            rows,
            slots,
            page_table,
            q_norm,
            k_norm,
            x.stride(0),
            page_table.shape[1],
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            ROTARY_HALF=cos_sin.shape[-1],
            PAGE_SIZE=page_size,
            BLOCK_HEADS=HEADS_PER_PROGRAM,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            FP32_WEIGHT=weight is not None and weight.dtype == torch.float32,
            V_NORM=v_norm,
            KEYS_AS_VALUES=keys_as_values,
            LARGEST=LARGEST.get(store.keys.dtype, 0.0),
            SCALES=SCALES.get(store.keys.dtype, 0.0),
            EXPONENT=exponent_of(dim) if store.transforms else 0,
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return queries
