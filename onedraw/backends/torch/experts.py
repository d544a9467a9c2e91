"""Experts that answer for the tokens that chose them: one expert after the other, in plain products.

In: tokens h [T, E], the experts of each token and their weights. Out: [T, E], the answers added in expert order, so neither
the batch nor the grouping changes a token's sum. Kernels answer the same question in fewer launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onedraw.backends.torch.layers.linear import Linear
from onedraw.models.spec import Activation


class Bank(Protocol):
    """All experts of one layer, ready for one device."""

    @property
    def linears(self) -> list[Linear]:
        """Products that the self-check compares and that obey its rule."""
        ...

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        """ids and weights [T, used] → scale · Σ weight · expert(h), the lowest expert first, in h's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class PlainBank:
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    activation: Activation
    gated: Callable[[Tensor, Activation], Tensor]

    @property
    def linears(self) -> list[Linear]:
        return [*self.gate_up, *self.down]

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(h, dtype=torch.float32)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            tokens, place = torch.nonzero(ids == number, as_tuple=True)  # in order of tokens, each at most once
            if len(tokens):
                padding = down.rule.padded(len(tokens)) - len(tokens)  # rows are offered as the products want them
                chosen = h.index_select(0, torch.cat([tokens, tokens[-1:].expand(padding)]) if padding else tokens)
                answer = down(self.gated(gate_up(chosen), self.activation))[: len(tokens)].float()
                out.index_add_(0, tokens, answer * weights[tokens, place].unsqueeze(1))
        return (out if scale == 1 else out.mul_(scale)).to(h.dtype)
