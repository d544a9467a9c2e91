"""The Triton kernels without a GPU: their logic under the interpreter, and tiles that fit small cards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from onedraw.backends.torch.ops.cuda.attention import block_keys, split_indices
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, choose_tile

LARGE_SHARED = 227 * 1024


def passed_under_the_interpreter(folder: Path, file: str, tests: Sequence[str] = (), *, only: str = "") -> set[str]:
    """Run a device test file, or some of its tests, in a new process: Triton reads TRITON_INTERPRET when it is imported. No test
    may fail; the names of those that passed are returned. `only`: an expression of pytest's -k."""
    report, path = folder / "report.xml", f"tests/device/{file}"
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", only]
    command = [sys.executable, "-m", "pytest", *options, *([f"{path}::{test}" for test in tests] or [path])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    cases = ElementTree.parse(report).iter("testcase")
    return {str(case.get("name")).partition("[")[0] for case in cases if case.find("skipped") is None}


def test_delta_and_experts_pass_under_the_interpreter(tmp_path: Path) -> None:
    tests = [
        "test_a_committed_draft_leaves_the_state_of_a_known_token",
        "test_a_tree_node_has_the_bits_of_a_chain_that_equals_its_path",
        "test_parallel_branches_have_the_bits_of_one_branch_after_the_other",
        "test_convolution_windows_are_read_before_they_are_written",
        "test_the_output_is_a_gated_norm",
        "test_experts_are_added_in_expert_order_whatever_the_batch",
        "test_pairs_are_grouped_as_by_sorting",
        "test_experts_are_selected_as_in_plain_torch",
        "test_a_row_of_nan_logits_gets_distinct_experts_and_a_nan_output",
    ]
    assert passed_under_the_interpreter(tmp_path, "test_delta_and_experts.py", tests) == set(tests)


def test_top_k_and_top_p_limits_pass_under_the_interpreter(tmp_path: Path) -> None:
    tests = ["test_limits_are_found_with_any_number_of_tokens_near_them"]
    assert passed_under_the_interpreter(tmp_path, "test_sampler.py", tests, only="0.01-64 or 8.0-4096") == set(tests)


def test_sampling_with_logprobs_and_masks_passes_under_the_interpreter(tmp_path: Path) -> None:
    tests = [
        "test_every_row_is_sampled_by_the_rule",
        "test_the_most_likely_tokens_of_equal_logits_are_the_lowest_ids",
        "test_masks_applied_to_the_rows_of_neighbours_are_caught",
    ]
    assert passed_under_the_interpreter(tmp_path, "test_sampler.py", tests) == set(tests)


def test_requests_of_every_kind_in_captured_steps_pass_under_the_interpreter(tmp_path: Path) -> None:
    tests = [
        "test_rows_with_logprobs_and_constraints_have_the_bits_of_eager_steps_in_captured_ones",
        "test_a_planted_fault_in_what_rows_request_is_caught",
    ]
    assert passed_under_the_interpreter(tmp_path, "test_cuda_graphs.py", tests) == set(tests)


def test_captured_steps_pass_under_the_interpreter(tmp_path: Path) -> None:
    tests = [
        "test_captured_steps_have_the_bits_of_eager_steps",
        "test_steps_launched_ahead_have_the_bits_of_eager_steps",
        "test_a_planted_fault_in_steps_launched_ahead_is_caught",
        "test_sampling_inputs_that_exceed_their_staging_buffer_change_nothing",
        "test_sampling_that_reads_memory_shared_between_captures_is_caught",
        "test_overflow_ends_its_rows_and_names_the_layer_with_a_step_launched_ahead",
        "test_warmed_up_verify_steps_are_not_captured_again_and_change_no_state",
    ]
    assert passed_under_the_interpreter(tmp_path, "test_cuda_graphs.py", tests) == set(tests)


def test_captured_stages_pass_under_the_interpreter(tmp_path: Path) -> None:
    tests = [
        "test_captured_stages_have_the_bits_of_one_stage",
        "test_a_stage_that_reads_the_staging_buffer_of_another_step_is_caught",
        "test_captured_stages_beside_eager_stages_have_the_bits_of_eager_stages",
        "test_captured_steps_in_flight_at_once_have_the_bits_of_eager_steps",
    ]
    assert passed_under_the_interpreter(tmp_path, "test_pipeline_graphs.py", tests) == set(tests)


def test_a_quantized_cache_passes_under_the_interpreter(tmp_path: Path) -> None:
    tests = [
        "test_every_code_is_unpacked_to_its_value",
        "test_outputs_are_transformed_as_in_plain_torch",
        "test_codes_and_scales_are_written_as_in_plain_torch",
        "test_a_value_that_is_not_finite_affects_only_its_row",
        "test_quantized_attention_is_right_and_no_batch_chunk_or_tile_changes_a_bit",
        "test_a_kept_draft_is_moved_with_its_scales",
    ]
    assert passed_under_the_interpreter(tmp_path, "test_kv_quant.py", tests) == set(tests)


def test_tree_attention_passes_under_the_interpreter(tmp_path: Path) -> None:
    tests = ["test_a_tree_node_has_the_bits_of_the_chain_that_equals_its_path"]
    assert passed_under_the_interpreter(tmp_path, "test_tree_attention.py", tests) == set(tests)


def test_products_of_few_rows_pass_under_the_interpreter(tmp_path: Path) -> None:
    tests = ["test_a_row_has_the_same_bits_alone_and_in_a_batch_for_every_shape"]
    assert passed_under_the_interpreter(tmp_path, "test_few_row_products.py", tests) == set(tests)


def test_products_of_many_rows_pass_under_the_interpreter(tmp_path: Path) -> None:
    tests = ["test_a_row_has_the_same_bits_alone_and_in_a_large_batch", "test_products_by_cublas_have_the_bits_of_the_kernel"]
    assert passed_under_the_interpreter(tmp_path, "test_many_row_products.py", tests) == set(tests)


def test_large_offsets_pass_under_the_interpreter(tmp_path: Path) -> None:
    """Some of them are skipped where the system does not overcommit memory."""
    assert passed_under_the_interpreter(tmp_path, "test_large.py")


@pytest.mark.parametrize("shared", [SMALL_SHARED, LARGE_SHARED])
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 64, 100, 200, 2048])
def test_every_tile_fits_in_the_shared_memory_of_its_card(rows: int, shared: int) -> None:
    for n, k in ((6144, 4096), (4096, 14336), (128256, 4096), (5120, 17408), (576, 576), (49152, 576)):
        assert choose_tile(rows, n, k, torch.bfloat16, shared).shared(2) <= shared


def test_splits_are_consecutive_and_start_at_block_boundaries() -> None:
    split = split_indices(np.arange(40_000))
    begins = np.flatnonzero(np.diff(split, prepend=-1))
    assert set(np.diff(split)) == {0, 1}
    assert not (begins % max(block_keys(dim) for dim in (64, 128, 256, 512))).any()
    for low, high, length in ((0, 1024, 128), (1024, 2048, 256), (2048, 8192, 512), (8192, 39_000, 1024)):
        inside = begins[(begins >= low) & (begins < high)]
        assert set(np.diff(inside)) == {length}
