"""Gated DeltaNet with Triton: the operations before and after the recurrent state.

In: projections of a step's tokens, and the lanes' convolution windows. Out: queries, keys, values and gates of every token
(`conv_and_gates`); the layer's output from the state's output, and updated windows (`gated_norm`). The state itself is updated in
`delta_chunked.py` (chunked form, 64 absolute positions at a time, for prompts) and in `delta_recurrent.py` and `delta_tree.py`
(recurrent form, for generated and drafted tokens). The formulas are in `ops/plain/delta.py`. Everything between the projections
and the last product is float32. Axes: T tokens, Hk key heads of size Dk, Hv value heads of size Dv, C = 2 Hk Dk + Hv Dv
convolution channels, K taps of the convolution. A lane is the slot of a sequence's recurrent state; its window holds the last K -
1 inputs of its convolution. PDL is programmatic dependent launch.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import (
    begin_kernel,
    exp,
    launch_dependents,
    sigmoid,
    silu,
    softplus,
    wait_for_inputs,
)
from onedraw.models.spec import DeltaSpec

WINDOW_BLOCK = 256  # channels of a window per program of `gated_norm`
SHIFT_BLOCK = 512  # channels of a window per program of `shift_conv_windows`
L2_EPS = 1e-6  # added to the sum of squares in the L2 normalization of queries and keys


def unsupported_reason(spec: DeltaSpec) -> str:
    """Why these kernels cannot compute a layer; empty if they can. Head sizes must be multiples of 8, because the recurrent form
    sums a column in eight partial sums over every eighth row."""
    heads = {"key heads": spec.key_dim, "value heads": spec.value_dim}
    for name, size in heads.items():
        if size % 8 or size < 16:
            return f"{name} of size {size} (the GPU kernels need multiples of 8 from 16 on)"
    if spec.value_heads % spec.key_heads:
        return f"{spec.value_heads} value heads for {spec.key_heads} key heads (the GPU kernels need a multiple)"
    if spec.conv < 2 or spec.conv & (spec.conv - 1):
        return f"a convolution over {spec.conv} positions (the GPU kernels need 2, 4, 8 …)"
    return ""


@dataclass(frozen=True, slots=True)
class DeltaQkv:
    """Queries, keys, values and gates of every token; float32."""

    q: Tensor  # [T, Hk, Dk]: queries, normalized and multiplied by Dk^-1/2
    k: Tensor  # [T, Hk, Dk]: normalized keys
    v: Tensor  # [T, Hv, Dv]: values
    gates: Tensor  # [3, T, Hv]: logarithm of the decay, decay, beta (how much of a value replaces the one in the state)


@dataclass(frozen=True, slots=True)
class DraftIncrements:
    """The rollback buffer: state increments of drafted tokens, which a commit applies to their lanes."""

    slots: Tensor  # [T] int32: slot of each token's increment, -1 for tokens that are not drafts
    decays: Tensor  # [slots, Hv]: the decays, by which the state is multiplied
    keys: Tensor  # [slots, Hk, Dk]: the normalized keys
    changes: Tensor  # [slots, Hv, Dv]: the changes; a commit adds the outer product key ⊗ change to the decayed state
    conv_inputs: Tensor  # [slots, C]: the inputs that enter the lane's window


def state_sizes(states: Tensor, *, key_heads: int) -> dict[str, int]:
    """The sizes that kernels updating states [lanes, Hv, Dk, Dv] take as constexpr arguments."""
    value_heads, key_dim, value_dim = states.shape[-3:]
    return {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}


# ------------------------------------------------------------------ before the state


@triton.jit
def _conv_input(projected, windows, source, tokens, stride, start, offsets, mask, CHANNELS: tl.constexpr):
    """The input of one convolution tap, in some channels. `source`: a row of the step, or from `tokens` on a row of `windows`; -1
    gives zeros."""
    current = projected + source * stride + start + offsets
    past = windows + (source - tokens) * CHANNELS + start + offsets
    value = tl.load(current, mask=mask & (source >= 0) & (source < tokens), other=0.0).to(tl.float32)
    value += tl.load(past, mask=mask & (source >= tokens), other=0.0)
    return value


@triton.jit
def _token_gates(projected, decay, bias, gates, draft_decays, token, tokens, slot, stride, START: tl.constexpr,
                 HEADS: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr):  # fmt: skip
    """Log decay, decay and beta of all heads of a token. START: the first column of the projections a and b."""
    head = tl.arange(0, BLOCK)
    mask = head < HEADS
    base = projected + token * stride + START + head
    a = tl.load(base, mask=mask, other=0.0).to(tl.float32) + tl.load(bias + head, mask=mask, other=0.0)
    g = tl.load(decay + head, mask=mask, other=0.0) * softplus(a)
    b = tl.load(base + HEADS, mask=mask, other=0.0).to(tl.float32)
    tl.store(gates + token * HEADS + head, g, mask=mask)
    alpha = exp(g)
    tl.store(gates + (token + tokens) * HEADS + head, alpha, mask=mask)
    if DRAFTS:
        tl.store(draft_decays + slot * HEADS + head, alpha, mask=mask & (slot >= 0))
    tl.store(gates + (token + 2 * tokens) * HEADS + head, sigmoid(b), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _conv_and_gates(
    projected,
    windows,
    taps,
    conv,
    decay,
    bias,
    q,
    k,
    v,
    gates,
    draft_slots,
    draft_decays,
    draft_keys,
    draft_inputs,
    tokens,
    stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one token: convolution, silu, and L2 normalization of queries and keys. The last program of a token computes
    its gates. The last tap is the token itself, so its input is the one that a draft stores in the rollback buffer."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.full((), -1, dtype=tl.int64)
    if DRAFTS:
        slot = tl.load(draft_slots + token).to(tl.int64)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    if head < 2 * KEY_HEADS + VALUE_HEADS:
        is_value = head >= 2 * KEY_HEADS
        width = tl.where(is_value, VALUE_DIM, KEY_DIM)
        start = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
        offsets = tl.arange(0, BLOCK)
        mask = offsets < width
        convolved = tl.zeros((BLOCK,), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            source = tl.load(taps + token * TAPS + tap).to(tl.int64)
            value = _conv_input(projected, windows, source, tokens, stride, start, offsets, mask, CHANNELS)
            convolved += value * tl.load(conv + tap * CHANNELS + start + offsets, mask=mask, other=0.0)
            if DRAFTS and tap == TAPS - 1:
                tl.store(draft_inputs + slot * CHANNELS + start + offsets, value, mask=mask & (slot >= 0))
        convolved = tl.where(mask, silu(convolved), 0.0)
        if is_value:
            tl.store(v + (token * VALUE_HEADS + head - 2 * KEY_HEADS) * VALUE_DIM + offsets, convolved, mask=mask)
        else:
            unit = convolved * tl.rsqrt(tl.sum(convolved * convolved, 0) + EPS)
            if head < KEY_HEADS:
                tl.store(q + (token * KEY_HEADS + head) * KEY_DIM + offsets, unit * (KEY_DIM**-0.5), mask=mask)
            else:
                tl.store(k + (token * KEY_HEADS + head - KEY_HEADS) * KEY_DIM + offsets, unit, mask=mask)
                if DRAFTS:
                    tl.store(
                        draft_keys + (slot * KEY_HEADS + head - KEY_HEADS) * KEY_DIM + offsets, unit, mask=mask & (slot >= 0)
                    )
    else:
        START: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM
        _token_gates(
            projected, decay, bias, gates, draft_decays, token, tokens, slot, stride, START, VALUE_HEADS, BLOCK_HEADS, DRAFTS
        )
    launch_dependents(PDL)  # at the end: started earlier, the next kernel's programs spread unevenly over the multiprocessors


def conv_and_gates(
    projected: Tensor,
    windows: Tensor,
    taps: Tensor,
    *,
    conv: Tensor,
    decay: Tensor,
    bias: Tensor,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    drafts: DraftIncrements | None = None,
    pdl: bool = False,
) -> DeltaQkv:
    """Convolution, norms and gates of every token. projected [T, C + Hv * Dv + 2 Hv]: columns of qkv, z, a and b. taps [T, K]
    int32, oldest first: rows of the step, or from T on rows of windows [lanes * (K - 1), C], or -1 for zeros. Drafts store decay,
    key and convolution input in the rollback buffer."""
    count, device = len(projected), projected.device
    q, k = (torch.empty(count, key_heads, key_dim, device=device) for _ in range(2))
    v = torch.empty(count, value_heads, value_dim, device=device)
    gates = torch.empty(3, count, value_heads, device=device)
    if count:
        _conv_and_gates[(count, 2 * key_heads + value_heads + 1)](
            projected,
            windows,
            taps,
            conv,
            decay,
            bias,
            q,
            k,
            v,
            gates,
            *((None,) * 4 if drafts is None else (drafts.slots, drafts.decays, drafts.keys, drafts.conv_inputs)),
            count,
            projected.stride(0),
            KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            TAPS=taps.shape[1],
            DRAFTS=drafts is not None,
            BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
            BLOCK_HEADS=triton.next_power_of_2(value_heads),
            EPS=L2_EPS,
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return DeltaQkv(q, k, v, gates)


# ------------------------------------------------------------------ after the state


@triton.jit
def _shift_window(
    inputs,
    windows,
    target,
    sources,
    index,
    block,
    rows,
    stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one window. All sources are read before anything is written, because a window may be its own source."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < CHANNELS
    tap = tl.arange(0, TAPS)
    source = tl.load(sources + index * (TAPS + 1) + 1 + tap).to(tl.int64)[:, None]
    slot = tl.load(sources + index * (TAPS + 1)).to(tl.int64)
    new = tl.load(inputs + source * stride + offsets[None, :], mask=mask[None, :] & (source >= 0) & (source < rows), other=0.0)
    old = tl.load(windows + (source - rows) * CHANNELS + offsets[None, :], mask=mask[None, :] & (source >= rows), other=0.0)
    tl.debug_barrier()
    row = slot * (TAPS - 1) + tap[:, None]
    keep = mask[None, :] & (tap < TAPS - 1)[:, None] & (slot >= 0)
    tl.store(target + row * CHANNELS + offsets[None, :], new.to(tl.float32) + old, mask=keep)


@triton.jit(do_not_specialize=["rows"])
def _shift_windows(
    inputs,
    windows,
    target,
    sources,
    rows,
    stride,
    windows_stride,
    target_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the windows of all layers. The strides are elements from one layer to the next."""
    begin_kernel(PDL)
    layer = tl.program_id(2).to(tl.int64)
    inputs += layer * rows * stride
    windows += layer * windows_stride
    target += layer * target_stride
    _shift_window(inputs, windows, target, sources, tl.program_id(0), tl.program_id(1), rows, stride, CHANNELS, TAPS, BLOCK)


def shift_conv_windows(inputs: Tensor, windows: Tensor, target: Tensor, sources: Tensor, *, pdl: bool = False) -> None:
    """Write convolution windows: target[slot] ← K - 1 rows of `inputs` [n, ≥ C] or, from n on, of windows [lanes, K - 1, C].

    sources [m, 1 + K] int32: the target slot (-1: none), the K - 1 source rows, oldest first (-1: zeros), one column of padding.
    K is a power of two. `target` may be `windows`. Tensors are of one layer, or contiguous with the layers as leading dimension.
    """
    layers = windows.shape[0] if windows.dim() == 4 else 1
    taps, channels = windows.shape[-2] + 1, windows.shape[-1]
    if len(sources):
        _shift_windows[(len(sources), triton.cdiv(channels, SHIFT_BLOCK), layers)](
            inputs,
            windows,
            target,
            sources,
            inputs.shape[-2],
            inputs.stride(-2),
            windows.numel() // layers,
            target.numel() // layers,
            CHANNELS=channels,
            TAPS=taps,
            BLOCK=SHIFT_BLOCK,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )


@triton.jit(do_not_specialize=["tokens"])
def _gated_norm(
    x,
    projected,
    weight,
    y,
    windows,
    sources,
    tokens,
    stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the output of one head of one token. The programs after those of all tokens each shift some channels of a window
    instead."""
    begin_kernel(PDL)
    program = tl.program_id(0)
    window_program = program - tokens * HEADS
    if window_program < 0:
        token = (program // HEADS).to(tl.int64)
        head = program % HEADS
        offsets = tl.arange(0, BLOCK)
        mask = offsets < D
        values = tl.load(x + (token * HEADS + head) * D + offsets, mask=mask, other=0.0)
        scale = tl.rsqrt(tl.sum(values * values, 0) * (1.0 / D) + eps)
        normed = values * scale * tl.load(weight + offsets, mask=mask, other=0.0)
        z = tl.load(projected + token * stride + CHANNELS + head * D + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + (token * HEADS + head) * D + offsets, (normed * silu(z)).to(y.dtype.element_ty), mask=mask)
    elif SHIFT:
        BLOCKS: tl.constexpr = (CHANNELS + BLOCK_WINDOW - 1) // BLOCK_WINDOW
        index, block = window_program // BLOCKS, window_program % BLOCKS
        _shift_window(projected, windows, windows, sources, index, block, tokens, stride, CHANNELS, TAPS, BLOCK_WINDOW)


def gated_norm(
    out: Tensor,
    projected: Tensor,
    weight: Tensor,
    eps: float,
    *,
    channels: int,
    windows: Tensor | None = None,
    sources: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The layer's output from the state's output: RMSNorm(out) · silu(z), with z after the first `channels` columns of
    `projected`: [T, Hv * Dv] in the dtype of `projected`. The same launch shifts the windows as `shift_conv_windows` does,
    because no later kernel of the step reads them."""
    count, heads, dim = out.shape
    y = torch.empty(count, heads * dim, dtype=projected.dtype, device=out.device)
    window_count = 0 if sources is None else len(sources)
    if count or window_count:
        _gated_norm[(count * heads + window_count * triton.cdiv(channels, WINDOW_BLOCK),)](
            out,
            projected,
            weight,
            y,
            windows,
            sources,
            count,
            projected.stride(0),
            eps,
            HEADS=heads,
            D=dim,
            CHANNELS=channels,
            BLOCK=triton.next_power_of_2(dim),
            TAPS=2 if windows is None else windows.shape[1] + 1,
            BLOCK_WINDOW=WINDOW_BLOCK,
            SHIFT=window_count > 0,
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y
