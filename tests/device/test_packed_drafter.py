"""A packed drafter with a packed model on a GPU: it drafts, and changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onedraw.checkpoints.random_weights import DRAFTER_SHAPES, make_random_drafter
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.memory.allocator import Allocator
from onedraw.models.dflash import check_drafter_fits, read_drafter_info
from onedraw.speculation.draft_tree import build_tree
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request, SamplingParams
from tests.support.quantized_weights import quantized_weights, tiny_spec

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.drafters.dflash import DflashDrafter
    from onedraw.backends.torch.ops.cuda.packed.linear import PackedLinear
    from onedraw.backends.torch.ops.cuda.packed.ops import PackedOps

DEVICE = torch.device("cuda:0")
TINY: dict[str, Any] = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
TINY |= {"num_target_layers": 2, "dflash_config": {"block_size": 4, "mask_token_id": 299, "target_layer_ids": [0, 1]}}


def test_a_packed_drafter_drafts_for_a_packed_model_and_changes_no_bit() -> None:
    spec = tiny_spec(tied=True)
    drafter = read_drafter_info(make_random_drafter({**DRAFTER_SHAPES["qwen3.6-27b-dflash"], **TINY}, "tiny", mixture="q4_0"))
    check_drafter_fits(drafter.spec, spec)
    made: list[DflashDrafter] = []

    def make(stack: Any, sampler: object, layout: Any) -> DflashDrafter:
        sizes = {"lanes": 1, "max_context": 64, "arrange": lambda candidates: build_tree(candidates, 0)}
        made.append(DflashDrafter(drafter.spec, drafter.weights, target=stack, layout=layout, **sizes))
        return made[-1]

    backend = TorchBackend(
        spec,
        quantized_weights(spec, ("Q4_0",)),
        dtype="packed-bf16",
        device=str(DEVICE),
        lanes=1,
        pages=4,
        page_size=16,
        max_context=64,
        drafts=8,
        ops=PackedOps(DEVICE, torch.bfloat16),
        check=False,
        make_drafter=make,
    )
    params = SamplingParams(temperature=0.9, checksums=True, max_tokens=24, seed=5)
    found, drafted = [], []
    for count in (0, 3):
        chosen: list[Any] = []
        scheduler = Scheduler(
            allocator=Allocator(backend.capacity, reuse=False),
            capacity=backend.capacity,
            speculator=Speculator([], draft_tokens=count),
            step_tokens=16,
        )
        engine = Engine(backend=backend, scheduler=scheduler)
        engine.add(Request("r", (1, 5, 9, 200, 7), params), lambda event, chosen=chosen: chosen.extend(event.sampled))  # type: ignore[misc]
        while engine.busy:
            engine.step()
        found.append([(choice.token, choice.checksum) for choice in chosen])
        drafted.append(engine.stats().draft_tokens)
    assert found[0] == found[1]
    assert drafted[0] == 0 < drafted[1]
    assert isinstance(made[0]._fc, PackedLinear)  # its weights are packed, too
