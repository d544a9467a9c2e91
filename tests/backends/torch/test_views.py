"""Tiles of recorded turns: every node of a tree is read once in what it shares and once in what is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.torch.ops.cuda.attention import OWN, SHARED, TILE_WORDS
from onedraw.backends.torch.ops.cuda.attention_inputs import Heads, device_view, host_view
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import Bucket, InputLayout, Span, fed_layout
from onedraw.backends.torch.runner.staging_buffers import DirectStaging
from onedraw.types import Draft

TREE = tuple(Draft(i, -1 if i < 4 else (i - 4) // 2) for i in range(21))
BUCKET = Bucket(rows=1, tokens=24, longest=24, reach=32_768, depth=32)


@pytest.mark.parametrize("group", [4, 6])
@pytest.mark.parametrize("count", [22, 4])
def test_every_node_is_in_one_tile_of_what_is_shared(group: int, count: int) -> None:
    drafts = TREE[: count - 1]
    layout = InputLayout(16, (2048,), RowRule(floor=1))
    table = tuple(range(2000))
    inputs = fed_layout(
        [0] * count,
        [Span(0, count, 24_000, drafts, lane=0)],
        [(table,)],
        layout=layout,
        staging=DirectStaging(torch.device("cpu")),
        bucket=BUCKET,
    )
    host = host_view(inputs, Heads(4 * group, 4, 256, None, 264))
    assert [(cut.kind, cut.height) for cut in host.layout.cuts] == [
        (SHARED, 64),
        (OWN, 16),
    ]  # of the bucket, which has room for 24
    view = device_view(torch.from_numpy(host.words), host.layout)
    for kind in (SHARED, OWN):
        tiles = np.concatenate([tiles.tiles.numpy() for tiles in view.sets if tiles.kind == kind])
        assert tiles.shape[1] == TILE_WORDS
        read = [token for first, tokens in tiles[:, :2] for token in range(first, first + tokens)]
        assert read == list(range(count))
    assert sorted(view.view.lines[:count].tolist()) == list(range(count))
    assert sum(len(tiles.tokens) for tiles in view.sets) == BUCKET.tokens
