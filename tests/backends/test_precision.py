"""The precision tables: dtypes by device, for activations and for keys and values."""

from __future__ import annotations

import itertools

import pytest

from onedraw.backends.devices import (
    Device,
    activation_precision,
    cuda_precision,
    device_precision,
    hip_precision,
    kv_precision,
    parse_device,
    weakest,
)
from onedraw.errors import BadSetting


@pytest.mark.parametrize(("major", "minor"), list(itertools.product(range(13), range(10))))
def test_cuda_precision_follows_the_compute_capability(major: int, minor: int) -> None:
    if major >= 8:
        expected = "bf16"
    elif major == 7 or (major, minor) == (6, 0):
        expected = "f16"
    else:
        expected = "f32"
    assert cuda_precision((major, minor)) == expected
    assert device_precision(Device("x", "cuda", f"sm{major}{minor}")) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gfx90a", "gfx90a:sramecc+:xnack-", "gfx940", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1200", "gfx1201"], "bf16"),
        (["gfx900", "gfx906", "gfx908", "gfx90c", "gfx1010", "gfx1030", "gfx1036"], "f16"),
        (["", "gfx803", "gfx701", "gfx600", "unknown", "gfx13"], "f32"),
    ],
)
def test_hip_precision_follows_the_architecture_name(names: list[str], expected: str) -> None:
    assert {hip_precision(name) for name in names} == {expected}
    assert {device_precision(Device("x", "hip", name)) for name in names} == {expected}


def test_a_cpu_and_an_unknown_device_use_float32() -> None:
    assert device_precision(parse_device("cpu")) == device_precision(parse_device("cuda")) == cuda_precision(None) == "f32"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_devices_use_the_dtype_that_all_support(count: int) -> None:
    for found in itertools.product(("f32", "f16", "bf16"), repeat=count):
        expected = "f32" if "f32" in found else "f16" if "f16" in found else "bf16"
        assert weakest(found) == expected
    assert weakest([]) == "f32"


def test_an_explicit_activation_dtype_wins_and_an_unknown_one_is_an_error() -> None:
    pair = [parse_device("cuda/sm86"), parse_device("cuda/sm75")]
    assert activation_precision(pair) == "f16"
    assert [activation_precision(pair, requested=requested) for requested in ("f32", "f16", "bf16")] == ["f32", "f16", "bf16"]
    with pytest.raises(BadSetting, match="'fp8' is not one of auto, f32, f16, bf16"):
        activation_precision(pair, requested="fp8")


def test_float32_products_have_a_float32_residual_stream_by_default() -> None:
    modern = [parse_device("cuda/sm90")]
    assert activation_precision(modern, products="f32") == "f32"
    assert activation_precision(modern, products="f32", requested="bf16") == "bf16"
    assert activation_precision(modern, products="bf16") == activation_precision(modern) == "bf16"
    assert activation_precision([parse_device("cpu")], products="bf16") == "f32"


def test_keys_and_values_have_the_dtype_of_the_products_or_a_narrower_one() -> None:
    assert [kv_precision("auto", products=p) for p in ("f32", "bf16", "packed", "packed-f32", "packed-bf16", "f16")] == [
        "f32", "bf16", "f16", "f32", "bf16", "f16",
    ]  # fmt: skip
    assert [kv_precision(kind, products="packed") for kind in ("f32", "bf16", "f16", "fp8", "int8", "int4")] == [
        "f32", "bf16", "f16", "fp8", "int8", "int4",
    ]  # fmt: skip
    for products, requested in (("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"), ("packed-f16", "f32")):
        with pytest.raises(BadSetting, match="use auto, fp8, int8 or int4"):
            kv_precision(requested, products=products)


@pytest.mark.parametrize(
    ("device", "supported"), [("cuda/sm86", False), ("cuda/sm80", False), ("cuda/sm89", True), ("cuda/sm90", True), ("cpu", True)]
)
def test_fp8_needs_hardware_conversion_and_int8_does_not(device: str, supported: bool) -> None:
    given = {"products": "bf16", "devices": [parse_device("cuda/sm90"), parse_device(device)]}
    assert kv_precision("int8", **given) == "int8"  # type: ignore[arg-type]
    if supported:
        assert kv_precision("fp8", **given) == "fp8"  # type: ignore[arg-type]
    else:
        with pytest.raises(BadSetting, match="from sm89 on; use int8, which has the same size"):
            kv_precision("fp8", **given)  # type: ignore[arg-type]
