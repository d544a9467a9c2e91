"""Experts whose matrices stay in their blocks on a GPU.

In: stacks of stored matrices. Out: a `PackedBank`. Experts follow the rule of all packed products (spans.py): what one of them
makes of a row has the bits of a product with its matrix alone. Rows are brought together by expert on the device, and one launch
serves all experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onedraw.backends.torch.ops.cuda.experts import Routes, combine, route, route_borders
from onedraw.backends.torch.ops.cuda.linear import shared_memory
from onedraw.backends.torch.ops.cuda.norm import gated_activation
from onedraw.backends.torch.ops.cuda.packed.activations import Prepared, Ready, empty_prepared, prepare_border, prepare_rows
from onedraw.backends.torch.ops.cuda.packed.few_rows import grouped_product, make_groups_ready, tile_height
from onedraw.backends.torch.ops.cuda.packed.linear import Courier, bring_fragments
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import Fragments
from onedraw.backends.torch.ops.cuda.packed.work_split import group_borders
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.models.source import LazyTensor
from onedraw.models.spec import Activation


class PackedBank:
    """All experts' matrices in blocks: gate and up below each other where they are of one kind, else side by side. `ready`: where
    rows may lie that were made ready before."""

    def __init__(
        self,
        gate_up: Sequence[Fragments],
        down: Fragments,
        activation: Activation,
        *,
        ready: Ready | None = None,
        pdl: bool = False,
    ) -> None:
        self._gate_up, self._down, self._activation = tuple(gate_up), down, activation
        self._ready, self._pdl = ready or Ready(), pdl

    @property
    def kind(self) -> str:
        return "+".join(part.kind for part in (*self._gate_up, self._down))

    @property
    def linears(self) -> list[Linear]:
        """None that must be offered rows by a rule."""
        return []

    def borders(self, used: int) -> tuple[int, ...]:
        """Where tables are made by sorting, where tiles are higher, and where rows are made ready otherwise."""
        device, count = self._down.units.device, self._down.count
        if device.type != "cuda":  # an emulator takes seconds for so many rows
            return ()
        found = {route_borders(count, used)[0], prepare_border(self._gate_up[0].width)}
        found.update(pairs // used + 1 for pairs in group_borders(count, shared=shared_memory(device)))
        return tuple(sorted(found - {1}))

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        count, pdl = self._down.count, self._pdl
        prepared = self._ready.look(h)  # an expert that always answers may read them behind us
        if prepared is None:
            prepared = prepare_rows(h if h.stride(1) == 1 else h.contiguous(), pdl=pdl)
        routes = route(ids, weights, count=count, height=tile_height(ids.numel(), count, h.device), pdl=pdl)
        opened = self._products(prepared, self._gate_up, routes, divide=routes.used, dtype=h.dtype)  # [pairs, 2F]
        between = empty_prepared(len(opened), opened.shape[1] // 2, h.device)
        gated_activation(opened, self._activation, packed=between, pdl=pdl)
        answers = self._products(between, [self._down], routes, divide=1, dtype=h.dtype)  # [pairs, E]
        return combine(answers, routes, width=h.shape[1], scale=scale, pdl=pdl)

    def _products(
        self, prepared: Prepared, parts: Sequence[Fragments], routes: Routes, *, divide: int, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(len(routes.order), sum(part.rows for part in parts), dtype=dtype, device=prepared.x.device)
        start = 0
        for part in parts:
            here = out[:, start : start + part.rows]
            grouped_product(prepared, part, routes, divide=divide, out=here, pdl=self._pdl)
            start += part.rows
        return out


def load_bank(
    gate_up: Sequence[LazyTensor],
    down: LazyTensor,
    activation: Activation,
    *,
    pad: int,
    courier: Courier,
    device: torch.device,
    ready: Ready | None = None,
    pdl: bool = False,
) -> PackedBank:
    """Stacks of matrices → experts; inner widths are padded with zero rows."""
    together = len({tensor.kind for tensor in gate_up}) == 1
    groups = [list(gate_up)] if together else [[tensor] for tensor in gate_up]
    first = [bring_fragments(group, pad=pad, courier=courier, device=device) for group in groups]
    last = bring_fragments([down], pad=1, courier=courier, device=device)
    if device.type == "cuda":  # nothing is compiled in the middle of a turn
        for kind in {part.kind for part in (*first, last)}:
            make_groups_ready(kind, device)
    return PackedBank(first, last, activation, ready=ready, pdl=pdl)
