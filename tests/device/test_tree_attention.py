"""Tree attention: a node gets the same bits as the last token of a chain that equals its path, at any block or split offset.

On a GPU, or under Triton's interpreter.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, Span, lay_out
from onedraw.types import Draft

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float16
PAGE, PAGES = 16, 200
PARENTS = (-1, -1, 0, 2, 1, 4, 3, 3)
PATHS = ((0, 2, 3, 7), (0, 2, 3, 6), (1, 4, 5))
# Some of these make a path cross from one split into the next.
STARTS = (127, 254, 300, 1015)
if not INTERPRETED:
    STARTS += (5, 128, 253, 255, 505, 510, 511, 512, 1022, 2043, 2046, 2560, 3000)
SHAPES = [(4, 2, 16, None), (4, 2, 16, 100), (12, 2, 16, None)]
if not INTERPRETED:
    SHAPES += [(32, 8, 128, None), (24, 4, 256, None), (24, 4, 256, 300)]
WIDE = tuple(-1 if i < 4 else (i - 4) // 2 for i in range(21))  # more nodes than one tile holds with six query heads per KV head
WIDE_PATHS = ((0, 4, 12), (3, 11), (2, 9), (1, 7, 18), (1, 7, 19))


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=DTYPE)


class AttentionCase:
    """One layer's KV pages, and a row that reads them."""

    def __init__(self, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
        self.heads, self.kv_heads, self.dim, self.window = heads, kv_heads, dim, window
        self.table = np.random.default_rng(3).permutation(PAGES).tolist()
        self.keys, self.values = (normal(PAGES, kv_heads, PAGE, dim, seed=seed) for seed in (1, 2))

    def inputs(self, start: int, drafts: tuple[Draft, ...]) -> Inputs:
        count = 1 + len(drafts)
        layout = InputLayout(PAGE, (PAGES,), RowRule(floor=1), windows=(self.window,))
        return lay_out([0] * count, [Span(0, count, start, drafts)], [(self.table,)], layout=layout, device=DEVICE)

    def attend(self, q: Tensor, inputs: Inputs, keys: Tensor, values: Tensor) -> Tensor:
        from onedraw.backends.torch.ops.cuda.attention import attend
        from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape, stage_attention_inputs

        device = stage_attention_inputs(inputs, AttentionShape(self.heads, self.kv_heads, self.dim, self.window, full_grid=64))
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "scale": self.dim**-0.5}
        flat = [store.view(-1, PAGE * self.dim) for store in (keys, values)]
        return attend(q, *flat, metadata=device.metadata, tile_sets=list(device.tile_sets), **sizes)  # type: ignore[arg-type]

    def as_chain(self, store: Tensor, start: int, path: tuple[int, ...]) -> Tensor:
        """The page store with the nodes of a path in the slots of their depths, as a chain would have written them."""
        found = store.clone()
        for depth, node in enumerate(path):
            source, target = start + 1 + node, start + 1 + depth
            found[self.table[target // PAGE], :, target % PAGE] = store[self.table[source // PAGE], :, source % PAGE]
        return found

    def reference(self, q: Tensor, last: int, keys: Tensor, values: Tensor) -> Tensor:
        """One query at position `last`, in float64."""
        first = 0 if self.window is None else max(0, last - self.window + 1)
        at = np.arange(first, last + 1)
        pages, place = torch.tensor([self.table[p // PAGE] for p in at]), torch.from_numpy(at % PAGE)
        k, v = (x.cpu().double()[pages, :, place].repeat_interleave(self.heads // self.kv_heads, 1) for x in (keys, values))
        weights = torch.einsum("hd,nhd->hn", q.cpu().double().view(self.heads, -1), k).mul(self.dim**-0.5).softmax(1)
        return torch.einsum("hn,nhd->hd", weights, v).reshape(-1)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), SHAPES)
def test_a_tree_node_has_the_bits_of_the_chain_that_equals_its_path(
    heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    case = AttentionCase(heads, kv_heads, dim, window)
    parents, paths = (WIDE, WIDE_PATHS) if heads // kv_heads == 6 else (PARENTS, PATHS)
    tree = tuple(Draft(i, parent) for i, parent in enumerate(parents))
    q = normal(1 + len(tree), heads * dim, seed=7)
    for start in STARTS:
        found = case.attend(q, case.inputs(start, tree), case.keys, case.values)
        for path in paths:
            tokens = [0, *(1 + node for node in path)]
            chain = tuple(Draft(0, i - 1) for i in range(len(path)))
            stores = [case.as_chain(store, start, path) for store in (case.keys, case.values)]
            chain_output = case.attend(q[tokens], case.inputs(start, chain), *stores)
            assert torch.equal(chain_output, found[tokens]), (start, path)
            expected = case.reference(q[tokens[-1]], start + len(path), *stores)
            error = (found[tokens[-1]].cpu().double() - expected).norm() / expected.norm()
            assert error < 2e-3, (start, path, float(error))
