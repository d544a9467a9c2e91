"""Delta states and experts on an accelerator, against slow float64 recurrences, and bit by bit against themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain.experts import choose_experts, join_shared
from onedraw.backends.torch.runner.staging_buffers import DirectStaging
from onedraw.backends.torch.state.recurrent_spans import RecurrentSpan
from onedraw.models.spec import MoeSpec
from onedraw.types import Draft

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]

if torch.cuda.is_available() or INTERPRETED:
    from onedraw.backends.torch.ops.cuda import delta
    from onedraw.backends.torch.ops.cuda import expert_routing as routes
    from onedraw.backends.torch.ops.cuda import experts as moe
    from onedraw.backends.torch.ops.cuda.delta_chunked import chunked_delta
    from onedraw.backends.torch.ops.cuda.delta_inputs import PathBuilder, add_span
    from onedraw.backends.torch.ops.cuda.delta_recurrent import commit_states, recurrent_delta
    from onedraw.backends.torch.ops.cuda.delta_tree import REPEAT, RESTART, tree_delta

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
KEY_HEADS, VALUE_HEADS, DIM, TAPS = (2, 4, 32, 4) if INTERPRETED else (4, 12, 128, 4)
CHANNELS = 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM
LANES = 6


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(DEVICE)


def words(rows: list[list[int]] | list[int]) -> Tensor:
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


def gated(
    projected: Tensor, taps: list[list[int]], windows: Tensor, drafts: delta.DraftIncrements | None = None
) -> delta.DeltaQkv:
    return delta.conv_and_gates(
        projected,
        windows,
        words(taps),
        conv=LAYER.conv,
        decay=LAYER.decay,
        bias=LAYER.bias,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        drafts=drafts,
    )


def line(count: int, *, first: int = 0) -> list[list[int]]:
    """Taps of tokens one behind the other, zeros before the first."""
    return [[first + t - 3 + j if t - 3 + j >= 0 else -1 for j in range(TAPS)] for t in range(count)]


def windows() -> Tensor:
    return torch.zeros(LANES, TAPS - 1, CHANNELS, device=DEVICE)


def drafts(places: list[int]) -> delta.DraftIncrements:
    """Tokens at these places of a rollback buffer full of NaN; -1 for tokens that are known."""
    count = max(places) + 1
    return delta.DraftIncrements(
        words(places),
        torch.full((count, VALUE_HEADS), torch.nan, device=DEVICE),
        torch.full((count, KEY_HEADS, DIM), torch.nan, device=DEVICE),
        torch.full((count, VALUE_HEADS, DIM), torch.nan, device=DEVICE),
        torch.full((count, CHANNELS), torch.nan, device=DEVICE),
    )


def draft_buffers(increments: delta.DraftIncrements) -> tuple[Tensor, Tensor, Tensor]:
    return increments.decays, increments.keys, increments.changes


def states() -> Tensor:
    return normal(LANES, VALUE_HEADS, DIM, DIM, seed=9, spread=0.1)


def outputs(count: int) -> Tensor:
    return torch.full((count, VALUE_HEADS, DIM), torch.nan, device=DEVICE)


def slow_gates(projected: Tensor, taps: list[list[int]]) -> tuple[Tensor, ...]:
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


def slow_steps(state: Tensor, parts: tuple[Tensor, ...], tokens: list[int]) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = parts
    state, found = state.double(), []
    for t in tokens:
        state = state * decay[t][:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t].unsqueeze(2) * change.unsqueeze(1)
        found.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return state, torch.stack(found)


def test_steps_are_the_recurrence_and_a_lane_does_not_know_its_neighbours() -> None:
    counts = [5, 1, 3, 2, 1]  # as many as are stepped in wide programs; alone each is stepped in narrow ones
    taps, paths, first = [], [], 0
    for lane, count in enumerate(counts):
        taps += line(count, first=first)
        paths.append([lane, first, count, count, int(lane == 1)])
        first += count
    projected = projections(first, seed=5)
    parts = gated(projected, taps, windows())
    now, out = states(), outputs(first)
    entries = words([4 * token for token in range(first)])
    recurrent_delta(parts, now, out, paths=words(paths), entries=entries)
    slow = slow_gates(projected, taps)
    for path in paths:
        lane, begin, count = path[:3]
        start = states()[lane] * (0 if path[4] else 1)
        state, found = slow_steps(start, slow, list(range(begin, begin + count)))
        assert error(out[begin : begin + count], found) < 1e-4
        assert error(now[lane], state) < 1e-4
        again, alone = states(), outputs(first)
        recurrent_delta(parts, again, alone, paths=words([path]), entries=entries)
        assert torch.equal(alone[begin : begin + count], out[begin : begin + count])
        assert torch.equal(again[lane], now[lane])


def test_a_kept_draft_leaves_the_state_that_stepping_leaves() -> None:
    """A chain behind one known token: the kept part, committed, has the bits of the same tokens known from the start."""
    projected = projections(6, seed=6)
    increments = drafts([-1, 0, 1, 2, 3, 4])
    parts, plain_parts = gated(projected, line(6), windows(), increments), gated(projected, line(6), windows())
    assert torch.equal(parts.gates, plain_parts.gates)
    assert torch.equal(increments.conv_inputs, projected[1:, :CHANNELS].float())
    entries = words([4 * token for token in range(6)])
    plain, out = states(), outputs(6)
    recurrent_delta(parts, plain, out, paths=words([[2, 0, 4, 4, 0]]), entries=entries)
    now, seen = states(), outputs(6)
    recurrent_delta(parts, now, seen, paths=words([[2, 0, 6, 1, 0]]), entries=entries, drafts=increments)
    assert torch.equal(seen[:4], out[:4])
    commit_states(now, increments=draft_buffers(increments), lanes=words([2]), kept_slots=words([[0, 1, 2, -1]]))
    assert torch.equal(now, plain)


def test_a_node_of_a_tree_has_the_bits_of_its_path() -> None:
    """Known token 0; nodes 1 (of 0), 2 (of 0), 3 (of 1), 4 (of 3), 5 (of 2), 6 (of 3); beside it a row that has one token."""
    projected = projections(8, seed=7)
    taps = [[-1, -1, -1, 0], [-1, -1, 0, 1], [-1, -1, 0, 2], [-1, 0, 1, 3], [0, 1, 3, 4], [-1, 0, 2, 5], [0, 1, 3, 6]]
    increments = drafts([-1, 0, 1, 2, 3, 4, 5, -1])
    parts = gated(projected, [*taps, [-1, -1, -1, 7]], windows(), increments)
    now, out = states(), outputs(8)
    back, again = RESTART, REPEAT
    entries = words([0, 4 * 1, 4 * 3, 4 * 4, 4 * 1 + back + again, 4 * 3 + again, 4 * 6, 4 * 2 + back, 4 * 5, 4 * 7])
    paths = words([[1, 0, 9, 1, 0], [0] * 5, [3, 9, 1, 1, 0]])
    tree_delta(parts, now, out, paths=paths, entries=entries, drafts=increments, branches=1)
    assert not out.isnan().any()
    for path in ([0, 1, 3, 4], [0, 1, 3, 6], [0, 2, 5]):
        chain, alone = states(), outputs(8)
        lone = words([[1, 0, len(path), len(path), 0]])
        recurrent_delta(parts, chain, alone, paths=lone, entries=words([4 * token for token in path]))
        assert torch.equal(alone[path], out[path])
        kept = now.clone()
        commit_states(kept, increments=draft_buffers(increments), lanes=words([1]), kept_slots=words([[t - 1 for t in path[1:]]]))
        assert torch.equal(kept[1], chain[1])


@pytest.mark.parametrize(("count", "known"), [(2, 2), (4, 1)])
def test_branches_side_by_side_have_the_bits_of_one_walk(count: int, known: int) -> None:
    """A tree of 21 drafts and, in a lane of its own, a chain: outputs, lanes and changes of one walk branch by branch."""
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
        increments = drafts(places)
        parts = gated(projected, line(total), windows(), increments)
        now, out = states(), outputs(total)
        given = {"paths": laid.table, "entries": laid.entries, "drafts": increments}
        tree_delta(parts, now, out, branches=branches, **given)
        found.append((out, now, increments.changes))
        longest = max(row[2] for row in paths.rows)
        assert longest == known + {1: 33, 2: 18, 4: 9}[branches]
    assert not found[0][0].isnan().any()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", [64, 200] if not INTERPRETED else [70])
def test_chunks_are_the_recurrence_and_a_cut_between_chunks_does_not_show(count: int) -> None:
    projected = projections(count, seed=8)
    parts = gated(projected, line(count), windows())
    chunks = [[start, min(64, count - start)] for start in range(0, count, 64)]
    saved = torch.full((2, VALUE_HEADS, DIM, DIM), torch.nan, device=DEVICE)
    slots = [1 if i == 0 else -1 for i in range(len(chunks))]

    def run(now: Tensor, some: list[list[int]], slots: list[int], fresh: int, out: Tensor) -> None:
        spans = words([[3, 0, len(some), fresh]])
        chunked_delta(parts, now, saved, out, chunks=words(some), spans=spans, save_slots=words(slots))

    now, out = states(), outputs(count)
    run(now, chunks, slots, 1, out)
    state, found = slow_steps(torch.zeros_like(now[3]), slow_gates(projected, line(count)), list(range(count)))
    assert error(out, found) < 1e-3
    assert error(now[3], state) < 1e-3
    again, other = states(), outputs(count)
    run(again, chunks[:1], slots[:1], 1, other)
    assert torch.equal(again[3], saved[1])
    if len(chunks) > 1:
        run(again, chunks[1:], slots[1:], 0, other)
    assert torch.equal(other, out)
    assert torch.equal(again[3], now[3])


def test_windows_are_read_before_they_are_written() -> None:
    fed = projections(5, seed=10)
    past = normal(LANES, TAPS - 1, CHANNELS, seed=11)
    now = past.clone()
    sources = [[2, 5 + 2 * 3 + 1, 5 + 2 * 3 + 2, 0, -1], [4, 1, 2, 3, -1], [0, -1, -1, 4, -1]]
    delta.shift_conv_windows(fed, now, now, words(sources))
    expected = past.clone()
    wide = fed.float()[:, :CHANNELS]
    expected[2] = torch.stack([past[2, 1], past[2, 2], wide[0]])
    expected[4] = wide[1:4]
    expected[0] = torch.stack([torch.zeros_like(wide[0]), torch.zeros_like(wide[0]), wide[4]])
    assert torch.equal(now, expected)
    closed, out = past.clone(), normal(5, VALUE_HEADS, DIM, seed=13)
    given = delta.gated_norm(out, fed, LAYER.norm, 1e-6, channels=CHANNELS, windows=closed, sources=words(sources))
    assert torch.equal(closed, expected)
    assert torch.equal(given, delta.gated_norm(out, fed, LAYER.norm, 1e-6, channels=CHANNELS))


def test_what_comes_after_the_state_is_a_gated_norm() -> None:
    projected, out = projections(4, seed=12), normal(4, VALUE_HEADS, DIM, seed=13)
    found = delta.gated_norm(out, projected, LAYER.norm, 1e-6, channels=CHANNELS)
    z = projected.double()[:, CHANNELS : CHANNELS + VALUE_HEADS * DIM].reshape(4, VALUE_HEADS, DIM)
    wide = out.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * LAYER.norm.double()
    assert error(found, (expected * torch.nn.functional.silu(z)).reshape(4, -1)) < 4e-3


# ------------------------------------------------------------------ experts


def test_experts_answer_each_row_by_itself_in_expert_order() -> None:
    count, used, width, hidden = (4, 2, 16, 32) if INTERPRETED else (32, 4, 256, 512)
    rows = 5 if INTERPRETED else 300
    x = normal(rows, hidden, seed=1).to(DTYPE)
    gate_up = normal(count, 2 * width, hidden, seed=2, spread=hidden**-0.5).to(DTYPE)
    down = normal(count, hidden, width, seed=3, spread=width**-0.5).to(DTYPE)
    scores = normal(rows, count, seed=4).softmax(1)
    weights, chosen = scores.topk(used, dim=1)

    def answer(part: slice) -> Tensor:
        tables = moe.route(chosen[part], weights[part], count=count)
        return moe.run_experts(x[part], tables, gate_up=gate_up, down=down, activation="silu")

    found = answer(slice(0, rows))
    for row in range(0, rows, 37):
        expected = torch.zeros(hidden, dtype=torch.float64, device=DEVICE)
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            wide = x[row].double() @ gate_up[expert].double().t()
            inner = torch.nn.functional.silu(wide[:width]) * wide[width:]
            expected += weight * (inner @ down[expert].double().t())
        assert error(found[row], expected) < 1e-2
    for size in (1, 2, 3) if INTERPRETED else (1, 2, 5, 16, 64):
        assert torch.equal(answer(slice(0, size)), found[:size]), size
        assert torch.equal(answer(slice(2, 2 + size)), found[2 : 2 + size]), size


@pytest.mark.parametrize("rows", [1, 3] if INTERPRETED else [1, 3, 24, 64])
def test_rows_are_brought_together_as_sorting_would(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, used = (8, 4) if INTERPRETED else (256, 8)
    weights, chosen = normal(rows, count, seed=rows).softmax(1).topk(used, dim=1)
    found = moe.route(chosen, weights, count=count)
    monkeypatch.setattr(moe, "MAX_PAIRS", 0)
    expected = moe.route(chosen, weights, count=count)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.weights, expected.weights)
    live = expected.tiles[:, 2] > 0
    assert torch.equal(found.tiles[live], expected.tiles[live])
    assert not found.tiles[~live][:, 2].any()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("more", [False, True])
def test_experts_are_chosen_by_the_plain_rule(scores: Literal["softmax", "sigmoid"], more: bool) -> None:
    count, rows = 20 if INTERPRETED else 250, 5
    spec = MoeSpec(count, 4, 8, scores=scores, normalised=more, softcap=5.0 if more else None)
    given = normal(rows, count + 12, seed=3, spread=4.0).round().to(DTYPE)  # ties, and columns behind the last expert
    extra = {"bias": normal(count, seed=4) if more else None, "factors": normal(count, seed=5) if more else None}
    ids, weights = routes.choose_experts(given, spec, **extra)
    expected_ids, expected = choose_experts(given, spec, **extra)
    assert torch.equal(ids, expected_ids)
    assert error(weights, expected) < 1e-6
    out, always, residual = (normal(rows, 40, seed=6 + i).to(DTYPE) for i in range(3))
    for gate, before in ((None, None), (given, residual)):
        assert error(routes.add_shared_expert(out, always, gate, before), join_shared(out, always, gate, before)) < 5e-3


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_of_a_row_without_numbers_are_several_and_the_row_is_noticed(scores: Literal["softmax", "sigmoid"]) -> None:
    """Such a row once had one expert several times over; the others' answers were never written, and were read all the same."""
    count, used, rows, hidden, width = 8, 3, 4, 32, 16
    spec = MoeSpec(count, used, width, scores=scores)
    given = normal(rows, count, seed=3).to(DTYPE)
    given[1], given[2, 5] = torch.nan, torch.nan
    ids, weights = routes.choose_experts(given, spec, bias=None, factors=None)
    expected, _ = choose_experts(given, spec, bias=None, factors=None)
    assert torch.equal(ids, expected)
    assert weights.isnan().any(1).tolist() == [False, True, True, False]
    tables = moe.route(ids, weights, count=count)
    assert sorted(tables.order.tolist()) == list(range(rows * used))  # every pair is answered, and has its weight
    x, gate_up, down = (normal(*shape, seed=4).to(DTYPE) for shape in ((rows, hidden), (count, 32, hidden), (count, hidden, 16)))
    found = moe.run_experts(x, tables, gate_up=gate_up, down=down, activation="silu")
    assert found.isnan().any(1).tolist() == [False, True, True, False]
    assert found[[1, 2]].isnan().all()
