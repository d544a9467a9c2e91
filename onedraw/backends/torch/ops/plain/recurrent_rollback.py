"""Roll recurrent state back from rejected drafts, in plain torch: advance each lane's state by the kept drafts alone.

During a step drafts never change a lane's state. They store their increments, which are a decay, a key and a change for each
position (see `advance_state`), in the rollback buffer. After verification the commit repeats the updates of the kept drafts; a
rejected draft leaves nothing behind, because its increments are never applied. A lane is the slot of a sequence's recurrent
state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onedraw.backends.torch.state.recurrent_state import KeptDrafts, LaneStore


def commit_states(store: LaneStore, kept: Sequence[KeptDrafts]) -> None:
    """Advance lanes by their kept drafts: repeat the updates, with the same bits, from the increments in the rollback buffer."""
    for one in kept:
        window = store.windows[one.lane]
        for place in one.places:
            replay_draft(store.states[one.lane], store, place)
        line = torch.cat([window, store.fed[list(one.places)]])
        window.copy_(line[len(line) - len(window) :])


def replay_draft(state: Tensor, store: LaneStore, place: int) -> None:
    """Repeat the update of the draft in slot `place` of the rollback buffer."""
    repeats = store.spec.value_heads // store.spec.key_heads
    advance_state(state, store.decays[place], store.keys[place].repeat_interleave(repeats, 0), store.changes[place])


def advance_state(state: Tensor, decay: Tensor, key: Tensor, change: Tensor) -> None:
    """Update a state in place: state ← state · decay + key ⊗ change. Each product is rounded before the sum (no fused
    multiply-add), so the update has the same bits when the commit repeats it."""
    state.mul_(decay[:, None, None]).add_(key.unsqueeze(2) * change.unsqueeze(1))
