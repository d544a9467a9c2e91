"""Replaces the weights of a loaded model in place, so that captured graphs and kernels keep the addresses that they read.

In: the parts of a model in use, and the same parts loaded from other weights. Out: a WeightUpdate, which exchanges the memory of
the two. Both were made by the same code, so tensors are in the same places and layouts, packed ones too. A part that differs in
anything but the content of its tensors is refused before anything changes. An update that was applied can be undone, since the
memory of the new weights then holds the old ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.errors import BadParameter, UnsupportedModel

# Attributes that an update leaves unchanged, because they follow from other attributes or from an object's address in memory.
DERIVED = frozenset({"fused", "address", "rule"})
OURS = "onedraw.backends.torch."  # modules of the objects whose attributes are searched for tensors
STORED = ("onedraw.models.", "onedraw.checkpoints.")  # modules of the tables that stay in a checkpoint file


class WeightUpdate:
    """Collects pairs of memory ranges, of the old and the new weights, and exchanges their contents. Owner: the backend, while it
    replaces its weights."""

    def __init__(self) -> None:
        self._ranges: list[MemoryRange] = []
        self._opaque: dict[int, tuple[Tensor, Tensor]] = {}  # tensors whose address cannot be read: (in use, new), by id
        self._tables: list[tuple[Any, str, Any]] = []  # tables that stay in a checkpoint file: (owner, attribute, new value)

    def match(self, old: object, new: object, path: str = "") -> None:
        """Add the weights of a part of the model. Raise UnsupportedModel if the parts differ in more than their tensors'
        content."""
        if old is new:
            return
        if type(old) is not type(new):
            raise _differs(path, f"{type(old).__name__}, now {type(new).__name__}")
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            self._match_tensors(old, new, path)
        elif isinstance(old, tuple | list) and isinstance(new, tuple | list):
            if len(old) != len(new):
                raise _differs(path, f"{len(old)} parts, now {len(new)}")
            for number, (one, other) in enumerate(zip(old, new, strict=True)):
                self.match(one, other, f"{path}[{number}]")
        elif isinstance(old, ctypes.Array | ctypes.Structure) or (callable(old) and not _ours(old)):
            return  # Kernel arguments point to tensors that are handled here anyway; functions have no weights.
        elif _ours(old):
            for name, value in _attributes(old):
                if type(value).__module__.startswith(STORED) and hasattr(value, "take_rows"):
                    self._tables.append((old, name, getattr(new, name)))
                else:
                    self.match(value, getattr(new, name), f"{path}.{name}".lstrip("."))
        elif old != new:
            raise _differs(path, f"{old!r}, now {new!r}"[:200])

    def _match_tensors(self, old: Tensor, new: Tensor, path: str) -> None:
        kinds = [(one.shape, one.dtype, one.layout, one.device) for one in (old, new)]
        if kinds[0] != kinds[1]:
            raise _differs(path, f"{old.dtype} {list(old.shape)}, now {new.dtype} {list(new.shape)}")
        if old.layout != torch.strided:  # an opaque layout, such as that of oneDNN, whose storage cannot be accessed
            self._opaque.setdefault(id(old), (old, new))
            return
        if old.stride() != new.stride():
            raise _differs(path, "another layout in memory")
        if old.numel():
            self._ranges.append(MemoryRange(old.data_ptr(), new.data_ptr(), _span(old), old, new.cpu(), path))

    def _disjoint(self) -> list[MemoryRange]:
        """Return the ranges of memory to exchange. Tensors may share memory, but each byte is in one range only. Raise
        UnsupportedModel if tensors overlap in part, or do not overlap in the same way in both models."""
        found: list[MemoryRange] = []
        for one in sorted(self._ranges, key=lambda one: (one.start, -one.size)):
            before = found[-1] if found else None
            if before is None or one.start >= before.start + before.size:
                found.append(one)
            elif one.start + one.size > before.start + before.size or one.start - before.start != one.partner - before.partner:
                raise _differs(one.path, "memory that other tensors share in part")
        return found

    @torch.inference_mode()
    def swap(self) -> None:
        """Exchange the old and the new weights; called again, this puts the old ones back. If it raises, nothing has changed."""
        pairs = [*((one.used, one.other) for one in self._disjoint()), *self._opaque.values()]
        done: list[tuple[Tensor, Tensor]] = []
        try:
            for used, other in pairs:
                exchange(used, other)
                done.append((used, other))
        except BaseException:
            for used, other in done:
                exchange(used, other)
            raise
        exchanged = []
        for owner, name, value in self._tables:
            exchanged.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        self._tables = exchanged


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """The memory of a tensor in use, and the memory, on the same device or on the host, that has its new content."""

    start: int  # address of the memory in use
    partner: int  # address of the new content when it was loaded
    size: int  # bytes
    used: Tensor
    other: Tensor
    path: str


def exchange(used: Tensor, other: Tensor) -> None:
    """Exchange the content of two tensors; both keep their addresses."""
    kept = used.clone() if used.layout != torch.strided else used.to("cpu", copy=True)
    used.copy_(other)
    other.copy_(kept)


def _ours(value: object) -> bool:
    return type(value).__module__.startswith(OURS)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if is_dataclass(value):
        named = [(one.name, getattr(value, one.name)) for one in fields(value)]
    else:
        named = list(vars(value).items())
    return ((name, found) for name, found in named if name not in DERIVED)


def _span(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()


def _differs(path: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the new weights cannot replace those in use: {path or 'a weight'} has {what}; restart the server with them"
    )


# ---------------------------------------------------------------------- tensors from memory


KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def stored_bytes(name: str, tensor: object) -> tuple[tuple[int, ...], str, npt.NDArray[np.uint8]]:
    """The shape, stored type and a copy of the bytes of a tensor of torch on any device, or of an array of numpy."""
    found = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor
    if not isinstance(found, Tensor) or found.dtype not in KINDS:
        kind = getattr(found, "dtype", type(found).__name__)
        raise BadParameter(name, f"must be a tensor or array of float32, bfloat16 or float16, not {kind}")
    data = found.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
    return tuple(found.shape), KINDS[found.dtype], data
