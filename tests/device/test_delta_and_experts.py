"""Gated DeltaNet and mixture-of-experts kernels: against float64 references, and bit for bit against themselves.

On a GPU, or under Triton's interpreter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain.experts import choose_experts, join_shared
from onedraw.backends.torch.runner.staging_buffers import DirectStaging
from onedraw.backends.torch.state.recurrent_state import RecurrentSpan
from onedraw.models.spec import MoeSpec
from onedraw.types import Draft

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]

if torch.cuda.is_available() or INTERPRETED:
    from onedraw.backends.torch.ops.cuda import delta, experts
    from onedraw.backends.torch.ops.cuda import experts as expert_routing
    from onedraw.backends.torch.ops.cuda.delta_chunked import chunked_delta
    from onedraw.backends.torch.ops.cuda.delta_inputs import PathBuilder, add_span
    from onedraw.backends.torch.ops.cuda.delta_recurrent import recurrent_delta
    from onedraw.backends.torch.ops.cuda.delta_tree import REPEAT, RESTART, tree_delta
    from onedraw.backends.torch.ops.cuda.recurrent_rollback import commit_states

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
KEY_HEADS, VALUE_HEADS, DIM, TAPS = (2, 4, 32, 4) if INTERPRETED else (4, 12, 128, 4)
CHANNELS = 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM
LANES = 6


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(DEVICE)


def int32(rows: list[list[int]] | list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@dataclass
class Layer:
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor


LAYER = Layer(
    conv=normal(TAPS, CHANNELS, seed=1, spread=0.5),
    decay=-normal(VALUE_HEADS, seed=2).abs() - 0.1,
    bias=normal(VALUE_HEADS, seed=3),
    norm=normal(DIM, seed=4),
)


def projections(count: int, seed: int) -> Tensor:
    return normal(count, CHANNELS + VALUE_HEADS * DIM + 2 * VALUE_HEADS, seed=seed).to(DTYPE)


def qkv_of(
    projected: Tensor, taps: list[list[int]], windows: Tensor, drafts: delta.DraftIncrements | None = None
) -> delta.DeltaQkv:
    return delta.conv_and_gates(
        projected,
        windows,
        int32(taps),
        conv=LAYER.conv,
        decay=LAYER.decay,
        bias=LAYER.bias,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        drafts=drafts,
    )


def chain_taps(count: int, *, first: int = 0) -> list[list[int]]:
    """Convolution taps of consecutive tokens, zeros before the first."""
    return [[first + t - 3 + j if t - 3 + j >= 0 else -1 for j in range(TAPS)] for t in range(count)]


def windows() -> Tensor:
    return torch.zeros(LANES, TAPS - 1, CHANNELS, device=DEVICE)


def empty_increments(places: list[int]) -> delta.DraftIncrements:
    """A rollback buffer full of NaN, with these slots for the tokens; -1 for known tokens."""
    count = max(places) + 1
    return delta.DraftIncrements(
        int32(places),
        torch.full((count, VALUE_HEADS), torch.nan, device=DEVICE),
        torch.full((count, KEY_HEADS, DIM), torch.nan, device=DEVICE),
        torch.full((count, VALUE_HEADS, DIM), torch.nan, device=DEVICE),
        torch.full((count, CHANNELS), torch.nan, device=DEVICE),
    )


def draft_buffers(increments: delta.DraftIncrements) -> tuple[Tensor, Tensor, Tensor]:
    return increments.decays, increments.keys, increments.changes


def start_states() -> Tensor:
    return normal(LANES, VALUE_HEADS, DIM, DIM, seed=9, spread=0.1)


def outputs(count: int) -> Tensor:
    return torch.full((count, VALUE_HEADS, DIM), torch.nan, device=DEVICE)


def slow_qkv(projected: Tensor, taps: list[list[int]]) -> tuple[Tensor, ...]:
    wide = projected.double()
    fed = torch.cat([wide[:, :CHANNELS], wide.new_zeros(1, CHANNELS)])
    mixed = sum(fed[[t[j] for t in taps]] * LAYER.conv[j].double() for j in range(TAPS))
    mixed = torch.nn.functional.silu(torch.as_tensor(mixed))
    keys = KEY_HEADS * DIM
    q, k, v = (x.reshape(len(taps), -1, DIM) for x in mixed.split([keys, keys, VALUE_HEADS * DIM], 1))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    rest = wide[:, CHANNELS + VALUE_HEADS * DIM :]
    g = LAYER.decay.double() * torch.nn.functional.softplus(rest[:, :VALUE_HEADS] + LAYER.bias.double())
    repeats = VALUE_HEADS // KEY_HEADS
    q, k = (x.repeat_interleave(repeats, 1) for x in (q * DIM**-0.5, k))
    return q, k, v, g.exp(), rest[:, VALUE_HEADS:].sigmoid()


def slow_steps(state: Tensor, inputs: tuple[Tensor, ...], tokens: list[int]) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = inputs
    state, found = state.double(), []
    for t in tokens:
        state = state * decay[t][:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t].unsqueeze(2) * change.unsqueeze(1)
        found.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return state, torch.stack(found)


def test_the_recurrent_form_is_right_and_lanes_are_independent() -> None:
    counts = [5, 1, 3, 2, 1]  # enough paths for MANY_COLUMNS per warp; alone, each runs with COLUMNS
    taps, paths, first = [], [], 0
    for lane, count in enumerate(counts):
        taps += chain_taps(count, first=first)
        paths.append([lane, first, count, count, int(lane == 1)])
        first += count
    projected = projections(first, seed=5)
    qkv = qkv_of(projected, taps, windows())
    states, out = start_states(), outputs(first)
    entries = int32([4 * token for token in range(first)])
    recurrent_delta(qkv, states, out, paths=int32(paths), entries=entries)
    slow = slow_qkv(projected, taps)
    for path in paths:
        lane, begin, count = path[:3]
        start = start_states()[lane] * (0 if path[4] else 1)
        state, found = slow_steps(start, slow, list(range(begin, begin + count)))
        assert error(out[begin : begin + count], found) < 1e-4
        assert error(states[lane], state) < 1e-4
        again, alone = start_states(), outputs(first)
        recurrent_delta(qkv, again, alone, paths=int32([path]), entries=entries)
        assert torch.equal(alone[begin : begin + count], out[begin : begin + count])
        assert torch.equal(again[lane], states[lane])


def test_a_committed_draft_leaves_the_state_of_a_known_token() -> None:
    """A chain after one known token: the kept drafts, committed, give the bits of the same tokens as known tokens."""
    projected = projections(6, seed=6)
    increments = empty_increments([-1, 0, 1, 2, 3, 4])
    qkv, plain_qkv = qkv_of(projected, chain_taps(6), windows(), increments), qkv_of(projected, chain_taps(6), windows())
    assert torch.equal(qkv.gates, plain_qkv.gates)
    assert torch.equal(increments.conv_inputs, projected[1:, :CHANNELS].float())
    entries = int32([4 * token for token in range(6)])
    plain, out = start_states(), outputs(6)
    recurrent_delta(qkv, plain, out, paths=int32([[2, 0, 4, 4, 0]]), entries=entries)
    states, seen = start_states(), outputs(6)
    recurrent_delta(qkv, states, seen, paths=int32([[2, 0, 6, 1, 0]]), entries=entries, drafts=increments)
    assert torch.equal(seen[:4], out[:4])
    commit_states(states, increments=draft_buffers(increments), lanes=int32([2]), kept_slots=int32([[0, 1, 2, -1]]))
    assert torch.equal(states, plain)


def test_a_tree_node_has_the_bits_of_a_chain_that_equals_its_path() -> None:
    """Known token 0; nodes 1 (parent 0), 2 (0), 3 (1), 4 (3), 5 (2), 6 (3); and another row with one token."""
    projected = projections(8, seed=7)
    taps = [[-1, -1, -1, 0], [-1, -1, 0, 1], [-1, -1, 0, 2], [-1, 0, 1, 3], [0, 1, 3, 4], [-1, 0, 2, 5], [0, 1, 3, 6]]
    increments = empty_increments([-1, 0, 1, 2, 3, 4, 5, -1])
    qkv = qkv_of(projected, [*taps, [-1, -1, -1, 7]], windows(), increments)
    states, out = start_states(), outputs(8)
    restart, repeat = RESTART, REPEAT
    entries = int32([0, 4 * 1, 4 * 3, 4 * 4, 4 * 1 + restart + repeat, 4 * 3 + repeat, 4 * 6, 4 * 2 + restart, 4 * 5, 4 * 7])
    paths = int32([[1, 0, 9, 1, 0], [0] * 5, [3, 9, 1, 1, 0]])
    tree_delta(qkv, states, out, paths=paths, entries=entries, drafts=increments, branches=1)
    assert not out.isnan().any()
    for path in ([0, 1, 3, 4], [0, 1, 3, 6], [0, 2, 5]):
        chain, alone = start_states(), outputs(8)
        lone = int32([[1, 0, len(path), len(path), 0]])
        recurrent_delta(qkv, chain, alone, paths=lone, entries=int32([4 * token for token in path]))
        assert torch.equal(alone[path], out[path])
        kept = states.clone()
        commit_states(kept, increments=draft_buffers(increments), lanes=int32([1]), kept_slots=int32([[t - 1 for t in path[1:]]]))
        assert torch.equal(kept[1], chain[1])


@pytest.mark.parametrize(("count", "known"), [(2, 2), (4, 1)])
def test_parallel_branches_have_the_bits_of_one_branch_after_the_other(count: int, known: int) -> None:
    """A tree of 21 drafts and, in another lane, a chain: outputs, states and changes."""
    parents = [-1 if i < 4 else (i - 4) // 2 for i in range(21)]
    tree, chain = tuple(Draft(0, parent) for parent in parents), tuple(Draft(0, i - 1) for i in range(3))
    first = known + len(tree)
    total = first + 1 + len(chain)
    projected = projections(total, seed=11)
    places = [*[-1] * known, *range(21), -1, 21, 22, 23]
    spans = [
        RecurrentSpan(first=0, lane=1, known=known, prompt=0, fresh=False, drafts=tree, saves=(), held=0),
        RecurrentSpan(first=first, lane=3, known=1, prompt=0, fresh=True, drafts=chain, saves=(), held=21),
    ]
    found = []
    for branches in (1, count):
        paths = PathBuilder(branches)
        for span in spans:
            add_span(span, paths)
        laid = paths.build(DirectStaging(DEVICE), rows=3, entries=len(paths.entries))
        increments = empty_increments(places)
        qkv = qkv_of(projected, chain_taps(total), windows(), increments)
        states, out = start_states(), outputs(total)
        given = {"paths": laid.table, "entries": laid.entries, "drafts": increments}
        tree_delta(qkv, states, out, branches=branches, **given)
        found.append((out, states, increments.changes))
        longest = max(row[2] for row in paths.rows)
        assert longest == known + {1: 33, 2: 18, 4: 9}[branches]
    assert not found[0][0].isnan().any()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", [64, 200] if not INTERPRETED else [70])
def test_the_chunked_form_is_right_and_steps_may_end_between_chunks(count: int) -> None:
    projected = projections(count, seed=8)
    qkv = qkv_of(projected, chain_taps(count), windows())
    chunks = [[start, min(64, count - start)] for start in range(0, count, 64)]
    saved = torch.full((2, VALUE_HEADS, DIM, DIM), torch.nan, device=DEVICE)
    slots = [1 if i == 0 else -1 for i in range(len(chunks))]

    def run(states: Tensor, some: list[list[int]], slots: list[int], fresh: int, out: Tensor) -> None:
        spans = int32([[3, 0, len(some), fresh]])
        chunked_delta(qkv, states, saved, out, chunks=int32(some), spans=spans, save_slots=int32(slots))

    states, out = start_states(), outputs(count)
    run(states, chunks, slots, 1, out)
    state, found = slow_steps(torch.zeros_like(states[3]), slow_qkv(projected, chain_taps(count)), list(range(count)))
    assert error(out, found) < 1e-3
    assert error(states[3], state) < 1e-3
    again, other = start_states(), outputs(count)
    run(again, chunks[:1], slots[:1], 1, other)
    assert torch.equal(again[3], saved[1])
    if len(chunks) > 1:
        run(again, chunks[1:], slots[1:], 0, other)
    assert torch.equal(other, out)
    assert torch.equal(again[3], states[3])


def test_convolution_windows_are_read_before_they_are_written() -> None:
    inputs = projections(5, seed=10)
    past = normal(LANES, TAPS - 1, CHANNELS, seed=11)
    shifted = past.clone()
    sources = [[2, 5 + 2 * 3 + 1, 5 + 2 * 3 + 2, 0, -1], [4, 1, 2, 3, -1], [0, -1, -1, 4, -1]]
    delta.shift_conv_windows(inputs, shifted, shifted, int32(sources))
    expected = past.clone()
    wide = inputs.float()[:, :CHANNELS]
    expected[2] = torch.stack([past[2, 1], past[2, 2], wide[0]])
    expected[4] = wide[1:4]
    expected[0] = torch.stack([torch.zeros_like(wide[0]), torch.zeros_like(wide[0]), wide[4]])
    assert torch.equal(shifted, expected)
    closed, out = past.clone(), normal(5, VALUE_HEADS, DIM, seed=13)
    given = delta.gated_norm(out, inputs, LAYER.norm, 1e-6, channels=CHANNELS, windows=closed, sources=int32(sources))
    assert torch.equal(closed, expected)
    assert torch.equal(given, delta.gated_norm(out, inputs, LAYER.norm, 1e-6, channels=CHANNELS))


def test_the_output_is_a_gated_norm() -> None:
    projected, out = projections(4, seed=12), normal(4, VALUE_HEADS, DIM, seed=13)
    found = delta.gated_norm(out, projected, LAYER.norm, 1e-6, channels=CHANNELS)
    z = projected.double()[:, CHANNELS : CHANNELS + VALUE_HEADS * DIM].reshape(4, VALUE_HEADS, DIM)
    wide = out.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * LAYER.norm.double()
    assert error(found, (expected * torch.nn.functional.silu(z)).reshape(4, -1)) < 4e-3


# ------------------------------------------------------------------ experts


def test_experts_are_added_in_expert_order_whatever_the_batch() -> None:
    count, used, width, hidden = (4, 2, 16, 32) if INTERPRETED else (32, 4, 256, 512)
    rows = 5 if INTERPRETED else 300
    x = normal(rows, hidden, seed=1).to(DTYPE)
    gate_up = normal(count, 2 * width, hidden, seed=2, spread=hidden**-0.5).to(DTYPE)
    down = normal(count, hidden, width, seed=3, spread=width**-0.5).to(DTYPE)
    scores = normal(rows, count, seed=4).softmax(1)
    weights, chosen = scores.topk(used, dim=1)

    def output(part: slice) -> Tensor:
        tables = experts.route(chosen[part], weights[part], count=count)
        return experts.run_experts(x[part], tables, gate_up=gate_up, down=down, activation="silu")

    found = output(slice(0, rows))
    for row in range(0, rows, 37):
        expected = torch.zeros(hidden, dtype=torch.float64, device=DEVICE)
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            wide = x[row].double() @ gate_up[expert].double().t()
            inner = torch.nn.functional.silu(wide[:width]) * wide[width:]
            expected += weight * (inner @ down[expert].double().t())
        assert error(found[row], expected) < 1e-2
    for size in (1, 2, 3) if INTERPRETED else (1, 2, 5, 16, 64):
        assert torch.equal(output(slice(0, size)), found[:size]), size
        assert torch.equal(output(slice(2, 2 + size)), found[2 : 2 + size]), size


@pytest.mark.parametrize("rows", [1, 3] if INTERPRETED else [1, 3, 24, 64])
def test_pairs_are_grouped_as_by_sorting(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, used = (8, 4) if INTERPRETED else (256, 8)
    weights, chosen = normal(rows, count, seed=rows).softmax(1).topk(used, dim=1)
    found = experts.route(chosen, weights, count=count)
    monkeypatch.setattr(experts, "MAX_PAIRS", 0)
    expected = experts.route(chosen, weights, count=count)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.weights, expected.weights)
    live = expected.tiles[:, 2] > 0
    assert torch.equal(found.tiles[live], expected.tiles[live])
    assert not found.tiles[~live][:, 2].any()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("more", [False, True])
def test_experts_are_selected_as_in_plain_torch(scores: Literal["softmax", "sigmoid"], more: bool) -> None:
    count, rows = 20 if INTERPRETED else 250, 5
    spec = MoeSpec(count, 4, 8, scores=scores, normalised=more, softcap=5.0 if more else None)
    given = normal(rows, count + 12, seed=3, spread=4.0).round().to(DTYPE)  # ties, and columns after the last expert
    extra = {"bias": normal(count, seed=4) if more else None, "factors": normal(count, seed=5) if more else None}
    ids, weights = expert_routing.choose_experts(given, spec, **extra)
    expected_ids, expected = choose_experts(given, spec, **extra)
    assert torch.equal(ids, expected_ids)
    assert error(weights, expected) < 1e-6
    out, shared, residual = (normal(rows, 40, seed=6 + i).to(DTYPE) for i in range(3))
    for gate, before in ((None, None), (given, residual)):
        assert error(expert_routing.add_shared_expert(out, shared, gate, before), join_shared(out, shared, gate, before)) < 5e-3


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_row_of_nan_logits_gets_distinct_experts_and_a_nan_output(scores: Literal["softmax", "sigmoid"]) -> None:
    """Such a row once selected one expert several times; the outputs of other pairs were then read uninitialized."""
    count, used, rows, hidden, width = 8, 3, 4, 32, 16
    spec = MoeSpec(count, used, width, scores=scores)
    given = normal(rows, count, seed=3).to(DTYPE)
    given[1], given[2, 5] = torch.nan, torch.nan
    ids, weights = expert_routing.choose_experts(given, spec, bias=None, factors=None)
    expected, _ = choose_experts(given, spec, bias=None, factors=None)
    assert torch.equal(ids, expected)
    assert weights.isnan().any(1).tolist() == [False, True, True, False]
    tables = experts.route(ids, weights, count=count)
    assert sorted(tables.order.tolist()) == list(range(rows * used))  # every pair occurs once
    x, gate_up, down = (normal(*shape, seed=4).to(DTYPE) for shape in ((rows, hidden), (count, 32, hidden), (count, hidden, 16)))
    found = experts.run_experts(x, tables, gate_up=gate_up, down=down, activation="silu")
    assert found.isnan().any(1).tolist() == [False, True, True, False]
    assert found[[1, 2]].isnan().all()
