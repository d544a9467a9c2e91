"""Packed weights on CPUs and GPUs: which tensors stay quantized, their bytes, and when --dtype auto selects them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from onedraw.backends.devices import Device
from onedraw.backends.memory_plan import memory_plan
from onedraw.backends.packing import (
    cpu_packed_bytes,
    gpu_packed_bytes,
    gpu_packed_savings,
    matrix_kinds,
    partial_sum_bytes,
    plan_weight_storage,
    product_dtypes,
    saves_memory,
    why_not_gpu_packed,
)
from onedraw.checkpoints.base import StoredTensor
from onedraw.checkpoints.dequantize import QUANT_TYPES
from onedraw.checkpoints.random_weights import RandomQuantTensor
from onedraw.errors import BadSetting
from onedraw.models.source import ADD_ONE, ColumnSelection, ElementwiseTensor, RowSelection
from onedraw.models.weight_names import weight_shapes
from tests.support.quantized_weights import FLOAT_KINDS, QUANTIZED_KINDS, quantized_weights, random_tensor, tiny_spec

CPU, GPU = Device("cpu", "cpu"), Device("cuda:0", "cuda", "sm90")
OLD, REFUSED = Device("cuda:1", "cuda", "sm75"), Device("hip:0", "hip", "gfx906")
REQUEST = {"requested": "auto", "activations": "int8", "stream": "auto", "kinds": {"Q4_1"}, "no_kernels": {}}


def test_packed_weights_take_the_bytes_of_the_file_except_for_six_bit_scales() -> None:
    for kind in (*QUANTIZED_KINDS, *FLOAT_KINDS):
        size = cpu_packed_bytes((64, 512), kind)
        on_disk = 64 * 512 // QUANT_TYPES[kind].block_values * QUANT_TYPES[kind].block_bytes
        assert on_disk <= size <= on_disk * (1.03 if kind in ("Q4_K", "Q5_K") else 1)


def test_rows_are_padded_to_whole_panels_also_in_a_stack_of_experts() -> None:
    assert cpu_packed_bytes((3, 33, 64), "Q8_0") == 3 * 64 * 64 // 32 * 34


@pytest.mark.parametrize("tied", [True, False])
def test_the_memory_plan_counts_packed_weights(tied: bool) -> None:
    spec = tiny_spec(tied=tied)
    weights = quantized_weights(spec, ("Q4_1",))
    storage = plan_weight_storage(weights, "packed")
    matrices = sum(weights.tensor(i, name).data.nbytes for i in range(2) for name in ("q", "k", "v", "o", "gate", "up", "down"))
    norms = 5 * 256 * 4
    head = 320 * 256 // 32 * 20  # 300 rows padded to whole panels; an untied embedding is read from the file
    assert storage.weights.total == matrices + norms + head
    plan = memory_plan(spec, dtype="packed", weights=storage.weights, max_batch=1, page_size=16)
    assert plan.weight_bytes == storage.weights.total
    assert plan.kv_dtype == "f16"
    assert dict(storage.kept) == {"Q4_1": 15 if tied else 16}
    assert not storage.converted


def test_dequantized_tensors_are_listed_with_the_reason() -> None:
    spec = tiny_spec(tied=True)
    weights = quantized_weights(spec, ("Q4_1", "Q3_K"))
    converted = plan_weight_storage(weights, "packed").converted
    assert {(kind, why) for kind, why, _ in converted} == {("Q3_K", "no kernel reads this kind")}
    assert saves_memory(matrix_kinds(weights))
    plain = quantized_weights(spec, ("F32",))
    assert not saves_memory(matrix_kinds(plain))
    assert not plan_weight_storage(plain, "packed").converted


def test_tensors_with_permuted_rows_stay_packed_and_with_permuted_columns_do_not() -> None:
    tensor: StoredTensor = random_tensor("w", (4, 64), "Q8_0", np.random.default_rng(0))
    taken = RowSelection(tensor, np.array([3, 1]))
    assert taken.stays_packed
    raw = taken.packed()
    assert raw is not None
    assert np.array_equal(raw, tensor.packed()[[3, 1]])
    moved = ColumnSelection(tensor, np.arange(64)[::-1].copy())
    assert not moved.stays_packed
    assert moved.packed() is None


def dtypes_of(*devices: Device, **changes: Any) -> tuple[str, ...]:
    return product_dtypes(devices, **REQUEST | changes)


def test_auto_is_packed_on_cpus_if_it_saves_memory() -> None:
    assert dtypes_of(CPU) == ("packed",)
    assert dtypes_of(CPU, CPU, activations="f32") == ("packed-f32", "packed-f32")
    assert dtypes_of(CPU, stream="bf16") == ("packed",)
    assert dtypes_of(CPU, kinds={"F32"}) == ("f32",)
    assert dtypes_of(CPU, no_kernels={"cpu": "no compiler"}) == ("f32",)
    assert dtypes_of(CPU, requested="f32") == ("f32",)
    assert dtypes_of(CPU, requested="bf16", activations="f32") == ("bf16",)
    assert dtypes_of(CPU, requested="packed", kinds={"F32"}) == ("packed",)


@pytest.mark.parametrize(
    ("devices", "changes", "message"),
    [
        ([REFUSED], {}, r"no kernels read packed weights on hip:0 \(gfx906\); use --dtype bf16 or f16"),
        ([CPU, REFUSED], {}, "on hip:0"),
        ([CPU], {"no_kernels": {"cpu": "no compiler"}}, "no CPU kernels: no compiler; use --dtype f32"),
        ([GPU], {"no_kernels": {"tensor cores": "no NVRTC"}}, "no GPU kernels: no NVRTC, or use --dtype bf16"),
        ([OLD], {"no_kernels": {"triton": "no Triton"}}, "no GPU kernels: no Triton, or use --dtype f16"),
    ],
)
def test_packed_weights_that_cannot_run_are_rejected(devices: list[Device], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        dtypes_of(*devices, requested="packed", **changes)


def test_each_device_keeps_weights_packed_if_it_has_kernels_for_them() -> None:
    assert dtypes_of(GPU, CPU) == ("packed-bf16", "packed")
    assert dtypes_of(GPU, CPU, activations="f32") == ("packed-bf16", "packed-f32")
    assert dtypes_of(GPU, CPU, requested="packed") == ("packed-bf16", "packed")
    assert dtypes_of(GPU, CPU, no_kernels={"cpu": "no compiler"}) == ("packed-bf16", "f32")
    assert dtypes_of(GPU, CPU, no_kernels={"tensor cores": "no NVRTC"}) == ("bf16", "packed")
    assert dtypes_of(REFUSED, CPU) == ("f16", "packed")
    # One dtype serves all if weights stay packed nowhere, or if a dtype is named.
    assert dtypes_of(GPU, CPU, kinds={"F32"}) == ("f32", "f32")
    assert dtypes_of(GPU, CPU, requested="bf16") == ("bf16", "bf16")


def test_auto_is_packed_on_gpus_with_kernels_if_the_file_is_quantized() -> None:
    ampere, pascal = Device("cuda:1", "cuda", "sm86"), Device("cuda:1", "cuda", "sm61")
    assert dtypes_of(GPU, ampere) == ("packed-bf16", "packed-bf16")
    assert dtypes_of(GPU, stream="f16") == ("packed-f16",)
    assert dtypes_of(GPU, kinds={"F16", "BF16"}) == ("bf16",)
    assert dtypes_of(GPU, kinds={"F16"}, requested="packed") == ("packed-bf16",)
    # GPUs have one dtype among them, except those that compute well in float32 only.
    assert dtypes_of(GPU, OLD) == ("packed-f16", "packed-f16")
    assert dtypes_of(OLD, OLD, CPU) == ("packed-f16", "packed-f16", "packed")
    assert dtypes_of(GPU, pascal) == ("packed-bf16", "packed-gpu-f32")
    assert dtypes_of(pascal, pascal) == ("packed-gpu-f32", "packed-gpu-f32")
    assert dtypes_of(Device("hip:0", "hip", "gfx942:sramecc+:xnack-")) == ("packed-bf16",)
    assert dtypes_of(REFUSED) == ("f16",)
    assert dtypes_of(GPU, no_kernels={"tensor cores": "no NVRTC"}) == ("bf16",)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpu_keeps_all_matrices_packed_including_the_embedding(tied: bool) -> None:
    spec = tiny_spec(tied=tied)
    weights = quantized_weights(spec, ("Q4_K", "Q6_K"))
    storage = plan_weight_storage(weights, "packed-bf16")
    tensors = {where: weights.tensor(*where) for where in weight_shapes(spec)}
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
    norms = sum(4 * tensor.shape[0] for tensor in tensors.values() if len(tensor.shape) == 1)
    assert storage.weights.total == sum(gpu_packed_bytes(tensor.shape, tensor.kind) for tensor in matrices) + norms
    assert (storage.weights.first > 0) == (not tied)
    assert dict(storage.kept) == dict(Counter(tensor.kind for tensor in matrices))
    plan = memory_plan(spec, dtype="packed-bf16", weights=storage.weights, max_batch=1, page_size=16)
    assert plan.kv_dtype == "bf16"
    # Partial sums of a product with few rows: the widest product is counted.
    joined = sum(-(-shape[0] // 64) * 64 for (layer, _), shape in weight_shapes(spec).items() if layer == 0 and len(shape) == 2)
    assert storage.weights.parts == partial_sum_bytes(max(joined, 320), 256) == max(joined, 320) * 64 * 4
    assert plan_weight_storage(weights, "packed").weights.parts == 0  # a CPU has none


def test_a_gpu_keeps_permuted_columns_packed_and_dequantizes_unsupported_kinds() -> None:
    tensor: StoredTensor = random_tensor("w", (4, 256), "Q4_K", np.random.default_rng(0))
    assert why_not_gpu_packed(ColumnSelection(tensor, np.arange(256)[::-1].copy())) == ""
    assert why_not_gpu_packed(ElementwiseTensor(tensor, ADD_ONE)) == "its values change on loading"
    assert why_not_gpu_packed(RandomQuantTensor("w", (2**22, 4096), "Q8_0", 0, 1.0)) == ""  # allocates nothing
    weights = quantized_weights(tiny_spec(tied=True), ("Q4_1", "Q3_K", "F16"))
    assert {(kind, why) for kind, why, _ in plan_weight_storage(weights, "packed-bf16").converted} == {
        ("Q3_K", "no kernel reads this kind")
    }


def test_packed_savings_are_relative_to_two_bytes_per_value() -> None:
    rng = np.random.default_rng(0)
    tensors = [
        random_tensor("w", (16, 256), "Q4_K", rng),
        random_tensor("w", (16, 256), "F16", rng),
        random_tensor("n", (256,), "F32", rng),
    ]
    assert gpu_packed_savings(tensors) == 2 * 16 * 256 - 16 * 144
    assert gpu_packed_savings(tensors[1:]) == 0
