"""Quantized KV cache: codes and scales that are written, attention over them, and equal bits for any batch, chunk or tile.

On a GPU; without one the kernels alone, under Triton's interpreter.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.attention import attend
from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape, stage_attention_inputs
from onedraw.backends.torch.ops.cuda.commit import move_kept_kv, verify_drafts
from onedraw.backends.torch.ops.cuda.hadamard import transform_outputs
from onedraw.backends.torch.ops.cuda.kv_quant import unpack_words
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.backends.torch.ops.plain.elementwise import rms_norm, rope_table, rotate
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, Span, lay_out
from onedraw.backends.torch.state.kv_pages import KV_DTYPES, PageStore, code_values, encode, transformed
from onedraw.models.spec import AttentionSpec, RopeSpec
from onedraw.types import Draft

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's numpy has no bf16
KINDS = ("int8", "fp8", "int4")  # the interpreter's rounding to fp8 loses a carry, so its codes differ from plain torch's
PAGE = 16
PAGES = 60 if INTERPRETED else 700
LONG = 100 if INTERPRETED else 2300
TREE = tuple(Draft(token, parent) for parent, token in ((-1, 5), (-1, 6), (0, 7), (2, 8), (1, 9), (4, 3), (0, 2), (3, 1)))


def spec_of(heads: int, kv: int, dim: int, *, window: int | None = None, norm: bool = False) -> AttentionSpec:
    rope = RopeSpec(1e4, dim // 2 if norm else dim)
    return AttentionSpec(heads=heads, kv_heads=kv, head_dim=dim, rope=rope, scale=dim**-0.5, window=window, qk_norm=norm)


SPECS = (
    (spec_of(4, 2, 32, norm=True),)
    if INTERPRETED
    else (spec_of(32, 8, 128), spec_of(24, 4, 256, norm=True), spec_of(6, 2, 64, window=700), spec_of(8, 2, 512, window=300))
)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(DTYPE)


def step_inputs(spans: list[tuple[int, int, tuple[Draft, ...]]], tables: list[list[int]]) -> Inputs:
    laid, first = [], 0
    for start, count, drafts in spans:
        laid.append(Span(first, count, start, drafts))
        first += count
    layout = InputLayout(PAGE, (PAGES,), RowRule(floor=1))
    return lay_out([0] * first, laid, [(table,) for table in tables], layout=layout, device=DEVICE)


class AttentionCase:
    """KV pages with random contents, and rows that continue them."""

    def __init__(self, spec: AttentionSpec, kind: str) -> None:
        self.spec, self.kind = spec, KV_DTYPES[kind]
        self.rope = rope_table(spec.rope, 8192, dtype=DTYPE, device=DEVICE)
        self.norm = normal(spec.head_dim, seed=11) if spec.qk_norm else None
        self.width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        order, per = np.random.default_rng(3).permutation(PAGES), PAGES // 4
        self.tables = [order[i * per : (i + 1) * per].tolist() for i in range(4)]

    def store(self) -> PageStore:
        store = PageStore(self.spec, pages=PAGES, page_size=PAGE, dtype=self.kind, device=DEVICE)
        for number, (codes, scales) in enumerate(((store.keys, store.key_scales), (store.values, store.value_scales))):
            heads = normal(len(codes) * PAGE, self.spec.head_dim, seed=21 + number) * (0.1 + number)
            heads = transformed(heads, kept=True) if store.transforms else heads
            found, scale = encode(heads, self.kind)
            assert scales is not None
            codes.copy_(found.view(codes.shape))
            scales.copy_(scale.view(scales.shape))
        return store

    def run(self, ops: TritonOps | TorchOps, inputs: Inputs, qkv: Tensor, store: PageStore | None = None) -> Tensor:
        prepared = ops.prepare_attention(inputs, self.spec, self.rope)
        given = {"spec": self.spec, "store": store or self.store(), "q_norm": self.norm, "k_norm": self.norm, "eps": 1e-6}
        return prepared.attend(qkv, **given)  # type: ignore[arg-type]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def slow_attention(case: AttentionCase, inputs: Inputs, qkv: Tensor, store: PageStore) -> Tensor:
    """Token by token in float64, from the contents of the pages after the step."""
    spec = case.spec
    q = qkv[:, : spec.heads * spec.head_dim].reshape(len(qkv), spec.heads, -1)
    q = rotate(q if case.norm is None else rms_norm(q, case.norm, 1e-6), case.rope[inputs.positions]).double()
    assert store.key_scales is not None
    assert store.value_scales is not None
    pairs = ((store.keys, store.key_scales), (store.values, store.value_scales))
    keys, values = (
        code_values(codes.view(-1, spec.kv_heads, PAGE, store.width)).double() * scales.view(-1, spec.kv_heads, PAGE, 1).double()
        for codes, scales in pairs
    )
    if store.transforms:  # the transform of a transform is the head itself
        keys, values = (transformed(heads, kept=False).double() for heads in (keys, values))
    firsts, out = inputs.host_firsts(spec.window), []
    for token in range(len(qkv)):
        slots = np.arange(firsts[token], inputs.host_ends[token] + 1)
        if inputs.host_tails is not None and inputs.host_paths is not None:
            own = slots >= inputs.host_tails[token]
            slots[own] = inputs.host_tails[token] + inputs.host_paths[token][slots[own] - inputs.host_tails[token]]
        pages = torch.from_numpy(inputs.host_tables[0][inputs.host_rows[token], slots // PAGE]).to(DEVICE)
        place = torch.from_numpy(slots % PAGE).to(DEVICE)
        k, v = (x[pages, :, place].repeat_interleave(spec.heads // spec.kv_heads, 1) for x in (keys, values))
        weights = torch.einsum("hd,nhd->hn", q[token], k).mul(spec.scale).softmax(1)
        out.append(torch.einsum("hn,nhd->hd", weights, v).reshape(-1))
    return torch.stack(out)


@triton.jit
def _unpack(words, out, kind: tl.constexpr, KV_QUANT: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    parts = unpack_words(tl.load(words + at), kind, KV_QUANT)
    for part in tl.static_range(PARTS):
        tl.store(out + part * N + at, parts[part])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16])
def test_every_code_is_unpacked_to_its_value(kind: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    words = torch.stack([codes, codes.flip(0)], 1)
    expected = code_values(words.view(KV_DTYPES[kind])).float()  # [256, codes of a word]
    found = torch.empty(expected.T.shape, dtype=dtype, device=DEVICE)
    numbers = {"KV_QUANT": 1 + KINDS.index(kind), "PARTS": len(found), "N": 256}
    given = words.view(torch.int16).view(-1).to(DEVICE)
    _unpack[(1,)](given, found, kind=tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, **numbers)
    sound = torch.isfinite(expected)  # fp8 has two NaN codes, which are never written
    assert torch.equal(found.T.cpu().float()[sound], expected[sound])


@pytest.mark.parametrize("dim", [32, 96, 256])
def test_outputs_are_transformed_as_in_plain_torch(dim: int) -> None:
    heads = normal(3, 5 * dim, seed=6)
    expected = transformed(heads.view(3, 5, dim), kept=False).to(DTYPE).view(3, -1)
    transform_outputs(heads, heads=5, dim=dim, pdl=False)
    assert torch.equal(heads, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fp8" or not INTERPRETED])
@pytest.mark.parametrize("index", range(len(SPECS)))
def test_codes_and_scales_are_written_as_in_plain_torch(index: int, kind: str) -> None:
    case = AttentionCase(SPECS[index], kind)
    inputs = step_inputs([(LONG, 5, ()), (3, 4, ())], case.tables)
    qkv = normal(9, case.width, seed=5)
    qkv[1] = 0.0  # heads of zeros have scale 0
    stores = []
    for ops in (TritonOps(DEVICE), TorchOps(DEVICE)):
        stores.append(case.store())
        case.run(ops, inputs, qkv, stores[-1])
    for name, found in stores[0].parts().items():
        plain = stores[1].parts()[name]
        if "scales" in name:
            assert error(found, plain) < 1e-6, name
        else:  # rounding of the norm may move a value across a code boundary
            assert (found != plain).float().mean() < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_affects_only_its_row(kind: str) -> None:
    case = AttentionCase(SPECS[0], kind)
    spans = [(20, 3, ()), (40, 3, ())]
    qkv = normal(6, case.width, seed=5)
    store = case.store()
    clean = case.run(TritonOps(DEVICE), step_inputs(spans, case.tables), qkv, store)
    for column in (-1, (case.spec.heads + 1) * case.spec.head_dim - 1):  # a value, a key
        broken = qkv.clone()
        broken[1, column] = float("inf")
        found = case.run(TritonOps(DEVICE), step_inputs(spans, case.tables), broken, case.store())
        assert torch.equal(found[3:], clean[3:])
        assert torch.equal(found[0], clean[0])
        assert not torch.isfinite(found[1]).all()
        assert not torch.isfinite(found[2]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(SPECS)))
def test_quantized_attention_is_right_and_no_batch_chunk_or_tile_changes_a_bit(index: int, kind: str) -> None:
    case = AttentionCase(SPECS[index], kind)
    ops, length = TritonOps(DEVICE), 5 if INTERPRETED else 300
    chain = tuple(Draft(i, i - 1) for i in range(2 if INTERPRETED else 7))
    spans = [(LONG // 2, length, ()), (LONG, 1 + len(chain), chain), (30, 1 + len(TREE), TREE), (3, 1, ())]
    whole = step_inputs(spans, case.tables)
    qkv = normal(len(whole.host_tokens), case.width, seed=5)
    store = case.store()
    found = case.run(ops, whole, qkv, store)
    expected = slow_attention(case, whole, qkv, store)
    assert error(found, expected) < (6e-3 if torch.bfloat16 == DTYPE else 2e-3)
    if not (INTERPRETED and kind == "fp8"):
        assert error(case.run(TorchOps(DEVICE), whole, qkv), expected) < 2e-2
    first = 0
    for span, table in zip(spans, case.tables, strict=True):  # alone
        part = slice(first, first + span[1])
        assert torch.equal(case.run(ops, step_inputs([span], [table]), qkv[part]), found[part]), span
        first += span[1]
    for cut in (1, length // 2, length - 1):  # in chunks
        store = case.store()
        parts = [(LONG // 2, cut, ()), (LONG // 2 + cut, length - cut, ())]
        pieces = [qkv[:cut], qkv[cut:length]]
        got = [case.run(ops, step_inputs([p], case.tables[:1]), x, store) for p, x in zip(parts, pieces, strict=True)]
        assert torch.equal(torch.cat(got), found[:length]), cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(SPECS)))
def test_sequential_and_parallel_splits_give_equal_bits(index: int, kind: str) -> None:
    case = AttentionCase(SPECS[index], kind)
    spec, store = case.spec, case.store()
    inputs = step_inputs([(LONG, 4, ())], case.tables[:1])
    q = normal(4, spec.heads * spec.head_dim, seed=5)
    found = []
    for full_grid in (1, 10**9):
        device = stage_attention_inputs(inputs, AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.window, full_grid))
        for warps, stages in ((4, 1), (8, 3)):
            sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "dim": spec.head_dim, "scale": spec.scale}
            given = {
                "metadata": device.metadata,
                "tile_sets": list(device.tile_sets),
                "scales": store.scales,
                "warps": warps,
                "stages": stages,
            }
            found.append(attend(q, store.keys, store.values, **given, **sizes))  # type: ignore[arg-type]
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_draft_is_moved_with_its_scales(kind: str) -> None:
    case = AttentionCase(SPECS[0], kind)
    store, plain, spec = case.store(), case.store(), case.spec
    start = 30  # the drafts cross a page
    tokens = torch.tensor([1, *(draft.token for draft in TREE)], device=DEVICE)
    samples = torch.tensor([6, 0, 9, 0, 0, 3, 0, 0, 0], device=DEVICE)  # 6, then 9, then 3: nodes 1, 4 and 5
    parents = torch.tensor([-2, *(draft.parent for draft in TREE)], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([[0, 1 + len(TREE), 0, 0, start + 1]], dtype=torch.int32, device=DEVICE)
    verified = verify_drafts(samples, tokens=tokens, parents=parents, rows=rows, longest=1 + len(TREE))
    assert verified.kept[0, :4].tolist() == [1, 4, 5, -1]
    table = torch.tensor([case.tables[0]], dtype=torch.int32, device=DEVICE)
    for pair, head_bytes in ((("keys", "values"), store.width), (("key_scales", "value_scales"), 4)):
        stores = torch.tensor([[store.parts()[name].data_ptr() for name in pair]], device=DEVICE)
        sizes = {"kv_heads": spec.kv_heads, "head_bytes": head_bytes, "page_size": PAGE}
        move_kept_kv(stores, verified, rows=rows, page_table=table, **sizes)
    slots = [(start + 1 + index, start + 1 + depth) for depth, index in enumerate((1, 4, 5))]
    pages = case.tables[0]
    moves = [(pages[a // PAGE], a % PAGE, pages[b // PAGE], b % PAGE) for a, b in slots]
    plain.move(torch.tensor(moves, device=DEVICE))
    assert all(torch.equal(part, plain.parts()[name]) for name, part in store.parts().items())


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma4_e4b"])
def test_no_schedule_changes_a_bit_with_a_quantized_cache(name: str, kind: str) -> None:
    from tests.device.test_families import backend_of, requests, schedules_agree
    from tests.laws.harness import plain

    expected = schedules_agree(name, kv_dtype=kind)
    [plainly] = plain(lambda: backend_of(name, lanes=1), requests()[:1])
    assert plainly.checksums != expected[0].checksums  # quantization has an effect
