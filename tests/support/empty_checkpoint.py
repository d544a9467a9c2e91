"""Checkpoints of released shapes without weights: headers that tell every tensor, over files that take no room on a disk.

In: the name of a released config. Out: a folder that can be described and planned for, and not run.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
import transformers

from tests.support.released_configs import CONFIGS


def write_empty_checkpoint(name: str, folder: Path) -> Path:
    """A safetensors folder in bf16, its data a hole."""
    given = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    config = transformers.CONFIG_MAPPING[CONFIGS[name]["model_type"]](**given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    header: dict[str, object] = {}
    stop = 0
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        start, stop = stop, stop + 2 * tensor.numel()
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + stop)
    return folder
