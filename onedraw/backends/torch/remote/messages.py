"""The messages between the engine's process and a stage: plain data, encoded as msgpack.

The engine sends a StageMessage; the stage answers UseRule, ExportCheckpoint and ImportCheckpoint with a StageReply. A residual
stream is not a message: it is a `StreamBuffer`, one tensor of bytes with a short header. Page numbers and other long lists of
integers are little-endian int32. A lane is the slot of a sequence's recurrent state; a checkpoint is the saved state after a
prompt prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.runner.inputs import Inputs, Span
from onedraw.backends.torch.state.model_state import KeptPath
from onedraw.types import CheckpointSave, Draft

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16)
}


def packed_ints(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, dtype="<i4").tobytes()


def unpacked_ints(data: bytes) -> list[int]:
    return [int(number) for number in np.frombuffer(data, dtype="<i4")]


class SpanData(msgspec.Struct, array_like=True, frozen=True):
    """A row of a step: the fields of `Span`, and its pages in each group."""

    first: int
    count: int
    start: int
    drafts: tuple[tuple[int, int], ...]  # (token, parent)
    whole: bool
    anchored: bool
    lane: int
    prompt_stop: int
    saves: tuple[tuple[int, int], ...]  # (position, checkpoint slot)
    held: int
    pages: tuple[bytes, ...]

    def span(self) -> Span:
        return Span(
            first=self.first,
            count=self.count,
            start=self.start,
            drafts=tuple(Draft(*draft) for draft in self.drafts),
            whole=self.whole,
            anchored=self.anchored,
            lane=self.lane,
            prompt_stop=self.prompt_stop,
            saves=tuple(CheckpointSave(*save) for save in self.saves),
            held=self.held,
        )


def span_data(inputs: Inputs) -> tuple[SpanData, ...]:
    """The rows of a step, without padding."""
    found = []
    for number, span in enumerate(inputs.spans):
        if span.lane is None:  # padding is left out, since each stage adds it again
            continue
        used = -(-(span.start + span.count) // inputs.page_size)
        found.append(
            SpanData(
                first=span.first,
                count=span.count,
                start=span.start,
                drafts=tuple((draft.token, draft.parent) for draft in span.drafts),
                whole=span.whole,
                anchored=span.anchored,
                lane=span.lane,
                prompt_stop=span.prompt_stop,
                saves=tuple((save.position, save.slot) for save in span.saves),
                held=span.held,
                pages=tuple(packed_ints(table[number][:used]) for table in inputs.host_tables),
            )
        )
    return tuple(found)


class RunLayers(msgspec.Struct, tag="run", array_like=True, frozen=True):
    """Run the layers of the stage in a step. The residual stream arrives from the stage before, and goes on to the one after."""

    step: int
    rows: tuple[SpanData, ...]
    left: int  # number of layers that were not run yet, in this stage and later ones
    layers: tuple[int, ...]  # layers of the model after which the residual stream is sent to the engine
    finite: bool  # whether to send which tokens are finite after each layer


class PrepareRows(msgspec.Struct, tag="prepare", array_like=True, frozen=True):
    """Copy pages and restore lanes before the next step."""

    copies: tuple[tuple[int, int, int], ...]  # (group, source page, target page)
    restored: tuple[tuple[int, int], ...]  # (checkpoint slot, lane): the recurrent state saved in the slot is copied to the lane


class KeptPathData(msgspec.Struct, array_like=True, frozen=True):
    lane: int
    rollback_start: int
    stop: int
    path: tuple[int, ...]
    pages: tuple[bytes, ...]

    @staticmethod
    def of(kept: KeptPath) -> KeptPathData:
        pages = tuple(packed_ints(pages) for pages in kept.pages)
        return KeptPathData(kept.lane, kept.rollback_start, kept.stop, kept.path, pages)

    def kept(self) -> KeptPath:
        pages = tuple(unpacked_ints(pages) for pages in self.pages)
        return KeptPath(self.lane, self.rollback_start, self.stop, self.path, pages)


class CommitDrafts(msgspec.Struct, tag="commit", array_like=True, frozen=True):
    """Make these kept drafts part of the state."""

    paths: tuple[KeptPathData, ...]


class UseRule(msgspec.Struct, tag="rule", array_like=True, frozen=True):
    """Use this row rule from now on. The stage answers with a StageReply; its `checks` are empty unless `check`, which asks to
    compare results under the rule."""

    floor: int
    block: int | None
    check: bool
    largest_tile: bool  # use only the largest attention tile, because results differ between tile heights


class ExportCheckpoint(msgspec.Struct, tag="export", array_like=True, frozen=True):
    """Copy a checkpoint and its pages to the host. The stage answers with a StageReply that has `arrays`."""

    slot: int
    pages: tuple[bytes, ...]


class NamedArray(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(name: str, tensor: Tensor) -> NamedArray:
        tensor = tensor.contiguous()
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return NamedArray(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)

    def tensor(self) -> Tensor:
        dtype = DTYPES[self.dtype]
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)


class ImportCheckpoint(msgspec.Struct, tag="import", array_like=True, frozen=True):
    """Write exported arrays into a checkpoint and its pages. The stage answers with a StageReply, with an error if they do not
    fit."""

    slot: int | None
    page_maps: tuple[dict[int, int], ...]
    arrays: tuple[NamedArray, ...]


StageMessage = RunLayers | PrepareRows | CommitDrafts | UseRule | ExportCheckpoint | ImportCheckpoint


class StageReply(msgspec.Struct, array_like=True, frozen=True):
    error: str = ""  # why the request could not be served
    checks: tuple[tuple[str, bool], ...] = ()  # comparisons of the self-check, and whether they passed
    arrays: tuple[NamedArray, ...] = ()


_messages: msgspec.msgpack.Decoder[StageMessage] = msgspec.msgpack.Decoder(StageMessage)
_replies = msgspec.msgpack.Decoder(StageReply)
encode = msgspec.msgpack.encode


def decode_message(data: bytes) -> StageMessage:
    return _messages.decode(data)


def decode_reply(data: bytes) -> StageReply:
    return _replies.decode(data)
