"""The residual stream of a step as one tensor of bytes, which goes from process to process.

Layout, little-endian: a header of HEADER_BYTES (four int64: step number, rank of the stage that failed or -1, whether that stage
ran out of memory, length of the error's text; then the text as UTF-8), then x [count, E], then the layers' own inputs [count,
layers still to run, width] if the model has any. If a stage failed, what follows the header is undefined. E is the hidden width;
`count` is the number of tokens without padding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

HEADER_BYTES = 512
WORDS = 4
NO_STAGE = -1


class StreamBuffer:
    """A view of `count` rows in a tensor of bytes on the host."""

    def __init__(self, memory: Tensor, *, count: int, hidden: int, own: tuple[int, int] | None, dtype: torch.dtype) -> None:
        """`own`: for models whose layers have inputs of their own, the number of layers still to run and the width of such an
        input."""
        first = HEADER_BYTES + count * hidden * dtype.itemsize
        last = first + (0 if own is None else count * math.prod(own) * dtype.itemsize)
        assert len(memory) >= last, f"{count} rows take {last} bytes, and the buffer has {len(memory)}"
        self.memory = memory[:last]
        self._header = self.memory[:HEADER_BYTES].numpy()
        self.x = self.memory[HEADER_BYTES:first].view(dtype).view(count, hidden)
        self.own = None if own is None else self.memory[first:last].view(dtype).view(count, *own)

    def fill(self, step: int, x: Tensor, own: Tensor | None) -> None:
        self._write(step, NO_STAGE, False, "")
        self.x.copy_(x[: len(self.x)])
        if self.own is not None and own is not None:
            self.own.copy_(own[: len(self.own)])

    def fail(self, step: int, rank: int, *, memory: bool, text: str) -> None:
        """Write into the buffer that the stage with this rank failed in a step, so that later stages pass the failure on."""
        self._write(step, rank, memory, text)

    def _write(self, step: int, rank: int, memory: bool, text: str) -> None:
        words, room = self._header[: 8 * WORDS].view("<i8"), HEADER_BYTES - 8 * WORDS
        data = text.encode()[:room]
        words[:] = step, rank, memory, len(data)
        self._header[8 * WORDS : 8 * WORDS + len(data)] = np.frombuffer(data, np.uint8)

    @property
    def step(self) -> int:
        return int(self._header[:8].view("<i8")[0])

    @property
    def failed(self) -> tuple[int, bool, str] | None:
        """The rank of the stage that failed, whether it ran out of memory, and why; None if no stage failed."""
        _, rank, memory, length = (int(word) for word in self._header[: 8 * WORDS].view("<i8"))
        text = self._header[8 * WORDS : 8 * WORDS + length].tobytes().decode(errors="replace")
        return None if rank == NO_STAGE else (rank, bool(memory), text)


def stream_bytes(rows: int, *, hidden: int, inputs: int, dtype: torch.dtype) -> int:
    """The bytes of a buffer for up to `rows` rows. `inputs`: numbers per row of the layers' own inputs."""
    return HEADER_BYTES + rows * (hidden + inputs) * dtype.itemsize
