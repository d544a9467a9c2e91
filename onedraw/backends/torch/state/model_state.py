"""The state of a model between steps: KV pages per layer group, lanes of recurrent layers, checkpoints of prompts.

In: sizes, then rows and their kept drafts. Out: stores that the layers read and write. Everything is allocated once. After
every step the state after a row's kept tokens is in its pages and its lane, and nowhere else. A row is the work of one sequence
in one step; a lane is the slot of its recurrent state; a group is the layers that keep the same positions in pages. The rollback
buffer holds the state increments of drafts until the commit (`ops/plain/recurrent_rollback.py`). V': vocabulary with padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.runner.inputs import Bucket
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.recurrent_state import KeptDrafts, LaneBlock, LaneStore
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec
from onedraw.types import Row

LayerStore = PageStore | LaneStore


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of a state."""

    pages: tuple[int, ...]  # number of pages of each group
    page_size: int
    windows: tuple[int | None, ...] = (None,)  # attention window of each group; None: all positions
    lanes: int = 0
    drafts: int = 0  # number of drafts that the rollback buffer holds
    checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class KeptPath:
    """The kept drafts of one row."""

    lane: int
    rollback_start: int  # slot of the row's first draft in the rollback buffer
    stop: int  # position after the row's known tokens, which is the slot of its first draft in its pages
    path: tuple[int, ...]  # indices of the kept drafts, in order of position
    pages: tuple[Sequence[int], ...]  # the row's pages in each group


class ModelState:
    """The stores of the layers on one device, from layer `first` on. A layer that reuses another's keys and values shares its
    store. `dtype` is that of the pages."""

    def __init__(
        self, layers: Sequence[LayerSpec], sizes: StateSizes, *, dtype: torch.dtype, device: torch.device, first: int = 0
    ) -> None:
        self.sizes, self.first = sizes, first
        self._device = device
        self.stores: list[LayerStore] = []
        self._groups: list[list[PageStore]] = [[] for _ in sizes.pages]
        self.lanes: list[LaneStore] = []
        deltas = Counter(layer.mixer for layer in layers if isinstance(layer.mixer, DeltaSpec))
        given = {"lanes": sizes.lanes, "drafts": sizes.drafts, "checkpoints": sizes.checkpoints}
        self.blocks = {spec: LaneBlock(spec, count, device=device, **given) for spec, count in deltas.items()}
        self.attending: list[tuple[AttentionSpec, PageStore]] = []  # the layers that store keys and values, with their stores
        for layer in layers:
            self.stores.append(self._make(layer.mixer, dtype))
        # The addresses of the pages of all layers of one kind, which never change, so that one kernel can access all these
        # layers.
        self.addresses = {mixer: self._addresses(mixer) for mixer in dict.fromkeys(mixer for mixer, _ in self.attending)}

    def _make(self, mixer: AttentionSpec | DeltaSpec, dtype: torch.dtype) -> LayerStore:
        sizes = self.sizes
        if isinstance(mixer, DeltaSpec):
            store = LaneStore(self.blocks[mixer], sum(store.spec == mixer for store in self.lanes))
            self.lanes.append(store)
            return store
        if mixer.reuses is not None:
            return self.stores[mixer.reuses - self.first]
        group = self.group(mixer)
        pages = PageStore(mixer, pages=sizes.pages[group], page_size=sizes.page_size, dtype=dtype, device=self._device)
        self._groups[group].append(pages)
        self.attending.append((mixer, pages))
        return pages

    def group(self, spec: AttentionSpec) -> int:
        return self.sizes.windows.index(spec.window) if spec.window in self.sizes.windows else 0

    def _addresses(self, kind: AttentionSpec) -> list[tuple[Tensor, int]]:
        """Tables [layers, 2] int64 of the addresses of keys and values, and of their scales if they have any; each with the bytes
        of one position of a head."""
        stores = [pages for mixer, pages in self.attending if mixer == kind]
        pairs = [[(pages.keys, pages.values) for pages in stores], [pages.scales for pages in stores if pages.scales]]
        found = []
        for layers in filter(None, pairs):
            places = torch.tensor([[part.data_ptr() for part in pair] for pair in layers], dtype=torch.int64, device=self._device)
            first = layers[0][0]
            found.append((places, first.dtype.itemsize * first.shape[1] // self.sizes.page_size))
        return found

    # ------------------------------------------------------------------ before a step

    def open(self, rows: Sequence[Row]) -> None:
        """Make the page copies of the rows, and restore lanes from their checkpoints."""
        self.prepare(
            copies=[(copy.group, copy.source, copy.target) for row in rows for copy in row.copies],
            restored=[(row.restore, row.lane) for row in rows if row.restore is not None],
        )

    def prepare(self, *, copies: Sequence[tuple[int, int, int]], restored: Sequence[tuple[int, int]]) -> None:
        """Make page copies (group, source, target), and restore lanes: (checkpoint slot, lane)."""
        for group, stores in enumerate(self._groups):
            pairs = [(source, target) for number, source, target in copies if number == group]
            for store in stores if pairs else ():
                store.copy_pages([source for source, _ in pairs], [target for _, target in pairs])
        if restored:
            slots, lanes = [slot for slot, _ in restored], [lane for _, lane in restored]
            for states in self.lanes:
                states.restore(slots, lanes)

    # ------------------------------------------------------------------ commit

    def kept_drafts(self, paths: Sequence[KeptPath]) -> list[KeptDrafts]:
        """The kept drafts as recurrent layers commit them; rows without kept drafts are left out."""
        return [KeptDrafts(p.lane, tuple(p.rollback_start + index for index in p.path)) for p in paths if p.path]

    def move_kept_pages(self, paths: Sequence[KeptPath]) -> None:
        """Move the keys and values of kept drafts to the slots of their positions; all are read before any is written. Drafts of
        a chain are already in the slots of their positions."""
        size = self.sizes.page_size
        for group, stores in enumerate(self._groups):
            moves = []
            for kept in paths if stores else ():
                pages = kept.pages[group]
                for depth, index in enumerate(kept.path):
                    source, target = kept.stop + index, kept.stop + depth
                    if index != depth:
                        moves.append((pages[source // size], source % size, pages[target // size], target % size))
            if moves:
                table = torch.tensor(moves, dtype=torch.long, device=self._device)
                for store in stores:
                    store.move(table)

    def commits(self, bucket: Bucket) -> bool:
        """Whether a decode step of this padded shape may have drafts to commit. Without recurrent layers, drafts of a chain
        (`depth` is None) need no commit: their keys and values are already in the slots of their positions."""
        return bucket.longest > 1 and (bool(self.lanes) or bucket.depth is not None)

    # ------------------------------------------------------------------ to and from the disk

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Copies on the host of a checkpoint and its pages, named by layer number in the model."""
        found: dict[str, Tensor] = {}
        for name, group, store in self._named():
            if isinstance(store, LaneStore):
                found[f"{name}.state"] = store.saved_states[slot].clone().cpu()
                found[f"{name}.window"] = store.saved_windows[slot].clone().cpu()
            else:
                found |= {f"{name}.{part}": tensor for part, tensor in store.read(pages[group]).items()}
        return found

    def import_checkpoint(self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, Tensor]) -> None:
        for name, group, store in self._named():
            if isinstance(store, PageStore):
                store.fill(page_maps[group], {part: arrays[f"{name}.{part}"] for part in store.parts()})
            elif slot is not None:
                store.saved_states[slot] = arrays[f"{name}.state"].to(self._device)
                store.saved_windows[slot] = arrays[f"{name}.window"].to(self._device)

    def _named(self) -> Iterator[tuple[str, int, LayerStore]]:
        """Every store once, with the name under which it is exported (the layer that writes to it) and its page group."""
        groups = {id(store): number for number, group in enumerate(self._groups) for store in group}
        seen: set[int] = set()
        for index, store in enumerate(self.stores):
            if id(store) not in seen:
                seen.add(id(store))
                yield str(self.first + index), groups.get(id(store), 0), store


class StageState(Protocol):
    """The state of one stage as the engine's process uses it: a ModelState here, or a RemoteState for one in another process."""

    @property
    def sizes(self) -> StateSizes: ...

    def open(self, rows: Sequence[Row]) -> None: ...

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, Tensor]: ...

    def import_checkpoint(
        self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, Tensor]
    ) -> None: ...


class CheckpointLogits:
    """For each checkpoint slot, the float32 logits at its prompt's last position: [slots, V']. Owner: the backend."""

    def __init__(self, checkpoints: int, width: int, device: torch.device) -> None:
        self.rows = torch.zeros(checkpoints, width, dtype=torch.float32, device=device)

    def keep(self, slot: int, logits: Tensor) -> None:
        self.rows[slot, : len(logits)] = logits


Arrays = Mapping[str, npt.NDArray[Any]]


class Snapshots:
    """Copies checkpoints to and from numpy arrays. `dtype` is that of weights and products; if it is bf16, stored 16-bit integers
    are reinterpreted as bf16. Owner: the backend."""

    def __init__(
        self, states: Sequence[StageState], drafter: StageState | None, kept: CheckpointLogits, dtype: torch.dtype
    ) -> None:
        self._named: list[tuple[str, StageState]] = [("layer", state) for state in states]
        if drafter is not None:
            self._named.append(("drafter", drafter))
        self._kept, self._dtype = kept, dtype

    @torch.inference_mode()
    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        found = {"logits": self._kept.rows[slot].cpu().clone()}
        for name, state in self._named:
            found |= {f"{name}.{part}": tensor for part, tensor in state.export_checkpoint(slot, pages).items()}
        return {name: as_stored(tensor) for name, tensor in found.items()}

    @torch.inference_mode()
    def import_checkpoint(self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Arrays) -> None:
        for name, state in self._named:
            own = {part.removeprefix(f"{name}."): array for part, array in arrays.items() if part.startswith(f"{name}.")}
            state.import_checkpoint(slot, page_maps, {part: as_tensor(array, self._dtype) for part, array in own.items()})
        if slot is not None and "logits" in arrays:
            self._kept.keep(slot, as_tensor(arrays["logits"], torch.float32).to(self._kept.rows.device))


def as_stored(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor as a numpy array. numpy has no bf16, so the bits of bf16 are stored as integers."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 and dtype == torch.bfloat16 else tensor
