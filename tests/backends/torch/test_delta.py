"""Gated DeltaNet: two forms that agree, rejected drafts that change nothing, and commits with equal bits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops.base import HostCommit, Ops
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import InputLayout, make_inputs
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.backends.torch.state.recurrent_state import LaneStore
from onedraw.models.spec import DeltaSpec, LayerSpec, MlpSpec
from onedraw.settings import default_cache_dir
from onedraw.types import CheckpointSave, Draft, History, Plan, Row, SamplingParams

CPU = torch.device("cpu")
SPEC = DeltaSpec(key_heads=2, value_heads=6, key_dim=12, value_dim=20, conv=4)
WIDTH = SPEC.channels + SPEC.value_heads * SPEC.value_dim + 2 * SPEC.value_heads
LENGTH = 150


def ops_of(kind: str) -> Ops:
    return pick_ops("cpu", "f32", cache=default_cache_dir()) if kind == "kernels" else TorchOps(CPU)


@pytest.fixture(params=["kernels", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = DeltaWeights(
    conv=draw(SPEC.conv, SPEC.channels, seed=1) * 0.5,
    decay=-(0.05 + 4 * torch.rand(SPEC.value_heads, generator=torch.Generator().manual_seed(2))),
    bias=draw(SPEC.value_heads, seed=3) * 0.5 - 1,
    norm=1 + 0.2 * draw(SPEC.value_dim, seed=4),
    eps=1e-6,
)
PROJECTED = draw(LENGTH, WIDTH, seed=5)


def state_of(*, lanes: int = 3, drafts: int = 24, checkpoints: int = 4) -> ModelState:
    sizes = StateSizes(pages=(30,), page_size=8, lanes=lanes, drafts=drafts, checkpoints=checkpoints)
    return ModelState([LayerSpec(SPEC, MlpSpec(64))], sizes, dtype=torch.float32, device=CPU)


def store_of(*, lanes: int = 3) -> LaneStore:
    return state_of(lanes=lanes).lanes[0]


def row(
    start: int, stop: int, *, prompt: int, lane: int = 0, drafts: tuple[Draft, ...] = (), saves: tuple[CheckpointSave, ...] = ()
) -> Row:
    return Row(
        request_id=str(lane),
        lane=lane,
        pages=((0,) * 30,),
        start=start,
        tokens=(1,) * (stop - start),
        drafts=drafts,
        prompt_stop=prompt,
        samples=True,
        params=SamplingParams(),
        history=History((1,)),
        saves=saves,
    )


def run_step(ops: Ops, store: LaneStore, rows: list[Row], projected: torch.Tensor) -> torch.Tensor:
    inputs = make_inputs(Plan(tuple(rows)), layout=InputLayout(8, (30,), RowRule(1)), device=CPU)
    return ops.prepare_delta(inputs, SPEC).run(projected, weights=WEIGHTS, store=store)


def reference(projected: torch.Tensor) -> torch.Tensor:
    """Compute the formula position by position in double precision."""
    p = projected.double()
    keys, heads, dv = SPEC.key_heads * SPEC.key_dim, SPEC.value_heads, SPEC.value_dim
    fed = torch.cat([torch.zeros(SPEC.conv - 1, SPEC.channels, dtype=torch.float64), p[:, : SPEC.channels]])
    state = torch.zeros(heads, SPEC.key_dim, dv, dtype=torch.float64)
    out = []
    for t in range(len(p)):
        u = torch.nn.functional.silu((fed[t : t + SPEC.conv] * WEIGHTS.conv.double()).sum(0))
        q, k = u[:keys].view(SPEC.key_heads, -1), u[keys : 2 * keys].view(SPEC.key_heads, -1)
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = q.repeat_interleave(3, 0) / math.sqrt(SPEC.key_dim), k.repeat_interleave(3, 0)
        v = u[2 * keys :].view(heads, dv)
        z, a, b = torch.split(p[t, SPEC.channels :], [heads * dv, heads, heads])
        g = WEIGHTS.decay.double() * torch.nn.functional.softplus(a + WEIGHTS.bias)
        state = state * g.exp()[:, None, None]
        change = torch.sigmoid(b)[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * change[:, None]
        o = torch.einsum("hkv,hk->hv", state, q)
        o = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + WEIGHTS.eps) * WEIGHTS.norm
        out.append(o.view(-1) * torch.nn.functional.silu(z))
    return torch.stack(out)


def test_both_forms_compute_the_formula(ops: Ops) -> None:
    chunked = run_step(ops, store_of(), [row(0, LENGTH, prompt=LENGTH)], PROJECTED)
    stepped = run_step(ops, store_of(), [row(0, LENGTH, prompt=0)], PROJECTED)
    expected = reference(PROJECTED)
    assert (chunked - expected).abs().max() < 1e-5
    assert (stepped - expected).abs().max() < 1e-5
    assert not torch.equal(chunked, stepped)  # both forms are used; otherwise this test would show nothing


def test_rows_that_end_at_chunk_boundaries_do_not_change_bits(ops: Ops) -> None:
    whole, cut = store_of(), store_of()
    expected = run_step(ops, whole, [row(0, LENGTH, prompt=140)], PROJECTED)
    parts = [run_step(ops, cut, [row(a, b, prompt=140)], PROJECTED[a:b]) for a, b in ((0, 64), (64, 128), (128, 143), (143, 150))]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut.states, whole.states)
    assert torch.equal(cut.windows, whole.windows)


def test_a_prompt_row_that_ends_inside_a_chunk_is_refused(ops: Ops) -> None:
    with pytest.raises(AssertionError, match="inside a chunk"):
        run_step(ops, store_of(), [row(0, 36, prompt=100)], PROJECTED[:36])


def test_other_rows_and_lanes_do_not_change_bits(ops: Ops) -> None:
    alone = store_of()
    expected = run_step(ops, alone, [row(0, 70, prompt=66, lane=1)], PROJECTED[:70])
    batch = store_of()
    rows = [row(0, 5, prompt=5, lane=0), row(0, 70, prompt=66, lane=1), row(0, 1, prompt=0, lane=2)]
    got = run_step(ops, batch, rows, torch.cat([PROJECTED[100:105], PROJECTED[:70], PROJECTED[120:121]]))
    assert torch.equal(got[5:75], expected)
    assert torch.equal(batch.states[1], alone.states[1])


CHAIN = tuple(Draft(7, i - 1) for i in range(6))
TREE = (Draft(1, -1), Draft(2, -1), Draft(3, 1), Draft(4, 0), Draft(5, 2), Draft(6, 2), Draft(7, 4))


@pytest.mark.parametrize(("drafts", "path"), [(CHAIN, (0, 1, 2, 3)), (CHAIN, ()), (CHAIN, tuple(range(6))), (TREE, (1, 2, 4, 6))])
def test_committed_drafts_leave_the_state_of_known_tokens(ops: Ops, drafts: tuple[Draft, ...], path: tuple[int, ...]) -> None:
    """The kept drafts have the projections of positions 81 and following; the other nodes of the tree have different ones."""
    known = store_of()
    run_step(ops, known, [row(0, 80, prompt=78)], PROJECTED[:80])
    state = state_of()
    [drafted], last = state.lanes, row(80, 81, prompt=78, drafts=drafts)
    run_step(ops, drafted, [row(0, 80, prompt=78)], PROJECTED[:80])
    nodes = draw(len(drafts), WIDTH, seed=9)
    for depth, index in enumerate(path):
        nodes[index] = PROJECTED[81 + depth]
    got = run_step(ops, drafted, [last], torch.cat([PROJECTED[80:81], nodes]))
    expected = run_step(ops, known, [row(80, 81 + len(path), prompt=78)], PROJECTED[80 : 81 + len(path)])
    assert torch.equal(got[[0, *(1 + index for index in path)]], expected)
    if path:
        ops.commit(state, HostCommit.of([last], [path], 0))
    assert torch.equal(drafted.states, known.states)
    assert torch.equal(drafted.windows, known.windows)


def test_a_tree_node_reads_the_state_of_its_parent_and_not_of_siblings(ops: Ops) -> None:
    store, alone = store_of(), store_of()
    for one in (store, alone):
        run_step(ops, one, [row(0, 10, prompt=10)], PROJECTED[:10])
    got = run_step(ops, store, [row(10, 11, prompt=10, drafts=TREE)], PROJECTED[10:18])
    chain = (Draft(2, -1), Draft(3, 0), Draft(6, 1))  # the path to node 5
    expected = run_step(ops, alone, [row(10, 11, prompt=10, drafts=chain)], PROJECTED[[10, 12, 13, 16]])
    assert torch.equal(got[[0, 2, 3, 6]], expected)


def test_rows_without_drafts_write_nothing_to_the_rollback_buffer(ops: Ops) -> None:
    store = store_of()
    run_step(ops, store, [row(0, 20, prompt=20, lane=0), row(0, 10, prompt=10, lane=1)], PROJECTED[:30])
    buffers = (store.decays, store.keys, store.changes, store.fed)
    for buffer in buffers:
        buffer.fill_(torch.nan)
    rows = [row(20, 21, prompt=20, lane=0, drafts=CHAIN[:2]), row(10, 11, prompt=10, lane=1)]
    run_step(ops, store, rows, PROJECTED[30:34])
    for buffer in buffers:
        assert torch.isfinite(buffer[:2]).all()
        assert torch.isnan(buffer[2:]).all()
    for buffer in buffers:
        buffer.fill_(torch.nan)
    run_step(ops, store, [dataclasses.replace(rows[1], start=11)], PROJECTED[34:35])
    assert all(torch.isnan(buffer).all() for buffer in buffers)
    assert torch.isfinite(store.states).all()


def test_checkpoints_hold_the_states_of_a_run_without_cache(ops: Ops) -> None:
    store, cold = store_of(), store_of()
    saves = (CheckpointSave(64, 2), CheckpointSave(128, 0), CheckpointSave(150, 3))
    run_step(ops, store, [row(0, LENGTH, prompt=LENGTH, saves=saves)], PROJECTED)
    for save in saves:
        run_step(ops, cold, [row(0, save.position, prompt=save.position, lane=1)], PROJECTED[: save.position])
        store.restore([save.slot], [2])
        assert torch.equal(store.states[2], cold.states[1])
        assert torch.equal(store.windows[2], cold.windows[1])


def test_a_prompt_of_one_token_keeps_its_window(ops: Ops) -> None:
    """A window shorter than the convolution begins with zeros, in lanes and in checkpoints."""
    store = store_of()
    store.windows.fill_(9.0)  # left by another sequence
    run_step(ops, store, [row(0, 1, prompt=1, lane=1, saves=(CheckpointSave(1, 0),))], PROJECTED[:1])
    for window in (store.windows[1], store.saved_windows[0]):
        assert not window[:2].any()
        assert torch.equal(window[2], PROJECTED[0, : SPEC.channels])


def test_the_kernels_agree_with_plain_torch() -> None:
    ours, reference_store = store_of(), store_of()
    a = run_step(ops_of("kernels"), ours, [row(0, LENGTH, prompt=100)], PROJECTED)
    b = run_step(ops_of("torch"), reference_store, [row(0, LENGTH, prompt=100)], PROJECTED)
    assert (a - b).abs().max() < 2e-5
    assert (ours.states - reference_store.states).abs().max() < 2e-5
