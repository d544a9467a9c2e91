"""The state of recurrent (Gated DeltaNet) layers: per lane, per checkpoint, and the increments of a step's drafts.

In: sizes. Out: tensors that the delta operations read and write. Allocated once. After every step a lane holds the state after
its kept tokens; drafts are written to the rollback buffer and reach a lane by the commit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.errors import OutOfMemory
from onedraw.models.spec import DeltaSpec


@dataclass(frozen=True, slots=True)
class KeptDrafts:
    """A commit of one lane: the rollback slots of its kept drafts, in order of position."""

    lane: int
    places: tuple[int, ...]


class LaneBlock:
    """The states of all delta layers of one shape, side by side, so that one operation can reach every layer. Owner: the state.

    Everything is float32, whatever the model's dtype.
    """

    def __init__(self, spec: DeltaSpec, layers: int, *, lanes: int, drafts: int, checkpoints: int, device: torch.device) -> None:
        self.spec = spec
        head = (spec.value_heads, spec.key_dim, spec.value_dim)
        window = (spec.conv - 1, spec.channels)
        try:
            self.states = _zeros(layers, lanes, *head, device=device)  # [layer, lane, value head, key dim, value dim]
            self.windows = _zeros(layers, lanes, *window, device=device)  # inputs of the convolution, oldest first
            self.saved_states = _zeros(layers, checkpoints, *head, device=device)
            self.saved_windows = _zeros(layers, checkpoints, *window, device=device)
            # The increment of a drafted position: state = state * decay + key ⊗ change; and its input to the convolution.
            self.decays = _zeros(layers, drafts, spec.value_heads, device=device)
            self.keys = _zeros(layers, drafts, spec.key_heads, spec.key_dim, device=device)
            self.changes = _zeros(layers, drafts, spec.value_heads, spec.value_dim, device=device)
            self.fed = _zeros(layers, drafts, spec.channels, device=device)
        except (RuntimeError, MemoryError):  # torch reports missing memory like this
            raise OutOfMemory(
                f"the states of {lanes} lanes, {checkpoints} checkpoints and {drafts} drafts do not fit into the memory of "
                f"{device}; lower --max-batch, --checkpoint-memory or --draft-memory"
            ) from None


class LaneStore:
    """One layer of a block. Owner: the state."""

    def __init__(self, block: LaneBlock, layer: int) -> None:
        self.spec = block.spec
        self.states, self.windows = block.states[layer], block.windows[layer]
        self.saved_states, self.saved_windows = block.saved_states[layer], block.saved_windows[layer]
        self.decays, self.keys, self.changes = block.decays[layer], block.keys[layer], block.changes[layer]
        self.fed = block.fed[layer]

    @staticmethod
    def alone(spec: DeltaSpec, *, lanes: int, drafts: int, checkpoints: int, device: torch.device) -> LaneStore:
        """A layer by itself."""
        return LaneStore(LaneBlock(spec, 1, lanes=lanes, drafts=drafts, checkpoints=checkpoints, device=device), 0)

    @property
    def draft_bytes(self) -> int:
        return sum(t.nbytes for t in (self.decays, self.keys, self.changes, self.fed))

    @property
    def lane_bytes(self) -> int:
        return self.states.nbytes + self.windows.nbytes

    @property
    def checkpoint_bytes(self) -> int:
        return self.saved_states.nbytes + self.saved_windows.nbytes

    def restore(self, slots: Sequence[int], lanes: Sequence[int]) -> None:
        """Copy the states of checkpoints to lanes."""
        for slot, lane in zip(slots, lanes, strict=True):
            self.states[lane].copy_(self.saved_states[slot])
            self.windows[lane].copy_(self.saved_windows[slot])


def _zeros(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)
