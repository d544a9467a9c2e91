"""Sections of the GPU benchmark run on a CPU with a tiny model, and its drafts change no tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import gpu_backend
from bench.measuring import FIGURES
from onedraw.checkpoints.random_weights import DRAFTER_SHAPES, SHAPES

SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32}


def test_the_sections_for_drafters_long_contexts_and_sampling_report_their_figures(tmp_path: Path) -> None:
    target = {**SHAPES["qwen3.6-27b"], **SMALL, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    drafter = {**DRAFTER_SHAPES["qwen3.6-27b-dflash"], **SMALL, "num_target_layers": 4}
    drafter["dflash_config"] = {"block_size": 8, "mask_token_id": 500, "target_layer_ids": [0, 2]}
    for name, config in (("target", target), ("drafter", drafter)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    model = f"random:{tmp_path / 'target.json'}-q4_0"
    bench = gpu_backend.Bench(model, "cpu", context=768, lanes=1, pages=48, drafter=f"random:{tmp_path / 'drafter.json'}-q4_0")
    for section in ("long", "sampling", "drafter"):
        gpu_backend.SECTIONS[section](bench)
    found = {name.removeprefix(f"{bench.name}: "): value for name, value in FIGURES.items()}
    assert found["drafter: same tokens and checksums as without drafts"] is True
    assert found["drafter: drafts, kept, tokens"][0] > 40
    assert found["sampling 1 x 512, greedy, ms"] > 0
    assert "needs --context" in found["long"]
