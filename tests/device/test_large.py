"""Offsets past 2^31 elements, as large weights, KV page pools and recurrent states have, do not overflow 32 bits. Every case is
compared with the same work at small offsets.

The buffers are allocated and hardly touched: under the interpreter the system overcommits them; a GPU must have the memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]

if torch.cuda.is_available() or INTERPRETED:
    from onedraw.backends.torch.ops.cuda import commit, delta
    from onedraw.backends.torch.ops.cuda.delta_chunked import chunked_delta
    from onedraw.backends.torch.ops.cuda.delta_recurrent import recurrent_delta
    from onedraw.backends.torch.ops.cuda.experts import Routes, grouped_gemm
    from onedraw.backends.torch.ops.cuda.linear import linear
    from onedraw.backends.torch.ops.cuda.norm import gated_activation, rms_norm
    from onedraw.backends.torch.ops.cuda.ops import TritonOps
    from onedraw.backends.torch.ops.cuda.packed.activations import pack_activations
    from onedraw.backends.torch.ops.cuda.recurrent_rollback import commit_states
    from onedraw.backends.torch.ops.plain.elementwise import rope_table
    from onedraw.backends.torch.ops.plain.linear import RowRule
    from onedraw.backends.torch.runner.inputs import InputLayout, Span, lay_out
    from onedraw.backends.torch.state.kv_pages import KV_DTYPES, PageStore
    from onedraw.errors import OutOfMemory
    from onedraw.models.spec import AttentionSpec, RopeSpec

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
ROW_STRIDE = 2**30  # elements from row to row: the third row starts at 2^31
PAGE = 16


@pytest.fixture(autouse=True)
def no_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter copies all kernel arguments back to their own memory, which would touch all of it."""
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *given: None)
    elif torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of a device's memory")
    yield
    if not INTERPRETED:
        torch.cuda.empty_cache()


def untouched_memory(count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements of memory that is not touched."""
    if not INTERPRETED:
        return torch.empty(count, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def spread_rows(x: Tensor) -> Tensor:
    """The same rows with a stride of 2^30 elements."""
    far = untouched_memory((len(x) - 1) * ROW_STRIDE + x.shape[1], x.dtype).as_strided(x.shape, (ROW_STRIDE, 1))
    far.copy_(x)
    return far


def words(rows: list[list[int]] | list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def test_rows_with_a_large_stride_are_read_and_written() -> None:
    x, weight, residual = normal(4, 64, seed=1), normal(48, 64, seed=2), normal(4, 48, seed=3)
    expected = linear(x, weight, residual=residual)
    found = linear(spread_rows(x), weight, residual=spread_rows(residual), out=spread_rows(torch.zeros_like(expected)))
    assert torch.equal(found, expected)
    assert torch.equal(rms_norm(spread_rows(x), None, 1e-6), rms_norm(x, None, 1e-6))
    assert torch.equal(gated_activation(spread_rows(x), "silu"), gated_activation(x, "silu"))
    near, far = pack_activations(x), pack_activations(spread_rows(x))
    assert torch.equal(near.x, far.x)
    assert torch.equal(near.sums, far.sums)


# ------------------------------------------------------------------ pages


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_pages_at_large_offsets_are_written_read_and_moved(kind: str) -> None:
    heads, dim = 2, 64
    spec = AttentionSpec(heads=4, kv_heads=heads, head_dim=dim, rope=RopeSpec(1e4, dim), scale=dim**-0.5)
    dtype = DTYPE if kind == "bf16" else KV_DTYPES[kind]
    first = 2**33 // (heads * PAGE * dim * dtype.itemsize) + 3  # past 2^31 words, the unit in which kept drafts are moved
    length, found = 20, []
    qkv = normal(length, (4 + 2 * heads) * dim, seed=4)
    rope, ops = rope_table(spec.rope, 64, dtype=DTYPE, device=DEVICE), TritonOps(DEVICE)
    for pages, table in ((8, [2, 5, 1]), (first + 8, [first + 2, first + 5, first + 1])):
        try:
            store = PageStore(spec, pages=pages, page_size=PAGE, dtype=dtype, device=DEVICE)
        except OutOfMemory:
            pytest.skip("this system does not overcommit memory")
        layout = InputLayout(PAGE, (pages,), RowRule(floor=1))
        inputs = lay_out([0] * length, [Span(0, length, 0, ())], [(table,)], layout=layout, device=DEVICE)
        given = {"spec": spec, "store": store, "q_norm": None, "k_norm": None, "eps": 1e-6}
        out = ops.prepare_attention(inputs, spec, rope).attend(qkv, **given)  # type: ignore[arg-type]
        kept = commit.VerifiedDrafts(words([[1, -1]]), words([[0, -1]]), words([0]), words([[-1] * 5]))
        stores = torch.tensor([[store.keys.data_ptr(), store.values.data_ptr()]], dtype=torch.int64, device=DEVICE)
        commit.move_kept_kv(
            stores,
            kept,
            rows=words([[0, 3, 0, 0, 17]]),
            page_table=words([table]),
            kv_heads=heads,
            head_bytes=dim * store.keys.dtype.itemsize,
            page_size=PAGE,
        )
        found.append((out, *(part for part in store.read(table).values())))
    assert bool(found[0][1].any())
    for near, far in zip(*found, strict=True):
        assert torch.equal(near, far)


def test_more_slots_than_32_bits_can_index_are_refused() -> None:
    spec = AttentionSpec(heads=8, kv_heads=8, head_dim=64, rope=RopeSpec(1e4, 64), scale=0.125)
    with pytest.raises(OutOfMemory, match="exceed the 32-bit slot numbers"):
        PageStore(spec, pages=2**24, page_size=16, dtype=torch.int8, device=DEVICE)


# ------------------------------------------------------------------ states and experts


def test_states_at_large_offsets_are_updated_committed_and_saved() -> None:
    heads, dim, taps = 1, 32, 4
    channels = 2 * dim + heads * dim
    lane = 2**31 // (heads * dim * dim) + 5
    layer = {
        "conv": normal(taps, channels, seed=1).float(),
        "decay": -normal(heads, seed=2).float().abs(),
        "bias": normal(heads, seed=3).float(),
    }
    sizes = {"key_heads": 1, "value_heads": heads, "key_dim": dim, "value_dim": dim}
    projected = normal(70, channels + heads * dim + 2 * heads, seed=4)
    begin, window = normal(heads, dim, dim, seed=5).float(), normal(taps - 1, channels, seed=6).float()
    found = []
    for here in (1, lane):
        states = untouched_memory((here + 1) * heads * dim * dim, torch.float32).view(here + 1, heads, dim, dim)
        windows = untouched_memory((here + 1) * (taps - 1) * channels, torch.float32).view(here + 1, taps - 1, channels)
        states[here], windows[here] = begin, window
        rows = [70 + here * (taps - 1) + i for i in range(taps - 1)]
        tokens = [[*rows[min(t, 3) :], *range(max(t - 3, 0), t + 1)][-taps:] for t in range(70)]
        gates = delta.conv_and_gates(projected, windows.view(-1, channels), words(tokens), **layer, **sizes)
        out = torch.zeros(70, heads, dim, device=DEVICE)
        saved = untouched_memory(states.numel(), torch.float32).view(states.shape)
        chunks = {"chunks": words([[0, 64]]), "spans": words([[here, 0, 1, 0]]), "save_slots": words([here])}
        chunked_delta(gates, states, saved, out, **chunks)
        recurrent_delta(gates, states, out, paths=words([[here, 0, 6, 6, 0]]), entries=words([4 * t for t in range(64, 70)]))
        increments = (torch.full((1, heads), 0.5, device=DEVICE), gates.k[:1], gates.v[:1])
        commit_states(states, increments=increments, lanes=words([here]), kept_slots=words([[0]]))
        delta.shift_conv_windows(projected, windows, windows, words([[here, 67, 68, 69, -1]]))
        found.append((out, states[here].clone(), saved[here].clone(), windows[here].clone()))
    for near, far in zip(*found, strict=True):
        assert not near.isnan().any()
        assert torch.equal(near, far)


def only(expert: int, rows: int) -> Routes:
    weights = torch.ones(rows, 1, device=DEVICE)
    return Routes(words(list(range(rows))), words([[expert, 0, rows]]), weights, 16)


def test_experts_at_large_offsets_give_the_same_output() -> None:
    width, hidden, x = 32, 64, normal(3, 64, seed=1)
    own, last, found = normal(2 * width, hidden, seed=2), 2**31 // (2 * width * hidden) + 1, []
    for expert in (0, last):
        weight = untouched_memory((expert + 1) * own.numel(), DTYPE).view(expert + 1, 2 * width, hidden)
        weight[expert] = own
        found.append(grouped_gemm(x, weight, only(expert, 3), divide=1, gate=1, pdl=False))
    assert torch.equal(*found)
