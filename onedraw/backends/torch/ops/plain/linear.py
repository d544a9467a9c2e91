"""y = x Wᵀ + b with bits that do not depend on the number of rows.

In: rows x [T, K] and a weight [N, K], where T satisfies the row rule. Out: [T, N]. The row rule gives the row counts with which
no row of a product depends on another: at least `floor` rows (for a single row the library uses another kernel), or blocks of
exactly `block` rows if that does not suffice. The self-check determines the rule that a machine needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRule:
    floor: int = 2  # minimum rows of a product
    block: int | None = None  # the exact number of rows of every product, if not None

    def padded(self, rows: int) -> int:
        """The number of rows with which to call a product whose first `rows` rows are used."""
        if self.block is not None:
            return -(-rows // self.block) * self.block
        return max(rows, self.floor)


class Linear:
    """A weight [N, K] prepared for products on one device. If the library reorders it, the original is not kept."""

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, rule: RowRule | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.rule = rule or default_rule(weight.device)
        self.bias = bias
        self.dtype, self.device = weight.dtype, weight.device
        self._packed = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        # oneDNN's own layout: with it the products of a row are added along K in one order for every number of rows above one.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    @property
    def kind(self) -> str:
        """The storage type, which selects the kernel together with the shape. The self-check compares products of each kind."""
        return ""

    @property
    def borders(self) -> tuple[int, ...]:
        """Row counts from which another kernel or tile is used; the self-check compares results across each of them."""
        return ()

    @property
    def choices(self) -> tuple[str, ...]:
        """Kernel choices that were made for this product when its weight was loaded, as texts that become part of the backend's
        fingerprint."""
        return ()

    def rows(self, wanted: Tensor, thread_pool: int | None = None) -> Tensor:
        """Rows of the weight as floats, by number: [T] → [T, K]. Only operations with `Products.reads_weight_rows` implement
        this. `thread_pool`: the pool to use, see `Products.thread_pool`; None: the product's own."""
        raise NotImplementedError("this product's weight cannot be read back")

    def first_outputs(self, count: int) -> Linear:
        """A product with at least the first `count` outputs, which shares the weight. By default it is the whole product."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        block = self.rule.block
        if block is None or len(x) == block:
            return self._product(x)
        return torch.cat([self._product(x[start : start + block]) for start in range(0, len(x), block)])

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to a residual, residual + x Wᵀ + b, rounded after each addition. An implementation that fuses them
        must give the same bits."""
        return residual + self(x).to(residual.dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return y
        y = x @ self._weight.t()
        return y if self.bias is None else y + self.bias


def strictest(rules: list[RowRule]) -> RowRule:
    """One rule that satisfies all given ones, because the rows of a step are laid out once for all devices."""
    blocks = [rule.block for rule in rules if rule.block is not None]
    return RowRule(floor=max(rule.floor for rule in rules), block=max(blocks, default=None))


def default_rule(device: torch.device) -> RowRule:
    """The rule that the self-check tries first: on a CPU at least two rows; on a GPU one fixed shape, so always the same
    kernel."""
    return RowRule(floor=2) if device.type == "cpu" else RowRule(block=64)
