"""Tokens that never leave the device: what a turn chose is what the turn behind it begins with.

In: the tokens of a turn, some of them not known to the host, and a buffer with the last choice of every lane. Out: all of them
known; and, behind the choosing, the buffer brought up to date. A token that the host does not know stands as -1 - lane.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def awaited(given: Tensor, last: Tensor) -> Tensor:
    """given [n] tokens, last [lanes + 1] → [n]. Where a lane's law left no token, anything: nobody hears of that row."""
    found = torch.empty_like(given)
    _awaited[(triton.cdiv(len(given), BLOCK),)](given, last, found, len(given), BLOCK=BLOCK)
    return found


def leave(answers: Tensor, lanes: Tensor, last: Tensor) -> None:
    """last[lanes] = answers[:, 0]; answers [T, columns], lanes [T]. Padding has the lane behind the last."""
    _leave[(triton.cdiv(len(lanes), BLOCK),)](answers, lanes, last, len(lanes), answers.stride(0), BLOCK=BLOCK)


@triton.jit(do_not_specialize=["count"])
def _awaited(given, last, found, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    token = tl.load(given + place, mask=there, other=0)
    unknown = token < 0
    chosen = tl.load(last + (-1 - token), mask=there & unknown, other=0)
    tl.store(found + place, tl.where(unknown, tl.maximum(chosen, 0).to(token.dtype), token), mask=there)


@triton.jit(do_not_specialize=["count", "stride"])
def _leave(answers, lanes, last, count, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    lane = tl.load(lanes + place, mask=there, other=0)
    tl.store(last + lane, tl.load(answers + place * stride, mask=there, other=0), mask=there)
