"""Checkpoints with the shapes of released models and without weights: full headers over sparse files.

In: the name of a released config. Out: a folder whose spec and memory plan can be computed.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
import transformers

from tests.support.released_configs import CONFIGS


def write_empty_checkpoint(name: str, folder: Path) -> Path:
    """A safetensors folder in bf16 whose data is a hole in a sparse file."""
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
