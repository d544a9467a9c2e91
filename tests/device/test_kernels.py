"""The Triton kernels on a GPU: right results, and bits that depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.device, cuda]

if torch.cuda.is_available():
    from onedraw.backends.torch.ops.cuda.attention import attend
    from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape, stage_attention_inputs
    from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, Tile, choose_tile, linear
    from onedraw.backends.torch.ops.cuda.norm import apply_gate, gated_activation, rms_norm
    from onedraw.backends.torch.ops.cuda.ops import TritonLinear, TritonOps
    from onedraw.backends.torch.ops.plain.elementwise import gated as plain_gated
    from onedraw.backends.torch.ops.plain.elementwise import rms_norm as plain_norm
    from onedraw.backends.torch.ops.plain.elementwise import rope_table, rotate
    from onedraw.backends.torch.ops.plain.linear import RowRule
    from onedraw.backends.torch.ops.plain.ops import TorchOps
    from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, Span, lay_out
    from onedraw.backends.torch.state.kv_pages import PageStore
    from onedraw.models.spec import AttentionSpec, RopeSpec
    from onedraw.types import Draft

DEVICE = torch.device("cuda:0")
ROWS = (1, 2, 5, 16, 17, 24, 32, 40, 64, 100, 200, 300, 2048, 2100)
PAGES, PAGE = 2000, 16


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * spread).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ------------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (4096, 14336), (1000, 576), (192, 100), (5120, 6144)])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = normal(max(ROWS), k, dtype=dtype), normal(n, k, dtype=dtype, seed=1, spread=k**-0.5)
    full = linear(x, weight)
    assert error(full[:50], x[:50].double() @ weight.double().t()) < 4e-3
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], weight), full[:rows]), rows
        assert torch.equal(linear(x[7 : 7 + rows], weight), full[7 : 7 + rows]), rows


def test_no_tile_changes_a_bit_and_tiles_exist_for_small_cards() -> None:
    x, weight = normal(300, 4096), normal(6144, 4096, seed=1, spread=1 / 64)
    full = linear(x, weight)
    tiles = [Tile(16, 64, 64, 4, 3), Tile(32, 32, 512, 4, 2), Tile(128, 256, 64, 8, 3), Tile(64, 16, 128, 2, 2)]
    tiles += [Tile(rows, columns, 128, 4, 3, swapped=True) for rows in (16, 32, 64) for columns in (32, 64, 128)]
    for rows in (1, 16, 24, 64, 128, 300):
        small = choose_tile(rows, 6144, 4096, torch.bfloat16, SMALL_SHARED)
        assert small.shared(2) <= SMALL_SHARED
        for tile in (small, *tiles):
            assert torch.equal(linear(x[:rows], weight, tile=tile), full[:rows]), (rows, tile)


def test_fused_operations_round_like_separate_ones() -> None:
    for rows in (1, 16, 70, 500):
        x, weight, bias = normal(rows, 512), normal(768, 512, seed=1, spread=0.05), normal(768, seed=2)
        residual = normal(rows, 768, seed=3)
        product = linear(x, weight)
        assert torch.equal(linear(x, weight, bias=bias), product + bias)
        assert torch.equal(linear(x, weight, bias=bias, residual=residual), product + bias + residual)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336)])
def test_cublas_is_used_only_where_its_bits_are_equal(n: int, k: int) -> None:
    weight = normal(n, k, seed=1, spread=k**-0.5)
    x, residual = normal(4500, k, seed=5), normal(4500, n, seed=6)
    product = TritonLinear(weight, bias=None, pdl=False)
    expected = linear(x, weight, residual=residual)
    assert torch.equal(product(x, residual), expected)
    product.library_rows = ()
    assert torch.equal(product(x, residual), expected)


@pytest.mark.parametrize("width", [100, 576, 4096, 5120])
@pytest.mark.parametrize("wide", [False, True])
def test_norms_match_plain_torch(width: int, wide: bool) -> None:
    x, weight = normal(70, width), normal(width, seed=1, dtype=torch.float32 if wide else torch.bfloat16)
    found = rms_norm(x, weight, 1e-6)
    wide_x = x.double()
    plain = wide_x * (wide_x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert error(found, plain * weight.double()) < 4e-3
    if not wide:
        assert error(found, plain_norm(x, weight, 1e-6)) < 1e-3
    for rows in (1, 2, 5, 16, 64):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6), found[:rows])


def test_gated_activations_match_plain_torch() -> None:
    x = normal(33, 2 * 704)
    assert torch.equal(gated_activation(x, "silu"), plain_gated(x, "silu"))
    assert error(gated_activation(x, "gelu_tanh"), plain_gated(x, "gelu_tanh")) < 1e-3


def test_attention_gates_are_elementwise_or_per_head() -> None:
    x, gate = normal(9, 512, seed=1), normal(9, 512, seed=2)
    assert torch.equal(apply_gate(x, gate, "sigmoid"), x * gate.sigmoid())
    heads = normal(9, 8, seed=3)
    wide = torch.nn.functional.softplus(heads.float()).to(x.dtype).repeat_interleave(64, 1)
    assert error(apply_gate(x, heads, "softplus"), x * wide) < 1e-3


# ------------------------------------------------------------------ attention

TREE = ((-1, 3), (-1, 5), (0, 7), (2, 9), (1, 2), (4, 4), (3, 1), (3, 2))


def drafts_of(tree: tuple[tuple[int, int], ...]) -> tuple[Draft, ...]:
    return tuple(Draft(token, parent) for parent, token in tree)


def step_inputs(spans: list[tuple[int, int, tuple[Draft, ...]]], tables: list[list[int]]) -> Inputs:
    """Spans of (start, tokens including drafts, drafts), each with its own pages."""
    laid, first = [], 0
    for start, count, drafts in spans:
        laid.append(Span(first, count, start, drafts))
        first += count
    return lay_out(
        [0] * first, laid, [(table,) for table in tables], layout=InputLayout(PAGE, (PAGES,), RowRule(floor=1)), device=DEVICE
    )


def specs() -> list[AttentionSpec]:
    def of(heads: int, kv: int, dim: int, window: int | None, norm: bool, rotary: int | None = None) -> AttentionSpec:
        rope = RopeSpec(1e4, rotary or dim)
        return AttentionSpec(heads=heads, kv_heads=kv, head_dim=dim, rope=rope, scale=dim**-0.5, window=window, qk_norm=norm)

    return [of(32, 8, 128, None, False), of(24, 4, 256, None, True, 64), of(6, 2, 64, 700, False), of(8, 2, 512, 300, True)]


class AttentionCase:
    """KV pages with random contents, and rows that continue them."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        self.rope = rope_table(spec.rope, 8192, dtype=dtype, device=DEVICE)
        self.q_norm = normal(spec.head_dim, dtype=dtype, seed=11) if spec.qk_norm else None
        self.k_norm = normal(spec.head_dim, dtype=dtype, seed=12) if spec.qk_norm else None
        order = np.random.default_rng(3).permutation(PAGES)
        self.tables = [order[i * 400 : (i + 1) * 400].tolist() for i in range(5)]

    def store(self) -> PageStore:
        store = PageStore(self.spec, pages=PAGES, page_size=PAGE, dtype=self.dtype, device=DEVICE)
        store.keys.copy_(normal(*store.keys.shape, seed=21))
        store.values.copy_(normal(*store.values.shape, seed=22))
        return store

    def run(self, ops: object, inputs: Inputs, qkv: Tensor, store: PageStore | None = None) -> Tensor:
        store = store or self.store()
        prepared = ops.prepare_attention(inputs, self.spec, self.rope)  # type: ignore[attr-defined]
        found: Tensor = prepared.attend(qkv, spec=self.spec, store=store, q_norm=self.q_norm, k_norm=self.k_norm, eps=1e-6)
        return found


def slow_attention(case: AttentionCase, inputs: Inputs, qkv: Tensor, store: PageStore) -> Tensor:
    """Token by token in float64, from the contents of the pages after the step."""
    spec, size = case.spec, inputs.page_size
    cos_sin = case.rope[inputs.positions]
    q = qkv[:, : spec.heads * spec.head_dim].reshape(len(qkv), spec.heads, -1)
    q = rotate(q if case.q_norm is None else plain_norm(q, case.q_norm, 1e-6), cos_sin).double()
    keys, values = (x.view(-1, spec.kv_heads, size, spec.head_dim) for x in (store.keys, store.values))
    firsts, out = inputs.host_firsts(spec.window), []
    for token in range(len(qkv)):
        positions = np.arange(firsts[token], inputs.host_ends[token] + 1)
        slots = positions.copy()
        if inputs.host_tails is not None and inputs.host_paths is not None:
            own = positions >= inputs.host_tails[token]
            steps = inputs.host_paths[token][positions[own] - inputs.host_tails[token]]
            slots[own] = inputs.host_tails[token] + steps
        pages = torch.from_numpy(inputs.host_tables[0][inputs.host_rows[token], slots // size]).to(DEVICE)
        place = torch.from_numpy(slots % size).to(DEVICE)
        k, v = (x[pages, :, place].double().repeat_interleave(spec.heads // spec.kv_heads, 1) for x in (keys, values))
        weights = torch.einsum("hd,nhd->hn", q[token], k).mul(spec.scale).softmax(1)
        out.append(torch.einsum("hn,nhd->hd", weights, v).reshape(-1))
    return torch.stack(out)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_is_right_and_no_batch_chunk_or_tile_changes_a_bit(index: int, dtype: torch.dtype) -> None:
    spec = specs()[index]
    case = AttentionCase(spec, dtype)
    ops, plain = TritonOps(DEVICE), TorchOps(DEVICE)
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    drafts = drafts_of(TREE)
    chain = tuple(Draft(i, i - 1) for i in range(7))
    spans = [(1300, 300, ()), (4000, 1, ()), (2047, 1 + len(chain), chain), (1020, 2 + len(drafts), drafts), (3, 1, ())]
    inputs = step_inputs(spans, case.tables)
    qkv = normal(len(inputs.host_tokens), width, dtype=dtype, seed=5)
    store = case.store()
    found = case.run(ops, inputs, qkv, store)
    expected = slow_attention(case, inputs, qkv, store)
    assert error(found, expected) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    assert error(case.run(plain, inputs, qkv), expected) < 2e-2  # plain torch rounds its scores
    first = 0
    for span, table in zip(spans, case.tables, strict=True):  # alone
        part = slice(first, first + span[1])
        assert torch.equal(case.run(ops, step_inputs([span], [table]), qkv[part]), found[part]), span
        first += span[1]
    for cut in (1, 37, 128, 299):  # in chunks
        store = case.store()
        parts = [(1300, cut, ()), (1300 + cut, 300 - cut, ())]
        pieces = [qkv[:cut], qkv[cut:300]]
        got = [case.run(ops, step_inputs([p], case.tables[:1]), x, store) for p, x in zip(parts, pieces, strict=True)]
        assert torch.equal(torch.cat(got), found[:300]), cut


@pytest.mark.parametrize("index", range(4))
def test_tile_heights_and_sequential_or_parallel_splits_give_equal_bits(index: int) -> None:
    spec = specs()[index]
    case = AttentionCase(spec, torch.bfloat16)
    store = case.store()
    inputs = step_inputs([(4100, 16, ())], case.tables[:1])
    q = normal(16, spec.heads * spec.head_dim, seed=5)
    found = []
    for full_grid in (1, 10**9):
        heads = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.window, full_grid)
        for warps in (4, 8):
            for stages in (1, 3):
                device = stage_attention_inputs(inputs, heads)
                found.append(
                    attend(
                        q, store.keys, store.values, metadata=device.metadata, tile_sets=list(device.tile_sets), heads=spec.heads,
                        kv_heads=spec.kv_heads, dim=spec.head_dim, scale=spec.scale, warps=warps, stages=stages,
                    )
                )  # fmt: skip
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("index", range(3))
def test_a_tree_node_has_the_bits_of_a_chain(index: int) -> None:
    spec = specs()[index]
    case = AttentionCase(spec, torch.bfloat16)
    ops = TritonOps(DEVICE)
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    drafts = drafts_of(TREE)
    for start in (30, 505, 1015, 2500):
        qkv = normal(1 + len(drafts), width, seed=6)
        tree = case.run(ops, step_inputs([(start, 1 + len(drafts), drafts)], case.tables[:1]), qkv)
        for leaf, path in ((7, (0, 2, 3, 7)), (5, (1, 4, 5))):
            tokens = [0, *(1 + node for node in path)]
            chain = tuple(Draft(0, i - 1) for i in range(len(path)))
            alone = case.run(ops, step_inputs([(start, 1 + len(path), chain)], case.tables[:1]), qkv[tokens])
            assert torch.equal(alone, tree[tokens]), (start, leaf)


def test_a_value_that_is_not_finite_reaches_only_tokens_that_attend_to_it() -> None:
    spec = specs()[0]
    case = AttentionCase(spec, torch.bfloat16)
    ops = TritonOps(DEVICE)
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    inputs = step_inputs([(600, 40, ()), (90, 1, ())], case.tables[:2])
    qkv = normal(41, width, seed=5)
    sound = case.run(ops, inputs, qkv)
    qkv[20, -1] = torch.inf
    found = case.run(ops, inputs, qkv)
    assert torch.equal(found[:20], sound[:20])
    assert torch.equal(found[40], sound[40])
    assert bool(found[20:40].isnan().any(1).all())


@pytest.mark.parametrize("rows", [1, 7, 22, 300, 2048])
def test_a_fused_gated_product_has_the_bits_of_two_kernels(rows: int) -> None:
    from onedraw.backends.torch.ops.cuda.ops import TritonGated, TritonOps

    ops = TritonOps(DEVICE)
    x, weight = normal(rows, 512), normal(2 * 704, 512) * 512**-0.5
    joined = ops.linear(weight)
    expected = ops.gated(joined(x), "silu")
    assert torch.equal(TritonGated(joined, "silu").gated(x), expected)
