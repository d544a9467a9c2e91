"""Host-to-device inputs of a step: small arrays, and the facts that decide which kernels the step launches.

In: numpy arrays, one after the other. Out: tensors on the device. `DirectStaging` copies each array by itself. `StagingBuffer`
writes all arrays into one buffer, which is copied at once and has the same address in every step. A step's signature is the
layout of its arrays and the facts that the host noted; steps with equal signatures read the same addresses and launch the same
kernels, so a graph captured for one of them serves the others. A side is one of the buffer's copies on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostArray = npt.NDArray[Any]
Made = TypeVar("Made")
ALIGNED = 64  # every array begins at a multiple of this many bytes
MOST_VIEWS = 4096
DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class Staging(Protocol):
    @property
    def device(self) -> torch.device: ...

    def put(self, array: HostArray) -> Tensor:
        """Copy an array to the device and return it as a tensor."""
        ...

    def put_rows(self, array: HostArray, room: int) -> Tensor:
        """Copy an array to the device, as the first rows of a tensor that may have more rows. Steps with equal `room` share
        graphs, whatever the number of rows. It is the last array of a step."""
        ...

    def note(self, fact: Hashable) -> None:
        """Record a decision of the host that changes which kernels this step launches. Shapes of arrays are recorded by `put`."""
        ...

    def cached(self, tensor: Tensor, layout: Hashable, make: Callable[[], Made]) -> Made:
        """Return `make()`, or what it returned in an earlier step for this tensor and layout. `make` must not depend on the
        values in the tensor."""
        ...


class DirectStaging:
    """Copies every array by itself, into memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, array: HostArray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def put_rows(self, array: HostArray, room: int) -> Tensor:
        return self.put(array)

    def note(self, fact: Hashable) -> None:
        """No-op: eager steps are not captured, so no signature is needed."""

    def cached(self, tensor: Tensor, layout: Hashable, make: Callable[[], Made]) -> Made:
        return make()


class StagingBufferFull(Exception):
    """The arrays of a step do not fit into the buffer. The step uses `DirectStaging` instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """The facts that decide which kernels a step launches. Equal facts have one object, so that graphs are found by identity."""

    facts: Hashable


class StagingBuffer:
    """Copies all arrays of a step at once. Owner: the backend. A step calls `begin`, then `put` and `note` any number of times,
    then `send`; after that it may run.

    An array that is put after `send` would not reach a captured step, so that is an error. The host has several copies of the
    buffer (`sides`), so that a step can be laid out while earlier ones are still being sent.
    """

    def __init__(self, device: torch.device, size: int, *, sides: int = 2) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(sides)]
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sent = [torch.cuda.Event() if on_gpu else None for _ in range(sides)]  # type: ignore[no-untyped-call]
        self._side, self._bytes = 0, self._hosts[0].numpy()
        self._facts: list[Hashable] = []
        self._used, self._open, self._full = 0, False, False  # _full: `put_rows` was called, after which no array may follow
        self._made: dict[tuple[int, Hashable], Any] = {}
        self._signatures: dict[Hashable, Signature] = {}
        self._views: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}  # by offset, dtype and shape

    def begin(self) -> None:
        self._side = (self._side + 1) % len(self._hosts)
        sent = self._sent[self._side]
        if sent is not None:
            sent.synchronize()  # Wait until the previous copy from this buffer is complete.
        self._bytes = self._hosts[self._side].numpy()
        self._facts, self._used, self._open, self._full = [], 0, True, False

    def put(self, array: HostArray) -> Tensor:
        return self._put(array, array.shape)

    def put_rows(self, array: HostArray, room: int) -> Tensor:
        """Only the rows of the array are copied; the rest of the tensor has values of earlier steps."""
        view = self._put(array, (room, *array.shape[1:]))
        self._full = True
        return view

    def _put(self, array: HostArray, shape: tuple[int, ...]) -> Tensor:
        """Place the array in the buffer. `shape`: that of the returned tensor, whose first elements are the array."""
        if not self._open:
            raise RuntimeError("an array was put after the step was sent: a captured step would not read it")
        if self._full:
            raise RuntimeError("an array was put after `put_rows`: its place would depend on the number of rows")
        begin = self._used
        stop = begin + math.prod(shape) * array.itemsize
        if stop > len(self._bytes):
            raise StagingBufferFull
        filled = begin + array.nbytes
        self._bytes[begin:filled] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._used = -(-filled // ALIGNED) * ALIGNED
        place = (begin, array.dtype.char, shape)
        self._facts.append(place)
        view = self._views.get(place)
        if view is None:
            if len(self._views) > MOST_VIEWS:
                self._views.clear()
                self._made.clear()
            view = self._views[place] = self._there[begin:stop].view(DTYPES[array.dtype]).view(shape)
        return view

    def cached(self, tensor: Tensor, layout: Hashable, make: Callable[[], Made]) -> Made:
        key = (id(tensor), layout)  # The tensor is kept as long as the result, so its id is not reused.
        made: Made | None = self._made.get(key)
        if made is None:
            made = self._made[key] = make()
        return made

    def note(self, fact: Hashable) -> None:
        self._facts.append(fact)

    def send(self) -> Signature:
        """Start the copy of all arrays. Steps with equal signatures may share graphs."""
        self._open = False
        used = min(self._used, len(self._bytes))
        self._there[:used].copy_(self._hosts[self._side][:used], non_blocking=True)
        sent = self._sent[self._side]
        if sent is not None:
            sent.record()
        facts = tuple(self._facts)
        known = self._signatures.get(facts)
        if known is None:
            if len(self._signatures) > MOST_VIEWS:
                self._signatures.clear()
            known = self._signatures[facts] = Signature(facts)
        return known
