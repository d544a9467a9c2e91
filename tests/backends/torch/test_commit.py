"""One commit: drafts verified on the device leave the same state as drafts verified on the host."""

from __future__ import annotations

import pytest
import torch

from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops.base import DeviceCommit, HostCommit, Ops
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import Bucket
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, RopeSpec
from onedraw.sampling.verify import kept_drafts
from onedraw.settings import default_cache_dir
from onedraw.types import Draft, History, Row, SamplingParams

CPU = torch.device("cpu")
ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=0.25)
DELTA = DeltaSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv=4)
TREE = (Draft(7, -1), Draft(8, -1), Draft(9, 1), Draft(3, 0))  # 8, then 9, is the path that is sampled
ROWS = [
    Row("a", 1, ((0, 1, 2),), 10, (5,), TREE, 0, True, SamplingParams(), History((0,) * 11)),
    Row("b", 0, ((3, 4, 5),), 6, (6,), (Draft(1, -1),), 0, True, SamplingParams(), History((0,) * 7)),
]
TOKENS = [5, 7, 8, 9, 3, 6, 1]
PARENTS = [-2, -1, -1, 1, 0, -2, -1]
SAMPLES = [8, 0, 9, 4, 0, 2, 0]  # after each token; the draft of row b is rejected


def filled_state() -> ModelState:
    sizes = StateSizes(pages=(8,), page_size=8, lanes=3, drafts=8)
    layers = [LayerSpec(mixer, MlpSpec(64)) for mixer in (DELTA, ATTENTION)]
    state = ModelState(layers, sizes, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors(state):
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return state


def tensors(state: ModelState) -> list[torch.Tensor]:
    pages = [part for store in state.stores if isinstance(store, PageStore) for part in store.parts().values()]
    lanes = [t for one in state.lanes for t in (one.states, one.windows, one.decays, one.keys, one.changes, one.fed)]
    return [*pages, *lanes]


@pytest.mark.parametrize("ops", [TorchOps(CPU), pick_ops("cpu", "f32", cache=default_cache_dir())], ids=lambda ops: ops.name)
def test_drafts_verified_on_the_device_leave_the_state_of_drafts_verified_on_the_host(ops: Ops) -> None:
    before, host, device = filled_state(), filled_state(), filled_state()
    kept = [kept_drafts(TREE, SAMPLES[:5]), kept_drafts(ROWS[1].drafts, SAMPLES[5:])]
    assert kept == [(1, 2), ()]
    ops.commit(host, HostCommit.of(ROWS, kept, rollback_start=2))
    drafts = DeviceCommit(
        samples=torch.tensor(SAMPLES),
        tokens=torch.tensor(TOKENS),
        parents=torch.tensor(PARENTS, dtype=torch.int32),
        rows=torch.tensor([[0, 5, 1, 2, 11], [5, 2, 0, 6, 7]], dtype=torch.int32),
        bucket=Bucket(rows=2, tokens=7, longest=8, reach=512, depth=8),
        page_tables={ATTENTION: torch.tensor([[0, 1, 2], [3, 4, 5]])},
    )
    ops.commit(device, drafts)
    assert all(map(torch.equal, tensors(host), tensors(device)))
    changed = [not torch.equal(a, b) for a, b in zip(tensors(before), tensors(host), strict=True)]
    assert changed == [True, True, True, True, False, False, False, False]  # keys, values, states, windows; not the increments
