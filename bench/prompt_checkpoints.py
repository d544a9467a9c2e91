"""Measure how long saving and restoring the checkpoint of a prompt take, per megabyte of recurrent state.

    python -m bench.prompt_checkpoints [--repeats 25] [--layers 6]

Runs Gated DeltaNet layers of the Qwen3.5-0.8B shape (16 heads, 128 x 128) on random inputs with the CPU kernels. Prints one JSON
object. The cost of saving is the extra time of a step over one prompt chunk that saves a checkpoint at its end. Restoring copies
a checkpoint slot into a lane. A plain copy of the same number of bytes is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import InputLayout, make_inputs
from onedraw.backends.torch.state.recurrent_state import LaneStore
from onedraw.models.spec import DeltaSpec
from onedraw.settings import default_cache_dir
from onedraw.types import CheckpointSave, History, Plan, Row, SamplingParams

SPEC = DeltaSpec(key_heads=16, value_heads=16, key_dim=128, value_dim=128, conv=4)
TOKENS = 64
CPU = torch.device("cpu")


def timed(run: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several runs in milliseconds."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        found.append((time.perf_counter() - begin) * 1e3)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    ops = pick_ops("cpu", "f32", cache=default_cache_dir())
    stores = [LaneStore.alone(SPEC, lanes=2, drafts=0, checkpoints=2, device=CPU) for _ in range(options.layers)]
    width = SPEC.channels + SPEC.value_heads * SPEC.value_dim + 2 * SPEC.value_heads
    projected = torch.randn(TOKENS, width)
    heads = SPEC.value_heads
    weights = DeltaWeights(
        torch.randn(SPEC.conv, SPEC.channels), -torch.rand(heads), torch.randn(heads), torch.ones(SPEC.value_dim), 1e-6
    )

    def step(saves: tuple[CheckpointSave, ...]) -> None:
        row = Row(
            request_id="x",
            lane=0,
            pages=((0,) * 8,),
            start=0,
            tokens=(1,) * TOKENS,
            drafts=(),
            prompt_stop=TOKENS,
            samples=True,
            params=SamplingParams(),
            history=History((1,)),
            saves=saves,
        )
        inputs = make_inputs(Plan((row,)), layout=InputLayout(8, (8,), RowRule(1)), device=CPU)
        prepared = ops.prepare_delta(inputs, SPEC)
        for store in stores:
            prepared.run(projected, weights=weights, store=store)

    def restore_all() -> None:
        for store in stores:
            store.restore([1], [0])

    megabytes = options.layers * SPEC.state_bytes / 1e6
    step(())
    plain, saving = timed(lambda: step(()), options.repeats), timed(lambda: step((CheckpointSave(TOKENS, 1),)), options.repeats)
    restoring = timed(restore_all, options.repeats)
    source, target = torch.ones(int(megabytes * 250_000)), torch.zeros(int(megabytes * 250_000))
    copying = timed(lambda: target.copy_(source), options.repeats)
    report = {
        "megabytes": round(megabytes, 2),
        "step_ms": round(plain, 2),
        "save_ms_per_mb": round(max(saving - plain, 0.0) / megabytes, 4),
        "restore_ms_per_mb": round(restoring / megabytes, 4),
        "copy_ms_per_mb": round(copying / megabytes, 4),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
