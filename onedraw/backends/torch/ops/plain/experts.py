"""Mixture of experts in plain torch, one expert after the other.

In: tokens h [T, E], the experts of each token and their weights. Out: [T, E]. The outputs of a token's experts are added in the
order of expert numbers, so neither the batch nor the grouping of tokens changes a bit. Axes: T tokens, E hidden width, `used`
experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain.elementwise import opened, softcapped
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.backends.torch.sampling.exact import apply_elementwise, ordered_sum
from onedraw.models.spec import Activation, MoeSpec


class ExpertBank(Protocol):
    """The matrices of all experts of a layer, prepared for products on one device."""

    @property
    def kind(self) -> str:
        """The storage type of the matrices. Banks of different kinds use different kernels, so the self-check compares each."""
        ...

    @property
    def linears(self) -> list[Linear]:
        """The products for which the self-check determines how many rows they need (`Linear.rule`); empty if a kernel computes
        all experts."""
        ...

    def borders(self, used: int) -> tuple[int, ...]:
        """Row counts from which another kernel or tile is used, if each row has `used` experts."""
        ...

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        """Compute scale · Σ weight · expert(h) over the experts `ids` [T, used] with `weights` [T, used], added from the lowest
        expert on, in h's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class PlainExpertBank:
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    activation: Activation
    gated: Callable[[Tensor, Activation], Tensor]

    @property
    def kind(self) -> str:
        return "+".join(dict.fromkeys(linear.kind for linear in (self.gate_up[0], self.down[0])))

    @property
    def linears(self) -> list[Linear]:
        return [*self.gate_up, *self.down]

    def borders(self, used: int) -> tuple[int, ...]:
        return ()  # the self-check compares the products in `linears` instead

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(h, dtype=torch.float32)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            tokens, place = torch.nonzero(ids == number, as_tuple=True)  # sorted by token; a token has an expert at most once
            if len(tokens):
                padding = down.rule.padded(len(tokens)) - len(tokens)  # rows that the row rule of the products adds
                chosen = h.index_select(0, torch.cat([tokens, tokens[-1:].expand(padding)]) if padding else tokens)
                answer = down(self.gated(gate_up(chosen), self.activation))[: len(tokens)].float()
                out.index_add_(0, tokens, answer * weights[tokens, place].unsqueeze(1))
        return (out if scale == 1 else out.mul_(scale)).to(h.dtype)


def choose_experts(logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, [T, used] each: best first, and the lowest number among equals.

    logits [T, ≥ experts]. `bias` [experts] is added to scores for the selection only. `factors` [experts] multiply the weights
    after they are normalized.
    """
    logits = logits[:, : spec.experts].float().contiguous()
    if spec.softcap is not None:
        logits = softcapped(logits, spec.softcap)
    if spec.scores == "sigmoid":
        scores = opened(logits, "sigmoid")
    else:
        shares = apply_elementwise(torch.exp, logits - logits.amax(1, keepdim=True))
        scores = shares / ordered_sum(shares).unsqueeze(1)
    order = scores if bias is None else scores + bias
    ids = order.sort(dim=1, descending=True, stable=True).indices[:, : spec.used]
    weights = scores.gather(1, ids)
    if spec.normalised:
        weights = weights / ordered_sum(weights).unsqueeze(1)
    return ids, weights if factors is None else weights * factors[ids]


def join_shared(out: Tensor, always: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
    """The experts' output `out`, plus the shared expert's output `always` (times the sigmoid of the gate's first column, if there
    is a gate), plus the residual if there is one."""
    wide = always.float()
    if gate is not None:
        wide = wide * opened(gate.float(), "sigmoid")[:, :1]
    total = wide.add_(out).to(out.dtype)
    return total if residual is None else residual + total.to(residual.dtype)
