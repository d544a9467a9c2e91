"""The state of a stage between steps: KV pages and recurrent states, as arrays that programs update in place (donated arrays).

In: sizes, then the rows of each step. Out: one dictionary of arrays per layer of the stage, which every program takes and
returns. After every step, pages and lane (slot of a recurrent state) of a row hold the state after its kept tokens. Lanes, pages
and checkpoints have one extra entry at the end, which padding reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from onedraw.backends.xla import delta
from onedraw.backends.xla.inputs import CompiledShapes
from onedraw.backends.xla.platform import DTYPES, Array
from onedraw.backends.xla.weights import Weights
from onedraw.errors import OutOfMemory
from onedraw.models.spec import AttentionSpec, LayerSpec
from onedraw.types import Row

State = list[Weights]
COPIES = 16  # most page copies, and most restored lanes, of one call of `apply_copies`


def allocate(layers: Sequence[LayerSpec], shape: CompiledShapes, *, dtype: str, device: jax.Device) -> State:
    found: State = []
    try:
        with jax.default_device(device):
            for layer in layers:
                found.append({name: jnp.zeros(size, kind) for name, (size, kind) in _sizes(layer, shape, dtype).items()})
            jax.block_until_ready(found)
    except (RuntimeError, MemoryError):  # jax reports that memory is exhausted by one of these
        raise OutOfMemory(
            f"KV pages for {shape.max_context} tokens and the states of {shape.lanes} lanes do not fit into {device}; "
            f"lower --kv-memory, --max-context or --max-batch"
        ) from None
    return [{name: jax.device_put(array, device) for name, array in layer.items()} for layer in found]


def _sizes(layer: LayerSpec, shape: CompiledShapes, dtype: str) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of a layer's arrays. A layer that reuses the keys and values of another layer has none."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        if mixer.reuses is not None:
            return {}
        slots = (shape.pages[shape.windows.index(mixer.window)] + 1) * shape.page_size
        size = (slots, mixer.kv_heads, mixer.head_dim)
        return {"keys": (size, DTYPES[dtype]), "values": (size, DTYPES[dtype])}
    head = (mixer.value_heads, mixer.key_dim, mixer.value_dim)
    window = (mixer.conv - 1, mixer.channels)
    lanes, slots = shape.lanes + 1, shape.checkpoints + 1
    return {
        "states": ((lanes, *head), jnp.float32),
        "windows": ((lanes, *window), jnp.float32),
        "saved_states": ((slots, *head), jnp.float32),
        "saved_windows": ((slots, *window), jnp.float32),
    }


def copies_before(rows: Sequence[Row], shape: CompiledShapes) -> list[dict[str, npt.NDArray[np.int32]]]:
    """The page copies and checkpoint restores that come before a step, in parts of a fixed size; empty if there are none."""
    copies = [[(c.source, c.target) for row in rows for c in row.copies if c.group == group] for group in range(len(shape.pages))]
    restored = [(row.restore, row.lane) for row in rows if row.restore is not None]
    parts = -(-max(len(restored), *map(len, copies)) // COPIES)
    return [
        {
            "pages": np.stack([_padded(own, part, shape.pages[group]) for group, own in enumerate(copies)]),
            "lanes": _padded(restored, part, shape.checkpoints, shape.lanes),
        }
        for part in range(parts)
    ]


def no_copies(shape: CompiledShapes) -> dict[str, npt.NDArray[np.int32]]:
    pages = np.stack([_padded((), 0, scratch) for scratch in shape.pages])
    return {"pages": pages, "lanes": _padded((), 0, shape.checkpoints, shape.lanes)}


def _padded(pairs: Sequence[tuple[int, int]], part: int, *padding: int) -> npt.NDArray[np.int32]:
    """Pairs [part * COPIES, (part + 1) * COPIES) as an array [COPIES, 2], padded with copies from and to the padding entry."""
    found = np.empty((COPIES, 2), dtype=np.int32)
    found[:] = padding if len(padding) == 2 else padding * 2
    here = pairs[part * COPIES : (part + 1) * COPIES]
    if here:
        found[: len(here)] = here
    return found


def apply_copies(state: State, copied: dict[str, Array], *, layers: Sequence[LayerSpec], shape: CompiledShapes) -> State:
    """Copy shared pages that a row is going to write to (copy on write), and the states of checkpoints into lanes."""
    found: State = []
    for layer, store in zip(layers, state, strict=True):
        if isinstance(layer.mixer, AttentionSpec):
            source, target = copied["pages"][shape.windows.index(layer.mixer.window)].T
            paged = {name: array.reshape(-1, shape.page_size, *array.shape[1:]) for name, array in store.items()}
            paged = {name: array.at[target].set(array[source]) for name, array in paged.items()}
            found.append({name: array.reshape(-1, *array.shape[2:]) for name, array in paged.items()})
        else:
            slot, lane = copied["lanes"].T
            moved = {name: store[name].at[lane].set(store[f"saved_{name}"][slot]) for name in ("states", "windows")}
            found.append({**store, **moved})
    return found


def commit_drafts(
    state: State,
    increments: Sequence[Weights],
    sampled: Array,
    drafts: dict[str, Any],
    *,
    layers: Sequence[LayerSpec],
    shape: CompiledShapes,
) -> State:
    """Commit kept drafts: move keys and values of tree nodes to the slots of their positions, and update the lanes' states."""
    kept = verified(sampled, drafts, shape)
    found: State = []
    for layer, store, own in zip(layers, state, increments, strict=True):
        if isinstance(layer.mixer, AttentionSpec):
            group = shape.windows.index(layer.mixer.window)
            padding = shape.pages[group] * shape.page_size
            source = drafts["sources"][group]
            target = jnp.where(kept, drafts["targets"][group], padding)
            found.append({name: array.at[target].set(array[source]) for name, array in store.items()})
        else:
            found.append(delta.commit(store, own, kept, drafts))
    return found


def verified(sampled: Array, drafts: dict[str, Any], shape: CompiledShapes) -> Array:
    """Which of the D drafts of a step are kept, [D]. A draft is kept if its parent is the last kept token of its row and the
    token sampled after the parent equals the draft; this is the rule of `sampling.verify.kept_drafts` for all rows."""
    rows = shape.lanes + 1

    def one(index: jax.Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        kept, last = carry
        row = drafts["rows"][index]
        right = (drafts["parents"][index] == last[row]) & (drafts["tokens"][index] == sampled[drafts["picks"][index]])
        return kept.at[index].set(right), last.at[row].set(jnp.where(right, index.astype(jnp.int32), last[row]))

    begin = (jnp.zeros(max(shape.drafts, 1), bool), jnp.full(rows, -1, jnp.int32))
    return jax.lax.fori_loop(0, drafts["count"], one, begin)[0]


# ------------------------------------------------------------------ snapshots


@jax.jit
def take(array: Array, index: Array) -> Array:
    return array[index]


@partial(jax.jit, donate_argnums=0)
def put(array: Array, index: Array, value: Array) -> Array:
    return array.at[index].set(value)


def as_stored(array: Array) -> npt.NDArray[Any]:
    """The array as it is stored in a file. numpy has no bf16, so the bits of bf16 are stored as int16."""
    found = np.asarray(array)
    return found.view(np.int16) if array.dtype == jnp.bfloat16 else found


def as_given(array: npt.NDArray[Any], like: Array) -> npt.NDArray[Any]:
    found = array.view(like.dtype) if like.dtype == jnp.bfloat16 and array.dtype == np.int16 else array
    if found.dtype != like.dtype:
        raise ValueError(f"the array is {found.dtype}, expected {like.dtype}")
    return found


def export_checkpoint(
    state: State, layers: Sequence[LayerSpec], slot: int, pages: Sequence[Sequence[int]], *, shape: CompiledShapes, first: int
) -> dict[str, npt.NDArray[Any]]:
    """Copies on the host of a checkpoint's recurrent states and pages, named by the layer's index in the model and the array's
    name. `pages`: for each group, the pages to copy. `first`: the index of the stage's first layer."""
    found: dict[str, npt.NDArray[Any]] = {}
    for index, (layer, store) in enumerate(zip(layers, state, strict=True)):
        if isinstance(layer.mixer, AttentionSpec):
            wanted = pages[shape.windows.index(layer.mixer.window)]
            for name, array in store.items():
                size = (0, shape.page_size, *array.shape[1:])
                parts = [as_stored(take(array, slots_of(page, shape)))[None] for page in wanted]
                found[f"{first + index}.{name}"] = np.concatenate(parts) if parts else np.zeros(size, np.float32)
        else:
            for name in ("states", "windows"):
                found[f"{first + index}.{name}"] = as_stored(take(store[f"saved_{name}"], np.int32(slot)))
    return found


def import_checkpoint(
    state: State,
    layers: Sequence[LayerSpec],
    slot: int | None,
    page_maps: Sequence[Mapping[int, int]],
    arrays: Mapping[str, npt.NDArray[Any]],
    *,
    shape: CompiledShapes,
    first: int,
) -> None:
    """Write the arrays that `export_checkpoint` returned into `state`. `page_maps`: for each group, from the index of a stored
    page to the page that receives it. `slot`: the checkpoint slot for the recurrent states; None: only import pages."""
    for index, (layer, store) in enumerate(zip(layers, state, strict=True)):
        if isinstance(layer.mixer, AttentionSpec):
            for name in store:
                given = as_given(arrays[f"{first + index}.{name}"], store[name])
                if given.shape[1:] != (shape.page_size, *store[name].shape[1:]):
                    raise ValueError(f"pages have shape {given.shape[1:]}, expected {(shape.page_size, *store[name].shape[1:])}")
                for stored, page in page_maps[shape.windows.index(layer.mixer.window)].items():
                    store[name] = put(store[name], slots_of(page, shape), given[stored])
        elif slot is not None:
            for name in ("states", "windows"):
                saved = f"saved_{name}"
                store[saved] = put(store[saved], np.int32(slot), as_given(arrays[f"{first + index}.{name}"], store[saved]))


def slots_of(page: int, shape: CompiledShapes) -> Any:
    return page * shape.page_size + np.arange(shape.page_size, dtype=np.int32)
