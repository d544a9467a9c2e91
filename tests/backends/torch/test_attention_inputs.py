"""Attention tiles of captured steps: every tree node is in one TREE_PREFIX tile and in one TREE_PATH tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.torch.ops.cuda.attention import TILE_WORDS, TREE_PATH, TREE_PREFIX
from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape, device_attention_inputs, host_attention_inputs
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import Bucket, InputLayout, Span, staged_layout
from onedraw.backends.torch.runner.staging_buffers import DirectStaging
from onedraw.types import Draft

TREE = tuple(Draft(i, -1 if i < 4 else (i - 4) // 2) for i in range(21))
BUCKET = Bucket(rows=1, tokens=24, longest=24, reach=32_768, depth=32)


@pytest.mark.parametrize("group", [4, 6])
@pytest.mark.parametrize("count", [22, 4])
def test_every_tree_node_is_in_one_prefix_tile_and_one_path_tile(group: int, count: int) -> None:
    drafts = TREE[: count - 1]
    layout = InputLayout(16, (2048,), RowRule(floor=1))
    table = tuple(range(2000))
    inputs = staged_layout(
        [0] * count,
        [Span(0, count, 24_000, drafts, lane=0)],
        [(table,)],
        layout=layout,
        staging=DirectStaging(torch.device("cpu")),
        bucket=BUCKET,
    )
    host = host_attention_inputs(inputs, AttentionShape(4 * group, 4, 256, None, 264))
    assert [(tile_set.kind, tile_set.height) for tile_set in host.layout.tile_sets] == [
        (TREE_PREFIX, 64),
        (TREE_PATH, 16),
    ]  # heights of the bucket, which has 24 tokens
    device = device_attention_inputs(torch.from_numpy(host.words), host.layout)
    for kind in (TREE_PREFIX, TREE_PATH):
        tiles = np.concatenate([tiles.tiles.numpy() for tiles in device.tile_sets if tiles.kind == kind])
        assert tiles.shape[1] == TILE_WORDS
        read = [token for first, tokens in tiles[:, :2] for token in range(first, first + tokens)]
        assert read == list(range(count))
    assert sorted(device.metadata.merge_rows[:count].tolist()) == list(range(count))
    assert sum(len(tiles.merge_tokens) for tiles in device.tile_sets) == BUCKET.tokens
