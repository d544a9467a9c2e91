"""How often each lane's request has seen each token: what the penalties read, kept on the device.

In: positions with their histories. Out: two donated arrays: counts in the output [lanes + 1, V'] and whether a token stands
in the prompt. A lane's rows follow its history by a mark, so a decode step adds one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onedraw.backends.sampled_rows import CountedHistory, SamplingPosition
from onedraw.backends.xla.platform import Array

GROWTH = 512  # tokens that one program adds


def grow(output: Array, prompt: Array, opened: Array, grown: Array, prompted: Array) -> tuple[Array, Array]:
    """Empty the opened lanes, then count tokens: rows of (lane, token)."""
    output, prompt = jnp.where(opened[:, None], 0, output), jnp.where(opened[:, None], False, prompt)
    return output.at[grown[:, 0], grown[:, 1]].add(1), prompt.at[prompted[:, 0], prompted[:, 1]].set(True)


class XlaTokenCounts:
    """Owner: the sampler."""

    def __init__(self, *, width: int, lanes: int, device: jax.Device) -> None:
        self.output = jax.device_put(np.zeros((lanes + 1, width), np.int32), device)
        self.prompt = jax.device_put(np.zeros((lanes + 1, width), np.bool_), device)
        self._marks: list[CountedHistory | None] = [None] * lanes
        self._lanes = lanes
        self._grow = jax.jit(grow, donate_argnums=(0, 1))

    def follow(self, positions: Sequence[SamplingPosition]) -> None:
        """Bring the lanes of positions that count their history up to date."""
        opened = np.zeros(self._lanes + 1, dtype=np.bool_)
        grown: list[tuple[int, int]] = []
        prompted: list[tuple[int, int]] = []
        for position in positions:
            if not position.params.counts_history:
                continue
            history, mark, lane = position.history, self._marks[position.lane], position.lane
            start = len(history.prompt)
            if mark is None or not mark.is_prefix_of(position):
                opened[lane] = True
                prompted += [(lane, token) for token in history.prompt]
            else:
                start = mark.known
            grown += [(lane, token) for token in history.slice(start, len(history))]
            self._marks[lane] = CountedHistory(position.request_id, history.prompt, len(history))
        for part in range(-(-max(len(grown), len(prompted), int(opened.any())) // GROWTH)):
            pairs = self._part(grown, part), self._part(prompted, part)
            self.output, self.prompt = self._grow(self.output, self.prompt, opened & (part == 0), *pairs)

    def _part(self, pairs: list[tuple[int, int]], part: int) -> Any:
        found = np.full((GROWTH, 2), (self._lanes, 0), dtype=np.int32)
        here = pairs[part * GROWTH : (part + 1) * GROWTH]
        if here:
            found[: len(here)] = here
        return found
