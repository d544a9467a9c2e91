"""KV pages of a DFlash drafter, only for the positions in the attention windows of its layers.

In: a row's pages in the target (the model that is drafted for). Out: a state with a group of own pages for every window of the
drafter's layers, and per group a table that assigns own pages to the target's pages. A group has pages for the windows of all
lanes (slots of per-sequence state), so the drafter takes little memory however long contexts are. An own page stays assigned to a
page of the target until it is the least recently used one and another page needs it. So a prompt in the target's prefix cache
often still has the drafter's keys and values; if not, drafts are worse until the window holds newer positions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from onedraw.backends.memory_plan import drafter_pages
from onedraw.backends.torch.runner.inputs import InputLayout
from onedraw.backends.torch.state.model_state import LayerStore, ModelState, StateSizes
from onedraw.models.spec import LayerSpec
from onedraw.types import Row

NO_PAGE = -1  # no own page is assigned; `lay_out` puts the scratch page, which is never read, in its place


@dataclass(slots=True)
class OwnPages:
    """The own pages of one group, and the pages of the target to which they are assigned. Owner: ContextPages."""

    free: list[int]
    own: dict[int, int] = field(default_factory=dict)  # by page of the target, its own page, least recently used first

    def find(self, page: int) -> int:
        """The own page assigned to a page of the target, which becomes the most recently used; NO_PAGE if there is none."""
        found = self.own.pop(page, NO_PAGE)
        if found != NO_PAGE:
            self.own[page] = found
        return found

    def take(self, page: int) -> int:
        """Like `find`, but if there is none, assign a free own page, or else the least recently used one."""
        found = self.find(page)
        if found == NO_PAGE:
            found = self.free.pop() if self.free else self.own.pop(next(iter(self.own)))
            self.own[page] = found
        return found


class ContextPages:
    """Keys and values of a drafter's layers, which all have windows. Owner: the drafter."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        target: InputLayout,
        lanes: int,
        block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._page_size = target.page_size
        self.windows = sorted({window for layer in layers if (window := layer.attention.window) is not None})
        given = {"target_pages": target.scratch[0], "lanes": lanes, "block": block, "page_size": target.page_size}
        pages = tuple(drafter_pages(window, **given) for window in self.windows)
        self.sizes = StateSizes(pages=pages, page_size=target.page_size, windows=tuple(self.windows))
        self.layout = replace(target, scratch=pages, windows=tuple(self.windows))
        self.state = ModelState(layers, self.sizes, dtype=dtype, device=device)
        self._pools = [OwnPages(list(range(count))) for count in pages]

    @property
    def stores(self) -> list[LayerStore]:
        """The stores of the layers."""
        return self.state.stores

    def tables(self, pages: Sequence[int], *, start: int, stop: int, seen: int | None = None) -> tuple[list[int], ...]:
        """For every group, the own pages assigned to `pages`, the pages of a row of the target. Pages of positions [start, stop),
        which will be written, are assigned if missing; those of earlier positions may be NO_PAGE. Pages before the window, which
        ends at `seen` (by default at `stop`), are NO_PAGE."""
        found, seen = [], stop if seen is None else seen
        for window, pool in zip(self.windows, self._pools, strict=True):
            first = max(seen - window, 0) // self._page_size
            own = [NO_PAGE] * len(pages)
            for index in range(first, min(-(-stop // self._page_size), len(pages))):
                if pages[index] >= 0:  # the target has not released it
                    written = index >= start // self._page_size
                    own[index] = pool.take(pages[index]) if written else pool.find(pages[index])
            found.append(own)
        return tuple(found)

    def open(self, rows: Sequence[Row]) -> None:
        """Copy own pages as the rows' copy orders for the target's first group say, where the source has an own page."""
        copies = [(copy.source, copy.target) for row in rows for copy in row.copies if copy.group == 0]
        own = [
            (group, source, pool.take(target))
            for group, pool in enumerate(self._pools)
            for page, target in copies
            if (source := pool.find(page)) != NO_PAGE
        ]
        self.state.prepare(copies=own, restored=())

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Host copies of the own pages assigned to `pages[0]`, and as `places`, for every group, the indices in `pages[0]` that
        have one."""
        kept = [[index for index, page in enumerate(pages[0]) if page in pool.own] for pool in self._pools]
        own = [[pool.own[pages[0][index]] for index in found] for pool, found in zip(self._pools, kept, strict=True)]
        places = {f"places.{group}": torch.tensor(found, dtype=torch.int64) for group, found in enumerate(kept)}
        return self.state.export_checkpoint(slot, own) | places

    def import_checkpoint(self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, Tensor]) -> None:
        maps = [self._imported(pool, page_maps[0], arrays[f"places.{group}"].tolist()) for group, pool in enumerate(self._pools)]
        self.state.import_checkpoint(None, maps, arrays)

    def _imported(self, pool: OwnPages, targets: Mapping[int, int], places: Iterable[int]) -> dict[int, int]:
        """By the number of a stored page, the own page that it is loaded into; only the last pages if there is no room for
        all."""
        wanted = [(stored, targets[place]) for stored, place in enumerate(places) if place in targets]
        room = len(pool.free) + len(pool.own)
        return {stored: pool.take(page) for stored, page in wanted[-room:]}
