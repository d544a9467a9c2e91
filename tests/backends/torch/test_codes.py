"""The quantized KV cache on a CPU: how values are rounded to codes, and the C kernels against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.state.kv_pages import (
    KV_DTYPES,
    LARGEST,
    SCALES,
    PageStore,
    code_values,
    encode,
    transformed,
    write_places,
)
from onedraw.models.spec import AttentionSpec, RopeSpec
from tests.backends.torch.test_cpu_kernels import SPECS, attention_case, kernels

KINDS = ("int8", "fp8", "int4")
SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rope=RopeSpec(1e4, 8), scale=1.0)
CPU = torch.device("cpu")


def all_codes(kind: str) -> np.ndarray:
    """Return the value of every code in ascending order. Even codes are at even indices, which decides ties."""
    codes = code_values(torch.arange(256, dtype=torch.int16).to(torch.uint8).view(KV_DTYPES[kind])).float().numpy()
    return np.unique(codes[np.abs(codes) <= LARGEST[KV_DTYPES[kind]]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_rounded_to_the_nearest_code_with_the_scale_of_its_head(kind: str) -> None:
    heads = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 200)[:, None]
    heads[:, 3:5] = 0.0
    codes, scales = encode(heads, KV_DTYPES[kind])
    levels = all_codes(kind)
    largest = LARGEST[KV_DTYPES[kind]]
    ratios = (heads.double().numpy() / scales.double().numpy()[:, None]).clip(-largest, largest)
    distance = np.abs(code_values(codes).float().double().numpy() - ratios)
    nearest = np.abs(levels[None, None] - ratios[..., None]).min(-1)
    assert (distance <= nearest * (1 + 1e-6) + 1e-4).all()
    assert np.allclose(scales.numpy(), heads.abs().amax(1).numpy() / SCALES[KV_DTYPES[kind]])


def test_a_tie_is_rounded_to_the_even_code() -> None:
    heads = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert encode(heads, torch.int8)[0].tolist() == [[127, 0, 2, 2, 0, -2]]
    heads = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10]])
    assert encode(heads, torch.float8_e4m3fn)[0].float().tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2 * 2.0**-9]]
    heads = torch.tensor([[16.5, 2.0, 4.0, -2.0, 0.0, -16.5]])  # an even number is between two codes
    assert code_values(encode(heads, KV_DTYPES["int4"])[0]).tolist() == [[15, 1, 5, -3, 1, -15]]


@pytest.mark.parametrize("dim", [8, 20, 64, 96, 256])
def test_a_transform_undoes_itself_and_keeps_products_of_queries_and_keys(dim: int) -> None:
    queries, keys = torch.randn(2, 50, dim, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(transformed(transformed(keys, kept=True), kept=False), keys, atol=1e-5)
    products = (transformed(queries, kept=False) * transformed(keys, kept=True)).sum(-1)
    assert torch.allclose(products, (queries * keys).sum(-1), atol=1e-4)


def test_a_transform_is_a_product_with_the_hadamard_matrix() -> None:
    matrix = torch.tensor([[1.0]])
    for _ in range(3):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    heads = torch.randint(-9, 9, (20, 24), generator=torch.Generator().manual_seed(3)).float()  # three blocks of eight
    assert torch.equal(transformed(heads, kept=True).view(20, 3, 8), heads.view(20, 3, 8) @ matrix / 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [0.0, 1e-44, 1e-38, 3e38])
def test_the_largest_and_smallest_heads_have_finite_codes_and_scales(kind: str, largest: float) -> None:
    codes, scales = encode(torch.full((1, 8), largest), KV_DTYPES[kind])
    values = code_values(codes).float()
    assert torch.isfinite(values).all()
    assert torch.isfinite(scales).all()
    assert torch.allclose(values * scales[:, None], torch.full((1, 8), largest), rtol=0.1, atol=1e-43)


@pytest.mark.parametrize("kind", KINDS)
def test_a_non_finite_head_is_stored_with_the_scale_nan(kind: str) -> None:
    store = PageStore(SPEC, pages=2, page_size=4, dtype=KV_DTYPES[kind], device=CPU)
    keys, values = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(2))
    keys[0, 1, 3], values[1, 0, 2] = float("inf"), float("nan")
    store.write(keys, values, write_places(torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2]), kv_heads=2, page_size=4))
    assert store.key_scales is not None
    assert store.value_scales is not None
    broken = torch.isnan(store.key_scales[:2, :3])
    assert broken.tolist() == [[False, True, False], [True, False, False]]
    assert torch.isfinite(store.value_scales).all()
    assert (store.value_scales[:2, :3][broken] == 0).all()


@pytest.mark.parametrize("kind", ["bf16", "f16", *KINDS])
@pytest.mark.parametrize("name", SPECS)
def test_the_kernels_read_and_write_the_codes_of_plain_torch(name: str, kind: str) -> None:
    spec, kept = SPECS[name], KV_DTYPES[kind]
    found = attention_case(kernels(), spec, [0, 150], kept=kept)
    expected = attention_case(TorchOps(CPU), spec, [0, 150], kept=kept)
    exact = attention_case(kernels(), spec, [0, 150])
    scale = exact.abs().max()
    # The last bit of the rotary embedding may round a value to the neighbouring code.
    assert (found - expected).abs().max() < {"bf16": 4e-3, "f16": 5e-4, "fp8": 4e-2, "int8": 8e-3, "int4": 8e-2}[kind] * scale
    assert 0 < (found - exact).norm() / exact.norm() < {"bf16": 2e-2, "f16": 3e-3, "fp8": 0.12, "int8": 4e-2, "int4": 0.4}[kind]


@pytest.mark.parametrize("kind", ["bf16", "f16", *KINDS])
@pytest.mark.parametrize("name", ["grouped", "window", "norms, odd width", "keys as values"])
def test_chunks_and_other_rows_do_not_change_a_bit_of_attention(name: str, kind: str) -> None:
    spec, kept = SPECS[name], KV_DTYPES[kind]
    whole = attention_case(kernels(), spec, [0, 150], kept=kept)
    for cuts, beside in (([0, 1, 64, 149, 150], 0), ([0, 37, 150], 2)):
        assert torch.equal(attention_case(kernels(), spec, cuts, kept=kept, beside=beside), whole), (cuts, beside)


def test_values_are_converted_to_narrow_dtypes_as_in_torch() -> None:
    """Every exponent is converted by the kernels and by torch, without rotary embedding and norm."""
    spec = AttentionSpec(heads=1, kv_heads=1, head_dim=16, rope=RopeSpec(1e4, 2), scale=1.0)
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(400, 16, generator=generator) * torch.logspace(-9, 4, 400)[:, None]
    for kind in ("bf16", "f16", *KINDS):
        stores = [value_pages(ops, spec, values, KV_DTYPES[kind]) for ops in (kernels(), TorchOps(CPU))]
        for name in ("values", "value_scales"):
            if name in stores[0].parts():
                assert torch.equal(stores[0].parts()[name], stores[1].parts()[name]), (kind, name)


def value_pages(ops: object, spec: AttentionSpec, values: torch.Tensor, kept: torch.dtype) -> PageStore:
    from onedraw.backends.torch.ops.plain.elementwise import rope_table
    from onedraw.backends.torch.ops.plain.linear import RowRule
    from onedraw.backends.torch.runner.inputs import InputLayout, make_inputs
    from onedraw.types import Plan
    from tests.backends.torch.test_cpu_kernels import prompt_row

    store = PageStore(spec, pages=50, page_size=8, dtype=kept, device=CPU)
    inputs = make_inputs(Plan((prompt_row(0, 0, 400, range(50)),)), layout=InputLayout(8, (50,), RowRule(1)), device=CPU)
    prepared = ops.prepare_attention(inputs, spec, rope_table(spec.rope, 400, dtype=torch.float32, device=CPU))  # type: ignore[attr-defined]
    qkv = torch.cat([torch.zeros(400, 32), values], 1)
    prepared.attend(qkv, spec=spec, store=store, q_norm=None, k_norm=None, eps=1e-6)
    return store
