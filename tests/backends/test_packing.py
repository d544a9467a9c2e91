"""What a CPU keeps as it is stored, what that costs, and when packed is what `auto` becomes."""

from __future__ import annotations

import numpy as np
import pytest

from onedraw.backends.devices import Device
from onedraw.backends.packing import hold, is_narrow, matrix_kinds, panel_bytes, product_dtype
from onedraw.backends.plan import memory_plan
from onedraw.checkpoints.quants import KINDS
from onedraw.checkpoints.tensor import StoredTensor
from onedraw.errors import BadSetting
from onedraw.models.views import Columns, Rows
from tests.packed import PACKED, PLAIN_KINDS, packed_weights, stored, tiny_spec

CPU, GPU = Device("cpu", "cpu"), Device("cuda:0", "cuda", "sm90")
ASKED = {"asked": "auto", "activations": "int8", "stream": "auto", "narrow": True, "no_kernels": ""}


def test_a_panel_takes_what_the_file_takes_but_for_six_bit_scales() -> None:
    for kind in (*PACKED, *PLAIN_KINDS):
        size = panel_bytes((64, 512), kind)
        on_disk = 64 * 512 // KINDS[kind].values * KINDS[kind].size
        assert on_disk <= size <= on_disk * (1.03 if kind in ("Q4_K", "Q5_K") else 1)


def test_rows_are_padded_to_whole_panels_also_in_a_stack_of_experts() -> None:
    assert panel_bytes((3, 33, 64), "Q8_0") == 3 * 64 * 64 // 32 * 34


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_what_is_kept(tied: bool) -> None:
    spec = tiny_spec(tied=tied)
    weights = packed_weights(spec, ("Q4_1",))
    holding = hold(weights)
    matrices = sum(weights.tensor(i, name).data.nbytes for i in range(2) for name in ("q", "k", "v", "o", "gate", "up", "down"))
    norms = 5 * 256 * 4
    head = 320 * 256 // 32 * 20  # 300 rows in whole panels; an untied embedding stays in the file
    assert holding.weights.total == matrices + norms + head
    plan = memory_plan(spec, dtype="packed", weights=holding.weights, max_batch=1, page_size=16)
    assert plan.weight_bytes == holding.weights.total
    assert plan.kv_dtype == "f32"
    assert dict(holding.kept) == {"Q4_1": 15 if tied else 16}
    assert not holding.converted


def test_what_is_converted_says_why() -> None:
    spec = tiny_spec(tied=True)
    weights = packed_weights(spec, ("Q4_1", "Q3_K"))
    converted = hold(weights).converted
    assert {(kind, why) for kind, why, _ in converted} == {("Q3_K", "no kernel reads this kind")}
    assert is_narrow(matrix_kinds(weights))
    plain = packed_weights(spec, ("F32",))
    assert not is_narrow(matrix_kinds(plain))
    assert not hold(plain).converted


def test_rows_in_another_order_stay_packed_and_columns_do_not() -> None:
    tensor: StoredTensor = stored("w", (4, 64), "Q8_0", np.random.default_rng(0))
    taken = Rows(tensor, np.array([3, 1]))
    assert taken.stays_packed
    raw = taken.packed()
    assert raw is not None
    assert np.array_equal(raw, tensor.packed()[[3, 1]])
    moved = Columns(tensor, np.arange(64)[::-1].copy())
    assert not moved.stays_packed
    assert moved.packed() is None


def test_auto_is_packed_where_only_cpus_compute_and_it_saves_something() -> None:
    assert product_dtype([CPU], **ASKED) == "packed"
    assert product_dtype([CPU, CPU], **ASKED | {"activations": "f32"}) == "packed-f32"
    assert product_dtype([CPU], **ASKED | {"narrow": False}) == "f32"
    assert product_dtype([CPU], **ASKED | {"no_kernels": "no compiler"}) == "f32"
    assert product_dtype([CPU], **ASKED | {"asked": "f32"}) == "f32"
    assert product_dtype([CPU], **ASKED | {"asked": "bf16", "activations": "f32"}) == "bf16"
    assert product_dtype([GPU], **ASKED) == "bf16"
    assert product_dtype([GPU, CPU], **ASKED) == "f32"
    assert product_dtype([CPU], **ASKED | {"asked": "packed", "narrow": False}) == "packed"


@pytest.mark.parametrize(
    ("devices", "changes", "said"),
    [
        ([GPU], {}, "for the CPU alone"),
        ([CPU], {"no_kernels": "no compiler"}, "no compiler; use --dtype f32"),
        ([CPU], {"stream": "bf16"}, "computes in float32"),
    ],
)
def test_packed_weights_that_cannot_be_are_refused_by_name(devices: list[Device], changes: dict[str, str], said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        product_dtype(devices, **ASKED | {"asked": "packed"} | changes)
