"""y = x Wᵀ + b with bits that do not depend on the number of rows.

In: rows x [T, K] with T from the row rule. Out: [T, N]. The row rule says how many rows a product must be given so that no row
depends on another: at least `floor` rows (a single row takes another code path in the library), or blocks of exactly `block`
rows where even that is not enough. The self-check finds the rule that a machine needs.
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
        """How many rows to give for `rows` wanted."""
        if self.block is not None:
            return -(-rows // self.block) * self.block
        return max(rows, self.floor)


class Linear:
    """A weight prepared for products on one device. The plain weight is not kept."""

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, rule: RowRule | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.rule = rule or default_rule(weight.device)
        self.bias = bias
        self.dtype, self.device = weight.dtype, weight.device
        self._packed = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        # oneDNN's own layout, for more than one row: the products of a row then have one order along K.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    @property
    def kind(self) -> str:
        """Beside the shape, what selects the kernels; the self-check compares products of each kind."""
        return ""

    @property
    def borders(self) -> tuple[int, ...]:
        """Row counts from which another kernel or tile is used; the self-check compares across each of them."""
        return ()

    def rows(self, wanted: Tensor, thread_pool: int | None = None) -> Tensor:
        """Rows of the weight as numbers, [T] → [T, K], where `Products.reads_weight_rows`. `thread_pool`: see
        `Products.thread_pool`; None: its own."""
        raise NotImplementedError("this product's weight cannot be read back")

    def __call__(self, x: Tensor) -> Tensor:
        block = self.rule.block
        if block is None or len(x) == block:
            return self._product(x)
        return torch.cat([self._product(x[start : start + block]) for start in range(0, len(x), block)])

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x Wᵀ + b, each sum rounded. An implementation that fuses the sum has the same bits."""
        return residual + self(x).to(residual.dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return y
        y = x @ self._weight.t()
        return y if self.bias is None else y + self.bias


def strictest(rules: list[RowRule]) -> RowRule:
    """One rule that satisfies all: rows are laid out once for every device."""
    blocks = [rule.block for rule in rules if rule.block is not None]
    return RowRule(floor=max(rule.floor for rule in rules), block=max(blocks, default=None))


def default_rule(device: torch.device) -> RowRule:
    """The first candidate: two rows on a CPU; on a GPU always the same shape, so always the same kernel."""
    return RowRule(floor=2) if device.type == "cpu" else RowRule(block=64)
