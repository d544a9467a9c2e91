"""y = x Wᵀ + b with bits that do not depend on how many rows come along.

In: rows x [T, K] with T from the row rule. Out: [T, N]. The rule says how rows must be offered so that each row's bits
are its own: at least `floor` rows (a lone row takes another code path in the library), or in blocks of exactly `block`
rows where even that does not hold. Which rule a machine needs is found by the self-check at start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRule:
    floor: int = 2
    block: int | None = None

    def padded(self, rows: int) -> int:
        """How many rows to offer for `rows` wanted."""
        if self.block is not None:
            return -(-rows // self.block) * self.block
        return max(rows, self.floor)


class Linear:
    """A weight made ready for products on one device. Complete when constructed; the plain weight is not kept."""

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, rule: RowRule | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.rule = rule or default_rule(weight.device)
        self.bias = bias
        self.dtype, self.device = weight.dtype, weight.device
        self._packed = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        # oneDNN's own layout, chosen for more than one row: the products of a row then have one order along K.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    @property
    def kind(self) -> str:
        """What decides beside the shape which kernels serve: products of two kinds are compared each by itself."""
        return ""

    @property
    def borders(self) -> tuple[int, ...]:
        """Row counts from which on another kernel, or another tile, serves: the self-check compares over each of them."""
        return ()

    def rows(self, wanted: Tensor, by: object = None) -> Tensor:
        """Rows of the weight as numbers, [T] → [T, K], read by the threads of these operations or else by its own. Of those
        alone whose operations look up."""
        raise NotImplementedError("this product's weight cannot be read back")

    def __call__(self, x: Tensor) -> Tensor:
        block = self.rule.block
        if block is None or len(x) == block:
            return self._product(x)
        return torch.cat([self._product(x[start : start + block]) for start in range(0, len(x), block)])

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x Wᵀ + b, each sum rounded. The sum may be fused into the product; its bits are these."""
        return residual + self(x).to(residual.dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return y
        y = x @ self._weight.t()
        return y if self.bias is None else y + self.bias


def strictest(rules: list[RowRule]) -> RowRule:
    """One rule that all of them hold by: rows are laid out once for every device."""
    blocks = [rule.block for rule in rules if rule.block is not None]
    return RowRule(floor=max(rule.floor for rule in rules), block=max(blocks, default=None))


def default_rule(device: torch.device) -> RowRule:
    """What to try first: two rows on a CPU; on a GPU always the same shape, so always the same kernel."""
    return RowRule(floor=2) if device.type == "cpu" else RowRule(block=64)
