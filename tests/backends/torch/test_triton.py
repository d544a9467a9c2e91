"""The Triton kernels where there is no accelerator: their logic under the interpreter, and tiles that fit small cards."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from onedraw.backends.torch.ops.cuda.attention import block_keys, split_indices
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, choose_tile

LARGE_SHARED = 227 * 1024


def under_the_interpreter(file: str, chosen: str = "") -> str:
    """Tests of a file in a process of their own: the interpreter is chosen when Triton is imported."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        file,
        *(["-k", chosen] if chosen else []),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    return ran.stdout


def test_states_and_experts_are_right_under_the_interpreter() -> None:
    chosen = "kept_draft or tree or side_by_side or windows or experts or gated_norm or brought"
    assert "15 passed" in under_the_interpreter("tests/device/test_states.py", chosen)


def test_limits_are_found_under_the_interpreter() -> None:
    assert "2 passed" in under_the_interpreter("tests/device/test_sampler.py", "near and (0.01-64 or 8.0-4096)")


def test_turns_that_are_padded_and_replayed_have_the_bits_of_plain_ones_under_the_interpreter() -> None:
    assert "10 passed" in under_the_interpreter("tests/device/test_steady.py")


def test_recorded_parts_of_a_split_have_the_bits_of_the_whole_under_the_interpreter() -> None:
    assert "4 passed" in under_the_interpreter("tests/device/test_parts.py")


def test_codes_are_written_read_and_brought_home_under_the_interpreter() -> None:
    chosen = "every_code or written or not_finite or tile_changes or scales"
    assert "9 passed" in under_the_interpreter("tests/device/test_codes.py", chosen)


def test_a_node_of_a_tree_reads_like_a_chain_under_the_interpreter() -> None:
    assert "3 passed" in under_the_interpreter("tests/device/test_branches.py")


def test_products_of_a_few_rows_are_right_under_the_interpreter() -> None:
    assert "1 passed" in under_the_interpreter("tests/device/test_skinny.py")


def test_kernels_reach_far_into_large_memory_under_the_interpreter() -> None:
    assert " passed" in under_the_interpreter("tests/device/test_large.py")


@pytest.mark.parametrize("shared", [SMALL_SHARED, LARGE_SHARED])
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 64, 100, 200, 2048])
def test_every_tile_fits_into_the_shared_memory_of_its_card(rows: int, shared: int) -> None:
    for n, k in ((6144, 4096), (4096, 14336), (128256, 4096), (5120, 17408), (576, 576), (49152, 576)):
        assert choose_tile(rows, n, k, torch.bfloat16, shared).shared(2) <= shared


def test_splits_follow_each_other_and_none_begins_inside_a_block() -> None:
    split = split_indices(np.arange(40_000))
    begins = np.flatnonzero(np.diff(split, prepend=-1))
    assert set(np.diff(split)) == {0, 1}
    assert not (begins % max(block_keys(dim) for dim in (64, 128, 256, 512))).any()
    for low, high, length in ((0, 1024, 128), (1024, 2048, 256), (2048, 8192, 512), (8192, 39_000, 1024)):
        inside = begins[(begins >= low) & (begins < high)]
        assert set(np.diff(inside)) == {length}
