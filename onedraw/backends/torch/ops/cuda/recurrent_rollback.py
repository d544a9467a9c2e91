"""Roll recurrent state back from rejected drafts: advance each lane's state by the kept drafts alone.

During a step drafts never change a lane's state. They store their increments, which are a decay, a key and a change for each
position (the update is state ← state · decay + key ⊗ change), in the rollback buffer. After verification `commit_states` repeats
the updates of the kept drafts, in order of position; a rejected draft leaves nothing behind, because its increments are never
applied.

In: the states of the lanes, the rollback buffer, and the slots of the kept drafts in it. Out: the states, updated in place. The
window of the convolution is advanced by `shift_conv_windows` (`delta.py`), keys and values of attention by `move_kept_kv`
(`commit.py`). A lane is the slot of a sequence's recurrent state. Axes: n lanes that kept drafts, K taps of the convolution.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import state_sizes
from onedraw.backends.torch.ops.cuda.delta_recurrent import _rank_one_update
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel
from onedraw.backends.torch.state.recurrent_state import KeptDrafts

COMMIT_COLUMNS = 32  # state columns per program of a commit


@triton.jit(do_not_specialize=["width"])
def _commit_states(
    states,
    decays,
    keys,
    changes,
    lanes,
    kept_slots,
    width,
    states_stride,
    slots_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Repeat the updates of kept drafts with the same products and sums, so with the same bits. states_stride: elements of one
    layer's states; slots_stride: slots of one layer in the rollback buffer."""
    begin_kernel(PDL)
    COLUMN_BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    layer = (tl.program_id(2) // COLUMN_BLOCKS).to(tl.int64)
    states += layer * states_stride
    decays += layer * slots_stride * VALUE_HEADS
    keys += layer * slots_stride * KEY_HEADS * KEY_DIM
    changes += layer * slots_stride * VALUE_HEADS * VALUE_DIM
    row_index = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    lane = tl.load(lanes + row_index).to(tl.int64)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) % COLUMN_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    column_mask, row_mask = column < VALUE_DIM, row < KEY_DIM
    mask = row_mask[:, None] & column_mask[None, :]
    state_ptrs = states + ((lane * VALUE_HEADS + head) * KEY_DIM + row[:, None]) * VALUE_DIM + column[None, :]
    if tl.load(kept_slots + row_index * width) >= 0:
        state = tl.load(state_ptrs, mask=mask, other=0.0)
        for index in range(width):
            slot = tl.load(kept_slots + row_index * width + index).to(tl.int64)
            if slot >= 0:
                key = tl.load(keys + (slot * KEY_HEADS + key_head) * KEY_DIM + row, mask=row_mask, other=0.0)
                change = tl.load(changes + (slot * VALUE_HEADS + head) * VALUE_DIM + column, mask=column_mask, other=0.0)
                decayed = state * tl.load(decays + slot * VALUE_HEADS + head)
                state = _rank_one_update(key, change, decayed)
        tl.store(state_ptrs, state, mask=mask)


def commit_states(
    states: Tensor, *, increments: tuple[Tensor, Tensor, Tensor], lanes: Tensor, kept_slots: Tensor, pdl: bool = False
) -> None:
    """Apply the increments (decays, keys, changes) of kept drafts to the states of their lanes [n]. kept_slots [n, longest]
    int32: slots of a lane's kept drafts in order of position, -1 after the last. Tensors are of one layer, or contiguous with the
    layers as leading dimension."""
    layers = states.shape[0] if states.dim() == 5 else 1
    value_heads, key_dim, value_dim = states.shape[-3:]
    decays, keys, changes = increments
    if len(lanes) and kept_slots.shape[1]:
        _commit_states[(len(lanes), value_heads, layers * triton.cdiv(value_dim, COMMIT_COLUMNS))](
            states,
            decays,
            keys,
            changes,
            lanes,
            kept_slots,
            kept_slots.shape[1],
            states.numel() // layers,
            decays.shape[-2],
            **state_sizes(states, key_heads=keys.shape[-2]),
            BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_V=COMMIT_COLUMNS,
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )


def commit_tables(
    kept: Sequence[KeptDrafts], *, conv: int, slot_count: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Lanes [n], rollback buffer slots [n, longest] and, for `shift_conv_windows`, window sources [n, 1 + K] of a commit: the
    lane, its K - 1 source rows, one column of padding. `conv`: K; `slot_count`: slots of the rollback buffer."""
    longest = max(len(drafts.places) for drafts in kept)
    slots = np.full((len(kept), longest), -1, dtype=np.int32)
    sources = np.full((len(kept), conv + 1), -1, dtype=np.int32)
    for row, drafts in enumerate(kept):
        slots[row, : len(drafts.places)] = drafts.places
        window = [*(slot_count + drafts.lane * (conv - 1) + i for i in range(conv - 1)), *drafts.places]
        sources[row, 0], sources[row, 1:-1] = drafts.lane, window[len(window) - conv + 1 :]
    lanes = torch.tensor([drafts.lane for drafts in kept], dtype=torch.int32).to(device)
    return lanes, torch.from_numpy(slots).to(device), torch.from_numpy(sources).to(device)
