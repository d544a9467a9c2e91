"""Kernels compiled for cards with 99 KiB of shared memory per block fit in it; no such card is needed."""

from __future__ import annotations

import pytest
import torch
import triton

from onedraw.backends.torch.ops.cuda import attention, delta_chunked, experts, hadamard, linear, rope, tree_attention
from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, choose_tile
from tests.backends.torch.compiling import compiled

SM86 = 86
HOPPER_SHARED = 227 * 1024


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 4096, 14336), (22, 28672, 4096), (128, 6144, 4096), (512, 4096, 4096)])
def test_products_fit_on_small_cards(rows: int, n: int, k: int) -> None:
    tile = choose_tile(rows, n, k, torch.bfloat16, SMALL_SHARED)
    pointers = dict.fromkeys(("x", "weight", "bias", "residual", "y"), "*bf16")
    sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "GROUP": tile.group, "K": k}
    flags = {"HAS_BIAS": False, "HAS_RESIDUAL": True, "GATE": 0, "EVEN_N": True, "IEEE": False, "PDL": False}
    flags |= {"SWAPPED": tile.swapped}
    kernel = compiled(linear._linear, pointers, {**sizes, **flags}, capability=SM86, num_warps=tile.warps, num_stages=tile.stages)
    assert kernel.metadata.shared <= SMALL_SHARED


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kept"),
    [
        *((h, k, d, "bf16") for h, k, d in ((32, 8, 64), (32, 8, 128), (24, 4, 256), (32, 4, 512))),
        (24, 4, 256, "int8"),
        (32, 8, 128, "fp8"),
        (24, 4, 256, "int4"),
        (32, 8, 64, "int4"),
    ],
)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("capability", [SM86, 90])
def test_attention_fits_on_small_cards(heads: int, kv_heads: int, dim: int, kept: str, capability: int, tree: bool) -> None:
    """Float and quantized KV caches; the tallest tile, and the lowest one for tree nodes."""
    small, shared = capability == SM86, SMALL_SHARED if capability == SM86 else HOPPER_SHARED
    height = AttentionShape(heads, kv_heads, dim, None, 200, small_shared_memory=small).tile_heights[0 if tree else -1]
    kv_quant = {"bf16": 0, "int8": 1, "fp8": 2, "int4": 3}[kept]
    pointers = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("keys", "values"), "*i16" if kv_quant else "*bf16")
    pointers |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    pointers |= dict.fromkeys(("split_acc", "split_max", "split_sum"), "*fp32") | {"scale": "fp32"}
    pointers |= dict.fromkeys(("tiles", "first_keys", "last_keys", "merge_rows", "page_table"), "*i32")
    numbers = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "BLOCK_D": dim,
        "PAGE_SIZE": 16,
        "BLOCK_M": height,
        "KV_QUANT": kv_quant,
    }
    numbers |= {"BLOCK_KEYS": attention.block_keys(dim), "FIRST_SPLIT": attention.FIRST_SPLIT}
    numbers |= {"IEEE": False, "PDL": False}
    if tree:
        numbers |= {"COLUMNS": min(dim, attention.TREE_COLUMNS), "SPLITS_PER_LOAD": 16}
        numbers["MERGE_HEADS"] = triton.next_power_of_2(heads // kv_heads)
        kernel = compiled(
            tree_attention.attend_tree_paths, pointers | {"paths": "*i32"}, numbers, capability=capability, num_warps=4
        )
    else:
        numbers |= {"SEQUENTIAL": False, "STAGES": attention._stages(height, dim, 2, shared)}
        warps = attention._warps(height, dim, False)
        kernel = compiled(attention._attend, pointers, numbers, capability=capability, num_warps=warps)
    assert kernel.metadata.shared <= shared


def test_chunked_delta_and_experts_fit_on_small_cards() -> None:
    kinds = dict.fromkeys(("q", "k", "v", "gates", "inverse", "scores", "states", "saved_states", "out"), "*fp32")
    kinds |= dict.fromkeys(("chunks", "spans", "save_slots"), "*i32")
    sizes = {"KEY_HEADS": 16, "VALUE_HEADS": 48, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_K": 128, "CHUNK_LENGTH": 64}
    options = {"capability": SM86, "num_warps": delta_chunked.CHUNK_WARPS, "num_stages": 1}
    kernel = compiled(delta_chunked._scan_chunks, kinds, {**sizes, "BLOCK_V": delta_chunked.CHUNK_COLUMNS}, **options)
    assert kernel.metadata.shared <= SMALL_SHARED
    kinds = dict.fromkeys(("x", "weight", "y"), "*bf16") | dict.fromkeys(("order", "tiles"), "*i32")
    for height, columns, depth in ((16, 64, 128), (64, 128, 64)):
        for gate in (0, 1):
            numbers = {"DIVIDE": 8, "K": 2048, "GATE": gate, "BLOCK_M": height, "BLOCK_K": depth, "PDL": False}
            numbers["BLOCK_N"] = columns // 2 if gate else columns
            kernel = compiled(experts._grouped_gemm, kinds, numbers, capability=SM86, num_warps=4, num_stages=3)
            assert kernel.metadata.shared <= SMALL_SHARED


@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("capability", [75, SM86])
def test_transforms_of_heads_for_keys_and_values_of_4_bits_compile(dim: int, capability: int) -> None:
    dtype, block = "*fp16" if capability == 75 else "*bf16", triton.next_power_of_2(dim)
    sizes = {"HEADS": 6, "D": dim, "BLOCK_D": block, "BLOCK_HEADS": 4, "EXPONENT": hadamard.exponent_of(dim), "PDL": False}
    options = {"capability": capability, "num_warps": 4}
    assert compiled(hadamard._transform_outputs, {"x": dtype}, sizes, **options).metadata.shared <= SMALL_SHARED
    kinds = dict.fromkeys(("x", "queries", "cos_sin", "q_norm", "k_norm"), dtype) | dict.fromkeys(("keys", "values"), "*u8")
    kinds |= dict.fromkeys(("key_scales", "value_scales"), "*fp32") | {"eps": "fp32"}
    kinds |= dict.fromkeys(("positions", "rows", "slots", "page_table"), "*i32")
    sizes |= {"KV_HEADS": 2, "ROTARY_HALF": dim // 2, "PAGE_SIZE": 16, "LARGEST": 15.0, "SCALES": 16.5}
    flags = {"Q_NORM": True, "K_NORM": True, "FP32_WEIGHT": False, "V_NORM": False, "KEYS_AS_VALUES": False}
    assert compiled(rope._norm_rope_and_cache, kinds, {**sizes, **flags}, **options).metadata.shared <= SMALL_SHARED
