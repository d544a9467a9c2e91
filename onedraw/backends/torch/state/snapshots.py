"""A checkpoint to and from numpy arrays: pages, states and last logits of every layer, and the drafter's pages.

In: a checkpoint's slot and pages. Out: numpy arrays on the host by name, and back again, bit for bit. Layers are named by their
number in the model, so the names do not depend on the split into stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.state.model_state import CheckpointLogits, ModelState

Arrays = Mapping[str, npt.NDArray[Any]]


class Snapshots:
    """Owner: the backend. `dtype`: of weights and products; where it is bf16, stored 16-bit integers are reinterpreted as it."""

    def __init__(
        self, states: Sequence[ModelState], drafter: ModelState | None, kept: CheckpointLogits, dtype: torch.dtype
    ) -> None:
        self._named = [("layer", state) for state in states]
        if drafter is not None:
            self._named.append(("drafter", drafter))
        self._kept, self._dtype = kept, dtype

    @torch.inference_mode()
    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        found = {"logits": self._kept.rows[slot].cpu().clone()}
        for name, state in self._named:
            found |= {f"{name}.{part}": tensor for part, tensor in state.export_checkpoint(slot, pages).items()}
        return {name: as_stored(tensor) for name, tensor in found.items()}

    @torch.inference_mode()
    def import_checkpoint(self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Arrays) -> None:
        for name, state in self._named:
            own = {part.removeprefix(f"{name}."): array for part, array in arrays.items() if part.startswith(f"{name}.")}
            state.import_checkpoint(slot, page_maps, {part: as_tensor(array, self._dtype) for part, array in own.items()})
        if slot is not None and "logits" in arrays:
            self._kept.keep(slot, as_tensor(arrays["logits"], torch.float32).to(self._kept.rows.device))


def as_stored(tensor: Tensor) -> npt.NDArray[Any]:
    """numpy has no bf16: its bits are stored as integers."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 and dtype == torch.bfloat16 else tensor
